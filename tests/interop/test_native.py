import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bd3lm.interop import load, save
from bd3lm.interop import weights as weights_module
from bd3lm.models import BlockDiffusion
from tests.interop.small import BLOCK, CONTEXT, assert_same, small_model

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "no head bias": {"head_bias": False},
    "tied, no head bias": {"tied": True, "head_bias": False},
    "adaln": {"adaln": True},
    "time conditioning": {"adaln": True, "time_conditioning": True, "tied": True},
    "other shape": {"mlp_width": 24, "rotary_base": 500.0, "dropout": 0.25, "layers": 1},
    "autoregressive": {"causal": True},
    "one block": {"block_size": CONTEXT},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def saved(folder: Path, **variant: Any) -> Path:
    save(*small_model(**variant), folder)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; dicts are merged."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    for key, value in changes.items():
        data[key] = data[key] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(data))


def test_round_trip_is_bit_equal(variant: dict[str, Any], tmp_path: Path) -> None:
    model, config = small_model(**variant)
    save(model, config, tmp_path)
    again, same = load(tmp_path)
    assert same == config
    assert again.config == config.network
    assert_same(model, again)
    assert not again.training
    assert all(p.requires_grad and p.is_leaf for p in again.parameters())
    assert (again.output.weight is again.embedding.weight) == config.network.tied


def test_loaded_model_computes_the_same(tmp_path: Path) -> None:
    model, config = small_model(tied=True, adaln=True)
    save(model, config, tmp_path)
    again, _ = load(tmp_path)
    tokens = torch.arange(2 * CONTEXT).remainder(11).unsqueeze(0)
    layout = BlockDiffusion(CONTEXT, BLOCK)
    with torch.no_grad():
        assert torch.equal(model.head(model(tokens, layout=layout)), again.head(again(tokens, layout=layout)))


def test_tied_matrix_is_stored_once_and_trains_as_one(tmp_path: Path) -> None:
    stored = load_file(saved(tmp_path, tied=True) / "model.safetensors")
    assert "embedding.weight" in stored
    assert "output.weight" not in stored
    again, _ = load(tmp_path)
    with torch.no_grad():
        again.embedding.weight.zero_()
    assert not again.output.weight.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_kept_or_chosen(dtype: torch.dtype, tmp_path: Path) -> None:
    model, config = small_model(tied=True)
    save(model.to(dtype), config, tmp_path)
    assert_same(model, load(tmp_path)[0])
    chosen, _ = load(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in chosen.parameters()} == {torch.float32}
    assert torch.equal(chosen.embedding.weight, model.embedding.weight.float())
    with pytest.raises(ValueError, match=r"dtype must be a floating-point type or None, got torch\.int8"):
        load(tmp_path, dtype=torch.int8)


def test_nothing_is_written_of_a_config_that_json_cannot_hold(tmp_path: Path) -> None:
    model, config = small_model()
    odd = replace(config, mask_id=np.int64(config.mask_id))
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(model, odd, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_mixed_dtypes_need_a_choice(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    stored = load_file(path)
    save_file(stored | {"output.bias": stored["output.bias"].bfloat16()}, path)
    with pytest.raises(ValueError, match=r"one floating-point type.*torch\.bfloat16, torch\.float32"):
        load(tmp_path)
    assert load(tmp_path, dtype=torch.float32)[0].output.bias.dtype == torch.float32
    save_file(stored | {"output.bias": stored["output.bias"].int()}, path)
    with pytest.raises(ValueError, match=r"one floating-point type.*torch\.int32"):
        load(tmp_path, dtype=torch.float32)


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    saved(tmp_path)
    before = torch.random.get_rng_state()
    load(tmp_path)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_model_may_be_saved_over_itself(tmp_path: Path) -> None:
    model, config = load(saved(tmp_path))
    with torch.no_grad():
        model.output.bias.add_(1.0)
    save(model, config, tmp_path)
    assert_same(model, load(tmp_path)[0])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_failed_save_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, _ = load(saved(tmp_path))

    def fail(*_: object) -> Iterator[bytes]:
        yield b"half"
        raise OSError("disk full")

    monkeypatch.setattr(weights_module, "file_pieces", fail)
    with pytest.raises(OSError, match="disk full"):
        save(*small_model(seed=1), tmp_path)
    assert_same(old, load(tmp_path)[0])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_new_folder_gets_its_config_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "file_pieces", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(*small_model(), tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_both_files_may_be_read_by_whom_the_user_allows(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    saved(tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def test_what_is_written(tmp_path: Path) -> None:
    data = json.loads((saved(tmp_path, adaln=True) / "config.json").read_text())
    assert (data["format"], data["version"]) == ("bd3lm", 1)
    assert data["network"]["adaln"] is True
    assert data["method"] == {
        "kind": "block_diffusion",
        "score_first": False,
        "block_size": 4,
        "causal_clean": False,
        "previous_token": False,
        "joint": False,
        "law": "block",
        "lean": 0.0,
    }
    assert data["mask_id"] == 10


def test_a_config_of_another_network_is_not_saved(tmp_path: Path) -> None:
    model, _ = small_model()
    _, config = small_model(tied=True)
    with pytest.raises(ValueError, match=r"config\.network must be the network's"):
        save(model, config, tmp_path)


def test_a_file_is_no_folder_to_save_in(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="folder must be a folder to save in, got the file"):
        save(*small_model(), tmp_path / "file")


class TestWeightsThatDoNotFit:
    def test_shapes(self, tmp_path: Path) -> None:
        edit(saved(tmp_path), network={"mlp_width": 32})
        message = r"of another shape: layers\.0\.mlp_in\.weight is \(64, 16\) and must be \(32, 16\)"
        with pytest.raises(ValueError, match=message):
            load(tmp_path)

    def test_missing(self, tmp_path: Path) -> None:
        edit(saved(tmp_path, head_bias=False), network={"head_bias": True})
        with pytest.raises(ValueError, match=r"missing: output\.bias$"):
            load(tmp_path)

    def test_unexpected(self, tmp_path: Path) -> None:
        edit(saved(tmp_path), network={"tied": True})
        with pytest.raises(ValueError, match=r"unexpected: output\.weight$"):
            load(tmp_path)

    def test_all_at_once_and_only_a_handful(self, tmp_path: Path) -> None:
        edit(saved(tmp_path), network={"layers": 4, "vocab_size": 12, "tied": True})
        with pytest.raises(ValueError, match="missing: ") as caught:
            load(tmp_path)
        message = str(caught.value)
        assert "and 11 more" in message
        assert "unexpected: output.weight" in message
        assert "embedding.weight is (11, 16) and must be (12, 16)" in message

    def test_nothing_is_read_before_the_check(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        edit(saved(tmp_path), network={"hidden": 32})
        monkeypatch.setattr("bd3lm.interop.native.read_tensors", lambda *_: pytest.fail("tensors were read"))
        with pytest.raises(ValueError, match="of another shape"):
            load(tmp_path)

    def test_more_layers_than_tensors_are_refused_before_they_are_built(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        edit(saved(tmp_path), network={"layers": 10_000})
        monkeypatch.setattr(weights_module, "skeleton", lambda _: pytest.fail("a network was built"))
        with pytest.raises(ValueError, match=r"of 10000 layers, got \d+ tensors in all"):
            load(tmp_path)

    def test_types_that_torch_does_not_compute_in(self, tmp_path: Path) -> None:
        path = saved(tmp_path) / "model.safetensors"
        save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(path).items()}, path)
        for dtype in (None, torch.float32):
            with pytest.raises(ValueError, match=r"got torch\.float8_e4m3fn; allowed are float16, bfloat16"):
                load(tmp_path, dtype=dtype)
        with pytest.raises(
            ValueError, match=r"dtype must be .*, got torch\.float8_e5m2; allowed are float16"
        ):
            load(saved(tmp_path), dtype=torch.float8_e5m2)

    def test_no_safetensors(self, tmp_path: Path) -> None:
        path = saved(tmp_path) / "model.safetensors"
        path.write_text("version https://git-lfs.github.com/spec/v1")
        with pytest.raises(ValueError, match="must be a readable safetensors file"):
            load(tmp_path)
        path.unlink()
        with pytest.raises(ValueError, match=r"must hold a model\.safetensors, got none"):
            load(tmp_path)


class TestConfigsThatAreWrong:
    def test_newer_version(self, tmp_path: Path) -> None:
        edit(saved(tmp_path), version=2)
        with pytest.raises(ValueError, match=r"must be at most 1, got 2: a newer bd3lm wrote it"):
            load(tmp_path)

    @pytest.mark.parametrize("version", [0, "1", None, 1.0, True])
    def test_no_version(self, version: object, tmp_path: Path) -> None:
        edit(saved(tmp_path), version=version)
        with pytest.raises(ValueError, match="must be a whole number from 1 to 1, got"):
            load(tmp_path)

    def test_other_format(self, tmp_path: Path) -> None:
        edit(saved(tmp_path), format="gguf")
        with pytest.raises(ValueError, match=r"config\.json in .* must have format 'bd3lm'"):
            load(tmp_path)

    def test_all_problems_at_once(self, tmp_path: Path) -> None:
        edit(
            saved(tmp_path),
            network={"layer": 3, "dropout": "high"},
            method={"kind": "blockdiffusion"},
            extra=1,
        )
        with pytest.raises(ValueError, match=r"config\.json has 4 problems") as caught:
            load(tmp_path)
        message = str(caught.value)
        assert "network.layer: unknown key, did you mean 'layers'?" in message
        assert "network.dropout: " in message
        assert "got 'high'" in message
        assert "extra: unknown key" in message
        assert "did you mean 'block_diffusion'?" in message

    @pytest.mark.parametrize("text", ["{", "[1]", "", "\xff"])
    def test_no_json_object(self, text: str, tmp_path: Path) -> None:
        (saved(tmp_path) / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(
            ValueError, match=r"config\.json must (be valid JSON|be UTF-8 text|hold a JSON object)"
        ):
            load(tmp_path)

    def test_nested_too_deeply(self, tmp_path: Path) -> None:
        (saved(tmp_path) / "config.json").write_text("[" * 100_000 + "]" * 100_000)
        with pytest.raises(ValueError, match=r"config\.json must be valid JSON: .*recursion"):
            load(tmp_path)

    def test_none(self, tmp_path: Path) -> None:
        (saved(tmp_path) / "config.json").unlink()
        with pytest.raises(ValueError, match=r"must hold a config\.json, got none"):
            load(tmp_path)
