"""Files that are replaced whole: on odd file systems, too, and beside what others left behind."""

import errno
import os

import pytest

from common.durable_files import atomic_write, sync_folder


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


def test_what_a_kill_left_behind_is_replaced_not_written_to(tmp_path):
    """It may be a second name of a file that is in use, or belong to another user."""
    used = tmp_path / "used"
    used.write_bytes(b"in use")
    os.link(used, tmp_path / ".file.tmp")
    atomic_write(tmp_path / "file", lambda file: file.write(b"new"))
    assert used.read_bytes() == b"in use" and (tmp_path / "file").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["file", "used"]
