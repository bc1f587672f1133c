"""Files that survive a kill or a power cut at any moment: written beside their place, flushed to the disk,
renamed.

A reader finds the old file or the new one, never a half-written one.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError, WriteError


def atomic_write(
    path: Path, write: Callable[[BinaryIO], Any], rotate: Callable[[Path], None] | None = None
) -> None:
    """Replace `path` by what `write(file)` writes; on failure the old file stays. `rotate(path)` may rename
    it before. Raises UserError if the disk is full, the folder cannot be written ..."""
    with _beside(path) as temp:
        with open(temp, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if rotate is not None:
            rotate(path)
        os.replace(temp, path)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, under which it is written, and which the block then renames."""
    # always the same name, so that what a kill leaves behind is replaced
    temp = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(temp)  # it may be another user's file, which cannot be written but can be deleted
        yield temp
        sync_folder(path.parent)  # the rename itself must survive a power cut
    except (OSError, RuntimeError) as error:  # torch.save wraps an OSError in a RuntimeError
        if (translated := write_error(path, error)) is error:
            raise
        raise translated from error
    finally:
        with suppress(OSError):  # a read-only folder: nothing was written
            remove(temp)


def write_error(path: Path, error: BaseException) -> BaseException:
    """The WriteError for an OSError among the causes of `error`; any other error as it is."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return error
    return WriteError(
        f"{path} cannot be written ({cause.strerror or cause}); what was there is untouched; make room or give another "
        "folder"
    )


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def link(source: str | Path, name: str | Path) -> None:
    """Give a file a second name (a hard link), or copy it where the file system has no links. Nothing is left
    behind where neither works."""
    with suppress(OSError):
        os.link(source, name)
        return
    try:
        shutil.copyfile(source, name)
        with open(name, "rb") as copy:
            os.fsync(copy.fileno())
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename or a new file in it survives a power cut. Some file systems
    (of network shares, and in user space) do that by themselves and refuse to flush a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict) -> None:
    """Write JSON and flush it to the disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)  # ASCII: file names may hold bytes that are not UTF-8
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """A place to write a new file or folder, which appears at `path` complete and flushed when the block
    ends, or not at all. The place has the same name, in a temporary folder beside it. Raises UserError if
    `path` exists already, the disk is full, the folder cannot be written ..."""
    if os.path.lexists(path):
        raise UserError(f"{path} exists already; remove it, or give another name")
    with _beside(path) as temp:
        temp.mkdir()
        yield temp / path.name
        for written in temp.rglob("*"):
            with open(written, "rb") if written.is_file() else nullcontext() as file:
                os.fsync(file.fileno()) if file else sync_folder(written)
        os.replace(temp / path.name, path)
