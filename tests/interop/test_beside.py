"""Additions to frozen weights: PEFT's layout, the same network when loaded again, and a checked base."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bd3lm import interop
from bd3lm.interop import beside
from bd3lm.methods import (
    AutoregressiveMethod,
    Base,
    BlockDiffusionMethod,
    DrafterMethod,
    LanguageModelConfig,
)
from bd3lm.models import BlockDiffusion, Transformer
from tests.oracles.networks import tiny_transformer

SHAPES = {
    "GPT": {},
    "Llama": {"norm": "rms", "mlp": "swiglu", "mlp_width": 10, "heads": 4, "kv_heads": 2, "head_dim": 4},
}


def saved_base(folder: Path, seed: int = 1, **config: object) -> LanguageModelConfig:
    network = tiny_transformer(seed, dtype=torch.float32, mask_vector=True, **config)
    said = LanguageModelConfig(network=network.config, method=AutoregressiveMethod(), mask_id=4)
    interop.save(network, said, folder)
    return said


def drafter(folder: Path, **config: object) -> tuple[Transformer, LanguageModelConfig]:
    """The weights of a saved base, with additions and a mask of their own."""
    base, _ = interop.load(folder)
    network = tiny_transformer(9, dtype=torch.float32, mask_vector=True, additions=3, **config)
    state = network.state_dict()
    state |= {name: weight for name, weight in base.state_dict().items() if name != "mask_vector"}
    network.load_state_dict(state)
    said = LanguageModelConfig(
        network=network.config,
        method=DrafterMethod(masks=2),
        mask_id=4,
        base=Base(source=str(folder), sha256=beside.digest(folder)),
    )
    return network, said


@pytest.mark.parametrize("family", SHAPES)
def test_a_drafter_comes_back_as_it_was_from_a_folder_without_its_bases_weights(family, tmp_path):
    saved_base(tmp_path / "base", **SHAPES[family])
    network, said = drafter(tmp_path / "base", **SHAPES[family])
    interop.save(network, said, tmp_path / "drafter")
    again, found = interop.load(tmp_path / "drafter")
    assert found == said
    for name, weight in network.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], weight), name
    layout = BlockDiffusion(4, 2, causal_clean=True, adds=True)
    tokens = torch.tensor([[4, 4, 4, 4, 0, 1, 2, 3]])
    assert torch.equal(again(tokens, layout=layout), network(tokens, layout=layout))
    names = {file.name for file in (tmp_path / "drafter").iterdir()}
    assert names == {"config.json", "adapter_config.json", "adapter_model.safetensors"}


def test_the_files_are_as_peft_has_them(tmp_path):
    """W + B·A of each projection by its own name, times lora_alpha / r, is what the network computes with."""
    saved_base(tmp_path / "base", **SHAPES["Llama"])
    network, said = drafter(tmp_path / "base", **SHAPES["Llama"])
    interop.save(network, said, tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 3)
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert config["target_modules"] == sorted(
        f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")
    )
    tensors = load_file(tmp_path / "drafter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1."

    def product(part: str) -> torch.Tensor:
        return tensors[f"{prefix}{part}.lora_B.weight"] @ tensors[f"{prefix}{part}.lora_A.weight"]

    layer = network.layers[1]
    for name, parts in {
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention_out": ["self_attn.o_proj"],
        "mlp_in": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp_out": ["mlp.down_proj"],
    }.items():
        added = layer.additions[name].merged(torch.zeros_like(getattr(layer, name).weight))
        torch.testing.assert_close(added, torch.cat([product(part) for part in parts]))
    assert torch.equal(tensors["base_model.model.mask_vector"], network.mask_vector)
    assert len(tensors) == 1 + 2 * 7 * 2


class TestBadBases:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        saved_base(tmp_path / "base")
        network, said = drafter(tmp_path / "base")
        interop.save(network, said, tmp_path / "drafter")
        return tmp_path / "drafter"

    def test_other_weights_are_refused(self, folder: Path) -> None:
        saved_base(folder.parent / "base", seed=2)
        with pytest.raises(ValueError, match=r"was trained with other weights than those in .*base: the sha"):
            interop.load(folder)

    def test_a_base_that_is_gone_is_named(self, folder: Path) -> None:
        (folder.parent / "base").rename(folder.parent / "moved")
        with pytest.raises((ValueError, FileNotFoundError), match="base"):
            interop.load(folder)

    def test_a_base_may_be_next_to_the_model_that_adds_to_it(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.edit(folder, source="../base")
        monkeypatch.chdir("/")
        assert interop.load(folder)[1].base.source == "../base"

    def test_a_drafter_cannot_be_a_base(self, folder: Path) -> None:
        self.edit(folder, source=str(folder))
        with pytest.raises(ValueError, match="drafter cannot be the base of another model"):
            interop.load(folder)

    def test_tensors_of_another_rank_are_refused(self, folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text())
        data["network"]["additions"] = 2
        (folder / "config.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"wrong shape: .*lora_A\.weight is \(3, 16\) but must"):
            interop.load(folder)

    def test_without_a_base_nothing_is_written(self, folder: Path) -> None:
        network, said = interop.load(folder)
        with pytest.raises(ValueError, match="model of method drafter must name its base model to be saved"):
            interop.save(network, replace(said, base=None), folder.parent / "none")

    @staticmethod
    def edit(folder: Path, **changes: str) -> None:
        data = json.loads((folder / "config.json").read_text())
        data["base"] |= changes
        (folder / "config.json").write_text(json.dumps(data))


def test_a_drafter_needs_additions_and_only_a_drafter_has_them():
    plain, beside_it = (tiny_transformer(additions=rank).config for rank in (0, 2))
    with pytest.raises(ValueError, match=r"network\.additions must be at least 1 for a drafter"):
        LanguageModelConfig(network=plain, method=DrafterMethod(), mask_id=2)
    with pytest.raises(ValueError, match=r"network\.additions must be 0 for method\.kind autoregressive"):
        LanguageModelConfig(network=beside_it, method=AutoregressiveMethod(), mask_id=2)


def test_additions_at_every_position_are_for_any_method_but_a_drafter():
    tuned = tiny_transformer(additions=2, additions_at="all").config
    for method in (AutoregressiveMethod(), BlockDiffusionMethod(block_size=4)):
        assert LanguageModelConfig(network=tuned, method=method, mask_id=2).network == tuned
    with pytest.raises(ValueError, match=r"network\.additions_at must be masks for method\.kind drafter"):
        LanguageModelConfig(network=tuned, method=DrafterMethod(), mask_id=2)
