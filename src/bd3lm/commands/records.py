"""What was measured of a run, kept beside it: RUN/measured/NAME.json, one file a measurement.

A record says on which weights it was measured, so one that a longer training has outdated is not taken for a
measurement of the model that is there now.
"""

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bd3lm
from bd3lm.commands.subjects import Subject
from bd3lm.data.disk import write_atomically

FOLDER = "measured"


def new_record(
    subject: Subject, kind: str, *, settings: Mapping[str, Any], result: Mapping[str, Any]
) -> dict[str, Any]:
    """A measurement as JSON: what it is of, how it was made, and what came out."""
    return {
        "kind": kind,
        "model": subject.name,
        "title": subject.title,
        "weights": subject.weights,
        "dtype": subject.dtype,
        "bd3lm": bd3lm.__version__,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": _plain(settings),
        "result": _plain(result),
    }


def keep(subject: Subject, name: str, record: Mapping[str, Any]) -> Path | None:
    """Write a record beside its run, in place of one of the same name; nothing for a model without a run."""
    if subject.run is None:
        return None
    file = subject.run / FOLDER / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    write_record(file, record)
    return file


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """One record as a JSON file, whole or not at all."""
    text = json.dumps(record, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    write_atomically(file, text.encode())


def kept(subject: Subject, kind: str) -> list[dict[str, Any]]:
    """The records of a kind that were measured on the weights the run has now, by name."""
    if subject.run is None:
        return []
    records = [json.loads(file.read_text("utf-8")) for file in sorted((subject.run / FOLDER).glob("*.json"))]
    return [record for record in records if record["kind"] == kind and record["weights"] == subject.weights]


def slug(*parts: str) -> str:
    """A name for a record: letters, digits and dots, the rest as dashes."""
    return "-".join(re.sub(r"[^\w.]+", "-", part).strip("-.") for part in parts)


def _plain(value: Any) -> Any:
    """As JSON has it: what is not finite becomes null, paths and the like their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
