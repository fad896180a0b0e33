import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bd3lm.interop import load, save_reference
from bd3lm.interop.reference import from_reference_config, reference_name, to_reference_config
from bd3lm.methods import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    D3PMMethod,
    LanguageModelConfig,
    ScoreEntropyMethod,
    SimplexMethod,
)
from tests.interop.small import CONTEXT, PARITY, assert_same, small_model

FULL = json.loads((PARITY / "bd3lm-block4" / "config.json").read_text())
OLDER_MDLM = {
    "vocab_size": 53,
    "model_length": 32,
    "hidden_dim": 32,
    "cond_dim": 16,
    "n_blocks": 2,
    "n_heads": 4,
    "dropout": 0.1,
    "time_conditioning": False,
    "model_type": "mdlm",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a checkpoint of the reference, to be damaged."""
    return Path(shutil.copytree(PARITY / "bd3lm-block4", tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(FULL | changes))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or add tensors; None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path)


VARIANTS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "adaln": {"adaln": True},
    "time conditioning": {"adaln": True, "time_conditioning": True},
    "one block": {"block_size": CONTEXT, "adaln": True},
    "autoregressive": {"causal": True},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_round_trip(variant: dict[str, Any], tmp_path: Path) -> None:
    model, config = small_model(**variant)
    save_reference(model, config, tmp_path)
    again, same = load(tmp_path)
    assert same == config
    assert_same(model, again)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_tied_model_is_exported_untied(tmp_path: Path) -> None:
    model, config = small_model(tied=True)
    save_reference(model, config, tmp_path)
    again, other = load(tmp_path)
    assert not other.network.tied
    assert_same(model, again)


def test_names_are_those_of_the_reference() -> None:
    model, _ = small_model(adaln=True)
    names = [reference_name(name) for name in model.state_dict()]
    assert len(set(names)) == len(names)
    theirs = load_file(PARITY / "bd3lm-block4" / "model.safetensors")
    buffers = {"backbone.rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max"}
    assert set(names) == set(theirs) - buffers  # both have two layers


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mlp_width": 32}, r"network\.mlp_width must be 64, got 32"),
        (
            {"norm": "rms", "kv_heads": 1},
            r"kv_heads must be 2, got 1; network\.norm must be layer, got rms",
        ),
        ({"rotary_base": 500.0}, r"network\.rotary_base must be 10000\.0, got 500\.0"),
        ({"head_bias": False}, r"network\.head_bias must be True, got False"),
    ],
)
def test_networks_that_cannot_be_exported(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        save_reference(*small_model(**change), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_methods_that_cannot_be_exported() -> None:
    _, config = small_model()
    method = BlockDiffusionMethod(block_size=4, causal_clean=True, previous_token=True, score_first=True)
    with pytest.raises(ValueError, match="cannot hold this model") as caught:
        to_reference_config(LanguageModelConfig(network=config.network, method=method, mask_id=0))
    for name in ("causal_clean", "previous_token", "score_first"):
        assert f"method.{name} must be False, got True" in str(caught.value)
    assert "mask_id must be 10, got 0" in str(caught.value)


def test_a_model_that_leans_cannot_be_exported(tmp_path: Path) -> None:
    network, config = small_model()
    leans = replace(config, method=replace(config.method, lean=2.0))
    with pytest.raises(ValueError, match=r"cannot hold this model: method\.lean must be 0\.0, got 2\.0$"):
        save_reference(network, leans, tmp_path / "none")
    assert not (tmp_path / "none").exists()


class TestConfigs:
    def test_blocks(self) -> None:
        assert from_reference_config(FULL).method == BlockDiffusionMethod(block_size=4)

    @pytest.mark.parametrize("block_size", [4, 32, 1000])
    def test_without_cross_attention_there_is_one_block(self, block_size: int) -> None:
        config = from_reference_config(FULL | {"cross_attn": False, "block_size": block_size})
        assert config.method == BlockDiffusionMethod(block_size=32)

    def test_causal_is_autoregressive(self) -> None:
        config = from_reference_config(FULL | {"causal": True, "cross_attn": False, "adaln": False})
        assert config.method == AutoregressiveMethod()
        assert not config.network.adaln

    def test_older_mdlm(self) -> None:
        config = from_reference_config(OLDER_MDLM)
        assert config.method == BlockDiffusionMethod(block_size=32)
        assert config.network.adaln
        assert config.network.conditioning_dim == 16
        assert config.network.dropout == 0.1

    def test_older_mdlm_gives_the_same_network(self, tmp_path: Path) -> None:
        """The mdlm-noblocks checkpoint with the shorter config that MDLM's own repository writes."""
        source = PARITY / "mdlm-noblocks"
        shutil.copy(source / "model.safetensors", tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(OLDER_MDLM))
        model, config = load(tmp_path)
        full, full_config = load(source)
        assert_same(model, full)
        assert config.method == full_config.method

    def test_time_conditioning(self) -> None:
        assert from_reference_config(FULL | {"time_conditioning": True}).network.time_conditioning
        # Without adaptive norms the reference ignores the noise level.
        ignored = from_reference_config(FULL | {"time_conditioning": True, "adaln": False}).network
        assert not ignored.time_conditioning

    def test_missing_fields_are_named_all_at_once(self) -> None:
        with pytest.raises(ValueError, match=r"config\.json has 3 problems") as caught:
            from_reference_config({"hidden_dim": 32, "n_blocks": 2})
        for name in ("vocab_size", "model_length", "n_heads"):
            assert f"{name}: must be given, but is missing" in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"n_heads": 5}, r"hidden 32 and heads 5"),
            ({"block_size": 5}, r"block_size must divide the context 32, got 5"),
            ({"block_size": 0}, r"block_size must be at least 1, got 0"),
            ({"block_size": None}, r"block_size must be given where cross_attn is true"),
            ({"hidden_dim": "wide"}, r"hidden_dim: .*integer.* got 'wide'"),
        ],
    )
    def test_impossible_ones(self, change: dict[str, Any], named: str) -> None:
        with pytest.raises(ValueError, match=named):
            from_reference_config(FULL | change)


class TestWeights:
    def test_shapes_must_match_the_config(self, folder: Path) -> None:
        edit_config(folder, hidden_dim=64, n_heads=4)
        message = r"backbone\.vocab_embed\.embedding is \(61, 32\) but must be \(61, 64\)"
        with pytest.raises(ValueError, match=message):
            load(folder)

    def test_heads_must_match_the_rotary_buffer(self, folder: Path) -> None:
        edit_config(folder, n_heads=4)
        with pytest.raises(ValueError, match=r"inv_freq is \(8,\) but must be \(4,\)"):
            load(folder)

    def test_missing_and_unexpected(self, folder: Path) -> None:
        edit_weights(
            folder,
            **{"backbone.blocks.1.norm2.weight": None, "backbone.blocks.1.norm3.weight": torch.ones(32)},
        )
        with pytest.raises(ValueError, match=r"missing: backbone\.blocks\.1\.norm2\.weight") as caught:
            load(folder)
        assert "unexpected: backbone.blocks.1.norm3.weight" in str(caught.value)

    def test_adaln_must_match(self, folder: Path) -> None:
        edit_config(folder, adaln=False)
        with pytest.raises(ValueError, match=r"unexpected: backbone\.blocks\.0\.adaLN_modulation\.bias"):
            load(folder)

    def test_another_rotary_base_is_refused(self, folder: Path) -> None:
        wrong = 1.0 / 20000.0 ** (torch.arange(0, 16, 2).float() / 16)
        edit_weights(folder, **{"backbone.rotary_emb.inv_freq": wrong})
        with pytest.raises(ValueError, match=r"inv_freq in .* must match rotary_base 10000, got \[1\.0"):
            load(folder)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_the_right_base_is_seen_in_any_precision(self, dtype: torch.dtype, folder: Path) -> None:
        right = 10000.0 ** -(torch.arange(0, 16, 2).double() / 16)
        edit_weights(folder, **{"backbone.rotary_emb.inv_freq": right.to(dtype)})
        assert_same(load(folder)[0], load(PARITY / "bd3lm-block4")[0])

    def test_buffers_may_be_absent(self, folder: Path) -> None:
        buffers = ("backbone.rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max")
        edit_weights(folder, **dict.fromkeys(buffers))
        assert_same(load(folder)[0], load(PARITY / "bd3lm-block4")[0])

    def test_dtype(self) -> None:
        model, _ = load(PARITY / "bd3lm-block4", dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", [ScoreEntropyMethod, D3PMMethod, SimplexMethod])
def test_methods_that_the_reference_does_not_tell_apart_are_refused(kind: Any, tmp_path: Path) -> None:
    """If SEDD were saved as a model of one block, its scores would be read as logits."""
    network, config = small_model()
    options = {"block_size": 4} if kind is SimplexMethod else {}
    other = LanguageModelConfig(network=config.network, method=kind(**options), mask_id=config.mask_id)
    with pytest.raises(
        ValueError, match=r"holds autoregressive and block diffusion models, got method\.kind"
    ):
        save_reference(network, other, tmp_path / "out")
