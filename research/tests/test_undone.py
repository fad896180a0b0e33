"""research/undone.py: its plain forms are the same computations, are used, and are gone afterwards."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bd3lm.bench import Shape, Timing, TrainingCase
from bd3lm.commands.bench.timing import bench_training
from bd3lm.models import BlockDiffusion, attention, cross_entropy, render
from bd3lm.training import Trainer
from research import undone
from research.undone import OPTIMISATIONS, UNCHANGED, main, measure_all, without
from tests.training.tiny import network, rows, tiny_trainer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TINY = {"layers": 1, "hidden": 16, "heads": 2, "context": 8, "vocabulary": 11}
# What an eager step on a CPU does not come to, and a test of its own has.
ELSEWHERE = {"dropout", "_has_fine_tiles", "_kernel_options", "compile_trunk"}
REACHED = [
    name
    for name, optimisation in OPTIMISATIONS.items()
    if name == "all of them" or any(attribute not in ELSEWHERE for _, attribute, _ in optimisation.patches)
]


def trained(folder: Path, dropout: float = 0.0) -> tuple[Trainer, list[float]]:
    """Three eager steps: the trainer, and the loss and the gradient's norm of each."""
    trainer = tiny_trainer(folder, dropout=dropout, validate=False, steps=3)
    trainer.run()
    return trainer, [float(row[name]) for row in rows(folder) for name in ("train_nats", "gradient_norm")]


@contextmanager
def calls_of(patches: tuple[undone.Patch, ...]) -> Iterator[Counter[str]]:
    """How often each function that is patched by now is called."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as each:
        for owner, name, plain in patches:
            if vars(owner)[name] is plain:
                each.setattr(owner, name, counted(name, plain))
        yield calls


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, list[float]]:
    return trained(tmp_path_factory.mktemp("unchanged"))


@pytest.mark.parametrize("name", REACHED)
def test_the_plain_form_is_called_and_learns_the_same(name, unchanged, tmp_path, monkeypatch):
    patches = OPTIMISATIONS[name].patches
    if name == "kernels of the loss":
        monkeypatch.setattr(cross_entropy, "runs_kernels", lambda device: True)  # or none would be asked for
    with without(OPTIMISATIONS[name]), calls_of(patches) as calls:
        trainer, figures = trained(tmp_path)
    expected = {attribute for _, attribute, _ in patches} - ELSEWHERE
    if name == "all of them":
        expected -= {"_kernel"}  # without chunks there is nothing for it
    assert set(calls) == expected
    before, losses = unchanged
    assert losses[0] > losses[-2] > 0.0
    assert figures == pytest.approx(losses, abs=1e-4)
    for weight, average in before.ema.tensors().items():
        torch.testing.assert_close(trainer.ema.tensors()[weight], average, atol=1e-4, rtol=0.0)


def test_torchs_dropout_drops_as_much(unchanged, tmp_path):
    optimisation = OPTIMISATIONS["dropout as a hash"]
    with without(optimisation), calls_of(optimisation.patches) as calls:
        _, losses = trained(tmp_path, dropout=0.1)
    assert calls == {"dropout": 3 * 2 * 2}  # steps, layers, branches
    assert losses != pytest.approx(unchanged[1], abs=1e-4)
    x = torch.ones(100_000)
    dropped = undone.torchs_dropout(x, 0.1, torch.zeros(4, dtype=torch.int32))
    assert sorted(dropped.unique().tolist()) == pytest.approx([0.0, 1 / 0.9])
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("name", "tile"), [("masks of 64", 64), ("FlexAttention's tiles", None)])
def test_coarse_masks_in_tiles_of_ours_or_of_torch(name, tile, monkeypatch):
    monkeypatch.setattr(undone, "_forget", lambda: None)  # on a CPU nothing is fine, and so nothing is cached
    monkeypatch.setattr(attention, "_has_fine_tiles", lambda device: True)
    layout = BlockDiffusion(256, 4)

    def squares_and_tiles() -> tuple[int, dict[str, Any]]:
        mask = render(layout, (0, 256), CPU, "flex")
        return mask.blocks.BLOCK_SIZE[0], attention._kernel_options(64, torch.bfloat16, mask.fine)

    fine, ours = squares_and_tiles()
    with without(OPTIMISATIONS[name]):
        coarse, options = squares_and_tiles()
    assert (fine, coarse) == (64, 128)
    assert ours["fwd_BLOCK_M"] == 64
    assert options == (ours if tile else {})


@pytest.mark.parametrize(("length", "block", "copies"), [(8, 4, 1), (12, 3, 2), (6, 1, 1), (8, 8, 3)])
def test_the_rule_of_divisions_is_the_rule(length, block, copies):
    layout = BlockDiffusion(length, block, copies=copies)
    position = torch.arange(layout.size)
    pairs = position.unsqueeze(1), position.unsqueeze(0)
    assert torch.equal(undone.allows_by_divisions(layout, *pairs), layout.allows(*pairs))


def test_each_layer_is_compiled_by_itself(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compiled.append((module, options))
    )
    model = network()
    with without(OPTIMISATIONS["one graph for all layers"]):
        model.compile_trunk()
    options = {"dynamic": False, "backend": attention.compiler}
    assert compiled == [(layer, options) for layer in model.layers]


@pytest.mark.parametrize("name", OPTIMISATIONS)
def test_everything_is_put_back(name, monkeypatch):
    """Also after a failure; caches are dropped twice."""
    forgotten = []
    monkeypatch.setattr(undone, "_forget", lambda: forgotten.append(name))  # in earnest in the tests above
    optimisation = OPTIMISATIONS[name]
    places = [(owner, attribute) for owner, attribute, _ in optimisation.patches]
    before = [vars(owner)[attribute] for owner, attribute in places]

    def fail() -> None:
        with without(optimisation):
            inside = [vars(owner)[attribute] for owner, attribute in places]
            assert not set(inside) & set(before)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert [vars(owner)[attribute] for owner, attribute in places] == before
    assert forgotten == [name] * 2


def test_a_record_has_the_fields_of_the_bench():
    case = TrainingCase(shape=Shape(**TINY), batch_size=2, compile=False)
    (benched,) = bench_training(case, ["eager"], device=CPU, steps=1)
    first, without_chunks, last = measure_all(case, ["head in chunks"], device=CPU, steps=2, commit="abc")
    for record in (first, without_chunks, last):
        assert set(record) == {*benched, "undone", "instead", "ratio", "commit"}
        assert (record["case"], record["repeats"], record["commit"]) == (benched["case"], 2, "abc")
        assert record["ratio"] == record["seconds"]["median"] / first["seconds"]["median"]
    assert [record["undone"] for record in (first, without_chunks, last)] == [None, "head in chunks", None]


# --- the command ---


@pytest.fixture
def clock(monkeypatch) -> list[TrainingCase]:
    """Nothing is trained: every step takes half a second longer, and an eager one too much memory."""
    cases: list[TrainingCase] = []

    def measure(case: TrainingCase, *, device: torch.device, steps: int) -> Timing:
        cases.append(case)
        if not case.compile:
            raise torch.OutOfMemoryError("CUDA out of memory.\nOf the allocated memory ..")
        return Timing((0.5 * len(cases),) * steps, 2**30)

    monkeypatch.setattr(undone, "measure_training", measure)
    monkeypatch.setattr(undone, "matrix_rate", lambda device: 1e12)
    return cases


def run(*arguments: str) -> int:
    return main([*arguments, "--device", "cpu", "--steps", "2"])


def test_a_failure_is_written_down_and_the_rest_goes_on(clock, tmp_path, capsys):
    out = tmp_path / "undone.jsonl"
    assert run("--only", "compiled", "GELU by a sigmoid", "--out", str(out), "--commit", "abc") == 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["undone"] for line in lines] == [None, "compiled", "GELU by a sigmoid", None]
    assert [line.get("ratio") for line in lines] == [1.0, None, 3.0, 4.0]
    assert lines[1]["error"] == "OutOfMemoryError: CUDA out of memory."
    assert "seconds" not in lines[1]
    assert {line["commit"] for line in lines} == {"abc"}
    assert clock[0].shape == Shape()
    assert clock[0].batch_size == 32
    said = capsys.readouterr().out
    assert "undone: compiled: OutOfMemoryError: CUDA out of memory.\n" in said
    assert all(word in said for word in ("torch's tanh GELU", "1500.00", "3.000", "failed"))


def test_without_a_first_step_there_are_no_ratios(clock, monkeypatch):
    case = TrainingCase(shape=Shape(**TINY), batch_size=2, compile=False)
    eager = undone.Optimisation(instead="compiled", changes={"compile": True})
    monkeypatch.setitem(OPTIMISATIONS, "eager", eager)
    failed, record, _ = measure_all(case, ["eager"], device=CPU, steps=2)
    assert "error" in failed
    assert (record["ratio"], record["seconds"]["median"]) == (None, 1.0)


def test_what_a_cpu_has_not_is_said_and_left_out(clock, capsys):
    assert run("--only", "masks of 64", "GELU by a sigmoid", "average by foreach") == 0
    assert len(clock) == 3
    said = capsys.readouterr().out
    assert "'masks of 64' is left out: not on this device.\n" in said
    assert "'average by foreach' is left out: not on this device.\n" in said


def test_on_hopper_nothing_is_left_out():
    card = torch.device("cuda", 0)
    for capability, missing in (((9, 0), []), ((8, 0), ["masks of 64", "FlexAttention's tiles"])):
        with patch.object(torch.cuda, "get_device_capability", return_value=capability):
            assert [name for name, each in OPTIMISATIONS.items() if not each.at_work(card)] == missing
    assert UNCHANGED.at_work(CPU)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "magic"], "invalid choice: 'magic'"),
        (["--block-size", "1024"], "--block-size must be below the context 1024"),
        (["--heads", "7"], "hidden must be a multiple of heads"),
        (["--out", "nowhere/undone.jsonl"], "--out must be in an existing folder, and nowhere is none"),
    ],
)
def test_mistakes_are_said_before_anything_is_timed(arguments, said, clock, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    assert said in capsys.readouterr().err
    assert not clock
