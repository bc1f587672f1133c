"""The files that the web page's user uploads for training, in `.uploads` of --save_dir. They are written as
they arrive, inspected, and listed. They are never served or unpacked. This process does not decode them
either: look_at_file.py, scripts/plan.py and the trainings do."""

import asyncio
import fcntl
import filecmp
import json
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.requests import ClientDisconnect

from common.files import free_path, open_regular, remove
from scripts.serve.folders import Entry, files_in
from scripts.serve.jobs import try_lock
from scripts.serve.limited import run_limited
from scripts.serve.protocol import ApiError

LOOK, CONVERT = (Path(__file__).with_name(name) for name in ("look_at_file.py", "convert_upload.py"))
FOLDER = ".uploads"
KINDS = r"(\.(txt|md|jsonl|json|csv|tsv)(\.gz)?|\.(parquet|arrow|docx|epub|pdf|html|htm|srt|vtt))"
STEM_LENGTH = 40
NAME = re.compile(rf"\w[\w -]{{0,{STEM_LENGTH - 1}}}{KINDS}")
MAX_BYTES = 20 << 30
SILENCE_SECONDS = 30  # without data, after which an upload is aborted
DAY = 24 * 3600  # seconds after which an incomplete upload is removed
ROOM_FACTOR, ROOM = (3, 2 << 30)  # disk that an upload needs: FACTOR x its bytes + ROOM
LOOK_MEMORY, LOOK_SECONDS = 2 << 30, 20  # limits of inspecting a file, in bytes and seconds
PART = ".part."  # prefix of names while a file arrives or is inspected


class Uploads:
    """The uploaded files below a folder."""

    def __init__(self, save_dir: Path):
        self.folder = save_dir.absolute() / FOLDER
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # name -> size and modification time of a file, and what it contains
        self.known: dict[str, tuple[tuple[int, float], dict[str, Any]]] = {}
        self.one_at_a_time = CapacityLimiter(1)  # the limits are those of a single inspection
        for path in self.folder.glob(f"{PART}*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > DAY:
                    remove(path)

    def entries(self) -> dict[str, Entry]:
        """The files by name, including those that somebody copied into the folder."""
        found = files_in(self.folder, links=False)
        return {name: file for name, file in found.items() if NAME.fullmatch(name)}

    def path(self, name: str) -> Path:
        """The file of a name. The name is looked up, never joined to a path. Raises ApiError."""
        if name not in self.entries():
            raise ApiError(f"There is no file {name[:60]!r}.", 404, "name", "no_file")
        return self.folder / name

    def readable(self, name: str) -> tuple[Path, str]:
        """The file of a name and its kind, text or chat. Raises ApiError if training cannot read it."""
        path, file = self.path(name), self.entries().get(name)
        found = {} if file is None else self.about(name, file)
        if "error" in found:
            raise ApiError(found["error"], 422, "name", "other")
        if found.get("kind") is None:
            raise ApiError(f"Choose who is the assistant in {name}.", 422, "name", "export", file=name)
        return path, found["kind"]

    def listing(self) -> list[dict[str, Any]]:
        """What is known about each file."""
        return [self.about(name, file) for name, file in self.entries().items()]

    def about(self, name: str, file: Entry) -> dict[str, Any]:
        """What a file contains. It is inspected only once."""
        seen = file.size, file.mtime
        if self.known.get(name, (None,))[0] != seen:
            try:
                found = look_at(self.folder / name)
            except (OSError, ApiError) as error:  # copied into the folder by hand
                more = {"code": error.code, "values": error.values} if isinstance(error, ApiError) else {}
                found = {"kind": None, "error": str(error)} | more
            self.known[name] = seen, found
        return {"name": name, "bytes": file.size} | self.known[name][1]

    async def receive(self, name: str, length: int | None, pieces: AsyncIterator[bytes]) -> dict[str, Any]:
        """Write a file as it arrives. Returns what it contains. length: the announced number of bytes. If it
        raises ApiError, nothing of the file is left."""
        if not NAME.fullmatch(name):
            raise ApiError(f"{name[:60]!r} is not a file name that this page accepts.", 415, "name", "kind")
        if length is None:
            raise ApiError("The request needs a Content-Length.", 411, code="length")
        check_size(length, self.folder)
        if name in self.entries():
            raise ApiError(f"{name} exists already.", 409, "name", "exists")
        part = self.folder / f"{PART}{name}"
        with open_regular(part, "ab") as file:
            if not try_lock(file, fcntl.LOCK_EX):
                raise ApiError(f"{name} is already being uploaded.", 409, "name", "exists")
            try:
                file.truncate(0)
                await write(file, length, pieces)
                found = await run_sync(look_at, part, name, limiter=self.one_at_a_time)
                status = os.fstat(file.fileno())
                self.known[name] = (status.st_size, status.st_mtime), found
                os.replace(part, self.folder / name)
            finally:
                part.unlink(missing_ok=True)
        return {"name": name, "bytes": length} | found

    def convert(self, name: str, assistant: str) -> str:
        """Make a file of the conversations in an exported chat, in which this speaker is the assistant.
        Returns its name. Calls must not overlap. Raises ApiError."""
        path = self.path(name)
        check_size(path.stat().st_size, self.folder)
        with TemporaryDirectory(dir=self.folder, prefix=PART) as scratch:
            made = Path(scratch, "made.jsonl")
            arguments = str(path), str(made), json.dumps(assistant)
            run_limited(CONVERT, *arguments, memory=LOOK_MEMORY, seconds=LOOK_SECONDS)
            if not made.exists():
                text = f"No conversations can be made of {name} with {assistant[:60]!r} as the assistant."
                raise ApiError(text, 422, "assistant", "no_answers", file=name)
            stem = re.sub(r"[^\w -]+", "_", f"{name.rpartition('.')[0]} {assistant}").strip()
            path = self.folder / f"{stem}.jsonl"
            target = free_path(path, STEM_LENGTH, may_replace=lambda each: is_same(made, each))
            os.replace(made, target)
        return target.name


def is_same(made: Path, file: Path) -> bool:
    """Whether a file has the content of another one; links are not followed."""
    return not file.is_symlink() and filecmp.cmp(made, file, shallow=False)


async def write(file: Any, length: int, pieces: AsyncIterator[bytes]) -> None:
    """Write what arrives, and flush it to the disk. Raises ApiError if there are more or fewer bytes than
    announced, if nothing arrives for a while, or if the disk is full."""
    written = 0
    try:
        while True:
            try:
                piece = await asyncio.wait_for(anext(pieces), SILENCE_SECONDS)
            except StopAsyncIteration:
                break
            written += len(piece)
            if written > length:
                break
            file.write(piece)
        file.flush()
        await run_sync(os.fsync, file.fileno())
    except (TimeoutError, ClientDisconnect) as error:
        raise ApiError("The upload was interrupted.", 408, code="cut") from error
    except OSError as error:
        free = disk_usage(file.name).free
        text = f"The file cannot be written ({error.strerror})."
        raise ApiError(text, 507, code="disk", free=free) from error
    if written != length:
        raise ApiError("The file has another length than announced.", 400, code="cut")


def check_size(length: int, folder: Path) -> None:
    """Raise ApiError if a file is larger than allowed, or too large for the disk."""
    if length > MAX_BYTES:
        raise ApiError(
            f"A file may have at most {MAX_BYTES >> 30} GB.", 413, code="too_large", most=MAX_BYTES
        )
    if length > room(folder):
        raise no_room(ROOM_FACTOR * length + ROOM, disk_usage(folder).free)


def room(folder: Path) -> int:
    """The size in bytes of the largest file that the disk has room for; negative if there is no room."""
    return (disk_usage(folder).free - ROOM) // ROOM_FACTOR


def no_room(need: float, free: float) -> ApiError:
    """The error for a disk without room."""
    text = f"{need / 1e9:.1f} GB of disk are needed, {free / 1e9:.1f} GB are free."
    return ApiError(text, 507, code="room", need=need, free=free)


def look_at(path: Path, name: str = "") -> dict[str, Any]:
    """What the first records of a file are (look_at_file.py). name: the file's name in messages. Raises
    ApiError if it has no good record, or if reading it exceeds the limits."""
    name = name or path.name
    with TemporaryDirectory(dir=path.parent, prefix=PART) as scratch:
        arguments = str(path), name, scratch
        said = run_limited(LOOK, *arguments, memory=LOOK_MEMORY, seconds=LOOK_SECONDS)
    found: dict[str, Any]
    try:
        found = json.loads(said or b"")
    except ValueError:
        text = f"{name} cannot be read with {LOOK_MEMORY >> 30} GB of memory in {LOOK_SECONDS} s: it is "
        text += "damaged, or its records are too large; write it again, as JSON Lines"
        found = {"error": text, "code": "too_much", "seconds": LOOK_SECONDS, "most": LOOK_MEMORY}
    if "error" in found:
        raise ApiError(found.pop("error"), 422, "name", found.pop("code"), file=name, **found)
    return found
