"""Atomic writes: a file is whole or absent, whatever fails; one writer to a folder; a full disk named."""

import errno
import os
from pathlib import Path

import pytest

from bd3lm.data.disk import full_disk_explained, only_writer, write_atomically


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


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        only_writer(tmp_path),
        pytest.raises(BlockingIOError, match="another process is writing"),
        only_writer(tmp_path),
    ):
        pass
    with only_writer(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_plainly(tmp_path: Path, number: int) -> None:
    with (
        pytest.raises(OSError, match="the disk is full; what is finished is kept") as raised,
        full_disk_explained(tmp_path),
    ):
        raise OSError(number, "No space left on device")
    assert raised.value.errno == number
    assert raised.value.filename == str(tmp_path)


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="no"), full_disk_explained(tmp_path):
        raise PermissionError(errno.EACCES, "no")
