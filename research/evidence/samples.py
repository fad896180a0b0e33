"""The texts of the results as files that `bd3lm judge` reads, one for each run and way of writing.

    python -m research.evidence.samples FOLDER

FOLDER/NAME.jsonl, where NAME is that of a verdict in `judged*.json`, beside the results. What has a verdict
there is left out.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"
SAMPLES, JUDGED = "evidence*-samples.jsonl.gz", "judged*.json"


def text_name(run: str, seed: int, digest: str, way: str) -> str:
    """Of the texts of a run; the digest tells those of other settings from these."""
    return f"{run}-s{seed}-{digest[:8]}-{way}"


def in_order(folder: Path, pattern: str) -> list[Path]:
    """Files of results, oldest first: the tenth after the second."""
    return sorted(
        folder.glob(pattern), key=lambda file: [int(each) for each in re.findall(r"\d+", file.name)]
    )


def read_verdicts(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """What `bd3lm judge --out` wrote, by the name of the texts."""
    records = [record for file in files for record in json.loads(file.read_text("utf-8"))]
    return {Path(record["model"]).stem: record for record in records}


def unpack_samples(files: Iterable[Path], folder: Path, judged: Iterable[str] = ()) -> list[Path]:
    """The files that were written; documents, which are measured by their lengths, are left out."""
    texts: dict[str, list[Mapping[str, Any]]] = {}
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                name = text_name(line["run"], line["seed"], line["digest"], line["set"])
                if line["set"] != "documents" and name not in judged:
                    texts.setdefault(name, []).append(line["sample"])
    return [write_texts(folder / f"{name}.jsonl", samples) for name, samples in texts.items()]


def write_texts(file: Path, samples: Iterable[Mapping[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in samples), "utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="Texts without a verdict, as files for `bd3lm judge`.")
    parser.add_argument("folder", type=Path, help="the folder to write them to")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"the folder with {SAMPLES}")
    options = parser.parse_args()
    judged = read_verdicts(in_order(options.results, JUDGED))
    written = unpack_samples(in_order(options.results, SAMPLES), options.folder, judged)
    print(f"wrote {len(written)} files of texts to {options.folder}, {len(judged)} were judged before")


if __name__ == "__main__":
    main()
