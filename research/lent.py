"""What a machine without a network is lent, in pieces small enough to travel, and what it makes of them.

    python research/lent.py pack .carry --checkpoint SMOLLM2.gguf --wikipedia FOLDER [--old COMMIT]
    python research/lent.py unpack .carry runs/lent

`pack` writes a folder for each of three calls: 1, 2 and 3. Each has a part of the checkpoint; the first also
has the packages that the image lacks, the source of an old commit and some of Wikipedia. `unpack` may be
called after each of them, and takes what has come by then.
"""

import argparse
import gzip
import hashlib
import importlib.util
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from shutil import copyfileobj

# As whoever runs the machine counts: the working tree goes along with each call.
MOST = 64 * 2**20
FIRST, SPARE = 24 * 2**20, 2 * 2**20
CHECKPOINT, WIKIPEDIA = "checkpoint.gguf", "wikipedia"
_PARTS, _SUM, _OLD = "checkpoint.gz.", "checkpoint.sha256", "old.tar.gz"
# By what must be importable: where that is missing, all of its row are taken, since they fit each other.
PACKAGES = {
    "tyro": ("tyro", "docstring_parser", "typeguard"),
    "pydantic": ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions"),
    "rich": ("rich", "markdown_it_py", "mdurl", "pygments"),
    "yaml": ("PyYAML",),
    "jinja2": ("jinja2", "markupsafe"),
    "gguf": ("gguf",),
    "pytest": ("pytest", "pluggy", "iniconfig", "pygments"),
    "xdist": ("pytest_xdist", "execnet"),
    "pytest_timeout": ("pytest_timeout",),
    "hypothesis": ("hypothesis", "sortedcontainers", "attrs"),
}
_PYTHON = "3.12"


def pack(
    out: Path,
    *,
    checkpoint: Path,
    wikipedia: Path,
    old: str,
    documents: int,
    tree: int,
    fetch: bool = True,
) -> list[int]:
    """The bytes that each call takes, the working tree included."""
    if out.exists():
        raise ValueError(f"{out} must not exist yet")
    calls = [out / name for name in ("1", "2", "3")]
    for call in calls:
        call.mkdir(parents=True)
    if fetch:
        _fetch(calls[0] / "wheels")
    archive = ["git", "archive", "--format=tar.gz", "-o", str(calls[0] / _OLD), old, "src", "pyproject.toml"]
    subprocess.run([*archive, ":(exclude)*.safetensors"], check=True)
    _some_of(wikipedia, calls[0] / f"{WIKIPEDIA}.train.jsonl.xz", "train", documents)
    _some_of(wikipedia, calls[0] / f"{WIKIPEDIA}.valid.jsonl.xz", "valid", max(documents // 20, 1))
    (calls[0] / _SUM).write_text(_sha256(checkpoint))
    packed = gzip.compress(checkpoint.read_bytes(), 6)
    first = min(FIRST, MOST - tree - _size(calls[0]) - SPARE)
    second = min(MOST - tree - SPARE, len(packed) - first)
    ends = (0, first, first + second, len(packed))
    for number, call in enumerate(calls):
        (call / f"{_PARTS}{number}").write_bytes(packed[ends[number] : ends[number + 1]])
    sizes = [tree + _size(call) for call in calls]
    if first < 0 or max(sizes) > MOST:
        raise ValueError(f"calls may take {MOST:,} bytes, and these take {sizes}")
    return sizes


def _fetch(folder: Path) -> None:
    names = sorted({name for row in PACKAGES.values() for name in row})
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "--python-version", _PYTHON, "--dest", str(folder), *names], check=True)


def _some_of(wikipedia: Path, out: Path, split: str, documents: int) -> None:
    with lzma.open(wikipedia / f"{split}.jsonl.xz", "rb") as file, lzma.open(out, "wb") as some:
        some.writelines(islice(file, documents))


def tree_size() -> int:
    """Of what git tracks here, and of what it would."""
    names = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(names, check=True, capture_output=True, text=True)
    files = [Path(name) for name in listed.stdout.split("\0") if name]
    return sum(file.stat().st_size for file in files if file.is_file())


def unpack(carried: Path, to: Path) -> list[str]:
    """Take what has come; returns what is there by now."""
    to.mkdir(parents=True, exist_ok=True)
    _take_packages(sorted(carried.glob("*/wheels/*.whl")), to / "site")
    for archive in carried.glob(f"*/{_OLD}"):
        with tarfile.open(archive) as file:
            file.extractall(to / "old", filter="data")
    for file in carried.glob(f"*/{WIKIPEDIA}.*.jsonl.xz"):
        split = file.name.split(".")[1]
        (to / WIKIPEDIA).mkdir(exist_ok=True)
        with lzma.open(file) as packed, (to / WIKIPEDIA / f"{split}.jsonl").open("wb") as plain:
            copyfileobj(packed, plain)
    for file in [*carried.glob(f"*/{_PARTS}*"), *carried.glob(f"*/{_SUM}")]:
        (to / file.name).write_bytes(file.read_bytes())
    _join(to)
    return [name for name in ("site", "old", WIKIPEDIA, CHECKPOINT) if (to / name).exists()]


def _take_packages(wheels: Sequence[Path], site: Path) -> None:
    for module, names in PACKAGES.items():
        if importlib.util.find_spec(module) is not None:
            continue  # the image's own
        for name in names:
            for wheel in wheels:
                if wheel.name.lower().startswith(f"{name.lower()}-"):
                    with zipfile.ZipFile(wheel) as file:
                        file.extractall(site)
    if wheels:
        site.mkdir(exist_ok=True)


def _join(to: Path) -> None:
    """The checkpoint, once all of it is there: what lacks a part is no gzip file, or has another sum."""
    parts = [to / f"{_PARTS}{number}" for number in range(3)]
    if (to / CHECKPOINT).exists() or not all(part.exists() for part in parts):
        return
    found = gzip.decompress(b"".join(part.read_bytes() for part in parts))
    if hashlib.sha256(found).hexdigest() != (to / _SUM).read_text():
        raise ValueError("the parts of the checkpoint do not fit together")
    (to / CHECKPOINT).write_bytes(found)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("out", type=Path)
    packing.add_argument("--checkpoint", type=Path, required=True)
    packing.add_argument("--wikipedia", type=Path, required=True)
    packing.add_argument("--old", default="006ec99")
    packing.add_argument("--documents", type=int, default=9000)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("carried", type=Path)
    unpacking.add_argument("to", type=Path)
    options = vars(parser.parse_args())
    if options.pop("command") == "pack":
        sizes = pack(**options, tree=tree_size())
        for number, size in enumerate(sizes, 1):
            print(f"call {number}: {size / 2**20:.1f} MiB with the working tree")
    else:
        print("there:", *unpack(options["carried"], options["to"]))


if __name__ == "__main__":
    main()
