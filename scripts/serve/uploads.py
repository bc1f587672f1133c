"""The files that the web page's user gives to train on, in `.uploads` of --save_dir: written as they arrive,
looked at, listed. Nobody reads them but scripts/plan.py and the trainings; they are never served or unpacked.
"""

import asyncio
import fcntl
import os
import re
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from tempfile import NamedTemporaryFile
from typing import Any

from anyio.to_thread import run_sync
from starlette.requests import ClientDisconnect

from common.errors import UserError
from dataset.files import TABLES, file_kind, is_plain_text, open_file, read_records
from dataset.messages import BadRecord
from dataset.records import Parsed, parse
from scripts.serve.jobs import try_lock
from scripts.serve.protocol import ApiError

FOLDER = ".uploads"
KINDS = r"(\.(txt|jsonl|json|csv)(\.gz)?|\.(parquet|arrow))"
NAME = re.compile(rf"\w[\w -]{{0,39}}{KINDS}")
MAX_BYTES = 20 << 30
SILENCE_SECONDS = 30  # without a byte, after which an upload ends
DAY = 24 * 3600  # seconds after which what is left of an upload is removed
ROOM_FACTOR, ROOM = 3, 2 << 30  # bytes of disk that an upload needs: so many times its own, for its tokens
LOOKED_AT, SHOWN, CHARACTERS = 200, 3, 300  # records that are read; that are shown; of each
HEAD_BYTES = 4 << 20  # of a file, decompressed, in which they are looked for
PART_OF_CHARACTER = re.compile(rb"[\xc0-\xff][\x80-\xbf]{0,2}$")  # in UTF-8, at the end
PART = ".part."  # what the name begins with while a file arrives


class Uploads:
    """The uploaded files below a folder."""

    def __init__(self, save_dir: Path):
        self.folder = save_dir.absolute() / FOLDER
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.known: dict[Path, tuple[tuple[int, float], dict[str, Any]]] = {}  # what was found in files
        for path in self.folder.glob(f"{PART}*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > DAY:
                    path.unlink()

    def paths(self) -> dict[str, Path]:
        """Name -> file; also of those that were put there by hand."""
        found = (path for path in sorted(self.folder.iterdir()) if NAME.fullmatch(path.name))
        return {path.name: path for path in found if path.is_file() and not path.is_symlink()}

    def path(self, name: str) -> Path:
        """The file of a name, which is looked up, never joined to a path. Raises ApiError."""
        path = self.paths().get(name)
        if path is None:
            raise ApiError(f"There is no file {name[:60]!r}.", 404, "name", "no_file")
        return path

    def listing(self) -> list[dict[str, Any]]:
        """What is known of each file."""
        return [self.about(path) for path in self.paths().values()]

    def about(self, path: Path) -> dict[str, Any]:
        """What a file holds; it is looked at once."""
        try:
            stat = path.stat()
            seen = stat.st_size, stat.st_mtime
            if self.known.get(path, (None,))[0] != seen:
                self.known[path] = seen, look_at(path)
            return {"name": path.name, "bytes": stat.st_size} | self.known[path][1]
        except (OSError, ApiError) as error:  # put there by hand
            return {"name": path.name, "bytes": 0, "kind": None, "error": str(error)}

    async def receive(self, name: str, length: int | None, pieces: AsyncIterator[bytes]) -> dict[str, Any]:
        """Write a file as it arrives; returns what it holds. length: bytes that were announced. Raises
        ApiError; then nothing of it is left."""
        if not NAME.fullmatch(name):
            raise ApiError(f"{name[:60]!r} is no name of a file that is read here.", 415, "name", "kind")
        if length is None:
            raise ApiError("The length must be announced.", 411, code="length")
        check_size(length, self.folder)
        if name in self.paths():
            raise ApiError(f"{name} is there already.", 409, "name", "exists")
        part = self.folder / f"{PART}{name}"
        with open(part, "ab") as file:
            if not try_lock(file, fcntl.LOCK_EX):
                raise ApiError(f"{name} is arriving already.", 409, "name", "exists")
            try:
                file.truncate(0)
                await write(file, length, pieces)
                found = await run_sync(look_at, part, name)
                os.replace(part, self.folder / name)
            finally:
                part.unlink(missing_ok=True)
        return {"name": name, "bytes": length} | found


async def write(file: Any, length: int, pieces: AsyncIterator[bytes]) -> None:
    """Write what arrives, and flush it to the disk. Raises ApiError if it is more or less than announced, or
    nothing comes for a while, or the disk is full."""
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
        raise ApiError("The file did not arrive.", 408, code="cut") from error
    except OSError as error:
        free = disk_usage(file.name).free
        text = f"The file cannot be written ({error.strerror})."
        raise ApiError(text, 507, code="disk", free=free) from error
    if written != length:
        raise ApiError("The file did not arrive as announced.", 400, code="cut")


def check_size(length: int, folder: Path) -> None:
    """Raise ApiError if a file is too large to be taken, or for the disk."""
    if length > MAX_BYTES:
        raise ApiError(
            f"More than {MAX_BYTES >> 30} GB are not taken.", 413, code="too_large", most=MAX_BYTES
        )
    if length > room(folder):
        raise no_room(ROOM_FACTOR * length + ROOM, disk_usage(folder).free)


def room(folder: Path) -> int:
    """Bytes of the largest file that the disk has room for; negative if it has none."""
    return (disk_usage(folder).free - ROOM) // ROOM_FACTOR


def no_room(need: float, free: float) -> ApiError:
    """The error of a disk without room."""
    text = f"{need / 1e9:.1f} GB of disk are needed, {free / 1e9:.1f} GB are free."
    return ApiError(text, 507, code="room", need=need, free=free)


@contextmanager
def head_of(path: Path) -> Iterator[tuple[Path, bool]]:
    """A file with the first bytes of another one, and whether there are more: some kinds of file, and lines,
    are read as a whole, and they may be larger than the memory."""
    head, kind = b"", file_kind(path.name)
    if kind not in TABLES:
        # what is wrong is said by read_records
        with suppress(UserError, OSError, EOFError, zlib.error), open_file(str(path)) as file:
            head = file.read(HEAD_BYTES + 1)
    if len(head) <= HEAD_BYTES:
        yield path, False
        return
    with NamedTemporaryFile(dir=path.parent, prefix=PART, suffix=kind) as file:
        file.write(head.rpartition(b"\n")[0] or PART_OF_CHARACTER.sub(b"", head))
        file.flush()
        yield Path(file.name), True


def look_at(path: Path, name: str = "") -> dict[str, Any]:
    """What the first records of a file are: texts or conversations, how many, the first of them, and of the
    first bad one the line and why. name: of the file, for messages. Raises ApiError if it has no good one."""
    with head_of(path) as (head, is_cut):
        return look_at_head(head, is_cut, name or path.name)


def look_at_head(path: Path, is_cut: bool, name: str) -> dict[str, Any]:
    """`look_at` of a file; is_cut: it is the begin of another one. Raises ApiError."""
    chats, texts, first, bad, count = 0, 0, [], None, 0
    try:
        for source, record in read_records([str(path)]):
            count += 1
            try:
                if isinstance(record, BadRecord):
                    raise record
                parsed = parse(record, "pretrain")
                is_text = parsed.document is not None
                shown = spoken(parsed) if parsed.document is None else parsed.document
            except BadRecord as error:
                bad = bad or {"line": abs(source.line), "why": str(error)}
            else:
                texts, chats = texts + is_text, chats + (not is_text)
                if len(first) < SHOWN:
                    first.append(shown[:CHARACTERS])
            if count == LOOKED_AT:
                break
    except UserError as error:
        if not is_cut or not texts + chats:
            text = str(error).replace(str(path), name)
            raise ApiError(text, 422, "name", code_of(text), file=name) from error
    if not texts + chats:
        text = f"{name}:{bad['line']}: {bad['why']}" if bad else f"{name} holds no record."
        code = "bad_record" if bad and code_of(text) == "other" else code_of(text)
        raise ApiError(text, 422, "name", code, file=name, **(bad or {}))
    kind = "text" if texts >= chats else "chat"
    more = is_cut or count == LOOKED_AT
    if is_plain_text(name):  # a text, in however many parts it is read
        count, more = 1, False
    found = {"kind": kind, "records": count, "first": first, "more": more}
    return found | ({"bad": bad} if bad else {})


def spoken(parsed: Parsed) -> str:
    """What is said in a conversation."""
    (chat,) = parsed.chats
    return "\n".join(f"{message['role']}: {message['content']}" for message in chat.messages)


def code_of(text: str) -> str:
    """The code of an error in a file."""
    if "UTF-8" in text or "UTF-16" in text:
        return "not_utf8"
    return "no_record" if "holds no record" in text else "other"
