"""Paths with ~; a file is whole or absent, whatever fails; one writer to a folder; a full disk named."""

import errno
import os
from pathlib import Path

import pytest

from bd3lm.io.files import (
    AtomicFile,
    full_disk_explained,
    local_path,
    only_writer,
    replacing,
    sync_folder,
    write_atomically,
)


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert local_path("~/tok") == local_path(Path("~/tok")) == Path("/home/of/mine/tok")
    assert local_path("a/~") == Path("a/~")
    assert local_path("~nobody-has-this-name/tok") == Path("~nobody-has-this-name/tok")


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"first")
    write_atomically(path, b"second, longer")
    assert path.read_bytes() == b"second, longer"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="the disk is broken"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_name_appears_only_after_the_contents_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _real=real, _name=name: (calls.append(_name), _real(*a)))
    write_atomically(tmp_path / "file", b"data")
    assert calls == ["fsync", "replace", "fsync"]  # the contents, the name, the folder
    file = AtomicFile(tmp_path / "file")
    file.write(b"more")
    assert len(calls) == 3
    file.commit()
    assert calls[3:] == calls[:3]
    assert (tmp_path / "file").read_bytes() == b"more"


def test_two_processes_that_write_the_same_file_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    with replacing(path) as mine, mine.open("wb") as file:
        file.write(b"one half, ")
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            write_atomically(path, b"theirs")
        assert path.read_bytes() == b"theirs"
        file.write(b"and the other")
    assert path.read_bytes() == b"one half, and the other"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_of_a_file_is_removed_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file[1].json"
    killed = os.fork()
    if not killed:
        with replacing(path) as temporary:
            temporary.write_bytes(b"half of")
            os._exit(0)
    os.waitpid(killed, 0)
    other = tmp_path / ".other.json.1.tmp"
    other.touch()
    (left,) = (each for each in tmp_path.iterdir() if each != other)
    assert left.name == f".file[1].json.{killed}.tmp"
    with replacing(path) as temporary:
        assert not left.exists()
        at_work = tmp_path / temporary.name.replace(str(os.getpid()), "1")
        temporary.rename(at_work)  # the file of another process, which holds it
        write_atomically(path, b"ours")
        assert at_work.exists()
        at_work.rename(temporary)
        temporary.write_bytes(b"theirs")
    assert path.read_bytes() == b"theirs"
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_a_file_may_be_read_by_whom_the_user_allows(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with replacing(tmp_path / "file") as temporary:
        temporary.write_bytes(b"data")
        temporary.chmod(0o600)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_cannot_sync_folders_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, "fsync failed")

    monkeypatch.setattr(os, "fsync", fail)
    if number == errno.EINVAL:
        sync_folder(tmp_path)
        return
    with pytest.raises(OSError, match="fsync failed"):
        sync_folder(tmp_path)


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        only_writer(tmp_path),
        pytest.raises(BlockingIOError, match="another process is writing"),
        only_writer(tmp_path),
    ):
        pass
    with only_writer(tmp_path) as held:
        assert held


def test_a_file_system_without_locks_is_said_to_hold_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with only_writer(tmp_path) as held:
        assert not held


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_plainly(tmp_path: Path, number: int) -> None:
    with (
        pytest.raises(OSError, match="the disk is full; finished files are safe") as raised,
        full_disk_explained(tmp_path),
    ):
        raise OSError(number, "No space left on device")
    assert raised.value.errno == number
    assert raised.value.filename == str(tmp_path)


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="no"), full_disk_explained(tmp_path):
        raise PermissionError(errno.EACCES, "no")
