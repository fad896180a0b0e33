"""Files that are what their sha256 says: what is read again, what is remembered, and where."""

import os
import shutil
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from bd3lm.io import verified
from bd3lm.io.verified import VerifiedFile

DATA = bytes(range(256)) * 5000
DIGEST = sha256(DATA).hexdigest()

Patch = pytest.MonkeyPatch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bd3lm" / "verified"


@pytest.fixture
def path(tmp_path: Path, cache: Path) -> Path:
    """A file that was written long enough ago, on a clock of our own."""
    path = tmp_path / "data.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def later(monkeypatch: Patch) -> float:
    """Files have settled: times are those of a second command, a while after they were written."""
    now = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: now)
    return now


@pytest.fixture
def checks(monkeypatch: Patch) -> Iterator[list[Path]]:
    """The files that were read whole to be checked, one time each."""
    read: list[Path] = []
    real = VerifiedFile._check

    def counted(file: VerifiedFile) -> verified.Stamp:
        read.append(file.path)
        return real(file)

    monkeypatch.setattr(VerifiedFile, "_check", counted)
    yield read
    verified._seen.clear()


def opened(path: Path, *, anew: bool = False) -> VerifiedFile:
    return VerifiedFile(path, size=len(DATA), digest=DIGEST, anew=anew)


def as_another_process() -> None:
    verified._seen.clear()


def test_any_part_can_be_read(path: Path) -> None:
    file = opened(path)
    for start, stop in ((0, 0), (0, 1), (255, 1000), (0, len(DATA)), (len(DATA), len(DATA))):
        assert file.read(start, stop) == DATA[start:stop]


def test_a_large_part_may_come_in_pieces(path: Path, monkeypatch: Patch) -> None:
    """As from a system that reads at most so much at once."""
    monkeypatch.setattr(
        verified, "_read_at", lambda handle, count, place: os.pread(handle, min(count, 999), place)
    )
    assert opened(path).read(5, 100_000) == DATA[5:100_000]


def test_a_second_start_reads_nothing(path: Path, later: float, checks: list[Path], cache: Path) -> None:
    opened(path)
    as_another_process()
    assert opened(path).read(3, 9) == DATA[3:9]
    assert checks == [path]
    assert [each.stat().st_size for each in cache.iterdir()] == [0]


def test_it_is_checked_anew_when_told_so(path: Path, later: float, checks: list[Path]) -> None:
    opened(path)
    opened(path, anew=True)
    assert checks == [path, path]


def test_a_folder_that_was_moved_is_known_and_one_that_was_copied_is_not(
    tmp_path: Path, later: float, checks: list[Path], cache: Path
) -> None:
    first, moved, copied = (tmp_path / name for name in ("first", "moved", "copied"))
    first.mkdir()
    (first / "data.bin").write_bytes(DATA)
    opened(first / "data.bin")
    first.rename(moved)
    opened(moved / "data.bin")
    assert len(checks) == 1
    shutil.copytree(moved, copied)
    opened(copied / "data.bin")
    assert checks[1:] == [copied / "data.bin"]


def test_a_folder_that_cannot_be_written_is_remembered_all_the_same(
    path: Path, later: float, checks: list[Path]
) -> None:
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        opened(path)
        as_another_process()
        opened(path)
    finally:
        path.parent.chmod(0o700)
    assert len(checks) == 1


@pytest.mark.parametrize("home", ["/proc/nowhere", "relative", "file"])
def test_without_a_cache_each_process_checks_once(
    home: str, path: Path, later: float, checks: list[Path], monkeypatch: Patch
) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path) if home == "file" else home)
    opened(path)
    opened(path)
    assert len(checks) == 1
    as_another_process()
    opened(path)
    assert len(checks) == 2
    assert sorted(each.name for each in path.parent.iterdir()) == ["data.bin"]


def test_what_was_just_written_is_not_remembered(path: Path, checks: list[Path], cache: Path) -> None:
    """A second write within one tick of the clock would look the same."""
    opened(path)
    opened(path)
    assert len(checks) == 2
    assert not cache.exists()


def test_small_files_leave_nothing_in_the_cache(tmp_path: Path, later: float, cache: Path) -> None:
    (tmp_path / "small").write_bytes(b"abc")
    VerifiedFile(tmp_path / "small", size=3, digest=sha256(b"abc").hexdigest())
    assert not cache.exists()


def test_old_memories_are_forgotten(path: Path, later: float, cache: Path) -> None:
    cache.mkdir(parents=True)
    old, recent = cache / "old", cache / "recent"
    for each, days in ((old, 91), (recent, 89)):
        each.touch()
        os.utime(each, (later - days * 86400,) * 2)
    opened(path)
    assert not old.exists()
    assert recent.exists()


@pytest.mark.parametrize("size", [len(DATA), len(DATA) - 1, len(DATA) + 1, 0])
def test_damage_is_found_whatever_is_remembered(
    size: int, path: Path, later: float, checks: list[Path]
) -> None:
    opened(path)
    before = path.stat()
    time.sleep(0.02)
    path.write_bytes(bytes(size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time of its change cannot be put back
    wrong = "its sha256 is" if size == len(DATA) else f"it has {size} bytes, not {len(DATA)}"
    with pytest.raises(ValueError, match=f"data.bin is damaged: {wrong}"):
        opened(path)


def test_damage_that_no_time_tells_is_found_anew_and_what_was_remembered_is_forgotten(
    path: Path, later: float, monkeypatch: Patch
) -> None:
    """As of a failing disk."""
    monkeypatch.setattr(verified, "_stamp", lambda handle: (os.fstat(handle).st_size, 1, 1, 1))
    opened(path)
    path.write_bytes(bytes(len(DATA)))
    opened(path)
    with pytest.raises(ValueError, match="is damaged"):
        opened(path, anew=True)
    as_another_process()
    with pytest.raises(ValueError, match="is damaged"):
        opened(path)


@pytest.mark.parametrize("size", [len(DATA), 0])
def test_damage_under_a_reader_is_found_at_the_next_read(size: int, path: Path) -> None:
    file = opened(path)
    assert file.read(0, 9) == DATA[:9]
    time.sleep(0.02)
    path.write_bytes(bytes(size))
    for _ in range(2):  # and at the one after that
        with pytest.raises(ValueError, match=r"data\.bin is damaged: .*; it was intact when it was opened$"):
            file.read(0, 9)


def test_a_change_of_times_alone_is_harmless(path: Path, checks: list[Path]) -> None:
    file = opened(path)
    os.utime(path, (1, 1))
    assert [file.read(0, 9) for _ in range(3)] == [DATA[:9]] * 3
    assert len(checks) == 2


def test_what_cannot_be_used_is_said_after_what_is_damaged(path: Path) -> None:
    def refuse(piece: bytes) -> None:
        raise ValueError("of no use")

    with pytest.raises(ValueError, match="of no use"):
        VerifiedFile(path, size=len(DATA), digest=DIGEST, inspect=refuse)
    with pytest.raises(ValueError, match="its sha256 is"):
        VerifiedFile(path, size=len(DATA), digest="0" * 64, inspect=refuse)


def test_a_file_that_is_let_go_is_closed(path: Path) -> None:
    file = opened(path)
    handle = file._handle
    os.fstat(handle)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
