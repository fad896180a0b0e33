"""The lines of results, read from their files; what older sessions wrote otherwise, as it is written now."""

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from research.evidence.runs import TIME, all_runs

Line = dict[str, Any]


def read_lines(files: Iterable[Path]) -> Iterator[Line]:
    """The lines of some files; a last one that a kill tore is left out.

    What is started from may have been trained several times, and not to the same weights, so a line is told
    which training it is of, and a training which one it started from: the last before it in its file, where
    every process wrote its lines in order, and trained what its runs start from.
    """
    for file in files:
        last: dict[str, str] = {}
        superseded: set[str | None] = set()
        for number, text in enumerate(file.read_text("utf-8").splitlines(keepends=True)):
            if not text.endswith("\n"):
                continue
            line = json.loads(text)
            if line["kind"] == "timed" and "as_trained" not in line:
                continue  # up to evidence-11.jsonl, of runs so short that they were not compiled
            if line.get("measure"):
                line["measure"] = read_measure(line["measure"])
            if line.get("cost"):
                line["cost"] = _costs().get(line["digest"], line["cost"])  # in words of that time
            if line["kind"] == "trained":
                line["started_from"] = last.get(line["parent"] or "")
                last[line["digest"]] = last[f"{line['run']}/{line['seed']}"] = f"{file.name}:{number}"
                if line["run"].startswith(TIME) and "budget" not in line:
                    superseded.add(last[line["digest"]])  # it got another's time by such steps
            line["training_id"] = last.get(line["digest"])
            line["superseded"] = line["training_id"] in superseded
            yield line


@cache
def _costs() -> dict[str, str]:
    """What decides the time of a step, by digest."""
    return {each.digest: each.cost for run in all_runs() for each in run.lineage}


def read_measure(measure: Mapping[str, Any]) -> dict[str, Any]:
    """A measure as `describe` gives it: of the test split and at lean 0, where it says nothing of that."""
    read = dict(measure)
    if read["kind"] == "perplexity":
        read = {"split": "test", "lean": 0.0} | read
    if read["kind"] == "texts":
        read["unmasking"] = read_rule(read["unmasking"])
    return read


def read_rule(written: str | Mapping[str, Any]) -> dict[str, Any]:
    """A rule by its kind and values: once "FirstHitting(tokens_per_pass=1)", then a mapping of that kind."""
    values = dict(written) if isinstance(written, Mapping) else _of_call(written)
    values["kind"] = re.sub(r"(?<=.)(?=[A-Z])", "_", values["kind"]).lower()
    if values["kind"] == "first_hitting":
        values.setdefault("lean", 0.0)
    return values


def _of_call(written: str) -> dict[str, Any]:
    call = ast.parse(written, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"a recorded rule must be written as Name(key=value), got {written!r}")
    return {"kind": call.func.id, **{str(each.arg): ast.literal_eval(each.value) for each in call.keywords}}
