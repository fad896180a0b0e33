"""Whether this tree computes what another commit does, to the last bit.

    python scripts/same_numbers.py COMMIT

trains a tiny model of every method and masking rule with both, from the same seeds on the same machine, each
by its own command line. It compares the training logs with their validations, the likelihoods of some texts,
and sampled tokens. A refactor changes none of them. Recipes of before 0.2 said how a method is trained in its
own section; they are translated.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
STEPS = 12
COMMON: dict[str, Any] = {
    "data": {"context": 32, "validation_sequences": 16, "validation_batch": 8},
    "network": {"size": "tiny", "layers": 2, "hidden": 32, "heads": 2, "dropout": 0.1},
    "optimizer": {"lr": 0.01, "warmup_steps": 2},
    "train": {"steps": STEPS, "global_batch": 8, "log_every": 1, "validate_every": 4, "ema_decay": 0.9},
    "trackers": {"nelbo_variance_batches": 1},
}
BLOCKS = {"kind": "block_diffusion", "block_size": 4}
CASES: Mapping[str, dict[str, Any]] = {
    "ar": {"method": {"kind": "autoregressive"}},
    "ar-random-batch": {
        "method": {"kind": "autoregressive", "score_first": True},
        "objective": {"random_batch": True},
    },
    "counts": {"method": BLOCKS},
    "times": {"method": BLOCKS, "objective": {"masking": {"kind": "times", "schedule": "cosine"}}},
    "mdlm": {"method": {"kind": "block_diffusion"}, "objective": {"masking": {"kind": "times"}}},
    "discrete": {"method": BLOCKS, "objective": {"masking": {"kind": "discrete", "steps": 50}}},
    "clipped": {
        "method": BLOCKS,
        "objective": {"masking": {"kind": "clipped", "redraw": True, "search": {"every": 4, "batches": 1}}},
    },
    "learned": {"method": BLOCKS, "objective": {"masking": {"kind": "learned_counts"}}},
    "leaning": {"method": {**BLOCKS, "lean": 2.0}, "objective": {"masking": {"kind": "counts", "lean": 1.0}}},
    "joint": {
        "method": {**BLOCKS, "causal_clean": True, "previous_token": True},
        "objective": {
            "masking": {"kind": "counts", "complementary": True, "weight": "flat"},
            "next_token": 2.0,
        },
    },
    "two-pass": {"method": BLOCKS, "objective": {"algorithm": "two_pass", "strata": "ordered"}},
    "told-the-time": {
        "method": {**BLOCKS},
        "objective": {"masking": {"kind": "times"}},
        "network": {"adaln": True, "time_conditioning": True},
    },
    "sedd": {"method": {"kind": "score_entropy"}},
    "sedd-uniform": {"method": {"kind": "score_entropy", "process": "uniform"}},
    "d3pm": {"method": {"kind": "d3pm", "steps": 20}, "objective": {"auxiliary": 0.5}},
    "d3pm-uniform": {"method": {"kind": "d3pm", "steps": 20, "process": "uniform"}},
    "ssd-lm": {"method": {"kind": "simplex", "block_size": 5}, "trackers": {}},
}
SAMPLING: Mapping[str, list[list[str]]] = {
    "ar": [[], ["--top-k", "5"], ["--temperature", "0"]],
    "counts": [[], ["--steps", "16"], ["--steps", "8", "--remask", "0.2"], ["--confidence", "0.3"]],
    "times": [["--entropy-bound", "0.5"], ["--tokens-per-pass", "2"]],
    "sedd": [["--steps", "20"]],
    "sedd-uniform": [["--steps", "20"]],
    "ssd-lm": [["--steps", "10"], ["--steps", "10", "--projection", "multi_hot"]],
}
TEXTS = ("The for statement is used to iterate.\n", "A class definition\n", "x" * 20 + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the other commit")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    asked = parser.parse_args()
    names = asked.cases or list(CASES)
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"cases must be among {', '.join(CASES)}, got {', '.join(unknown)}")
    with TemporaryDirectory() as folder:
        work, other = Path(folder), Path(folder) / "other"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", str(other), asked.commit], cwd=ROOT, check=True
        )
        try:
            return _compare({"this tree": ROOT, asked.commit: other}, names, work)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)


def _compare(trees: Mapping[str, Path], names: list[str], work: Path) -> int:
    texts = work / "texts.txt"
    texts.write_text("".join(TEXTS))
    data = work / "data"
    pages = sorted((ROOT / "docs").glob("*.md"))
    source = work / "pages.jsonl"
    source.write_text("".join(json.dumps({"text": page.read_text("utf-8")}) + "\n" for page in pages))
    _run(ROOT, "data", "prepare", str(source), str(data), "--tokenizer", "bytes", "--held-out", "0.3")
    differ = 0
    for name in names:
        measure = partial(_measured, name=name, data=data, texts=texts, work=work)
        with ThreadPoolExecutor(len(trees)) as pool:  # side by side, on the same machine
            one, other = pool.map(measure, trees.values())
        wrong = [what for what in one if one[what] != other.get(what)]
        differ += bool(wrong)
        print(
            f"{name:16} {'DIFFERS: ' + ', '.join(wrong) if wrong else 'the same: ' + ', '.join(one)}",
            flush=True,
        )
    print("all the same" if not differ else f"{differ} of {len(names)} differ")
    return int(differ > 0)


def _measured(tree: Path, name: str, data: Path, texts: Path, work: Path) -> dict[str, Any]:
    """All that is compared of a case, as a tree computes it."""
    place = work / ("new" if tree == ROOT else "old") / name
    place.mkdir(parents=True)
    run, config = place / "run", place / "recipe.yaml"
    config.write_text(yaml.safe_dump(_recipe(tree, name, data)))
    _run(tree, "train", "--config", str(config), "--out", str(run))
    measured: dict[str, Any] = {"log": _log(run / "metrics.csv")}
    if name != "ssd-lm" and not name.endswith("uniform"):
        _run(tree, "score", str(run), str(texts), "--out", str(place / "scores.jsonl"))
        measured["likelihoods"] = [each["log_p"] for each in _lines(place / "scores.jsonl")]
    for number, flags in enumerate(SAMPLING.get(name, [[]])):
        out = place / f"texts-{number}.jsonl"
        flags = [*flags, "--count", "3", "--length", "32", "--seed", "7", "--out", str(out)]
        _run(tree, "sample", str(run), "T", *flags)
        measured[f"tokens {number}"] = [each["tokens"] for each in _lines(out)]
    return measured


def _recipe(tree: Path, name: str, data: Path) -> dict[str, Any]:
    recipe = {**COMMON, **CASES[name], "data": {**COMMON["data"], "path": str(data)}}
    recipe["network"] = {**COMMON["network"], **CASES[name].get("network", {})}
    if (tree / "src/bd3lm/methods").is_dir():
        return recipe
    objective = dict(recipe.pop("objective", {}))  # before 0.2
    masking = dict(objective.get("masking", {}))
    if masking.get("kind") == "learned_counts":
        objective["masking"] = {"kind": "counts", "learn_proposal": True}
    return {**recipe, "method": {**recipe["method"], **objective}}


def _log(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as rows:
        return [
            {key: value for key, value in row.items() if key != "tokens_per_second"}
            for row in csv.DictReader(rows)
        ]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def _run(tree: Path, *words: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "bd3lm", *words],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{tree}: bd3lm {' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
