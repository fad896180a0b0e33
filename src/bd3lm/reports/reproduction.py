"""The commands that repeat measurements; records measured in the same way share one."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bd3lm.kinds import spelt_out
from bd3lm.reports.content import Record, Run
from bd3lm.reports.document import code


@dataclass(frozen=True)
class Typed:
    """The command of a record without the run, as typed; a record has it under `command`."""

    name: str
    """Such as bd3lm eval."""
    flags: str
    text: str = ""
    """The values of --data, which takes several texts; empty for the run's own."""


def measured_by(measured: Iterable[tuple[Run, Record]]) -> str:
    """A sentence to append: one command for all runs and texts that were measured in the same way."""
    lines = [code(line) for line in commands(measured)]
    return f" Measured by {', '.join(lines)}." if lines else ""


def commands(measured: Iterable[tuple[Run, Record]]) -> list[str]:
    folders: dict[Typed, list[str]] = {}
    for run, record in measured:
        if "command" in record:
            found = folders.setdefault(record["command"], [])
            if run.folder not in found:
                found.append(run.folder)
    texts: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for typed, runs in folders.items():
        texts.setdefault((typed.name, typed.flags, tuple(runs)), []).append(typed.text)
    lines = []
    for (name, flags, together), names in texts.items():
        data = [] if names == [""] else ["--data", *names]
        # Folders first: after --data, which takes several values, they would be texts.
        lines.append(" ".join(filter(None, [name, shlex.join([*together, *data]), flags])))
    return lines


def unmasking(written: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """An unmasking rule in a record: its name and its arguments."""
    values = dict(spelt_out(written))
    return values.pop("kind"), values
