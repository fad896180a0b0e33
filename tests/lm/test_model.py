import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bd3lm.lm.model
from bd3lm.interop import LightningFacts
from bd3lm.lm import LanguageModel, load
from tests.interop.small import CONTEXT, PARITY, assert_same, small_model
from tests.interop.test_lightning import checkpoint
from tests.lm import of_bytes


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
