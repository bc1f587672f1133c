"""Which files a `--data_path` means, and their raw contents, read in blocks that workers can parse on their own.

Files: JSONL (plain or .gz), `.json` that holds either JSON Lines or one array, and Parquet.
Line numbers count from 1; in Parquet the row number, from 1, takes their place.
"""

import glob
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset.errors import UserError, reason
from dataset.formats import BOM, BadRecord, check_characters, check_depth, decoder, not_utf8

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
COLUMNS = {"text", "conversations", "messages", "instruction", "input", "output", "system", "history", "tools"}
BLOCK_BYTES = 1 << 20  # large enough to keep a worker busy for a moment, small enough to keep memory flat
BLOCK_ROWS = 1024
DAMAGED_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)


@dataclass(frozen=True)
class Block:
    """Consecutive records of one file, not parsed yet: the amount that one worker handles at a time."""

    file: int  # index into the list of files
    path: str
    first: int  # line or row of its first record
    data: bytes | list  # raw lines; or [(line, record)] where reading the file meant parsing it
    size: int  # bytes of the file that it stands for (progress)


def expand_paths(data_path: str | os.PathLike | Sequence[str]) -> list[str]:
    """Files that `data_path` means: files, globs and folders (searched recursively), separated by commas.

    The parts keep the order in which they were typed; within a glob or folder the paths are sorted. A file that is
    named twice is read once. A path that exists as typed is never taken for a pattern or a list.
    Raises UserError for a missing or empty file and for a pattern or folder without data.
    """
    if isinstance(data_path, (str, os.PathLike)):
        whole = os.fspath(data_path)
        parts = [whole] if os.path.exists(whole) else [part.strip() for part in whole.split(",") if part.strip()]
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
            raise UserError(f"{path} is an empty file; take it out of --data_path or write it anew")
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
            raise UserError(f"{path} cannot be read ({why}); check the file or take it out of --data_path") from error


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
        raise UserError(f"{path} holds no record; take it out of --data_path or write it anew")


def _open(path: str):
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def _line_blocks(index: int, path: str) -> Iterator[Block]:
    """Blocks that end at a line end."""
    line, done = 1, 0
    with _open(path) as file:
        stored = getattr(file, "fileobj", file)  # for .gz the compressed file underneath: progress counts its bytes
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
                raise UserError(f"{path}: two columns have the same name ({', '.join(columns)}); write it anew")
            bytes_per_row = os.path.getsize(path) / max(1, table.metadata.num_rows)
            # Without one known column the whole row is read, so that the error can tell which keys there are.
            for batch in table.iter_batches(BLOCK_ROWS, columns=columns or None):
                rows = list(enumerate(batch.to_pylist(), row))
                yield Block(index, path, row, rows, round(len(rows) * bytes_per_row))
                row += len(rows)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # or values that Python has no type for
        raise UserError(
            f"{path}:{row}: from this row on no readable Parquet ({reason(error)}); write it anew"
        ) from error


def _starts_an_array(path: str) -> bool:
    try:
        with _open(path) as file:
            return file.read(4096).removeprefix(BOM).lstrip().startswith(b"[")
    except DAMAGED_GZIP:
        return False  # reading it as lines reports the damage


def _array_blocks(index: int, path: str) -> Iterator[Block]:
    """A `.json` file that holds one array of records. It is read whole: only JSON Lines can be streamed."""
    try:
        with _open(path) as file:
            raw = file.read().removeprefix(BOM)
        text = raw.decode("utf-8")
    except DAMAGED_GZIP as error:
        raise UserError(f"{path} is damaged or cut off ({error}); get it again") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{raw.count(10, 0, error.start) + 1}: {not_utf8(error)}") from error
    rows = list(_array_records(path, text))
    for start in range(0, len(rows), BLOCK_ROWS):
        part = rows[start : start + BLOCK_ROWS]
        yield Block(index, path, part[0][0], part, os.path.getsize(path) * len(part) // len(rows))


def _array_records(path: str, text: str) -> Iterator[tuple[int, object]]:
    """Yield (line, record) of a JSON array. After a syntax error nothing can be trusted, so it always stops there."""
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
            check_depth(record)
            check_characters(record)
        except (BadRecord, ValueError, RecursionError) as error:
            why = str(error).split(": line")[0]
            raise UserError(f"{path}:{line}: from this line on no valid JSON array ({why}); mend it") from error
        yield line, record
        separator = ","


def _check_end(path: str, text: str, end: int) -> None:
    """What stands behind the array would be lost without a word."""
    position = _skip_blanks(text, end)
    if position < len(text):
        line = text.count("\n", 0, position) + 1
        raise UserError(f"{path}:{line}: the array has ended before this; a .json file holds one array, or JSON Lines")


def _skip_blanks(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\r", "\n"):
        position += 1
    return position
