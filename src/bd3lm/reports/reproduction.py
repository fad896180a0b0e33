"""The commands that measure the figures of records again, from the settings in the records."""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from bd3lm.kinds import spelt_out
from bd3lm.reports.content import OWN, Record, Run

Flags = Mapping[str, tuple[str, Any]]
"""By the name of a setting: its flag, and the default, for which the flag is left out."""

_PERPLEXITY: Flags = {
    "split": ("--split", "valid"),
    "field": ("--field", None),
    "estimator": ("--estimator", None),
    "lean": ("--lean", None),
    "replicates": ("--replicates", 1),
    "limit": ("--sequences", None),
    "seed": ("--seed", 0),
    "batch_size": ("--batch", 16),
}
_VARIANCE: Flags = {
    "batches": ("--batches", 20),
    "gradients": ("--gradients", 0),
    "seed": ("--seed", 0),
}
_DRAWN: Flags = {
    "lean": ("--lean", None),
    "length": ("--length", None),
    "nucleus_p": ("--nucleus", None),
    "nucleus_rule": ("--nucleus-rule", "inclusive"),
    "entropy_floor": ("--entropy-floor", 4.0),
    "seed": ("--seed", 0),
}
_LENGTHS: Flags = {
    "count": ("--count", 500),
    **_DRAWN,
    "entropy_window": ("--entropy-window", 256),
    "data": ("--data", None),
}
_JUDGEMENT: Flags = {
    "judge": ("--judge", "gpt2-large"),
    "count": ("--count", 300),
    **_DRAWN,
    "steps": ("--steps", None),
    "window": ("--window", 1024),
    "stride": ("--stride", 512),
    "judge_dtype": ("--judge-dtype", "float32"),
    "redraws": ("--redraws", 20),
    "mauve_reference": ("--mauve", None),
}
FLAGS: Mapping[str, tuple[str, Flags]] = {
    "perplexity": ("eval", _PERPLEXITY),
    "variance": ("variance", _VARIANCE),
    "lengths": ("lengths", _LENGTHS),
    "judgement": ("judge", _JUDGEMENT),
}


def commands(measured: Iterable[tuple[Run, Record]]) -> str:
    """As a part of a sentence: one command for all runs and texts that were measured in the same way."""
    folders: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for run, record in measured:
        found = folders.setdefault((_words(run, record), _text(record)), [])
        if run.folder not in found:
            found.append(run.folder)
    texts: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (words, text), found in folders.items():
        texts.setdefault((words, tuple(found)), []).append(text)
    lines = []
    for (words, runs), names in texts.items():
        data = [] if names == [""] else ["--data", *names]
        # Folders first: --data, which takes several values, would take them for texts.
        lines.append(f"`bd3lm {shlex.join([words[0], *runs, *data, *words[1:]])}`")
    return ", ".join(lines)


def _text(record: Record) -> str:
    """The text that a perplexity was measured on, if it is not the run's own."""
    data: str = record["settings"]["data"] if record["kind"] == "perplexity" else OWN
    return "" if data == OWN else data


def _words(run: Run, record: Record) -> tuple[str, ...]:
    """The command's name and its flags, without the --data of a perplexity."""
    name, flags = FLAGS[record["kind"]]
    settings = dict(record["settings"])
    words = [name]
    if settings.get("lean") == run.lean:
        del settings["lean"]  # no flag for the run's own
    if "entropy_floor" in flags and settings["entropy_floor"] is None:
        settings |= {"entropy_floor": 0, "redraws": None}  # without a floor nothing is drawn again
    if record["kind"] == "judgement" and run.method == "block_diffusion":
        settings["steps"] = unmasking(settings["unmasking"])[1].get("steps")
    for setting, (flag, default) in flags.items():
        if settings.get(setting, default) not in (None, default):
            words += [flag, _value(settings[setting])]
    if _text(record) and not settings["eos_between_documents"]:
        words.append("--no-eos")
    if record["kind"] != "variance" and record["dtype"] != "float32":
        words += ["--dtype", record["dtype"]]
    return tuple(words)


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def unmasking(written: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A way of unmasking as records have it: its name, and its arguments."""
    values = dict(spelt_out(written))
    return values.pop("kind"), values
