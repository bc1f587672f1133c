"""Files that several processes share and that a power cut may interrupt: locks, and waiting for the disk."""

import contextlib
import json
import os
from pathlib import Path

from dataset.errors import say

try:
    import fcntl
except ImportError:  # Windows: without locks several ranks may build the same cache, and the last one's is kept
    fcntl = None


@contextlib.contextmanager
def locked(path: Path, message: str):
    """Hold the lock of that name, and say whether it is held; the system releases it however the process ends."""
    with open(path, "ab") as file:
        is_held = True
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                say(message)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: as on Windows
            is_held = False
        yield is_held and fcntl is not None


def sync_folder(folder: Path) -> None:
    """Make a rename or a new file in the folder survive a power cut."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: dict) -> None:
    """Write and wait until it is on the disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)  # in ASCII: the name of a file may hold bytes that are not UTF-8
        file.flush()
        os.fsync(file.fileno())
