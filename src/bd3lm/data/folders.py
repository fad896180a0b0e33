"""Which files of a folder are read, which are skipped and why, and which splits their names say."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bd3lm.io.reading import COMPRESSIONS, compression_of

NOTES = ".md"
FORMATS = (".txt", NOTES, ".jsonl", ".parquet")
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
SPLIT_ORDER = ("train", "valid", "test")


@dataclass(frozen=True)
class Found:
    """The files under a path that are read, sorted by name, and the skipped files by reason."""

    root: Path
    files: list[Path]
    skipped: Mapping[str, Sequence[Path]]

    @property
    def skipped_in_words(self) -> str | None:
        """How many files are skipped and why, by suffix; with their names if there are few."""
        count = sum(map(len, self.skipped.values()))
        if not count:
            return None
        named = count <= _FEW
        reasons = [f"{why}: {_counted(self.root, paths, named)}" for why, paths in self.skipped.items()]
        total = count + len(self.files)
        return f"skipped {count:,} of the {total:,} files in {self.root}; {'; '.join(reasons)}"


_FEW = 5
_FORMAT, _HIDDEN, _NO_FILE, _LINKED, _NOTES = (
    f"format is not one of {', '.join(FORMATS)}",
    "hidden",
    "not regular files",
    "links to folders",
    f"{NOTES} notes next to data files",
)


def look_into(path: Path) -> Found:
    """The file itself, or what a folder holds that can and cannot be read."""
    allowed = f"{', '.join(FORMATS)}, all but the last also with {', '.join(COMPRESSIONS)}"
    if path.is_file():
        if format_of(path) is None:
            raise ValueError(f"{path} has no known format in its name: allowed are {allowed}")
        return Found(path.parent, [path], {})
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {path}")
    skipped: dict[str, list[Path]] = defaultdict(list)
    files: list[Path] = []
    for file, why in sorted(_under(path), key=lambda found: found[0].relative_to(path).parts):
        (files if why is None else skipped[why]).append(file)
    notes = [file for file in files if format_of(file) == (NOTES, compression_of(file.name))]
    data = [file for file in files if file not in notes]
    if any(_is_data(path, file) for file in data):
        files = data
        skipped[_NOTES] += notes
    if not files:
        raise ValueError(f"{path} holds no file that can be read: allowed are {allowed}")
    return Found(path, files, {why: found for why, found in skipped.items() if found})


def find_files(path: Path) -> list[Path]:
    """The file, or all readable files of a folder, sorted by name; hidden files are left out."""
    return look_into(path).files


def _under(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Everything in a folder, with the reason if it is not read. A hidden folder counts as one item."""

    def unreadable(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, onerror=unreadable):
        for name in list(folders):
            hidden, linked = name.startswith("."), Path(here, name).is_symlink()
            if hidden or linked:
                folders.remove(name)
                yield Path(here, name), _HIDDEN if hidden else _LINKED
        for name in names:
            file = Path(here, name)
            if name.startswith("."):
                yield file, _HIDDEN
            elif format_of(file) is None:
                yield file, _FORMAT
            else:
                yield file, None if file.is_file() else _NO_FILE


def _is_data(root: Path, file: Path) -> bool:
    return (
        required_format(file)[0] in (".jsonl", ".parquet") or _split_named(file.relative_to(root)) is not None
    )


def _counted(root: Path, files: Sequence[Path], named: bool) -> str:
    """How many files there are of each suffix, the most common first."""
    by_suffix: dict[str, list[str]] = defaultdict(list)
    for file in files:
        packed = compression_of(file.name) or ""
        suffix = Path(file.name.removesuffix(packed)).suffix + packed
        by_suffix[suffix or "without a suffix"].append(file.relative_to(root).as_posix())
    common = Counter({suffix: len(names) for suffix, names in by_suffix.items()}).most_common()
    counts = [
        f"{count:,} {_printable(suffix)}"
        + (f" ({', '.join(map(_printable, by_suffix[suffix]))})" if named else "")
        for suffix, count in common[:_FEW]
    ]
    if rest := sum(count for _, count in common[_FEW:]):
        counts.append(f"{rest:,} with other suffixes")
    return ", ".join(counts)


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def split_by_name(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """The files of each split, if their names tell splits apart; empty if no name does, or if all say
    train."""
    return {} if all_say_train(root, files) else files_by_name(root, files)


def files_by_name(root: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """The files of each split named; empty if no name says a split."""
    named: dict[str, list[Path]] = {split: [] for split in SPLIT_ORDER}
    unnamed: list[Path] = []
    for file in files:
        split = _split_named(file.relative_to(root))
        (unnamed if split is None else named[split]).append(file)
    if unnamed and any(named.values()):
        raise ValueError(
            f"{root} has files whose names say a split and files whose names do not, such as "
            f"{unnamed[0].relative_to(root)}: move them, or give held_out to read all files as one text"
        )
    return {split: found for split, found in named.items() if found}


def format_of(path: Path) -> tuple[str, str | None] | None:
    """The format and the compression that a name says; None for a name with no known format."""
    compression = compression_of(path.name)
    name = path.name.lower().removesuffix(compression or "")
    kind = next((suffix for suffix in FORMATS if name.endswith(suffix)), None)
    # Parquet compresses its own pages and is read from its end.
    return None if kind is None or (kind == ".parquet" and compression) else (kind, compression)


def required_format(path: Path) -> tuple[str, str | None]:
    """Like `format_of`, for a file that must be readable."""
    found = format_of(path)
    if found is None:
        raise ValueError(f"{path} has no known format in its name")
    return found


def all_say_train(root: Path, files: Iterable[Path]) -> bool:
    """Whether every name says train, so that names do not tell what to hold out."""
    return all(_split_named(file.relative_to(root)) == "train" for file in files)


def _split_named(relative: Path) -> str | None:
    for part in reversed(relative.parts):
        for word in re.split(r"[-_.]", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None
