"""Blocks of records, which are tokenised at a time, and the content of data files, compressed or not."""

import gzip
import io
from dataclasses import dataclass
from typing import Any, BinaryIO

COMPRESSED = (".gz", ".zst")
# of a file; large enough to outweigh the cost of passing a block on, small enough for memory
BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 1024
FIRST_INDEX = 1 << 40  # a "line" of FIRST_INDEX + i stands for element i of an array


def place(path: str, line: int) -> str:
    """Where a record stands, for messages: FILE:LINE, or FILE[INDEX], from 0, if it is one of several in a
    line."""
    return f"{path}:{line}" if line < FIRST_INDEX else f"{path}[{line - FIRST_INDEX}]"


@dataclass(frozen=True)
class Block:
    """Consecutive records of one file."""

    file: int  # index into the list of files
    path: str
    # (line, row or index (`place`), record): raw JSON, parsed, or a BadRecord in its place
    rows: list[tuple[int, Any]]
    size: int  # bytes of the file that it covers, for the progress


class DataFile:
    """A file that is being read.

    Attributes:
        content: its bytes, decompressed; for readers that go from the beginning to the end.
        stored: its bytes as they are.
        separator: the line between documents of plain text; empty for one document per file.
    """

    content: Any  # io.BufferedReader or gzip.GzipFile

    def __init__(self, path: str, separator: str = ""):
        self.path, self.separator = path, separator
        self.stored: BinaryIO = open(path, "rb")  # noqa: SIM115 (close() closes it)
        if path.lower().endswith(".gz"):
            self.content = gzip.GzipFile(fileobj=self.stored)
        elif path.lower().endswith(".zst"):
            import pyarrow  # only where a .zst file is read

            self.content = io.BufferedReader(pyarrow.CompressedInputStream(self.stored, "zstd"), BLOCK_BYTES)
        else:
            self.content = self.stored

    def close(self) -> None:
        """Close the file."""
        self.stored.close()
