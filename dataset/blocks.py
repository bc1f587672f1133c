"""Blocks of unparsed records, which the reader of each kind of file makes, and how compressed files are opened."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from common.errors import UserError, reason

COMPRESSED = (".gz", ".zst")
BLOCK_BYTES = 1 << 20  # large enough to outweigh the cost of passing it to a worker, small enough for memory
BLOCK_ROWS = 1024
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)


@dataclass(frozen=True)
class Block:
    """Consecutive, unparsed records of one file: what a worker gets at a time."""

    file: int  # index into the list of files
    path: str
    first: int  # line or row of its first record
    data: bytes | list  # raw lines; or [(line, record)] where the file can only be read by parsing it
    size: int  # bytes of the file that it covers, for the progress
    unread: tuple[str, ...] = ()  # columns of a table that are not read
    separator: str | None = None  # of plain text: the line between documents, "" for none; None: JSON Lines
    context: bytes = b""  # of plain text: the end of what precedes, if the block begins inside a document
    continues: bool = False  # of plain text: the block is part of one document, which goes on in the next block


class _ZstdFile(io.RawIOBase):
    """The content of a .zst file. `read` raises EOFError where it is damaged."""

    def __init__(self, stored: BinaryIO):
        import pyarrow  # only where a .zst file is read

        self.stream = pyarrow.CompressedInputStream(stored, "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            return self.stream.readinto(buffer)
        except OSError as error:
            if error.errno is not None:  # of the file, not of what is in it
                raise
            raise EOFError(reason(error)) from error


@contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The content of a file, decompressed, and a function that tells how many bytes of the file have been read.

    Reading raises one of DAMAGED where a compressed file is damaged or cut off.
    """
    with open(path, "rb") as stored:
        if path.lower().endswith(".gz"):
            file = cast(BinaryIO, gzip.GzipFile(fileobj=stored))
        elif path.lower().endswith(".zst"):
            file = cast(BinaryIO, io.BufferedReader(_ZstdFile(stored), BLOCK_BYTES))
        else:
            file = stored
        yield file, stored.tell


def read_on(file: BinaryIO, path: str, line: int, size: int, whole_lines: bool = False) -> bytes:
    """The next `size` bytes, with `whole_lines` up to the end of their last line; empty at the end of the file.

    Raises UserError where a compressed file is damaged; `line` is where the bytes begin.
    """
    try:
        data = file.read(size)
        return data + file.readline() if data and whole_lines else data
    except DAMAGED as error:
        raise UserError(f"{path}:{line}: {damage(path, error)}") from error


def damage(path: str, error: BaseException) -> str:
    """The message for a compressed file that cannot be read on."""
    kind = path[path.rfind(".") :]
    return f"after this line the {kind} file is damaged or cut off ({reason(error)}); get it again"
