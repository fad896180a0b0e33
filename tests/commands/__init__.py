"""A sample as `bd3lm sample --out` writes it, for the tests of commands that read files of them."""

import json
from pathlib import Path

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


def written(folder: Path, *lines: object) -> Path:
    file = folder / "samples.jsonl"
    file.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), "utf-8")
    return file
