"""Tells which run.sh was written by a plan, because somebody who starts it by a click has not read it.

A plan signs the run.sh that it writes (HMAC-SHA256). The key is beside the plan's folder, not in it. A folder
from elsewhere does not bring the key, so its run.sh is refused, whatever else it contains.
"""

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import WriteError
from common.files import atomic_write, open_regular

KEY, KEY_BYTES = ".plan.key", 32


def sign(script: bytes, folder: Path) -> str | None:
    """The signature of a run.sh in this folder; None if no key can be stored."""
    key = read_key(folder)
    if key is None:
        with suppress(WriteError):
            atomic_write(folder.parent / KEY, write_key)
        key = read_key(folder)
    return None if key is None else hmac.digest(key, script, "sha256").hex()


def is_signed(script: bytes, folder: Path, signature: Any) -> bool:
    """Whether a plan on this machine gave this signature to this run.sh in this folder."""
    key = read_key(folder)
    if key is None or not isinstance(signature, str):
        return False
    return hmac.compare_digest(hmac.digest(key, script, "sha256").hex().encode(), os.fsencode(signature))


def read_key(folder: Path) -> bytes | None:
    """The key beside a folder; None if there is no key that only its owner can read."""
    with suppress(OSError), open_regular(folder.parent / KEY) as file:
        status = os.fstat(file.fileno())
        key = file.read()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077 and len(key) == KEY_BYTES:
            return key
    return None


def write_key(file: BinaryIO) -> None:
    """Write a new key, which nobody else may read."""
    os.fchmod(file.fileno(), 0o600)
    file.write(secrets.token_bytes(KEY_BYTES))
