import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bd3lm.training import tensor_files
from bd3lm.training.checkpoint import CheckpointStore, optimizer_groups
from bd3lm.training.distributed import Engine
from tests.training.processes import run_processes
from tests.training.scenarios import Run, fingerprint, flip_byte, full_disk

ONE = Engine()


def numbers(value: float) -> dict[str, dict[str, Tensor]]:
    return {"model": {"w": torch.full((3, 2), value), "b": torch.full((), value)}}


def save(store: CheckpointStore, *steps: int, **scores: float) -> None:
    for step in steps:
        store.save(step, numbers(float(step)), {"n": step}, engine=ONE, score=scores.get(f"s{step}"))


def loaded(store: CheckpointStore, **options: Any) -> tuple[Any, float]:
    """The state, and the value that `numbers` gave to all tensors."""
    target = numbers(-1.0)
    state = store.load_into(target, engine=ONE, **options)
    values = {value for tensor in target["model"].values() for value in tensor.flatten().tolist()}
    (value,) = values
    return state, value


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- What goes in comes out ----------------------------------------------------------------------------


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(7, 5, generator=generator)
    tensors = {
        "floats": {
            "f32": noise,
            "f64": noise.double() / 3,
            "bf16": noise.bfloat16(),
            "f16": noise.half(),
            "odd": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        },
        "others": {
            "i64": torch.tensor([2**62, -1]),
            "u8": torch.arange(5, dtype=torch.uint8),
            "bool": torch.tensor([True, False, True]),
            "number": torch.tensor(3.5),
            "none": torch.zeros(0, 4),
            "transposed": noise.T,
        },
    }
    empty = {g: {n: torch.zeros_like(t) for n, t in named.items()} for g, named in tensors.items()}
    store = CheckpointStore(tmp_path)
    store.save(1, tensors, {}, engine=ONE)
    assert store.load_into(empty, engine=ONE) == {}
    assert fingerprint(empty) == fingerprint(tensors)


def test_the_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(12, numbers(2.0), {"a": [1]}, engine=ONE, score=0.5)
    assert path == tmp_path / "step-00000012"
    assert names(path) == ["state.json", "tensors.safetensors"]
    index = json.loads((path / "state.json").read_text())
    assert (index["format"], index["step"], index["score"], index["state"]) == (1, 12, 0.5, {"a": [1]})
    assert index["tensors"]["model/w"] == {
        "dtype": "F32",
        "shape": [3, 2],
        "pieces": [["tensors.safetensors", 0, 3]],
    }
    read = load_file(path / "tensors.safetensors")
    assert {key: tuple(value.shape) for key, value in read.items()} == {"model/w": (3, 2), "model/b": ()}


def test_state_is_json(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    state = {"text": "é", "float": 0.1, "nested": {"list": [1, None, True]}, "worst": float("inf")}
    store.save(1, numbers(1.0), state, engine=ONE)
    assert loaded(store)[0] == state
    with pytest.raises(ValueError, match=r"state must be JSON: .*Tensor"):
        store.save(2, numbers(2.0), {"t": torch.zeros(1)}, engine=ONE)
    assert store.steps() == [1]


def test_one_group_can_be_read_alone_and_into_other_tensors(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {**numbers(1.0), "ema": numbers(2.0)["model"]}, {}, engine=ONE)
    model = numbers(0.0)["model"]
    store.load_into({"ema": model}, engine=ONE)
    assert model["b"].item() == 2.0
    assert store.load_into({}, engine=ONE) == {}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"w": torch.zeros(3, 2)}, "model/b is stored but not expected"),
        ({"w": torch.zeros(3, 2), "b": torch.zeros(()), "c": torch.zeros(1)}, "model/c is not stored"),
        ({"w": torch.zeros(2, 3), "b": torch.zeros(())}, r"model/w is F32 \[3, 2\] instead of F32 \[2, 3\]"),
        ({"w": torch.zeros(3, 2).half(), "b": torch.zeros(())}, r"F32 \[3, 2\] instead of F16 \[3, 2\]"),
    ],
)
def test_tensors_of_another_network_are_refused_untouched(
    asked: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, 2)
    with pytest.raises(ValueError, match=f"step-00000002 does not fit: .*{message}"):
        store.load_into({"model": asked}, engine=ONE)
    assert all(not tensor.any() for tensor in asked.values())


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        CheckpointStore(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="keep_best must not be negative, got -1"):
        CheckpointStore(tmp_path, keep_best=-1)
    store = CheckpointStore(tmp_path)
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        save(store, -1)
    with pytest.raises(ValueError, match="group's name must not be empty or contain '/', got 'a/b'"):
        store.save(1, {"a/b": {}}, {}, engine=ONE)
    with pytest.raises(ValueError, match=r"model/w must have one of the dtypes .* got torch.complex64"):
        store.save(1, {"model": {"w": torch.zeros(1, dtype=torch.complex64)}}, {}, engine=ONE)
    save(store, 1, 2)
    with pytest.raises(ValueError, match=r"step must have a checkpoint in .*, which has \[1, 2\], got 3"):
        loaded(store, step=3)
    assert loaded(store, step=1) == ({"n": 1}, 1.0)


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    for store in (CheckpointStore(tmp_path), CheckpointStore(tmp_path / "not" / "there")):
        assert store.latest() is None
        assert store.steps() == []
        assert store.load_into(numbers(0.0), engine=ONE, required=False) is None
        with pytest.raises(ValueError, match="holds no intact checkpoint"):
            store.load_into(numbers(0.0), engine=ONE)
    save(CheckpointStore(tmp_path / "not" / "there"), 1)
    assert CheckpointStore(tmp_path / "not" / "there").latest() == 1


# --- Which checkpoints are kept -------------------------------------------------------------------------


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    seen = []
    for step, score in enumerate([5.0, 3.0, None, 4.0, float("nan"), 2.0, 6.0, 7.0], start=1):
        store.save(step, numbers(step), {}, engine=ONE, score=score)
        seen.append(store.steps())
    assert seen == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7], [6, 7, 8]]
    assert names(tmp_path) == ["step-00000006", "step-00000007", "step-00000008"]


def test_several_or_none_of_the_best_can_be_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "two", keep_last=1, keep_best=2)
    save(store, 1, 2, 3, 4, s1=2.0, s2=1.0, s3=3.0, s4=4.0)
    assert store.steps() == [1, 2, 4]
    store = CheckpointStore(tmp_path / "none", keep_last=1, keep_best=0)
    save(store, 1, 2, 3, s1=1.0, s2=2.0, s3=3.0)
    assert store.steps() == [3]


def test_later_steps_are_left_alone_and_take_no_place(tmp_path: Path) -> None:
    """A run that went back before a damaged checkpoint keeps its own last ones."""
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=0)
    save(store, 10, 20, 12, 14, 16)
    assert store.steps() == [14, 16, 20]
    save(store, 20, 30)
    assert store.steps() == [20, 30]
    assert loaded(store, step=20) == ({"n": 20}, 20.0)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    store.save(1, numbers(7.0), {"n": 7}, engine=ONE)
    assert loaded(store) == ({"n": 7}, 7.0)
    assert names(tmp_path) == ["step-00000001"]


def test_other_files_in_the_folder_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-00000009").write_text("a file")
    (tmp_path / "log.csv").write_text("1,2")
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1, 2)
    assert store.steps() == [2]
    assert names(tmp_path) == ["log.csv", "step-00000002", "step-00000009", "step-notes"]


# --- Damage --------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    (path / "tensors.safetensors").write_bytes((path / "tensors.safetensors").read_bytes()[:-1])


def change_state(path: Path) -> None:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"n": 2', '"n": 3'))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "tensors.safetensors has .* bytes instead of"),
    "flipped": (lambda p: flip_byte(p / "tensors.safetensors", -3), "SHA-256 differs"),
    "header flipped": (lambda p: flip_byte(p / "tensors.safetensors", 2), "SHA-256 differs"),
    "deleted": (lambda p: (p / "tensors.safetensors").unlink(), "safetensors cannot be read: No such file"),
    "index empty": (lambda p: (p / "state.json").write_text(""), "state.json is not JSON"),
    "index cut": (lambda p: (p / "state.json").write_text("{"), "state.json is not JSON"),
    "index a list": (lambda p: (p / "state.json").write_text("[]"), "state.json is not what was written"),
    "index not text": (lambda p: (p / "state.json").write_bytes(b"\xff\xfe\xfd"), "state.json is not JSON"),
    "index changed": (change_state, "state.json is not what was written"),
    "index deleted": (lambda p: (p / "state.json").unlink(), "state.json cannot be read: No such file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(kind: str, tmp_path: Path) -> None:
    damage, reason = DAMAGE[kind]
    store = CheckpointStore(tmp_path)
    save(store, 1, 2)
    damage(tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match=f"skipping the damaged checkpoint .*step-00000002: .*{reason}"):
        assert loaded(store) == ({"n": 1}, 1.0)
    save(store, 2)  # the run gets there again
    assert loaded(store) == ({"n": 2}, 2.0)


@pytest.mark.parametrize("required", [True, False])
def test_only_damaged_checkpoints_are_an_error(required: bool, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, 2)
    truncate(tmp_path / "step-00000001")
    change_state(tmp_path / "step-00000002")
    message = "holds no intact checkpoint .step-00000002: state.json .*; step-00000001: tensors.safetensors"
    with pytest.warns(UserWarning, match="skipping"), pytest.raises(ValueError, match=message):
        loaded(store, required=required)


def test_a_newer_format_is_not_reported_as_damage(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with mock.patch.object(tensor_files, "FORMAT", 2):
        save(store, 2)
    with pytest.raises(ValueError, match="step-00000002 has format 2; this version of bd3lm reads format 1"):
        loaded(store)


# --- Accidents while writing ---------------------------------------------------------------------------


def test_a_full_disk_is_one_clear_line_and_costs_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    with full_disk(), pytest.raises(OSError, match="step 2 could not be written") as caught:
        save(store, 2)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value) == (
        f"[Errno 28] the checkpoint of step 2 could not be written to {tmp_path}: No space left on device; "
        "earlier checkpoints are intact"
    )
    assert names(tmp_path) == ["step-00000001"]
    assert loaded(store) == ({"n": 1}, 1.0)
    save(store, 2)
    assert loaded(store) == ({"n": 2}, 2.0)


def test_a_disk_that_is_found_full_only_when_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left on device"):
            save(store, 2)
    assert names(tmp_path) == ["step-00000001"]


def test_an_old_one_that_resists_removal_does_not_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=0)
    save(store, 1)
    rename = os.rename

    def stubborn(source: Path, target: Path) -> None:
        if Path(source).name == "step-00000001":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", stubborn)
        with pytest.warns(UserWarning, match="step-00000001 could not be removed: Permission denied"):
            save(store, 2)
    assert loaded(store) == ({"n": 2}, 2.0)
    save(store, 3)
    assert store.steps() == [3]


def test_everything_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        events.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def watched_rename(source: Path, target: Path) -> None:
        events.append(("rename", f"{Path(source).name} {Path(target).name}"))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    save(store, 2)
    assert events == [
        ("fsync", "tensors.safetensors"),
        ("fsync", "state.json"),
        ("fsync", "tmp-step-00000002"),
        ("rename", "tmp-step-00000002 step-00000002"),
        ("fsync", tmp_path.name),
        ("rename", "step-00000001 tmp-removed-step-00000001"),
    ]


@pytest.mark.slow
def test_a_save_killed_at_any_moment_leaves_complete_checkpoints(tmp_path: Path) -> None:
    """kill -9 before and after every call that changes the disk, when saving step 3, and step 2 again."""
    base = tmp_path / "base"
    for number in (1, 2):
        tensors = {"model": {"w": torch.full((4,), float(number))}}
        CheckpointStore(base).save(number, tensors, {"run": 1}, engine=ONE)
    (results,) = run_processes("tests.training.scenarios.killed_everywhere", str(base), world=1)
    for step, outcomes in zip((3, 2), results, strict=True):
        assert [outcome["killed"] for outcome in outcomes] == [True] * (len(outcomes) - 1) + [False]
        newest = []
        for outcome in outcomes:
            values = {int(found): value for found, value in outcome["values"].items()}
            assert all(numbers == [float(found)] * 4 for found, (_, numbers) in values.items())
            newest.append((max(values), values[max(values)][0]["run"]))
            # The next save cleans up, and keeps its own and the best, which is `step` if that was completed.
            kept = [step, step + 1] if newest[-1] == (step, 2) else [step + 1]
            assert outcome["after"] == [f"step-{number:08d}" for number in kept]
        before = newest.index((step, 2))
        assert newest == [(2, 1)] * before + [(step, 2)] * (len(newest) - before)
        assert 5 < before < len(newest) - 5


# --- Optimizer state -----------------------------------------------------------------------------------


def test_an_optimizer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = Run(ONE)
    for step in range(4):
        straight.train(step)
    first, store = Run(ONE), CheckpointStore(tmp_path)
    for step in range(2):
        first.train(step)
    store.save(2, first.groups(), {"updates": first.ema.updates}, engine=ONE)
    second = Run(ONE)
    second.train(9)  # overwritten, whatever it was before
    state = store.load_into(second.groups(), engine=ONE)
    assert state is not None
    second.ema.updates = state["updates"]
    for step in range(2, 4):
        second.train(step)
    assert fingerprint(second.groups()) == fingerprint(straight.groups())


def test_a_fresh_optimizer_begins_with_its_own_zeros() -> None:
    touched, untouched = Run(ONE), Run(ONE)
    groups = touched.groups()
    assert set(groups) == {"model", "ema", "exp_avg", "exp_avg_sq", "optimizer_step"}
    assert all(not t.any() for g in ("exp_avg", "exp_avg_sq", "optimizer_step") for t in groups[g].values())
    touched.train(0)
    untouched.train(0)
    assert fingerprint(touched.groups()) == fingerprint(untouched.groups())
    assert {t.item() for t in touched.groups()["optimizer_step"].values()} == {1.0}


def test_only_the_optimizers_own_parameters_have_a_state() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="parameters must be the optimizer's own, but 'w' is not"):
        optimizer_groups(optimizer, {"w": nn.Parameter(torch.zeros(1))})


# --- Several processes ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_any_number_of_processes_reads_what_any_other_wrote(tmp_path: Path) -> None:
    """Four FSDP2 ranks, one of them without rows, then one process, two FSDP2 ranks, two DDP ranks, one."""
    sharded, single, again, replicated = (tmp_path / name for name in ("four", "one", "two", "ddp"))
    written = run_processes("tests.training.scenarios.train_and_save", str(sharded), world=4)
    (original,) = {result["fingerprint"] for result in written}
    assert not written[0]["empty"]
    assert "final_norm.weight" in written[3]["empty"]
    assert names(sharded / "step-00000002") == ["state.json"] + [
        f"tensors-0000{rank}-of-00004.safetensors" for rank in range(4)
    ]
    one = Run(Engine())
    state = CheckpointStore(sharded).load_into(one.groups(), engine=ONE)
    assert state == {"updates": 2}
    assert fingerprint(one.groups()) == original
    CheckpointStore(single).save(2, one.groups(), state, engine=ONE)
    arguments = [str(folder) for folder in (sharded, single, again, replicated)]
    for result in run_processes("tests.training.scenarios.convert", *arguments, world=2):
        assert result["state"] == state
        assert set(result["fingerprints"].values()) == {original}
        assert result["apart"] < 1e-5
    assert len(names(again / "step-00000002")) == 3
    assert names(replicated / "step-00000002") == ["state.json", "tensors.safetensors"]
    for folder in (again, replicated):
        one = Run(Engine())
        CheckpointStore(folder).load_into(one.groups(), engine=ONE)
        assert fingerprint(one.groups()) == original


@pytest.mark.slow
def test_an_error_on_one_process_is_an_error_for_all(tmp_path: Path) -> None:
    """A full disk or a damaged file on one rank is an error, or a step back, for all ranks."""
    first, second = run_processes("tests.training.scenarios.misfortunes", str(tmp_path), world=2)
    for result in (first, second):
        assert result["errno"] == errno.ENOSPC
        assert result["error"] == (
            f"[Errno 28] the checkpoint of step 2 could not be written to {tmp_path}: "
            "No space left on device (process 1 of 2); earlier checkpoints are intact"
        )
        assert result["after"] == ["step-00000001"]
        assert result["state"] == {"n": 1}
        assert result["went back"]
    assert len(first["warnings"]) == 1
    assert "tensors-00001-of-00002.safetensors is not what was written" in first["warnings"][0]
    assert second["warnings"] == []
