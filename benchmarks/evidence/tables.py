"""The results as Markdown tables, beside the paper's own figures.

    python -m benchmarks.evidence.tables [--judged judged.json...]

A figure with ± is the mean of several seeds and their standard deviation; one without is a single seed. ≤ is
an upper bound, no sign is exact. What is not measured yet is a dash. `--judged` reads what `bd3lm judge`
wrote with --out of the files that `samples.py` makes.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence import paper
from benchmarks.evidence.results import PATTERN, Line, Results
from benchmarks.evidence.runs import BEST, RANGES, TRAINED_ON, ZERO_SHOT, Run, all_runs, range_name

_RESULTS = Path(__file__).parent.parent / "results"
_DASH = "–"
MAIN = ("ar", "d3pm", "sedd", "mdlm", "bd3lm-16", "bd3lm-8", "bd3lm-4")
Rows = list[Sequence[Any]]


@dataclass(frozen=True)
class Evidence:
    """What was measured, by the name of a run, over its seeds."""

    results: Results
    runs: Sequence[Run]

    def measured(self, name: str, kind: str) -> Iterator[Line]:
        for run in self.runs:
            if run.name == name:
                lines = self.results.of(run, "measured")
                yield from (line for line in lines if line["measure"]["kind"] == kind)

    def nats(
        self,
        name: str,
        estimator: str,
        data: str = TRAINED_ON,
        *,
        figure: str | None = None,
        part: bool = False,
    ) -> list[float]:
        """Of every seed, by what was asked for; `figure` names one of several that an estimator gives."""
        found: dict[int, float] = {}
        for line in self.measured(name, "perplexity"):
            asked = line["measure"]
            if (asked["estimator"], asked["data"], asked["part"]) != (estimator, data, part):
                continue
            for each in line["result"]["figures"]:
                if each["name"] == (figure or estimator) and each["nats"] is not None:
                    found[line["seed"]] = each["nats"]
        return list(found.values())

    def exact(self, name: str, data: str = TRAINED_ON, *, part: bool = False) -> list[float]:
        return self.nats(name, "exact", data, part=part)

    def bound(self, name: str, data: str = TRAINED_ON, *, part: bool = False) -> list[float]:
        """The NELBO: enumerated, by counts, or as the method has it."""
        ways = {"exact": "nelbo", "counts": "counts", "nelbo": "nelbo"}
        each = (self.nats(name, way, data, figure=figure, part=part) for way, figure in ways.items())
        return next((values for values in each if values), [])

    def best(self, name: str, data: str = TRAINED_ON) -> str:
        """The exact figure, else the bound."""
        return perplexity(self.exact(name, data)) if self.exact(name, data) else bound(self.bound(name, data))

    def variances(self, name: str) -> dict[str, float]:
        lines = self.measured(name, "variance")
        return {rule: found["variance"] for line in lines for rule, found in line["result"]["rules"].items()}

    def above(self, values: Sequence[float], *, part: bool = False) -> str:
        """By how much a perplexity lies above that of AR on the same text."""
        ar = self.exact("ar", part=part)
        if not values or not ar:
            return _DASH
        return f"{math.expm1(statistics.mean(values) - statistics.mean(ar)):+.1%}"


def perplexity(nats: Sequence[float]) -> str:
    """Of one seed, or the mean over several and their standard deviation."""
    values = [math.exp(each) for each in nats]
    if not values:
        return _DASH
    mean = statistics.mean(values)
    return f"{mean:.2f}" if len(values) == 1 else f"{mean:.2f} ± {statistics.stdev(values):.2f}"


def bound(nats: Sequence[float]) -> str:
    return f"≤ {perplexity(nats)}" if nats else _DASH


def number(value: float | None, form: str = ".2f") -> str:
    return _DASH if value is None else format(value, form)


def above(value: float | None, other: float | None) -> str:
    return _DASH if value is None or other is None else f"{value / other - 1:+.1%}"


def main_table(evidence: Evidence) -> Rows:
    ours = ("bound", "over AR", "exact", "over AR")
    rows: Rows = [("model", *ours, "paper, LM1B", "over AR", "paper, OpenWebText", "over AR")]
    for name in MAIN:
        theirs = [
            cell
            for table in (paper.LM1B, paper.OPENWEBTEXT)
            for cell in (number(table.get(name)), above(table.get(name), table["ar"]))
        ]
        rows.append((name, *_both(evidence, name), *theirs))
    return rows


def _both(evidence: Evidence, name: str) -> tuple[str, str, str, str]:
    """The bound and the exact figure, each with its distance from AR."""
    least, exact = evidence.bound(name) if name != "ar" else [], evidence.exact(name)
    return bound(least), evidence.above(least), perplexity(exact), evidence.above(exact)


def part_table(evidence: Evidence) -> Rows:
    """What takes many passes, on fewer sequences: exact for blocks of 8, a tighter bound for blocks of 16."""
    rows: Rows = [("run", "NELBO", "over AR", "exact, or ≤ iw:8", "over AR")]
    for name in dict.fromkeys(run.name for run in evidence.runs):
        exact, tight = evidence.exact(name, part=True), evidence.nats(name, "iw:8", part=True)
        if not exact and not tight:
            continue
        least = evidence.bound(name, part=True) if name != "ar" else []
        shown = perplexity(exact) if exact else bound(tight)
        nelbo = bound(least), evidence.above(least, part=True)
        rows.append((name, *nelbo, shown, evidence.above(exact or tight, part=True)))
    return rows


def zero_shot_table(evidence: Evidence) -> Rows:
    rows: Rows = [("model", *ZERO_SHOT)]
    for name in (*MAIN, f"{BEST}-4", f"{BEST}-16"):
        rows.append((name, *(evidence.best(name, data) for data in ZERO_SHOT)))
        if name in paper.ZERO_SHOT:
            rows.append((f"{name}, the paper's", *map(number, paper.ZERO_SHOT[name]), _DASH))
    return rows


def case_table(evidence: Evidence) -> Rows:
    rows: Rows = [
        ("model", "perplexity", "paper", "Var, linear", "Var, fully masked", "nats at 25, 50, 75, 100 %")
    ]
    for name, theirs in paper.CASE_STUDY.items():
        found = evidence.variances(name)
        spreads = [number(found.get(rule)) for rule in paper.CASE_VARIANCE]
        rows.append((name, evidence.best(name), number(theirs), *spreads, _curve(evidence, name)))
    rows.append(("the paper's Var", "", "", *map(number, paper.CASE_VARIANCE.values()), ""))
    return rows


def _curve(evidence: Evidence, name: str) -> str:
    """The training loss of the first seed; all of it is in the results."""
    run = next(run for run in evidence.runs if run.name == name)
    losses = {line["step"]: line["train_nats"] for line in evidence.results.of(run, "step")}
    last = run.recipe.train.steps
    near = [
        min(losses, key=lambda step: abs(step - last * part)) for part in (0.25, 0.5, 0.75, 1.0) if losses
    ]
    return ", ".join(f"{losses[step]:.2f}" for step in near) or _DASH


def range_table(evidence: Evidence) -> Rows:
    rows: Rows = [("blocks", "masks", "bound", "Var", "paper's bound", "paper's Var")]
    for size in (None, 16, 4):
        for low, high in RANGES:
            name = range_name(size, low, high)
            rows.append(
                (size or "L", f"U[{low:g}, {high:g}]", *_tuned(evidence, name, paper.RANGES[size, low, high]))
            )
    return rows


def schedule_table(evidence: Evidence) -> Rows:
    rows: Rows = [("run", "bound", "Var", "paper's bound", "paper's Var")]
    rows += [(name, *_tuned(evidence, name, theirs)) for name, theirs in paper.SCHEDULES.items()]
    return rows


def _tuned(evidence: Evidence, name: str, theirs: tuple[float, float]) -> tuple[str, ...]:
    spread = next(iter(evidence.variances(name).values()), None)
    return bound(evidence.bound(name)), number(spread), *map(number, theirs)


def past_table(evidence: Evidence) -> Rows:
    cost = ("steps", "ms a step", "minutes")
    rows: Rows = [("run", "seeds", "bound", "over AR", "exact", "over AR", "next-token head", *cost)]
    names = dict.fromkeys(run.name for run in evidence.runs if run.table == "past")
    for name in ("ar", "bd3lm-4", "bd3lm-16", *names):
        first = next(run for run in evidence.runs if run.name == name)
        stages = [line for each in first.lineage for line in evidence.results.of(each, "trained")[-1:]]
        timed = [line for line in stages if line["step_seconds"] is not None]
        minutes = sum(line["steps"] * line["step_seconds"] for line in timed) / 60
        rows.append(
            (
                name,
                len(evidence.bound(name) or evidence.exact(name)),
                *_both(evidence, name),
                perplexity(evidence.nats(name, "next-token", figure="exact")),
                " + ".join(str(line["steps"]) for line in stages) or _DASH,
                " + ".join(f"{line['step_seconds'] * 1000:.1f}" for line in timed) or _DASH,
                f"{minutes:.2f}" if timed and timed == stages else _DASH,
            )
        )
    return rows


def text_table(evidence: Evidence, judged: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Every set of texts, the decoding curves among them; generative perplexity is the judge's."""
    drawn = ("texts", "evaluations a token", "entropy", "redrawn")
    verdicts = ("generative perplexity", "bits a character", "paper, GPT2-Large")
    rows: Rows = [("run", "contexts", "written by", *drawn, *verdicts)]
    for name in dict.fromkeys(run.name for run in evidence.runs):
        for line in evidence.measured(name, "texts"):
            asked, found = line["measure"], line["result"]
            verdict = judged.get(f"{name}-s{line['seed']}-{found['set']}", {})
            rule = asked["unmasking"] if asked["steps"] is None else f"{asked['steps']} steps"
            rows.append(
                (
                    name,
                    asked["contexts"],
                    _DASH if name == "ar" else rule,
                    found["texts"],
                    number(found["evaluations_per_token"]),
                    number(found["entropy"]),
                    found["redraws"] if asked["floor"] else "free",
                    number(verdict.get("perplexity"), ".1f"),
                    number(verdict.get("bits_per_character"), ".3f"),
                    number(_theirs(name, asked), ".1f"),
                )
            )
    return rows


def _theirs(name: str, asked: Mapping[str, Any]) -> float | None:
    if name == "ssd-lm":
        return paper.SSD_LM.get(asked["steps"])
    return paper.GENERATIVE.get(name, (None, None))[asked["contexts"] - 1] if asked["floor"] else None


def length_table(evidence: Evidence) -> Rows:
    rows: Rows = [
        ("run", "documents", "median", "p90", "longest", "stopped by", "paper's median", "paper's longest")
    ]
    for name in dict.fromkeys(run.name for run in evidence.runs):
        for line in evidence.measured(name, "documents"):
            found = line["result"]
            ends = ", ".join(f"{reason} {count}" for reason, count in found["stopped_by"].items())
            theirs = map(str, paper.LENGTHS.get(name, (_DASH, _DASH)))
            rows.append((name, found["number"], found["median"], found["p90"], found["max"], ends, *theirs))
    return rows


def failure_table(evidence: Evidence) -> Rows:
    rows: Rows = [("run", "what", "error")]
    for run in evidence.runs:
        rows += [(run.key, "diverged", line["error"]) for line in evidence.results.of(run, "failed")]
    return rows


def markdown(rows: Rows) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def render(evidence: Evidence, judged: Mapping[str, Mapping[str, Any]]) -> str:
    sections = {
        "Test perplexity": main_table(evidence),
        "Test perplexity, on fewer sequences": part_table(evidence),
        "Zero-shot perplexity": zero_shot_table(evidence),
        "Blocks of one token": case_table(evidence),
        "Mask ranges": range_table(evidence),
        "Noise schedules": schedule_table(evidence),
        "Past the paper": past_table(evidence),
        "Texts": text_table(evidence, judged),
        "Lengths of documents": length_table(evidence),
        "Failures": failure_table(evidence),
    }
    return "\n\n".join(f"## {title}\n\n{markdown(rows)}" for title, rows in sections.items() if len(rows) > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="The results as Markdown tables.")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="the folder with evidence*.jsonl")
    parser.add_argument("--judged", type=Path, nargs="+", default=[], help="what `bd3lm judge --out` wrote")
    options = parser.parse_args()
    results = Results(options.results / "none", sorted(options.results.glob(PATTERN)))
    records = [record for file in options.judged for record in json.loads(file.read_text("utf-8"))]
    judged = {Path(record["model"]).stem: record["result"] for record in records}
    print(render(Evidence(results, all_runs()), judged))


if __name__ == "__main__":
    main()
