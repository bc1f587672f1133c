"""Finds the files of a `--data_path` and reads them in blocks, which workers parse independently.

Files: JSONL (plain or .gz), `.json` with either JSON Lines or one array, and Parquet.
Line numbers count from 1; for Parquet they are row numbers, from 1.
"""

import glob
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError, reason
from dataset.formats import COLUMNS
from dataset.json_records import (
    BOM,
    BadRecord,
    check_value,
    decoder,
    not_an_object,
    not_utf8,
    parse_line,
    without_nulls,
)

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
BLOCK_BYTES = 1 << 20  # large enough to outweigh the cost of passing it to a worker, small enough for memory
BLOCK_ROWS = 1024
DAMAGED_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)


@dataclass(frozen=True)
class Block:
    """Consecutive, unparsed records of one file: what a worker gets at a time."""

    file: int  # index into the list of files
    path: str
    first: int  # line or row of its first record
    data: bytes | list  # raw lines; or [(line, record)] where the file can only be read by parsing it
    size: int  # bytes of the file that it covers, for the progress
    unread: tuple[str, ...] = ()  # columns of a table that are not read


def expand_paths(data_path: str | os.PathLike | Sequence[str]) -> list[str]:
    """The files of `data_path`: files, globs and folders (searched recursively), separated by commas.

    The parts keep their order; within a glob or folder the paths are sorted. A file named twice is read once. A path
    that exists as typed is never read as a pattern or a list.
    Raises UserError for a missing or empty file and for a pattern or folder without data.
    """
    if isinstance(data_path, (str, os.PathLike)):
        typed = os.fspath(data_path)
        parts = [typed] if os.path.exists(typed) else [part.strip() for part in typed.split(",") if part.strip()]
    else:
        parts = [os.fspath(part) for part in data_path]
    if not parts:
        raise UserError("--data_path is empty; give a file, a folder or a pattern such as 'data/*.jsonl'")
    files: dict[str, str] = {}
    for part in parts:
        for path in _expand_one(os.path.expanduser(part)):
            files.setdefault(os.path.realpath(path), path)
    for path in files.values():
        if os.path.getsize(path) == 0:
            raise UserError(f"{path} is an empty file; remove it from --data_path or write it again")
    return list(files.values())


def _expand_one(part: str) -> list[str]:
    if os.path.isdir(part):
        found = [path for path in Path(part).rglob("*") if path.name.endswith(SUFFIXES) and path.is_file()]
        found = [path for path in found if not any(name.startswith(".") for name in path.relative_to(part).parts)]
        if not found:
            raise UserError(f"{part} is a folder without data; it must hold files named *{', *'.join(SUFFIXES)}")
        return sorted(str(path) for path in found)
    if os.path.exists(part):
        return [part]
    found = [path for path in glob.glob(part, recursive=True) if os.path.isfile(path)]
    if not found:
        what = "no file matches this pattern" if glob.has_magic(part) else "no such file"
        raise UserError(f"{part}: {what}; check --data_path")
    return sorted(found)


def iter_blocks(paths: Sequence[str]) -> Iterator[Block]:
    """Read the files one after another as blocks of raw records. Raises UserError where a file cannot be read."""
    for index, path in enumerate(paths):
        try:
            yield from _blocks_of_file(index, path)
        except OSError as error:
            why = error.strerror or reason(error)
            raise UserError(f"{path} cannot be read ({why}); check the file or remove it from --data_path") from error


def _blocks_of_file(index: int, path: str) -> Iterator[Block]:
    if path.endswith(".parquet"):
        blocks = _parquet_blocks(index, path)
    elif path.endswith((".json", ".json.gz")) and _starts_an_array(path):
        blocks = _array_blocks(index, path)
    else:
        blocks = _line_blocks(index, path)
    empty = True
    for block in blocks:
        empty = empty and not (block.data.replace(BOM, b"").strip() if isinstance(block.data, bytes) else block.data)
        yield block
    if empty:
        raise UserError(f"{path} holds no record; remove it from --data_path or write it again")


def _open(path: str):
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def _line_blocks(index: int, path: str) -> Iterator[Block]:
    """Blocks that end at a line end."""
    line, done = 1, 0
    with _open(path) as file:
        stored = getattr(file, "fileobj", file)  # of a .gz the compressed file: progress counts its bytes
        while True:
            try:
                data = file.read(BLOCK_BYTES)
                data += file.readline() if data else b""
            except DAMAGED_GZIP as error:
                why = f"after this line the .gz file is damaged or cut off ({error}); get it again"
                raise UserError(f"{path}:{line}: {why}") from error
            if not data:
                return
            position = stored.tell()
            yield Block(index, path, line, data, position - done)
            done, line = position, line + data.count(b"\n")


def _parquet_blocks(index: int, path: str) -> Iterator[Block]:
    import pyarrow.parquet  # only where Parquet is used

    row = 1
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            columns = [name for name in table.schema_arrow.names if name in COLUMNS]
            if len(set(columns)) < len(columns):
                raise UserError(f"{path}: two columns have the same name ({', '.join(columns)}); write it again")
            unread = tuple(name for name in table.schema_arrow.names if columns and name not in COLUMNS)
            bytes_per_row = os.path.getsize(path) / max(1, table.metadata.num_rows)
            # Without any known column all are read, so that the error can list the keys.
            for batch in table.iter_batches(BLOCK_ROWS, columns=columns or None):
                records = ({key: without_nulls(value) for key, value in record.items()} for record in batch.to_pylist())
                rows = list(enumerate(records, row))
                yield Block(index, path, row, rows, round(len(rows) * bytes_per_row), unread)
                row += len(rows)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # damaged, or no Python type for a value
        raise UserError(
            f"{path}:{row}: unreadable Parquet from this row on ({reason(error)}); write it again"
        ) from error


def _starts_an_array(path: str) -> bool:
    try:
        with _open(path) as file:
            return file.read(4096).removeprefix(BOM).lstrip().startswith(b"[")
    except DAMAGED_GZIP:
        return False  # reading it as lines reports the damage


def _array_blocks(index: int, path: str) -> Iterator[Block]:
    """A `.json` file that holds one array of records, which must be read at once: only JSON Lines can be streamed."""
    try:
        with _open(path) as file:
            raw = file.read().removeprefix(BOM)
        text = raw.decode("utf-8")
    except DAMAGED_GZIP as error:
        raise UserError(f"{path} is damaged or cut off ({error}); get it again") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{error.object.count(10, 0, error.start) + 1}: {not_utf8(error)}") from error
    rows = list(_array_records(path, text))
    for start in range(0, len(rows), BLOCK_ROWS):
        part = rows[start : start + BLOCK_ROWS]
        yield Block(index, path, part[0][0], part, os.path.getsize(path) * len(part) // len(rows))


def _array_records(path: str, text: str) -> Iterator[tuple[int, object]]:
    """Yield (line, record) of a JSON array. What follows a syntax error is unreliable, so it always stops there."""
    line, counted, position = 1, 0, text.index("[") + 1
    separator = ""
    while True:
        position = _skip_blanks(text, position)
        if separator and text.startswith(separator, position):
            position = _skip_blanks(text, position + 1)
        elif separator and not text.startswith("]", position):
            raise UserError(f"{path}:{line}: after this record a ',' or ']' is missing; the array looks cut off")
        elif text.startswith("]", position):
            _check_end(path, text, position + 1)
            return
        line, counted = line + text.count("\n", counted, position), position
        try:
            record, position = decoder.raw_decode(text, position)
            check_value(record)
        except (BadRecord, ValueError, RecursionError) as error:
            why = str(error).split(": line")[0]
            raise UserError(f"{path}:{line}: not a valid JSON array from this line on ({why}); fix it") from error
        yield line, record
        separator = ","


def _check_end(path: str, text: str, end: int) -> None:
    """Raise UserError if anything but blanks follows the array: it would be ignored silently."""
    position = _skip_blanks(text, end)
    if position < len(text):
        line = text.count("\n", 0, position) + 1
        raise UserError(f"{path}:{line}: the array has ended before this; a .json file holds one array, or JSON Lines")


def _skip_blanks(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\r", "\n"):
        position += 1
    return position


def parse_block(block: Block) -> Iterator[tuple[int, dict | BadRecord]]:
    """Yield (line or row, record) for each record of a block; an unusable one is replaced by its BadRecord."""
    if isinstance(block.data, list):
        for line, record in block.data:
            yield line, record if isinstance(record, dict) else BadRecord(not_an_object(record))
        return
    lines = block.data.split(b"\n")
    for offset, raw in enumerate(lines):
        raw = raw.removeprefix(BOM).strip(b" \t\r")
        if not raw:
            continue
        try:
            yield block.first + offset, parse_line(raw, last=offset == len(lines) - 1)
        except BadRecord as error:
            yield block.first + offset, error
