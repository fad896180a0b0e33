"""What tests of commands share: the line on a failure, models and texts in files, files of samples."""

import json
from pathlib import Path

import pytest

from bd3lm.cli import main
from bd3lm.lm import LanguageModel
from tests.data_room.documents import random_texts

LINE = {
    "documents": ["a line\u2028and a next\x85line"],
    "length": 9,
    "given": 1,
    "evaluations": 8,
    "redraws": 0,
    "redrawn_passes": 0,
    "stopped_by": "length",
    "entropy": 2,
    "dtype": "float32",
    "settings": {"length": None},
}


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on standard error, after exit code 1."""
    assert main(words) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("bd3lm: ")
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


def written(folder: Path, *lines: object) -> Path:
    file = folder / "samples.jsonl"
    file.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), "utf-8")
    return file


def saved(model: LanguageModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def documents(folder: Path, number: int = 12) -> Path:
    file = folder / "text.jsonl"
    texts = random_texts(number)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file
