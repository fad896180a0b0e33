"""Weights read from files some rows at a time, compared with the same models loaded whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bd3lm import interop
from bd3lm.interop import beside
from bd3lm.interop.rows import WholeRows
from bd3lm.interop.weights import RowReader
from bd3lm.methods import Base
from tests.interop.checkpoints import saved, tiny
from tests.interop.small import small_model
from tests.interop.test_beside import SHAPES, drafter, saved_base
from tests.interop.test_gguf import SHAPE
from tests.interop.test_gguf import write as write_gguf
from tests.oracles.networks import tiny_transformer


def compare(source: Path) -> interop.StoredWeights:
    """Every parameter whole, and every cut of it into three, as in sharding."""
    network, config = interop.load(source)
    stored = interop.open_rows(source)
    assert stored.config == config
    assert stored.dtype == network.dtype
    assert dict(stored.shapes) == {name: tuple(p.shape) for name, p in network.named_parameters()}
    for name, parameter in network.named_parameters():
        rows = parameter.shape[0]
        third = -(-rows // 3)
        for start, stop in ((0, rows), (0, third), (third, min(2 * third, rows)), (rows - 1, rows)):
            found = stored.rows(name, start, stop)
            assert found.dtype == parameter.dtype, name
            assert torch.equal(found, parameter[start:stop]), (name, start, stop)
    return stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [{}, {"tied": True}, {"adaln": True}])
def test_our_format(shape: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    network, config = small_model(**shape)
    interop.save(network.to(dtype), config, tmp_path / "model")
    compare(tmp_path / "model")


@pytest.mark.parametrize("name", ["llama", "llama, tied", "llama, all biases", "qwen2", "qwen3", "mistral"])
def test_folders_of_transformers(name: str, tmp_path: Path) -> None:
    compare(saved(tiny(name), tmp_path / "one"))
    compare(saved(tiny(name).to(torch.bfloat16), tmp_path / "several", max_shard_size="8KB"))
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "llama, all biases", "qwen2, tied", "qwen3"])
def test_gguf(name: str, kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny(name, **SHAPE | ({"head_dim": 32} if name == "qwen3" else {})), kind)
    compare(tmp_path / "m.gguf")


@pytest.mark.parametrize("family", SHAPES)
def test_additions_to_another_model(family: str, tmp_path: Path) -> None:
    saved_base(tmp_path / "base", **SHAPES[family])
    network, said = drafter(tmp_path / "base", **SHAPES[family])
    interop.save(network, said, tmp_path / "drafter")
    compare(tmp_path / "drafter")
    saved_base(tmp_path / "base", seed=2, **SHAPES[family])
    with pytest.raises(ValueError, match="was trained with other weights than those in"):
        interop.open_rows(tmp_path / "drafter")


def test_tuned_additions_are_merged_even_under_a_drafter(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base")
    network = tiny_transformer(9, dtype=torch.float32, mask_vector=True, additions=3, additions_at="all")
    of = Base(source=str(tmp_path / "base"), sha256=beside.digest(tmp_path / "base"))
    interop.save(network, replace(base, network=network.config, base=of), tmp_path / "tuned")
    assert isinstance(compare(tmp_path / "tuned"), WholeRows)
    interop.save(*drafter(tmp_path / "tuned"), tmp_path / "drafter")
    compare(tmp_path / "drafter")


def test_a_layout_of_small_models_is_loaded_whole(tmp_path: Path) -> None:
    network, config = small_model(adaln=True, mlp_bias=True, block_size=4)
    interop.save_reference(network, config, tmp_path / "theirs")
    assert isinstance(compare(tmp_path / "theirs"), WholeRows)


def test_a_tied_head_that_is_another_matrix_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tiny("llama, tied"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    compare(folder)
    for other in (head + 1, head[:-1].clone()):
        save_file(tensors | {"lm_head.weight": other}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"lm_head.weight in .* must equal model.embed_tokens.weight"):
            interop.open_rows(folder)


def test_weights_of_another_shape_are_refused_before_they_are_read(tmp_path: Path) -> None:
    network, config = small_model()
    interop.save(network, config, tmp_path / "model")
    other, _ = small_model(layers=1)
    interop.weights.write_tensors(tmp_path / "model" / "model.safetensors", dict(other.named_parameters()))
    with pytest.raises(ValueError, match="must match its config"):
        interop.open_rows(tmp_path / "model")


def test_a_file_that_was_cut_while_it_is_read(tmp_path: Path) -> None:
    network, config = small_model()
    interop.save(network, config, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    reader = RowReader(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    last = max(reader.header, key=lambda name: reader._begins[name])
    with pytest.raises(ValueError, match=f"must hold all of {last}, but ends within it"):
        reader.rows(last, 0, reader.header[last].shape[0])
