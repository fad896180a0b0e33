"""Damaged and forged checkpoints: a run goes on from an intact one and says so, or refuses in one line.

It never goes on with tensors that were not read. What killed runs leave is gone when they are taken up.
"""

import hashlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from bd3lm.cli import main
from bd3lm.cli.errors import EXPECTED
from bd3lm.io.files import only_writer
from bd3lm.runs.plan import plan_run
from bd3lm.runs.recipe import Recipe
from bd3lm.runs.train import train_stages
from bd3lm.training import CheckpointStore, Engine
from bd3lm.training.index import INDEX, Damaged, digest, read_index
from tests.adversary.confined import REFUSED, confined
from tests.adversary.test_models import ODD, fuzzed, places
from tests.tiny_recipes import prepared, tiny_recipe
from tests.training.scenarios import fingerprint

LAST, BEFORE = 4, 2  # the steps that have a checkpoint
TENSORS = "tensors.safetensors"
CASES_TOGETHER = 25


class Trained(NamedTuple):
    """A run of two checkpoints, and what is in them."""

    out: Path
    recipe: Recipe
    tensors: dict[int, str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    recipe = tiny_recipe(prepared(folder / "data"), {"train": {"steps": LAST}})
    train_stages([("run", recipe)], folder / "run", console=Console(quiet=True))
    run = plan_run(recipe, folder / "run").build()
    tensors = {}
    for step in (BEFORE, LAST):
        run.trainer.store.load_into(run.trainer._tensors(), engine=Engine(), step=step)
        tensors[step] = fingerprint(run.trainer._tensors())
    return Trained(folder / "run", recipe, tensors)


@pytest.fixture
def run(trained: Trained, tmp_path: Path) -> Trained:
    return trained._replace(out=Path(shutil.copytree(trained.out, tmp_path / "run")))


def newest(out: Path) -> Path:
    return out / "checkpoints" / f"step-{LAST:08d}"


def forge(out: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change state.json and write its digest anew."""
    file = newest(out) / INDEX
    index = json.loads(file.read_text())
    del index["sha256"]
    index = edit(index) or index
    file.write_text(json.dumps({**index, "sha256": digest(index)} if isinstance(index, dict) else index))


def taken_up(run: Trained) -> str:
    """Where a run goes on, with what is said about it; or why it does not."""
    trainer = plan_run(run.recipe, run.out).build().trainer
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            assert trainer.resume()
        except EXPECTED as error:
            line = f"{REFUSED}{error}"
            return line if "\n" not in line and len(line) < 3000 else f"no line: {line}"
    lines = [str(each.message) for each in said]
    assert fingerprint(trainer._tensors()) == run.tensors[trainer.step], "went on with other tensors"
    assert (trainer.step == LAST) == (not lines)
    assert all(line.startswith("skipping the damaged checkpoint ") and "\n" not in line for line in lines)
    return f"step {trainer.step}: {' '.join(lines)}"


# --- Forged ---


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def edit(index: dict[str, Any]) -> None:
        for key in path[:-1]:
            index = index[key]
        del index[path[-1]]

    return edit


def every_tensor(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    def edit(index: dict[str, Any]) -> None:
        for tensor in index["tensors"].values():
            change(tensor)

    return edit


def first(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    """Change the first tensor of several rows."""
    return lambda index: change(next(t for t in index["tensors"].values() if t["shape"][:1] > [1])) and None


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no pieces": (every_tensor(lambda t: t.update(pieces=[])), "pieces must hold every row of a tensor once"),
    "a row missing": (first(lambda t: t["pieces"][0].__setitem__(2, t["shape"][0] - 1)), "every row"),
    "a first row missing": (first(lambda t: t["pieces"][0].__setitem__(1, 1)), "every row"),
    "rows twice": (first(lambda t: t["pieces"].append([TENSORS, 0, 1])), "every row"),
    "an empty piece": (first(lambda t: t["pieces"].append([TENSORS, 1, 1])), "every row"),
    "a piece backwards": (first(lambda t: t["pieces"].append([TENSORS, 2, 1])), "every row"),
    "a negative row": (first(lambda t: t["pieces"].append([TENSORS, -1, 0])), "every row"),
    "no files": (lambda index: index.update(files={}), "pieces must be in one of the files"),
    "another file": (
        every_tensor(lambda t: [piece.__setitem__(0, "other") for piece in t["pieces"]]),
        "pieces must be in one of the files",
    ),
    "a file elsewhere": (
        lambda index: index["files"].update({f"../step-{BEFORE:08d}/{TENSORS}": {"size": 1, "sha256": ""}}),
        "files must have names without a folder",
    ),
    "the index as a file": (
        lambda index: index["files"].update({INDEX: {"size": 1, "sha256": ""}}),
        "files must have names without a folder",
    ),
    **{
        f"a file called {name!r}": (
            lambda index, name=name: index["files"].update({name: {"size": 1, "sha256": ""}}),
            "files must have names without a folder",
        )
        for name in ("", ".", "..", "a\0b", "\ud800", "a\n.safetensors")
    },
    "a tensor by another's name": (
        lambda index: index["tensors"].update(
            {"model/x": next(t for n, t in index["tensors"].items() if n == "model/embedding.weight")}
        ),
        "does not hold the piece of 'model/x'",
    ),
    "another type": (every_tensor(lambda t: t.update(dtype="F16")), "does not hold the piece of"),
    "another shape": (
        first(lambda t: t.update(shape=[*t["shape"], 1])),
        "does not hold the piece of",
    ),
    "rows without end": (
        first(lambda t: t.update(shape=[10**18], pieces=[[TENSORS, 0, 10**18]])),
        "does not hold the piece of",
    ),
    "another step": (lambda index: index.update(step=BEFORE), "the step that step-00000004 names"),
    "an older format": (lambda index: index.update(format=0), "must have format 1"),
    "a list": (lambda index: [index], "SHA-256 differs"),
    "sums of another number": (lambda i: i["state"].update(since_log=[1.0]), "since_log must be 3 sums"),
    "the state of another step": (lambda i: i["state"].update(step=16), "must have step 4, got 16"),
    "negative updates": (lambda i: i["state"].update(ema_updates=-10), "must not be negative"),
    "more updates than steps": (
        lambda i: i["state"].update(ema_updates=10**400),
        "must have 4 ema_updates",
    ),
    "fewer updates than steps": (
        lambda i: i["state"].update(ema_updates=0),
        "must have 4 ema_updates",
    ),
    "sums that are no numbers": (
        lambda i: i["state"].update(since_log=[float("nan")] * 3),
        "since_log must be finite",
    ),
    "a negative weight": (lambda i: i["state"].update(since_log=[1.0, 0.0, -1.0]), "a weight of at least 0"),
    "words for statistics": (lambda i: i["state"].update(statistics={"a": ["b"]}), "cannot be restored"),
    "something learned": (lambda i: i["state"].update(objective={"a": 1}), "has nothing to restore"),
    **{
        f"no {'.'.join(path)}": (without(*path), f"{'.'.join(path[-1:])}: must be given, but is missing")
        for path in [
            *((name,) for name in ("format", "step", "score", "state", "files", "tensors")),
            *(("files", TENSORS, name) for name in ("size", "sha256")),
            *(("tensors", "model/embedding.weight", name) for name in ("dtype", "shape", "pieces")),
            *(
                ("state", name)
                for name in (
                    *("step", "objective", "statistics", "ema_updates"),
                    *("validation_due", "since_log", "unlogged", "run"),
                )
            ),
        ]
    },
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_checkpoint_is_skipped(case: str, run: Trained) -> None:
    edit, message = FORGED[case]
    forge(run.out, edit)
    said = taken_up(run)
    assert said.startswith(f"step {BEFORE}: skipping the damaged checkpoint {newest(run.out)}: ")
    assert message in said


def test_a_tensor_left_out_is_refused(run: Trained) -> None:
    """The digest, the pieces and the schema are right: the network wants what is not there."""
    forge(run.out, without("tensors", "model/embedding.weight"))
    assert "step-00000004 does not fit: model/embedding.weight is not stored" in taken_up(run)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_what_is_no_file_is_not_read(make: Callable[[Path], object], run: Trained) -> None:
    """Both are empty as far as their size tells, and neither ends."""
    file = newest(run.out) / TENSORS
    file.unlink()
    make(file)
    forge(run.out, lambda index: index["files"][TENSORS].update(size=0))
    assert "tensors.safetensors is not a regular file" in confined(lambda: taken_up(run))


def test_a_file_does_not_stand_for_two_pieces_of_a_tensor(run: Trained) -> None:
    """Half the rows, listed as both halves: every digest is right, and every piece has the shape listed."""
    file, name = newest(run.out) / TENSORS, "model/embedding.weight"
    tensors = load_file(file)
    rows = len(tensors[name])
    tensors[name] = tensors[name][: rows // 2].clone()
    save_file(tensors, file)

    def edit(index: dict[str, Any]) -> None:
        data = file.read_bytes()
        index["files"][TENSORS] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        index["tensors"][name]["pieces"] = [[TENSORS, 0, rows // 2], [TENSORS, rows // 2, rows]]

    assert rows % 2 == 0
    forge(run.out, edit)
    assert "pieces must hold every row of a tensor once" in taken_up(run)


def test_a_checkpoint_that_is_nested_deeply_is_skipped(run: Trained) -> None:
    (newest(run.out) / INDEX).write_text('{"state":' * 100_000)
    assert taken_up(run).startswith(f"step {BEFORE}: ")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("batch", range(50))
def test_fuzzed_indices(batch: int, run: Trained) -> None:
    """With its digest right. What cannot be told from a state that was saved is taken for one."""
    original = (newest(run.out) / INDEX).read_text()
    index = json.loads(original)
    del index["sha256"]

    def work() -> list[str]:
        said = []
        for seed in range(batch * CASES_TOGETHER, (batch + 1) * CASES_TOGETHER):
            draw = random.Random(seed)
            (newest(run.out) / INDEX).write_text(original)
            forge(run.out, partial(instead, fuzzed(index, draw, lambda _, draw=draw: draw.choice(ODD))))
            try:
                said.append(taken_up(run))
                assert said[-1].startswith(("step ", REFUSED)), said[-1]
            except Exception as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error!s:.500}") from error
        return said

    assert len(set(confined(work, megabytes=500))) > CASES_TOGETHER / 3


def leaves(node: Any) -> Iterator[tuple[Any, ...]]:
    return (path for path in places(node) if len(path) < 4)


def instead(index: Any, _: dict[str, Any]) -> Any:
    return index


def test_every_field_may_be_missing(run: Trained) -> None:
    original = (newest(run.out) / INDEX).read_text()

    def work() -> int:
        paths = list(leaves(json.loads(original)))
        for path in paths:
            index = json.loads(original)
            del index["sha256"]
            if path != ("sha256",):
                without(*path)(index)
            (newest(run.out) / INDEX).write_text(original)
            forge(run.out, partial(instead, index))
            assert taken_up(run).startswith(("step ", REFUSED)), path
        return len(paths)

    assert confined(work) > 60


# --- Damaged ---


def hurt(name: str, how: str, place: float) -> Callable[[Path], None]:
    def do(out: Path) -> None:
        file = newest(out) / name
        data = bytearray(file.read_bytes())
        at = min(int(place * len(data)), len(data) - 1)
        match how:
            case "cut":
                data = data[:at]
            case "flipped":
                data[at] ^= 1 << at % 8
            case "zeroed":
                data[at : at + 64] = bytes(len(data[at : at + 64]))
            case "doubled":
                data = data + data
        if how in ("cut", "flipped", "zeroed", "doubled"):
            file.write_bytes(data)
            return
        file.unlink()
        {
            "gone": lambda path: None,
            "a folder": Path.mkdir,
            "a loop": lambda path: path.symlink_to(path),
            "the other's": lambda path: shutil.copy(out / "checkpoints" / f"step-{BEFORE:08d}" / name, path),
        }[how](file)

    return do


DAMAGE = [
    *(("cut", place / 8) for place in range(8)),
    *(("flipped", place / 40) for place in range(41)),
    *(("zeroed", place / 10) for place in range(10)),
    *((how, 0.0) for how in ("doubled", "gone", "a folder", "a loop", "the other's")),
]


@pytest.mark.sweep(40)
@pytest.mark.parametrize("name", [TENSORS, INDEX])
@pytest.mark.parametrize(("how", "place"), DAMAGE)
def test_a_damaged_checkpoint_is_skipped(name: str, how: str, place: float, run: Trained) -> None:
    before = (newest(run.out) / name).read_bytes()
    hurt(name, how, place)(run.out)
    file = newest(run.out) / name
    said = taken_up(run)
    if file.is_file() and json_alike(file.read_bytes(), before):
        assert said.startswith(f"step {LAST}")  # a space flipped to a tab
    else:
        assert said.startswith(f"step {BEFORE}: skipping the damaged checkpoint {newest(run.out)}: ")


def json_alike(one: bytes, other: bytes) -> bool:
    """Whether two files say the same."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return one == other


def test_only_damaged_ones_are_one_line_and_nothing_is_trained(
    run: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (BEFORE, LAST):
        (run.out / "checkpoints" / f"step-{step:08d}" / INDEX).write_text("{}")
    assert main(["train", "--out", str(run.out), "--resume"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["bd3lm"] * 3  # two warnings and an error
    assert "holds no intact checkpoint" in lines[-1]


def test_the_command_goes_on_from_the_older_one_and_says_so(
    run: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(run.out, every_tensor(lambda tensor: tensor.update(pieces=[])))
    assert main(["train", "--out", str(run.out), "--resume"]) == 0
    said = capsys.readouterr()
    assert "warning: skipping the damaged checkpoint" in said.err
    assert f"resumed at step {BEFORE}" in " ".join(said.out.split())
    index = read_index(newest(run.out))
    assert all(stored.is_whole for stored in index.tensors.values())


def test_an_index_says_of_each_file_what_it_holds(trained: Trained) -> None:
    index = read_index(newest(trained.out))
    assert index.in_file(TENSORS).keys() == index.tensors.keys()
    assert index.in_file("other") == {}
    with pytest.raises(Damaged, match="cannot be read"):
        read_index(trained.out)


# --- What killed runs leave ---

LEFT = (  # by a trainer that was killed: under a number that may well be that of a living process
    f".recipe.yaml.{os.getpid()}.tmp",
    ".metrics.csv.1.tmp",
    "model/.model.safetensors.1.tmp",
    "model/.config.json.123456.tmp",
    "model/.tokenizer.json.123456.tmp",
    "checkpoints/tmp-step-00000006/tensors.safetensors",
    "checkpoints/tmp-removed-step-00000001/state.json",
)
OTHERS = (
    ".report.html.1.tmp",
    "measured/.eval.json.1.tmp",
    "notes.tmp",
    "model/notes.1.tmp",
    "data/.x.1.tmp",
)


def litter(out: Path) -> None:
    for name in (*LEFT, *OTHERS):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(b"left")
    (out / "checkpoints" / f"step-{BEFORE:08d}").rename(out / "checkpoints" / f"old-step-{BEFORE:08d}")
    shutil.copytree(newest(out), out / "checkpoints" / f"old-step-{LAST:08d}")


def test_what_a_killed_run_left_is_gone_when_it_is_taken_up(run: Trained) -> None:
    litter(run.out)
    train_stages([("run", run.recipe)], run.out, resume=True, console=Console(quiet=True))
    assert not [name for name in LEFT if (run.out / name).exists()]
    assert all((run.out / name).read_bytes() == b"left" for name in OTHERS)
    assert sorted(path.name for path in (run.out / "checkpoints").iterdir()) == [
        f"step-{BEFORE:08d}",
        f"step-{LAST:08d}",
    ]


def test_nothing_is_removed_of_a_run_that_somebody_trains(run: Trained) -> None:
    litter(run.out)
    with only_writer(run.out), pytest.raises(ValueError, match="another process is training in"):
        train_stages([("run", run.recipe)], run.out, resume=True, console=Console(quiet=True))
    assert all((run.out / name).exists() for name in (*LEFT, *OTHERS))


def test_nothing_is_removed_where_the_command_is_refused(run: Trained) -> None:
    litter(run.out)
    with pytest.raises(ValueError, match="use --resume to continue"):
        train_stages([("run", run.recipe)], run.out, console=Console(quiet=True))
    assert all((run.out / name).exists() for name in (*LEFT, *OTHERS))


def test_a_stage_that_somebody_trains_is_left_alone(trained: Trained, tmp_path: Path) -> None:
    """On its own, in a folder that is also a stage of a run."""
    stages = [("ar", trained.recipe), ("block", trained.recipe)]
    shutil.copytree(trained.out, tmp_path / "ar")
    for name in ("ar", "block"):
        (tmp_path / name / "model").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "checkpoints" / "tmp-step-00000006").mkdir(parents=True)
    shutil.rmtree(tmp_path / "block" / "model")
    with only_writer(tmp_path / "ar"):
        train_stages(stages, tmp_path, resume=True, console=Console(quiet=True))
    assert (tmp_path / "ar" / "checkpoints" / "tmp-step-00000006").exists()
    assert not (tmp_path / "block" / "checkpoints" / "tmp-step-00000006").exists()


def test_a_store_that_is_not_there_has_nothing_to_sweep_up(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "none").sweep_up()
    assert not (tmp_path / "none").exists()


def test_a_whole_checkpoint_set_aside_outlives_a_damaged_one_in_its_place(
    run: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    aside = newest(run.out).with_name(f"old-step-{LAST:08d}")
    shutil.copytree(newest(run.out), aside)
    kept = {each.name: each.read_bytes() for each in aside.iterdir()}
    (newest(run.out) / TENSORS).write_bytes(b"damaged")
    assert main(["train", "--out", str(run.out), "--resume"]) == 0
    assert "damaged" not in capsys.readouterr().err
    assert {each.name: each.read_bytes() for each in newest(run.out).iterdir()} == kept
    assert not aside.exists()


def test_a_file_in_the_place_of_a_draft_is_swept_up(run: Trained) -> None:
    file = run.out / "checkpoints" / f"tmp-step-{LAST:08d}"
    file.write_text("in the way")
    CheckpointStore(file.parent).sweep_up()
    assert not file.exists()
