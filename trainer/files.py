"""Files that survive a kill at any moment, and the thread that writes them.

Every file is written beside its place, flushed to the disk and renamed, so a reader sees the old one or the new one,
never a half. What is read is checked, and nothing in it is executed.
"""

import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dataset.durable import sync_folder
from dataset.errors import UserError

# whatever a damaged or foreign file makes zipfile and torch.load raise
UNREADABLE = (OSError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError)
UNREADABLE += (MemoryError, OverflowError, ImportError, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error)


def atomic_write(path: Path, write: Callable[[BinaryIO], Any], keep: Callable[[Path], None] | None = None) -> None:
    """Replace `path` by what `write(file)` writes; on failure nothing has changed. `keep(path)` saves the old file.

    Raises:
        UserError: the disk is full, the folder cannot be written ...
    """
    temp = path.with_name(f".{path.name}.tmp")  # one name: what a kill leaves behind is written over
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temp, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if keep is not None:
                keep(path)
            os.replace(temp, path)
            sync_folder(path.parent)  # the rename itself must survive a power cut
        except (OSError, RuntimeError) as error:  # torch.save wraps the OSError that stopped it
            raise cannot_write(path, error) from error
    except BaseException:
        with suppress(OSError):  # a read-only folder: nothing was written
            remove(temp)
        raise


def cannot_write(path: Path, error: BaseException) -> BaseException:
    """The UserError for what kept a file or a folder from being written; any other error as it is."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return error
    return UserError(
        f"{path} cannot be written ({cause.strerror or cause}); the file that was there is untouched. Make room or "
        "give another folder, then go on with --from_resume 1"
    )


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def forms(path: Path) -> tuple[Path, Path]:
    """Where a state to resume from may lie: the file `<name>.pth`, or the folder `<name>` of a sharded run."""
    return path, path.with_suffix("")


def previous(path: Path) -> Path:
    """The file of the state before that of the file `path`."""
    return path.with_name(f"{path.stem}_previous.pth")


def newest_first(path: Path) -> tuple[Path, ...]:
    """All places of a state to resume from: the newest in either form, then the previous one."""
    return *forms(path), *forms(previous(path))


def set_aside(path: Path) -> None:
    """The state at `path`, in whichever of its forms, becomes the previous one; what was that before is deleted."""
    for now, then in zip(forms(path), forms(previous(path)), strict=True):
        if now.exists():
            for old in forms(previous(path)):
                remove(old)
            os.replace(now, then)


class Writer:
    """Writes files in the background, one after another in the order given, so that training need not wait for a disk.

    What is handed over must not change any more. After a failure nothing further is written, and the next call of any
    method raises it: the files on the disk stay those of the last save that was complete.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._jobs: list[Future] = []
        self._failed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Write soon. Raises what an earlier job failed with."""
        self.check()
        self._jobs.append(self._thread.submit(self._run, job))

    def check(self) -> None:
        """Raise what a job failed with; does not wait."""
        done = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if job not in done]
        for job in done:
            job.result()

    def wait(self) -> None:
        """Return when everything is on the disk, or raise what went wrong."""
        while self._jobs:
            self._jobs.pop(0).result()

    def _run(self, job: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            job()
        except BaseException:
            self._failed = True
            raise


def snapshot(value: Any, copies: dict | None = None) -> Any:
    """A copy on the host of nested dicts, lists and tensors; tensors that share memory (tied weights) still do."""
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        key = (value.data_ptr(), value.dtype, value.shape)
        if value.numel() == 0 or key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, dict):
        return {key: snapshot(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(item, copies) for item in value)
    return value


def read_file(path: Path) -> Any:
    """What `torch.save` wrote: every byte is checked, and nothing in the file is executed.

    Raises:
        one of UNREADABLE: the file is damaged, of another kind, or holds code.
    """
    with zipfile.ZipFile(path) as archive:  # torch.load itself leaves the checksums out
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    return torch.load(path, map_location="cpu", weights_only=True)
