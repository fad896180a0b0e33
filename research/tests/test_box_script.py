"""research/box.sh, as far as it goes without training."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "box.sh"


def start(folder: Path, out: str) -> subprocess.CompletedProcess[str]:
    """The script, where `python` only says that it was called and fails."""
    (folder / "python").write_text("#!/bin/sh\necho called\nexit 9\n")
    (folder / "python").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", SCRIPT, "text", out], cwd=folder, env={"PATH": path}, capture_output=True, text=True
    )


@pytest.mark.parametrize("out", ["old", "old/samples.jsonl"])
def test_what_lies_in_the_way_is_said_before_anything_is_done(out: str, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "samples.jsonl").touch()
    ended = start(tmp_path, out)
    said = f"OUT must be a new or empty folder, got {out}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", said)


def test_prepared_text_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "meta.json").touch()
    ended = start(tmp_path, "new")
    assert ended.stdout == "== 0 s: bd3lm train box --data.path text\ncalled\n"


@pytest.mark.parametrize("out", ["empty", "new"])
def test_a_new_or_empty_folder_will_do(out: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ended = start(tmp_path, out)
    assert (ended.returncode, ended.stderr) == (9, "")
    assert ended.stdout.endswith("called\n")
