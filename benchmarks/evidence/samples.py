"""The texts of the results as files that `bd3lm judge` reads, one for each run and way of writing.

python -m benchmarks.evidence.samples evidence-samples.jsonl.gz... FOLDER
"""

import argparse
import gzip
import json
from collections.abc import Iterable
from pathlib import Path


def unpack_samples(files: Iterable[Path], folder: Path) -> list[Path]:
    """FOLDER/RUN-sSEED-SET.jsonl; documents, which are measured by their lengths, are left out."""
    texts: dict[str, list[str]] = {}
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                if line["set"] != "documents":
                    name = f"{line['run']}-s{line['seed']}-{line['set']}.jsonl"
                    texts.setdefault(name, []).append(json.dumps(line["sample"], ensure_ascii=False) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for name, samples in texts.items():
        (folder / name).write_text("".join(samples), encoding="utf-8")
    return [folder / name for name in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description="Texts as files for `bd3lm judge`.")
    parser.add_argument(
        "files", type=Path, nargs="+", help="what a session left as evidence*-samples.jsonl.gz"
    )
    parser.add_argument("folder", type=Path, help="the folder to write them to")
    options = parser.parse_args()
    written = unpack_samples(options.files, options.folder)
    print(f"wrote {len(written)} files of texts to {options.folder}")


if __name__ == "__main__":
    main()
