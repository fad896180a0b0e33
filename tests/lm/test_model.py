import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bd3lm.lm.model
from bd3lm.interop import LightningFacts
from bd3lm.lm import LanguageModel, load
from bd3lm.methods import (
    AutoregressiveMethod,
    AutoregressiveTraining,
    BlockDiffusionMethod,
    BlockDiffusionTraining,
)
from bd3lm.models import BlockReading
from bd3lm.objectives import BlockDiffusionLoss, TokenBatch
from tests.interop.small import CONTEXT, PARITY, assert_same, small_model
from tests.interop.test_lightning import checkpoint
from tests.lm import BASELINES, BYTES, baseline, of_bytes, of_method


@pytest.mark.parametrize("open_model", [load, LanguageModel.from_pretrained])
def test_saved_models_are_loaded(open_model: Any, tmp_path: Path) -> None:
    model = LanguageModel(*small_model(tied=True))
    model.save_pretrained(tmp_path)
    again = open_model(tmp_path)
    assert isinstance(again, LanguageModel)
    assert again.config == model.config
    assert_same(again.network, model.network)
    assert not again.network.training


def test_a_model_says_what_it_is() -> None:
    model = of_bytes(4)
    count = sum(parameter.numel() for parameter in model.network.parameters())
    layers, hidden = model.config.network.layers, model.config.network.hidden
    title = "block diffusion, blocks of 4"
    assert repr(model) == f"LanguageModel({title}; {layers} x {hidden}, context 16, {count:,} parameters)"


@pytest.mark.parametrize("block_size", [4, 16])
def test_with_lean_is_the_same_network_in_another_order(block_size: int) -> None:
    model = of_bytes(block_size)
    leans = model.with_lean(2.0)
    assert leans.network is model.network
    assert leans.tokenizer is model.tokenizer
    assert model.config.method.lean == 0.0
    method = replace(model.config.method, lean=2.0)
    assert leans.config == replace(model.config, method=method)
    assert leans.with_lean(0.0).config == model.config
    assert leans.generate("a")[0].tokens != model.generate("a")[0].tokens


def test_a_lean_is_saved_with_a_model(tmp_path: Path) -> None:
    model = of_bytes(4).with_lean(0.75)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert again.generate("a", seed=3)[0].tokens == model.generate("a", seed=3)[0].tokens
    assert repr(again).startswith("LanguageModel(block diffusion, blocks of 4, lean 0.75; ")


def test_models_saved_before_there_was_a_lean_have_none(tmp_path: Path) -> None:
    of_bytes(4).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    data = json.loads(file.read_text())
    assert data["method"].pop("lean") == 0.0
    file.write_text(json.dumps(data))
    assert load(tmp_path).config == of_bytes(4).config


def test_a_lean_is_for_block_diffusion() -> None:
    with pytest.raises(ValueError, match="lean is for block diffusion, whose order can be chosen, got autor"):
        of_bytes(None).with_lean(1.0)
    for method in BASELINES.values():
        with pytest.raises(ValueError, match=f"lean is for block diffusion, .* got {method.kind}"):
            baseline(method).with_lean(0.0)
    with pytest.raises(ValueError, match="lean must be a number from 0 to 1e6, got -1"):
        of_bytes(4).with_lean(-1.0)
    for lean in (None, True, "abc", 2e6):
        with pytest.raises(ValueError, match=f"lean must be a number from 0 to 1e6, got {lean!r}"):
            of_bytes(4).with_lean(lean)
    timed = of_bytes(4, adaln=True, time_conditioning=True)
    with pytest.raises(ValueError, match=r"method\.lean must be 0 for a network that is told the noise"):
        timed.with_lean(1.0)
    assert timed.with_lean(0.0).config == timed.config


def test_subclasses_lean_as_themselves() -> None:
    class Mine(LanguageModel):
        pass

    model = of_bytes(4)
    assert type(Mine(model.network, model.config, model.tokenizer).with_lean(1.0)) is Mine


def test_config_json_is_ours(tmp_path: Path) -> None:
    LanguageModel(*small_model()).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert (data["format"], data["version"]) == ("bd3lm", 1)


def test_dtype_and_device() -> None:
    model = load(PARITY / "bd3lm-block4", device="cpu", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.network.parameters()} == {("cpu", torch.bfloat16)}


def test_reference_folders_are_loaded_and_saved_as_ours(tmp_path: Path) -> None:
    model = load(str(PARITY / "mdlm-noblocks"))
    model.save_pretrained(tmp_path)
    assert_same(load(tmp_path).network, model.network)


def test_lightning_files_are_loaded(tmp_path: Path) -> None:
    network, _ = small_model()
    torch.save(checkpoint(network), tmp_path / "last.ckpt")
    model = load(tmp_path / "last.ckpt", lightning=LightningFacts(context=CONTEXT, causal=True))
    assert_same(model.network, network)


def test_subclasses_load_as_themselves(tmp_path: Path) -> None:
    class Mine(LanguageModel):
        pass

    LanguageModel(*small_model()).save_pretrained(tmp_path)
    assert type(Mine.from_pretrained(tmp_path)) is Mine


def test_network_and_config_belong_together() -> None:
    network, _ = small_model()
    _, config = small_model(tied=True)
    with pytest.raises(ValueError, match=r"config\.network must be the network's"):
        LanguageModel(network, config)


def test_bad_sources() -> None:
    with pytest.raises(ValueError, match="It must be an existing folder"):
        load("./nowhere")


def test_push_to_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is uploaded is a folder that loads, and nothing beside it."""
    calls: dict[str, Any] = {}

    class Hub:
        def __init__(self, token: str | None) -> None:
            calls["token"] = token

        def create_repo(self, repo_id: str, **options: Any) -> SimpleNamespace:
            calls["created"] = (repo_id, options)
            return SimpleNamespace(repo_id=f"owner/{repo_id}")

        def upload_folder(self, *, folder_path: str, **options: Any) -> SimpleNamespace:
            calls["uploaded"] = options
            calls["files"] = sorted(file.name for file in Path(folder_path).iterdir())
            calls["model"] = load(folder_path)
            return SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr(bd3lm.lm.model, "HfApi", Hub)
    model = LanguageModel(*small_model())
    assert model.push_to_hub("name", private=True, token="t", revision="v2") == "https://hub/commit"
    assert calls["token"] == "t"
    assert calls["created"] == ("name", {"private": True, "exist_ok": True})
    assert calls["uploaded"]["repo_id"] == "owner/name"
    assert calls["uploaded"]["revision"] == "v2"
    assert calls["files"] == ["config.json", "model.safetensors"]
    assert_same(calls["model"].network, model.network)


@pytest.mark.parametrize("lean", [np.int64(1), np.float32(1.0), Fraction(1), 1], ids=repr)
def test_a_lean_of_any_kind_of_number_is_saved(lean: Any, tmp_path: Path) -> None:
    of_bytes(4).with_lean(lean).save_pretrained(tmp_path)
    found = load(tmp_path).config.method
    assert isinstance(found, BlockDiffusionMethod)
    assert (found.lean, type(found.lean)) == (1.0, float)


def test_a_model_without_a_tokenizer_is_not_saved_beside_anothers(tmp_path: Path) -> None:
    of_bytes(4).save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="folder must not hold another model's tokenizer: this model has n"):
        of_bytes(4, seed=1, tokenizer=None).save_pretrained(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    of_bytes(4, seed=1).save_pretrained(tmp_path)


def test_a_tokenizer_is_saved_with_its_model_in_a_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    of_bytes(4).save_pretrained("~/model")
    assert load(tmp_path / "home" / "model").tokenizer == BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"lean": 0},
            "^lean is not an option for loading, allowed are device, dtype, lightning, tokenizer, revis",
        ),
        (
            {"devise": "cuda"},
            r"^devise is not an option for loading, did you mean 'device'\? allowed are device",
        ),
        (
            {"torch_dtype": torch.float32},
            r"^torch_dtype is not an option for loading, did you mean 'dtype'\?",
        ),
        ({"device": "gpu"}, "^device must be cpu, cuda or cuda:N, got 'gpu'"),
        ({"device": "meta"}, "^device must be cpu, cuda or cuda:N, got 'meta'"),
        ({"dtype": "float31"}, "^dtype must be a floating-point type or None, got 'float31'"),
        ({"dtype": "nn"}, "^dtype must be a floating-point type or None, got 'nn'"),
        ({"dtype": "int8"}, "^dtype must be a floating-point type or None, got 'int8'"),
        ({"dtype": 32}, "^dtype must be a floating-point type or None, got 32"),
    ],
    ids=str,
)
def test_bad_options_of_loading(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load("box", **options)


def test_there_must_be_a_gpu_to_load_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match="device must be cpu, because torch finds no GPU it can use, got 'cu"
    ):
        load("box", device="cuda")


def test_dtypes_have_names() -> None:
    for name in ("bfloat16", "torch.bfloat16"):
        model = load(PARITY / "bd3lm-block4", dtype=name)
        assert {p.dtype for p in model.network.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("source", [None, 3, b"box"])
def test_what_is_no_source(source: Any) -> None:
    with pytest.raises(ValueError, match=f"source must be an existing folder, .* got {source!r}"):
        load(source)


# --- a training loop of one's own ---

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_a_models_own_loss_is_that_of_the_model_it_is() -> None:
    """A loop around the bare network would leave out how it reads the text before a block."""
    method = BlockDiffusionMethod(block_size=4, causal_clean=True, previous_token=True)
    model = of_method(method)
    reading = method.reading(model.config.frame)
    own = BlockDiffusionLoss(reading=reading)(model.network, TokenBatch.of(TOKENS), generator=seeded())
    loss = model.loss(TOKENS, generator=seeded())
    assert loss.item() == own.mean().item()
    bare = BlockDiffusionLoss(reading=BlockReading(block_size=4, mask_id=BYTES.mask_id))
    other = bare(model.network, TokenBatch.of(TOKENS), generator=seeded()).mean()
    assert loss.item() != other.item()
    loss.backward()
    assert all(each.grad is not None for each in model.network.parameters())


def test_a_models_own_loss_may_be_trained_with_options_of_its_method() -> None:
    model = of_method(BlockDiffusionMethod(block_size=4, causal_clean=True))
    training = BlockDiffusionTraining(next_token=0.5)
    loss, plain = (model.loss(TOKENS, options, generator=seeded()) for options in (training, None))
    assert loss.item() > plain.item()
    assert model.objective(training).next_token == 0.5
    with pytest.raises(
        ValueError, match="training must be a BlockDiffusionTraining for method block_diffusion"
    ):
        model.loss(TOKENS, AutoregressiveTraining())


def test_the_loss_of_an_autoregressive_model_is_its_likelihood() -> None:
    model = of_method(AutoregressiveMethod())
    (found,) = model.log_likelihood([TOKENS[0].tolist()])
    assert model.loss(TOKENS).item() == pytest.approx(-found.log_p / found.tokens, rel=1e-6)


def test_a_model_moves() -> None:
    model = of_method(AutoregressiveMethod())
    before = model.generate("a", length=8)
    assert model.to("cpu", "float64") is model
    assert model.network.embedding.weight.dtype == torch.float64
    assert model.device == torch.device("cpu")
    assert model.to(dtype=torch.float32).generate("a", length=8)[0].tokens == before[0].tokens
    with pytest.raises(ValueError, match="dtype must be a floating-point type"):
        model.to(dtype="int8")
