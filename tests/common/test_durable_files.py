"""Files that are replaced whole: on odd file systems, too, and beside what others left behind."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from common.durable_files import atomic_write, link, sync_folder
from common.errors import UserError
from trainer.run.hooks import link_state


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_folder_that_cannot_be_flushed(tmp_path, monkeypatch, number):
    """Network shares and file systems in user space refuse it; a disk that fails is an error."""

    def refuse(descriptor):
        raise OSError(number, "")

    monkeypatch.setattr(os, "fsync", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)


def test_a_copy_that_finds_no_room_leaves_nothing_behind(tmp_path, monkeypatch):
    """On a file system without links a second name is a copy."""
    (tmp_path / "state").write_bytes(b"x" * 100)

    def refuse(*_):
        raise OSError(errno.EPERM, "no links")

    def half(source, name):
        Path(name).write_bytes(b"x" * 50)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    link(tmp_path / "state", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"x" * 100
    monkeypatch.setattr(shutil, "copyfile", half)
    with pytest.raises(OSError, match="No space left"):
        link(tmp_path / "state", tmp_path / "second")
    with pytest.raises(UserError, match=r"best_resume.pth cannot be written \(No space left on device\)"):
        link_state(tmp_path / "state", tmp_path / "best_resume.pth")
    assert sorted(os.listdir(tmp_path)) == ["copy", "state"]


def test_what_a_kill_left_behind_is_replaced_not_written_to(tmp_path):
    """It may be a second name of a file that is in use, or belong to another user."""
    used = tmp_path / "used"
    used.write_bytes(b"in use")
    os.link(used, tmp_path / ".file.tmp")
    atomic_write(tmp_path / "file", lambda file: file.write(b"new"))
    assert used.read_bytes() == b"in use" and (tmp_path / "file").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["file", "used"]
