"""Locks between processes; the operating system releases them however the process ends."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from common.errors import UserError, say
from common.launcher import launch

PATIENCE = 60.0  # seconds for the run that holds a name to save and end
_held: list[TextIO] = []  # lock files of this process, open until it ends


@contextlib.contextmanager
def locked(path: Path, message: str = "") -> Iterator[bool]:
    """Hold the lock file exclusively, and delete it afterwards. If another process has it, print `message` and wait;
    without a message do not wait. Yields whether it is held: not on a file system without locks, and not where no file
    can be made."""
    file = None
    with contextlib.suppress(OSError):
        file = _open_locked(path, message)
    try:
        yield file is not None
    finally:
        if file is not None:
            with file, contextlib.suppress(OSError):
                path.unlink()  # while it is held, so that it is the file of nobody else


def _open_locked(path: Path, message: str) -> BinaryIO:
    """The lock file, held. Raises OSError if that is impossible, or another process has it and there is no message."""
    while True:
        file = open(path, "ab")  # noqa: SIM115 (closed below, or by whom it is for)
        try:
            _lock(file, message)
            if _is_at(path, file):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: BinaryIO, message: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not message:
            raise
        if launch().local_rank == 0:
            say(message)
        fcntl.flock(file, fcntl.LOCK_EX)


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether the file still has its name; else its last holder has deleted it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


def lock_output(run: str, **folders: str) -> None:
    """Reserve a run's name in its output folders until this process ends (rank 0 only); `folders` by flag. A run that
    has the name is waited for, but not longer than PATIENCE.

    Keeps a second run from writing the same files, and finds folders that cannot be written before any work. Record
    locks (POSIX fcntl) are not inherited by child processes.

    Raises:
        UserError: another run has the name, or a folder cannot be written.
    """
    for flag, folder in folders.items() if launch().rank == 0 else ():
        path = Path(folder) / f".{run}_{flag}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
            _held.append(file)
            with contextlib.suppress(PermissionError):  # it is the file of another user
                path.chmod(path.parent.stat().st_mode & 0o666)  # who may write into the folder may resume the run
            _reserve(file, path)
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"--{flag} {folder} cannot be written ({why}); give another folder") from error


def _reserve(file: TextIO, path: Path) -> None:
    """Lock the file and write into it who has it."""
    begin = time.monotonic()
    told = False
    while holder := _lock_record(file):
        taken = f"{holder} is training a run of this name and writes to {path.parent}"
        if time.monotonic() - begin >= PATIENCE:
            raise UserError(f"{taken}; wait for it, end it, or choose another --save_weight")
        if not told:
            say(f"{taken}; waiting up to {PATIENCE:.0f} s, in case it is saving and about to end")
        told = True
        time.sleep(0.2)


def _lock_record(file: TextIO) -> str:
    """Lock the file, unless another process has it: then who that is, as the file says."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        return file.read().strip() or "another process"
    except OSError:
        return ""  # a file system without locks
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return ""
