"""Locks between processes: record locks (POSIX fcntl), which end with the process, however it ends, and which
its children do not inherit."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from common.errors import UserError, say
from common.launcher import launch

PATIENCE = 60.0  # seconds for the run that holds a name to save and end
_held: list[TextIO] = []  # lock files of this process, open until it ends


@contextlib.contextmanager
def locked(path: Path, message: str) -> Iterator[bool]:
    """Hold a lock file. If another process has it, print `message` and wait. Yields whether it is held: not
    on a file system without locks, and not where no file can be made."""
    with contextlib.ExitStack() as stack:
        is_held = False
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "a+", encoding="utf-8"))
            holder = _holder(file)
            if holder:
                if launch().local_rank == 0:
                    say(message)
                fcntl.lockf(file, fcntl.LOCK_EX)
            is_held = holder is not None
        yield is_held


def lock_output(run: str, **folders: str) -> None:
    """Reserve a run's name in its output folders until this process ends (rank 0 only); `folders` by flag. A
    run that has the name is waited for, but not longer than PATIENCE.

    Keeps a second run from writing the same files, and finds folders that cannot be written before any work.
    Raises UserError if another run has the name, or a folder cannot be written."""
    for flag, folder in folders.items() if launch().rank == 0 else ():
        path = Path(folder) / f".{run}_{flag}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
            _held.append(file)
            with contextlib.suppress(PermissionError):  # it is the file of another user
                # who may write into the folder may resume the run
                path.chmod(path.parent.stat().st_mode & 0o666)
            _reserve(file, path)
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"--{flag} {folder} cannot be written ({why}); give another folder") from error


def _reserve(file: TextIO, path: Path) -> None:
    """Lock the file and write into it who has it."""
    begin, is_first = time.monotonic(), True
    while holder := _holder(file):
        taken = f"{holder} is training a run of this name and writes to {path.parent}"
        if time.monotonic() - begin >= PATIENCE:
            raise UserError(f"{taken}; wait for it, end it, or choose another --save_weight")
        if is_first:
            say(f"{taken}; waiting up to {PATIENCE:.0f} s, in case it is saving and about to end")
        is_first = False
        time.sleep(0.2)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def _holder(file: TextIO) -> str | None:
    """Lock a file: "" if that worked, None on a file system without locks. If another process has the lock,
    who that is, as the file says."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        return file.read().strip() or "another process"
    except OSError:
        return None
    return ""
