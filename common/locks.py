"""Locks between processes; the operating system releases them however the process ends."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError, say
from common.launcher import launch

_held: list = []  # lock files of this process, open until it ends


@contextlib.contextmanager
def locked(path: Path, message: str) -> Iterator[bool]:
    """Hold the lock file exclusively, printing `message` if another process has it; yields whether it is held: not on a
    file system without locks, and not where no file can be made."""
    try:
        file = open(path, "ab")  # noqa: SIM115 (closed below)
    except OSError:
        yield False
        return
    with file:
        is_held = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if launch().local_rank == 0:
                say(message)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            is_held = False
        yield is_held


def lock_output(run: str, **folders: str) -> None:
    """Reserve a run's name in its output folders until this process ends (rank 0 only); `folders` by flag.

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
            _lock_record(file, path)
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"--{flag} {folder} cannot be written ({why}); give another folder") from error


def _lock_record(file, path: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        raise UserError(
            f"{file.read().strip() or 'another process'} is training a run of this name and writes to {path.parent}; "
            "wait for it, end it, or choose another --save_weight"
        ) from error
    except OSError:
        return  # a file system without locks
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
