"""TensorBoard and W&B themselves, offline: we read back what was logged from their own files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bd3lm.training import SampleText, TensorBoardLog, Tracker, WandbLog
from tests.training.tiny import COUNTS, Crash, Watcher, crash_at, rows, tiny_trainer
from tests.training.tracker_files import events, left, offline

__all__ = ["offline"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ("train_nats", "learning_rate", "gradient_norm", "valid_nats", "valid_perplexity")
TEXTS = (
    SampleText(0, 7, "", "# no heading\n*no stars*", 9, "length"),
    SampleText(1, 8, "Ada ", "Ada and Öl", 5, "eos"),
)


def wandb_log(folder: Path) -> WandbLog:
    return WandbLog(project="tests", name="tiny", folder=folder)


def logged(folder: Path, name: str) -> list[tuple[int, float]]:
    """A figure by step, as in metrics.csv."""
    return [(int(row["step"]), float(row[name])) for row in rows(folder) if row[name]]


class TellsTexts:
    """A validator that gives two texts to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def __call__(self, trainer: Any) -> dict[str, float]:
        self.tracker.on_texts(trainer, TEXTS)
        return {}


def with_texts(folder: Path, tracker: Tracker, *watchers: Any, **settings: Any) -> Any:
    trainer = tiny_trainer(folder, COUNTS, tracker, *watchers, **settings)
    trainer.validators.append(TellsTexts(tracker))
    return trainer


# --- TensorBoard ---


def test_tensorboard_shows_what_metrics_csv_has(tmp_path):
    with_texts(tmp_path, TensorBoardLog(tmp_path / "tensorboard")).run()
    found = events(tmp_path / "tensorboard")
    for name in FIGURES:
        assert [(each.step, each.value) for each in found.Scalars(name)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in logged(tmp_path, name)
        ]
    shown = found.Tensors("samples/0/text_summary")
    assert [each.step for each in shown] == [3, 6, 9, 10]
    assert shown[0].tensor_proto.string_val[0].decode() == "    # no heading\n    *no stars*"
    assert found.Tensors("samples/1/text_summary")[0].tensor_proto.string_val[0].decode() == "    Ada and Öl"


def test_tensorboard_of_a_resumed_run_has_every_step_once(tmp_path):
    """Steps after the checkpoint are not shown twice, nor is a step with a pending validation."""
    with pytest.raises(Crash):
        tiny_trainer(tmp_path, COUNTS, TensorBoardLog(tmp_path / "tensorboard"), crash_at(7)).run()
    before = events(tmp_path / "tensorboard").Scalars("train_nats")
    assert [each.step for each in before] == [1, 2, 3, 4, 5, 6, 7]  # a dead run leaves everything it logged
    again = tiny_trainer(tmp_path, COUNTS, TensorBoardLog(tmp_path / "tensorboard"))
    assert again.resume()
    again.run()
    found = events(tmp_path / "tensorboard")
    assert [each.step for each in found.Scalars("train_nats")] == list(range(1, 11))
    assert [each.step for each in found.Scalars("valid_nats")] == [3, 6, 9, 10]


def test_tensorboard_of_a_run_that_died_while_it_validated(tmp_path):
    first = tiny_trainer(tmp_path, COUNTS, TensorBoardLog(tmp_path / "tensorboard"), checkpoint_every=3)
    first.callbacks.append(crash_at(3))  # after the row of the validation, before the checkpoint records it
    with pytest.raises(Crash):
        first.run()
    again = tiny_trainer(tmp_path, COUNTS, TensorBoardLog(tmp_path / "tensorboard"), checkpoint_every=3)
    assert again.resume()
    assert again.validation_due
    again.run()
    assert [each.step for each in events(tmp_path / "tensorboard").Scalars("valid_nats")] == [3, 6, 9, 10]


# --- W&B ---


def test_wandb_keeps_what_metrics_csv_has_and_never_prompts(tmp_path, offline):
    with_texts(tmp_path, wandb_log(tmp_path)).run()
    [found] = left(tmp_path)
    assert found.config["recipe"] == "tiny"
    assert found.exit_code == 0
    for name in FIGURES:
        assert [(each["_step"], each[name]) for each in found.history if name in each] == [
            (step, pytest.approx(value, rel=1e-8)) for step, value in logged(tmp_path, name)
        ]
    shown = {each["_step"]: each for each in found.history if "samples/path" in each or "samples" in each}
    assert list(shown) == [3, 6, 9, 10]
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.json"))
    assert len(tables) == 4
    assert {tuple(json.loads(table.read_text())["columns"]) for table in tables} == {
        ("step", "index", "prompt", "text")
    }
    assert sorted(json.loads(table.read_text())["data"] for table in tables) == [
        [[step, each.index, each.prompt, each.text] for each in TEXTS] for step in (3, 6, 9, 10)
    ]
    assert offline == []


def test_wandb_of_a_resumed_run_is_the_same_run(tmp_path, offline):
    with pytest.raises(Crash):
        tiny_trainer(tmp_path, COUNTS, wandb_log(tmp_path), crash_at(7)).run()
    again = tiny_trainer(tmp_path, COUNTS, wandb_log(tmp_path))
    assert again.resume()
    again.run()
    crashed, resumed = left(tmp_path)
    assert crashed.run == resumed.run != ""
    assert (crashed.exit_code, resumed.exit_code) == (1, 0)
    assert [each["_step"] for each in crashed.history] == [1, 2, 3, 4, 5, 6, 7]
    assert [each["_step"] for each in resumed.history] == [5, 6, 7, 8, 9, 10]
    assert {each["_step"]: each["train_nats"] for each in resumed.history}[7] == crashed.history[-1][
        "train_nats"
    ]
    other = tmp_path / "other"
    tiny_trainer(other, COUNTS, wandb_log(other), steps=1, validate=False).run()
    assert left(other)[0].run != crashed.run
    assert offline == []


_KILLED = """
import os, signal, sys, time
from pathlib import Path
from bd3lm.training import WandbLog, TensorBoardLog
from tests.training.tiny import COUNTS, Watcher, tiny_trainer
folder = Path(sys.argv[1])
def kill(trainer):
    if trainer.step == 7:
        time.sleep(2.0)  # W&B writes its data every 15 seconds; here, every half second
        os.kill(os.getpid(), signal.SIGKILL)
logs = [WandbLog(project="tests", name="tiny", folder=folder), TensorBoardLog(folder / "tensorboard")]
tiny_trainer(folder, COUNTS, *logs, Watcher(kill)).run()
"""


@pytest.mark.slow
def test_a_killed_run_leaves_records_that_can_be_read(tmp_path, offline, monkeypatch):
    monkeypatch.setenv("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "0.5")
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == -9, done.stderr.decode()
    [found] = left(tmp_path)
    steps = [each["_step"] for each in found.history]
    assert steps == list(range(1, len(steps) + 1))  # the last row stays open until the next step's
    assert len(steps) >= 6
    assert [e.step for e in events(tmp_path / "tensorboard").Scalars("train_nats")] == [1, 2, 3, 4, 5, 6, 7]
    assert offline == []


def test_without_a_login_a_run_says_so_before_it_starts(tmp_path, offline, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - nobody to ask
    trainer = tiny_trainer(tmp_path, COUNTS, wandb_log(tmp_path))
    with pytest.raises(
        ValueError, match=r"^trackers.wandb_project needs a login, or WANDB_MODE=offline: .+$"
    ):
        trainer.run()
    assert trainer.step == 0


@pytest.mark.slow  # W&B retries for ten seconds
def test_a_server_that_is_not_there_leaves_the_run_for_later(tmp_path, offline, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    tiny_trainer(tmp_path, COUNTS, wandb_log(tmp_path), steps=2, validate=False).run()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("W&B")]
    assert len(said) == 1
    assert said[0].startswith("W&B cannot be reached; the run is stored locally for `wandb sync`: ")
    [found] = left(tmp_path)
    assert [each["_step"] for each in found.history] == [1, 2]
    assert len(rows(tmp_path)) == 2
    assert offline  # it did try


# --- failures ---


class Fails(Tracker):
    """A tracker that fails in the given methods."""

    title = "Fake"

    def __init__(self, *where: str, steps: tuple[int, ...] = tuple(range(100))) -> None:
        super().__init__()
        self.where, self.steps, self.taken, self.calls = where, steps, [], []

    def _do(self, what: str, step: int) -> None:
        self.calls.append(what)
        if what in self.where and step in self.steps:
            raise OSError(28, "no space\nleft \x1b[2J")

    def open(self, trainer):
        self._do("open", 0)

    def add_metrics(self, step, metrics):
        self._do("metrics", step)
        self.taken.append(step)

    def add_texts(self, step, texts):
        self._do("texts", step)

    def close(self, *, failed):
        self._do("close", 0)


def said_by(tracker: Fails, folder: Path, capsys: Any) -> list[str]:
    trainer = with_texts(folder, tracker)
    trainer.run()
    assert trainer.step == 10
    assert len(rows(folder)) == 10
    return capsys.readouterr().err.splitlines()


def test_a_tracker_that_cannot_be_opened_is_off(tmp_path, capsys):
    tracker = Fails("open")
    [line] = said_by(tracker, tmp_path, capsys)
    assert line.startswith("Fake is off until the run is resumed; training continues: OSError: ")
    assert "\x1b" not in line
    assert tracker.calls == ["open"]


def test_a_tracker_that_fails_for_a_while_is_reported_once_and_continues(tmp_path, capsys):
    tracker = Fails("metrics", steps=(4, 5, 8))
    lines = said_by(tracker, tmp_path, capsys)
    assert tracker.taken == [1, 2, 3, 6, 7, 9, 10]
    assert [line.partition(":")[0] for line in lines] == [
        "Fake lacks this entry; training continues",
        "Fake lacks this entry; training continues",
        "Fake lacks 3 entries of this run; the run folder has all",
    ]


def test_a_tracker_that_fails_at_texts_and_at_its_end(tmp_path, capsys):
    lines = said_by(Fails("texts", "close"), tmp_path, capsys)
    assert [line.partition(";")[0] for line in lines] == [
        *["Fake lacks this entry"] * 4,
        "Fake was not closed",
        "Fake lacks 4 entries of this run",
    ]


def test_an_error_of_training_is_not_hidden_by_a_tracker_that_fails_too(tmp_path):
    with pytest.raises(Crash):
        tiny_trainer(tmp_path, COUNTS, Fails("metrics", "close"), crash_at(2)).run()


def test_a_full_disk_under_tensorboard_stops_nothing(tmp_path, capsys):
    """The failure kills the writer's own thread, which reports it at the next entry."""
    tracker = TensorBoardLog(tmp_path / "tensorboard")

    def break_it(trainer: Any) -> None:
        if trainer.step == 2:
            tracker._writer.close()
            tracker._writer = None

    tiny_trainer(tmp_path, COUNTS, tracker, Watcher(break_it), steps=4, validate=False).run()
    assert len(rows(tmp_path)) == 4
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("TensorBoard lacks this entry; training continues: ")
    assert lines[-1] == "TensorBoard lacks 2 entries of this run; the run folder has all"


def test_trackers_that_are_not_installed_say_how_to_get_them(tmp_path, monkeypatch):
    for module in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    told = r"trackers.tensorboard needs the package tensorboard: pip install 'bd3lm\[tensorboard\]'"
    with pytest.raises(ImportError, match=told):
        TensorBoardLog(tmp_path)
    told = r"trackers.wandb_project needs the package wandb: pip install 'bd3lm\[wandb\]'"
    with pytest.raises(ImportError, match=told):
        WandbLog(project="p", name="n", folder=tmp_path)


def test_only_the_main_process_has_trackers(tmp_path):
    from tests.training.test_callbacks import at

    tracker = Fails()
    tracker.on_start(at(0, main=False))
    tracker.on_log(at(1, main=False), {"train_nats": 1.0})
    tracker.on_texts(at(1, main=False), TEXTS)
    tracker.on_end(at(1, main=False))
    assert tracker.calls == []
