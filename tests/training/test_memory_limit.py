"""A model that exceeds one process's memory can be loaded and trained by several processes, but not by
one."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bd3lm import interop
from bd3lm.data import TokenShards
from bd3lm.interop.weights import parameter_shapes
from bd3lm.io.tensors import Later
from bd3lm.methods import AutoregressiveMethod, LanguageModelConfig
from bd3lm.models import TransformerConfig
from tests.tiny_recipes import plain, prepared
from tests.training.processes import run_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
WORLD = 4
LIMIT = 420  # MiB besides the libraries'; a process holds a quarter of the weights, and a few whole layers
LAYERS = 64


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> tuple[Path, float]:
    """A drafter's config, which trains little on many frozen weights, and its size in MiB in float32."""
    folder = tmp_path_factory.mktemp("large")
    tokenizer = TokenShards(prepared(folder / "data")).tokenizer
    network = TransformerConfig(
        vocab_size=tokenizer.vocab_size, layers=LAYERS, hidden=512, heads=8, context=16, dropout=0.0
    )
    config = LanguageModelConfig(network=network, method=AutoregressiveMethod(), mask_id=tokenizer.mask_id)
    shapes = parameter_shapes(network)
    generator = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return (0.02 * torch.randn(shape, generator=generator)).bfloat16()

    weights = {name: Later(shape, torch.bfloat16, partial(draw, shape)) for name, shape in shapes.items()}
    interop.save_tensors(weights, config, folder / "base")
    tokenizer.save(folder / "base")
    said: dict[str, Any] = plain(
        folder / "data", {"train": {"steps": 1, "ema_decay": 0.0}, "data": {"validation_sequences": 4}}
    )
    said |= {
        "method": {"kind": "drafter", "masks": 2},
        "network": {"size": "checkpoint", "additions": 4},
        "objective": {"aim": "soft"},
        "start_from": str(folder / "base"),
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(said))
    return path, 4 * sum(torch.Size(shape).numel() for shape in shapes.values()) / 2**20


@pytest.fixture(autouse=True)
def freed_at_once(monkeypatch):
    """glibc keeps pieces of this size in a heap, between others that stay, and so returns no memory."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "100000")


def train(recipe: Path, out: Path, world: int) -> list[dict[str, Any]]:
    words = ["train", "--config", str(recipe), "--out", str(out), "--device", "cpu", "--parallel", "fsdp"]
    found: list[dict[str, Any]] = run_processes(
        "tests.training.limited.train_within", LIMIT, words, world=world, timeout=200.0
    )
    return found


def test_four_processes_train_what_none_could_hold(recipe, tmp_path):
    path, weights = recipe
    found = train(path, tmp_path / "run", WORLD)
    assert [each["said"] for each in found] == [""] * WORLD
    assert [each["status"] for each in found] == [0] * WORLD
    assert all(each["before"] + LIMIT < weights for each in found), "all weights would have fitted"
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()
    assert interop.config_of(tmp_path / "run").base is not None


def test_one_process_fails_with_a_one_line_error(recipe, tmp_path):
    path, _ = recipe
    (found,) = train(path, tmp_path / "run", 1)
    assert found["status"] == 1
    (line,) = found["said"].splitlines()
    assert line.startswith("bd3lm: out of memory")
