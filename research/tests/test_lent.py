"""research/lent.py and research/session.sh, as far as they go without a GPU."""

import gzip
import hashlib
import json
import lzma
import os
import random
import subprocess
import zipfile
from pathlib import Path

import pytest

from research import lent

SCRIPT = Path(__file__).parents[1] / "session.sh"


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What three calls would take, without a network; some files stand for the old commit."""
    wikipedia = tmp_path / "wikipedia"
    wikipedia.mkdir()
    for split in ("train", "valid"):
        with lzma.open(wikipedia / f"{split}.jsonl.xz", "wt") as file:
            file.writelines(json.dumps({"text": f"{split} {number}"}) + "\n" for number in range(50))
    checkpoint = tmp_path / "smollm.gguf"
    checkpoint.write_bytes(random.Random(0).randbytes(10_000))
    tree = 1 << 20
    monkeypatch.setattr(lent, "SPARE", 0)
    out = tmp_path / "carry"
    archive = out / "1" / "old.tar.gz"

    def made(words: list[str], **_: object) -> None:
        assert words[:2] == ["git", "archive"]
        assert words[words.index("-o") + 1] == str(archive)
        subprocess.run(["tar", "-czf", archive, "-C", tmp_path, "wikipedia"], check=True)

    class Process:
        run = staticmethod(made)

    with monkeypatch.context() as only_here:
        only_here.setattr(lent, "subprocess", Process)
        only_here.setattr(lent, "FIRST", 4000)
        only_here.setattr(lent, "MOST", tree + 8000)
        sizes = lent.pack(
            out, checkpoint=checkpoint, wikipedia=wikipedia, old="HEAD", documents=40, tree=tree, fetch=False
        )
    assert len(sizes) == 3
    assert max(sizes) <= tree + 8000
    return out


def test_the_checkpoint_is_whole_once_all_calls_have_come(packed: Path, tmp_path: Path) -> None:
    to = tmp_path / "lent"
    came = tmp_path / "came"
    for number in ("1", "2", "3"):  # one at a time, as calls bring them
        came.mkdir()
        (packed / number).rename(came / number)
        there = lent.unpack(came, to)
        assert ("checkpoint.gguf" in there) == (number == "3")
        (came / number).rename(tmp_path / f"gone-{number}")
        came.rmdir()
    assert (to / "checkpoint.gguf").read_bytes() == (tmp_path / "smollm.gguf").read_bytes()
    assert {"old", "wikipedia"} <= set(there)
    lines = [
        len((to / "wikipedia" / f"{each}.jsonl").read_text().splitlines()) for each in ("train", "valid")
    ]
    assert lines == [40, 2]


def test_parts_of_different_files_are_refused(tmp_path: Path) -> None:
    to, call = tmp_path / "lent", tmp_path / "carry" / "1"
    call.mkdir(parents=True)
    for number, part in enumerate((gzip.compress(b"abc"), b"", b"")):
        (call / f"checkpoint.gz.{number}").write_bytes(part)
    (call / "checkpoint.sha256").write_text(hashlib.sha256(b"abd").hexdigest())
    with pytest.raises(ValueError, match="do not fit together"):
        lent.unpack(tmp_path / "carry", to)


def test_what_a_call_cannot_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "carry").mkdir()
    with pytest.raises(ValueError, match="must not exist yet"):
        lent.pack(
            tmp_path / "carry", checkpoint=tmp_path, wikipedia=tmp_path, old="HEAD", documents=1, tree=0
        )


def test_only_packages_that_lack_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "carry" / "1" / "wheels"
    wheels.mkdir(parents=True)
    for name in ("absent_package", "its_need", "pytest"):
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as file:
            file.writestr(f"{name}/__init__.py", "")
    rows = {"absent_package": ("absent_package", "its_need"), "pytest": ("pytest",)}
    monkeypatch.setattr(lent, "PACKAGES", rows)
    lent.unpack(tmp_path / "carry", tmp_path / "lent")
    assert sorted(each.name for each in (tmp_path / "lent" / "site").iterdir()) == [
        "absent_package",
        "its_need",
    ]


# --- the script ---


def start(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script, where Python only says what it is asked for."""
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "called $*"\n')
    python.chmod(0o755)
    given = {"PATH": os.environ["PATH"], "PYTHON": str(python), "LENT": str(folder / "lent"), **environment}
    return subprocess.run(
        ["bash", SCRIPT, *words], cwd=folder, env=given, capture_output=True, text=True, timeout=60
    )


def test_a_step_that_has_no_time_is_left_out_and_the_next_may_have_it(tmp_path: Path) -> None:
    ended = start(tmp_path, "out", "peers", COMMIT="abc", LIMIT="100")
    assert ended.returncode == 0
    said = ended.stdout
    assert "== train is left out: 110 s are not left of 100" in said
    assert "== sample\ncalled research/peers.py --commit abc" in said
    assert "--works sample" in said
    (step,) = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    assert (step["step"], step["estimate"], step["status"]) == ("sample", 90, 0)


def test_steps_may_be_named(tmp_path: Path) -> None:
    ended = start(tmp_path, "out", "peers", "sample", COMMIT="abc")
    assert "== train" not in ended.stdout
    assert "--works sample" in ended.stdout


def test_what_has_not_come_is_said(tmp_path: Path) -> None:
    ended = start(tmp_path, "out", "speed", COMMIT="abc")
    assert ended.returncode == 1
    assert "speed needs" in ended.stderr
    assert "checkpoint.gguf" in ended.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "COMMIT=... research/session.sh OUT"),
        (["out"], "COMMIT=... research/session.sh OUT"),
        (["out", "magic"], "got magic"),
    ],
)
def test_mistakes_are_said(words: list[str], said: str, tmp_path: Path) -> None:
    ended = start(tmp_path, *words, COMMIT="abc")
    assert ended.returncode == 1
    assert said in ended.stderr


def test_it_must_be_told_the_commit(tmp_path: Path) -> None:
    ended = start(tmp_path, "out", "peers")
    assert ended.returncode == 1
    assert "COMMIT" in ended.stderr
