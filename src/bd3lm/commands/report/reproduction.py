"""Turns a record into the command that measures it again."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bd3lm.commands.eval import Eval
from bd3lm.commands.judge import Judge
from bd3lm.commands.lengths import Lengths
from bd3lm.commands.shared.command import Command, typed_parts
from bd3lm.commands.variance import Variance
from bd3lm.reports.content import OWN, Record
from bd3lm.reports.reproduction import Typed, unmasking

_OTHER_NAMES = {"limit": "sequences"}
"""Settings whose fields in the command have another name."""


def repeatable(record: Record, recipe: Mapping[str, Any], law: str) -> Record:
    """A record of a run whose model writes under this law, with the command that measures it again, if there
    is one."""
    command = command_of(record, recipe, law)
    if command is None:
        return record
    name, _, flags = typed_parts(command)
    return {**record, "command": Typed(shlex.join(name), shlex.join(flags), _text(record))}


def command_of(record: Record, recipe: Mapping[str, Any], law: str) -> Command | None:
    """The command without its models and without the text of a perplexity; commands that differ only there
    are merged."""
    method, settings = recipe["method"], dict(record["settings"])
    measured = settings.get("law") or law
    if settings.get("lean") == float(method.get("lean", 0.0)) or measured == "causal":
        settings.pop("lean", None)  # no flag for the run's own law, nor for a law without an order
    if measured == law:
        settings.pop("law", None)
    settings["dtype"] = None if record["dtype"] == "float32" else record["dtype"]
    if "entropy_floor" in settings and settings["entropy_floor"] is None:
        settings |= {"entropy_floor": 0.0, "redraws": None}  # without a floor no sample is drawn again

    def given(*names: str) -> dict[str, Any]:
        """The settings that have a value in the record, by the names of the command's fields."""
        return {
            _OTHER_NAMES.get(name, name): settings[name] for name in names if settings.get(name) is not None
        }

    match record["kind"]:
        case "perplexity":
            if settings["split"] == "valid":
                del settings["split"]  # the default is a GPU if there is one
            if settings["context"] == recipe["data"]["context"]:
                del settings["context"]
            eos = settings["eos_between_documents"] or not _text(record)
            return Eval(**given(*_PERPLEXITY), eos=eos)
        case "variance":
            return Variance(**given("batches", "gradients", "seed"))
        case "lengths":
            return Lengths(**given("count", *_DRAWN, "entropy_window"), data=_path(settings.get("data")))
        case "judgement":
            if settings.get("unmasking") and settings.get("steps") is None:
                settings["steps"] = unmasking(settings["unmasking"])[1].get("steps")
            settings["length"] = (settings["length"],)
            reference = _path(settings.get("mauve_reference"))
            return Judge(**given("count", *_DRAWN, *_JUDGED), mauve=reference)
    return None


_PERPLEXITY = (
    *("split", "field", "estimator", "law", "lean", "replicates", "limit", "context", "seed", "batch_size"),
    "dtype",
)
_DRAWN = ("law", "lean", "length", "top_p", "top_p_rule", "entropy_floor", "seed", "dtype")
_JUDGED = ("judge", "judge_dtype", "window", "stride", "steps", "redraws")


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _text(record: Record) -> str:
    """The text that a perplexity was measured on, unless it is the run's own."""
    data: str = record["settings"]["data"] if record["kind"] == "perplexity" else OWN
    return "" if data == OWN else data
