"""What stands where a file should: pipes, devices, links elsewhere; names that are no text; a full disk."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from bd3lm.cli import main
from bd3lm.commands.shared import records
from bd3lm.commands.shared.partials import Partial
from bd3lm.interop import weights
from bd3lm.io.files import read_text, write_atomically
from bd3lm.runs.recipe import recipe_from_dict
from bd3lm.runs.train import train_stages
from tests.adversary.confined import confined
from tests.commands import fails
from tests.tiny_recipes import BLOCK, plain, prepared

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    recipe = recipe_from_dict(plain(prepared(folder / "shards"), BLOCK), where="here")
    train_stages([("run", recipe)], folder / "run", console=Console(quiet=True), device="cpu")
    assert main(["eval", str(folder / "run"), "--estimator", "nelbo", "--device", "cpu"]) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


STRANGE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "a loop": lambda path: path.symlink_to(path),
    "a folder": Path.mkdir,
    "large": lambda path: path.write_text("[" + "1," * 30_000_000),
}
COMMANDS = {
    "measured/more.json": ("report", "RUN", "--no-measure", "--device", "cpu"),
    "metrics.csv": ("train", "--out", "RUN", "--resume", "--train.steps", "8", "--device", "cpu"),
    "recipe.yaml": ("train", "--out", "RUN", "--resume", "--device", "cpu"),
    "checkpoints/step-00000006/state.json": ("train", "--out", "RUN", "--resume", "--device", "cpu"),
    "checkpoints/step-00000006/tensors.safetensors": ("train", "--out", "RUN", "--resume", "--device", "cpu"),
    "model/config.json": ("sample", "RUN", "a", "--max-new-tokens", "4", "--device", "cpu"),
    "model/model.safetensors": ("sample", "RUN", "a", "--max-new-tokens", "4", "--device", "cpu"),
    "model/tokenizer.json": ("sample", "RUN", "a", "--max-new-tokens", "4", "--device", "cpu"),
    "model/tokenizer_config.json": ("sample", "RUN", "a", "--max-new-tokens", "4", "--device", "cpu"),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("how", STRANGE)
@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_no_file_is_not_waited_for(name: str, how: str, run: Path, capfd: Capture) -> None:
    """It is one line, or as if nothing were there; a damaged checkpoint is skipped."""
    file = run / name
    file.unlink(missing_ok=True)
    STRANGE[how](file)
    words = [str(run) if word == "RUN" else word for word in COMMANDS[name]]
    status = confined(lambda: main(words), megabytes=500, seconds=40)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("bd3lm: ")]
    assert status in (0, 1)
    if status:
        assert [line for line in said if "warning" not in line], said
    if name.startswith("checkpoints"):
        assert status == 0
        assert "skipping the damaged checkpoint" in said[0]


def test_a_pipe_is_read_where_a_user_names_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"it is not a regular file: '.*pipe'"):
        read_text(tmp_path / "pipe", most=10)
    if not os.fork():
        (tmp_path / "pipe").write_text("abc")
        os._exit(0)
    assert read_text(tmp_path / "pipe", most=10, piped=True) == "abc"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("zeros", "must have at most 1,000,000 bytes, got more"),
        ("large", "must have at most 1,000,000 bytes, got 60,000,001"),
        ("a folder", "could not be read: Is a directory"),
        ("a loop", "could not be read: Too many levels of symbolic links"),
        ("bytes", "must be UTF-8 text"),
        ("nothing", "could not be read: No such file or directory"),
        ("nested", "json_schema cannot be used: it is nested too deeply to be read"),
    ],
)
def test_a_schema_that_is_none_is_one_line(how: str, said: str, tmp_path: Path, capfd: Capture) -> None:
    file = tmp_path / "schema.json"
    others: dict[str, Callable[[Path], object]] = {
        "bytes": lambda path: path.write_bytes(b"\xff\x00"),
        "nothing": lambda path: None,
        "nested": lambda path: path.write_text("[" * 50_000),
    }
    (STRANGE | others)[how](file)
    words = ["sample", "box", "--law", "causal", "--json-schema", str(file), "--length", "8"]
    assert confined(lambda: main(words), megabytes=500, seconds=40) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("bd3lm: ")
    assert said in line
    assert how == "nested" or "--json-schema" in line


@pytest.mark.parametrize("name", ["report.html", "report.md", "report/losses.svg"])
def test_a_report_is_not_written_through_a_link(name: str, run: Path, tmp_path: Path) -> None:
    """Else whoever gives a run away chooses a file of the reader's to be replaced."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    assert main(["report", str(run), "--no-measure", "--device", "cpu"]) == 0
    (name,) = [name] if (run / name).exists() else [f"report/{next((run / 'report').iterdir()).name}"]
    (run / name).unlink()
    (run / name).symlink_to(precious)
    assert main(["report", str(run), "--no-measure", "--device", "cpu"]) == 0
    assert precious.read_text() == "precious"
    assert not (run / name).is_symlink()


def test_an_earlier_report_may_be_anything(run: Path) -> None:
    (run / "report.md").write_bytes(b"\xff\xfe](report/x.svg)")
    assert main(["report", str(run), "--no-measure", "--device", "cpu"]) == 0
    assert (run / "report.md").read_text("utf-8").startswith("# ")


def test_a_report_that_cannot_be_written_is_not_measured_for(
    run: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Not even root can write to a file system that is read-only."""
    monkeypatch.setattr(records, "why_not_writable", lambda folder: "Read-only file system")
    monkeypatch.setattr("bd3lm.commands.report.measuring.measure_missing", None)
    line = fails(capsys, "report", str(run), "--device", "cpu")
    assert f"--out must be a writable folder, and {run} is not: Read-only file system" in line


@pytest.mark.parametrize("command", ["train", "adapt", "adapt --own", "prepare"])
@pytest.mark.parametrize(("out", "why"), [("a.txt", "it is a file"), ("a.txt/in", "Not a directory")])
def test_a_folder_that_cannot_be_made_is_named_with_its_flag(
    command: str, out: str, why: str, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "a.txt").write_text("a text\n\nanother text\n\n" * 20)
    text, where = str(tmp_path / "a.txt"), str(tmp_path / out)
    (tmp_path / "prompts").write_text("a")
    prompts = str(tmp_path / "prompts")
    adapt = ["adapt", str(run), "--to", "joint", "--out", where, "--device", "cpu"]
    words = {
        "train": ["train", "--config", str(run / "recipe.yaml"), "--out", where, "--device", "cpu"],
        "adapt": [*adapt, "--text", text],
        "adapt --own": [*adapt, "--own", "--own-prompts", prompts],
        "prepare": ["data", "prepare", text, where, "--tokenizer", "bytes"],
    }[command]
    line = fails(capsys, *words)
    assert f"out must be a folder that can be created, got {where}" in line
    assert line.rstrip().endswith((why, "Not a directory"))


# --- names that no text can hold ---


def test_a_score_of_a_file_whose_name_is_no_text_is_kept(run: Path, tmp_path: Path, capfd: Capture) -> None:
    file = tmp_path / "a\udcff.txt"
    file.write_text("a text")
    out = tmp_path / "scores.jsonl"
    words = ["score", str(run), str(file), "--estimator", "nelbo", "--device", "cpu"]
    assert main([*words, "--out", str(out)]) == 0
    assert main(words) == 0
    lines = [out.read_text("utf-8"), capfd.readouterr().out]
    assert [json.loads(line)["file"] for line in lines] == [str(file)] * 2


def test_a_source_whose_name_is_no_text_is_prepared(tmp_path: Path) -> None:
    file = tmp_path / "a\udcff\x1b[31m.txt"
    file.write_text("a text\n\nmore")
    assert main(["data", "prepare", str(file), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    assert "\\\\udcff\\\\x1b[31m" in (tmp_path / "out" / "meta.json").read_text("utf-8")
    assert main(["data", "verify", str(tmp_path / "out")]) == 0


# --- a disk that is full ---


def test_weights_that_do_not_fit_are_one_line(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    def full(*_: object) -> Iterator[bytes]:
        yield b"half"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights, "file_pieces", full)
    line = fails(capsys, "convert", str(run / "model"), str(tmp_path / "out"))
    assert "No space left on device" in line
    assert "model.safetensors" in line
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_line_that_does_not_fit_says_where_and_that_the_rest_is_kept(tmp_path: Path) -> None:
    with open("/dev/full", "ab", buffering=0) as full:
        partial = Partial(tmp_path / "out.jsonl", full)
        with pytest.raises(
            OSError, match=r"the disk is full; finished files are safe: .*run the same command"
        ):
            partial.write("{}")


def test_a_file_that_does_not_fit_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a\.json'"):
        write_atomically(tmp_path / "a.json", b"")
    assert not list(tmp_path.iterdir())
