"""Measurements of a run, stored next to it: RUN/measured/NAME.json, one file per measurement.

A record names the digest of the weights it was measured on. After more training, old records are not taken
for measurements of the new weights.
"""

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import bd3lm
from bd3lm.io.files import read_text, write_atomically
from bd3lm.io.terminal import as_utf8, say

if TYPE_CHECKING:  # this import loads all of training, which `bd3lm sample` does not need
    from bd3lm.commands.shared.subjects import Subject

FOLDER = "measured"
_MOST_BYTES = 50_000_000  # version of the record format


def new_record(
    of: "Subject | str",
    kind: str,
    *,
    settings: Mapping[str, Any],
    result: Mapping[str, Any],
    weights: str | None = None,
) -> dict[str, Any]:
    """A measurement as JSON: its subject, its settings and its result.

    The subject is a model, or a file by its name; then `weights` is the digest that the file gives for its
    model.
    """
    origin: dict[str, str | None]
    if not isinstance(of, str):
        origin = {"model": of.name, "title": of.title, "weights": of.weights, "dtype": of.dtype}
    else:
        origin = {"model": of, "title": None, "weights": weights, "dtype": settings.get("dtype")}
    return {
        "kind": kind,
        **origin,
        "bd3lm": bd3lm.__version__,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": plain_json(settings),
        "result": plain_json(result),
    }


def weights_digest(path: Path) -> str:
    """sha256 of the weights in a model folder, or of a file of them."""
    from bd3lm.interop.beside import digest  # torch, which is loaded by the time anything is measured

    return digest(path)


def keep(of: "Subject | str", name: str, record: Mapping[str, Any]) -> Path | None:
    """Write a record next to its run, replacing one of the same name; without a run, do nothing.

    If the disk refuses it, a warning says so, and `kept` still returns the record in this process, so the
    measurement can be shown.
    """
    if isinstance(of, str) or of.run is None:
        return None
    file = of.run / FOLDER / f"{name}.json"
    if of.can_keep:
        try:
            file.parent.mkdir(exist_ok=True)
            _write(file, record)
            return file
        except OSError as error:  # the disk is full by now
            warnings.warn(f"{file} could not be written: {error.strerror}", stacklevel=2)
    of.unkept.append(dict(record))
    return None


def why_not_writable(folder: Path) -> str | None:
    """Why no file can be created in a folder (or in its parent, if it does not exist); None if one can.

    It tries, because permissions do not tell: file systems can be read-only, and root ignores permissions.
    """
    try:
        with TemporaryFile(dir=folder if folder.exists() else folder.parent):
            return None
    except OSError as error:
        return error.strerror or str(error)


def check_new_file(out: Path | None, flag: str = "--out") -> None:
    """Refuse, before anything is measured, a file that exists or cannot be written."""
    if out is None:
        return
    if not out.parent.is_dir():
        raise ValueError(f"{flag} must be in an existing folder, and {out.parent} is not one")
    if out.exists():
        raise ValueError(f"{flag} must be a new file, and {out} exists")
    if (why := why_not_writable(out.parent)) is not None:
        raise ValueError(f"{flag} must be in a writable folder, and {out.parent} is not: {why}")


def write_records(out: Path | None, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the records of a command as a JSON list, if --out was given."""
    if out is not None:
        _write(out, records)
        say(f"wrote {out}")


def model_and_title(record: Mapping[str, Any]) -> str:
    """The subject of a record, as tables name it."""
    return record["model"] if record["title"] is None else f"{record['model']} ({record['title']})"


def kept(subject: "Subject", kind: str) -> list[dict[str, Any]]:
    """The records of a kind that were measured on the run's current weights, newest last."""
    if subject.run is None:
        return []
    from bd3lm.reports.records import check_record

    records = []
    for file in sorted((subject.run / FOLDER).glob("*.json")):
        record = _read(file)
        if record.get("kind") == kind and record.get("weights") == subject.weights:
            check_record(record, str(file))
            records.append(record)
    records += [
        each for each in subject.unkept if each.get("kind") == kind and each.get("weights") == subject.weights
    ]
    return sorted(records, key=lambda record: record["measured"])


def record_name(kind: str, settings: Mapping[str, Any], *words: str) -> str:
    """The name of a record: its kind, readable words, and a digest of its settings.

    The same settings give the same name, so a measurement replaces only one made in the same way.
    """
    from bd3lm.data.corpus import digest

    return f"{_slug(kind, *words)}-{digest(plain_json(settings))[:8]}"


def _slug(*parts: str) -> str:
    """A name for a record: letters, digits and dots; everything else becomes a dash."""
    return "-".join(re.sub(r"[^\w.]+", "-", part).strip("-.") for part in parts)


def _read(file: Path) -> dict[str, Any]:
    """Read a record; None for other JSON in the folder, such as the list that --out writes."""
    try:
        value = json.loads(read_text(file, most=_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{file} must be JSON, as measurements are stored, and is not: {why}") from None
    names = {"kind", "weights", "measured", "settings", "result"}
    is_record = isinstance(value, dict) and names <= value.keys() and isinstance(value["settings"], dict)
    return value if is_record else {}


def _write(file: Path, value: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    write_atomically(file, as_utf8(text))


def plain_json(value: Any) -> Any:
    """Make a value fit for JSON: non-finite numbers become null; paths and the like become text."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
