"""What was measured of a run, kept beside it: RUN/measured/NAME.json, one file a measurement.

A record says on which weights it was measured, so one that a longer training has outdated is not taken for a
measurement of the model that is there now.
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

if TYPE_CHECKING:  # a subject brings all of training with it, for which `bd3lm sample` need not wait
    from bd3lm.commands.shared.subjects import Subject

FOLDER = "measured"
_MOST_BYTES = 50_000_000  # of a record


def new_record(
    of: "Subject | str",
    kind: str,
    *,
    settings: Mapping[str, Any],
    result: Mapping[str, Any],
    weights: str | None = None,
) -> dict[str, Any]:
    """A measurement as JSON: what it is of, how it was made, and what came out.

    It is of a model or, by its name, of a file; `weights` is the digest that a file has of its model's.
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
    from bd3lm.interop.beside import digest  # torch, which is there by the time that anything is measured

    return digest(path)


def keep(of: "Subject | str", name: str, record: Mapping[str, Any]) -> Path | None:
    """Write a record beside its run, in place of one of the same name; nothing for what has no run.

    Where it cannot be written, which is said, `kept` has it all the same as long as this process runs: what
    was measured is still to be shown.
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
    """Why no file can be made in a folder, or where it is not there in the one above it; None if one can.

    Permissions alone do not say it: there are systems that can only be read, and root.
    """
    try:
        with TemporaryFile(dir=folder if folder.exists() else folder.parent):
            return None
    except OSError as error:
        return error.strerror or str(error)


def check_new_file(out: Path | None, flag: str = "--out") -> None:
    """Refuse, before anything is measured for it, a file that would be overwritten or cannot be written."""
    if out is None:
        return
    if not out.parent.is_dir():
        raise ValueError(f"{flag} must be in an existing folder, and {out.parent} is none")
    if out.exists():
        raise ValueError(f"{flag} must be a new file, and {out} exists")
    if (why := why_not_writable(out.parent)) is not None:
        raise ValueError(f"{flag} must be in a folder that can be written to, and {out.parent} cannot: {why}")


def write_records(out: Path | None, records: Sequence[Mapping[str, Any]]) -> None:
    """What a command measured, as a JSON list, where --out asks for it."""
    if out is not None:
        _write(out, records)
        say(f"wrote {out}")


def model_and_title(record: Mapping[str, Any]) -> str:
    """What a record is of, as a row of a table names it."""
    return record["model"] if record["title"] is None else f"{record['model']} ({record['title']})"


def kept(subject: "Subject", kind: str) -> list[dict[str, Any]]:
    """The records of a kind that were measured on the weights the run has now, the newest last."""
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
    """The name of a record: its kind, words for a reader, and a digest of its settings.

    The same settings have the same name, so that a measurement replaces only one made in the same way.
    """
    from bd3lm.data.corpus import digest

    return f"{_slug(kind, *words)}-{digest(plain_json(settings))[:8]}"


def _slug(*parts: str) -> str:
    """A name for a record: letters, digits and dots, the rest as dashes."""
    return "-".join(re.sub(r"[^\w.]+", "-", part).strip("-.") for part in parts)


def _read(file: Path) -> dict[str, Any]:
    """A record; nothing for other JSON that lies there, such as the list that --out writes."""
    try:
        value = json.loads(read_text(file, most=_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{file} must be JSON, as measurements are kept, and is not: {why}") from None
    names = {"kind", "weights", "measured", "settings", "result"}
    is_record = isinstance(value, dict) and names <= value.keys() and isinstance(value["settings"], dict)
    return value if is_record else {}


def _write(file: Path, value: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """As a JSON file, whole or not at all."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    write_atomically(file, as_utf8(text))


def plain_json(value: Any) -> Any:
    """As JSON has it: what is not finite becomes null, paths and the like their text."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
