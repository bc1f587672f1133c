"""Finds the files of a `--data_path` and reads them in blocks of records.

Files: JSON Lines, `.json` with either JSON Lines or one array, CSV and plain text, each also as .gz; Parquet
and Arrow; folders written by `datasets.save_to_disk`. Another kind of file is one more entry of READERS.
"""

import glob
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from typing import Any

from common.errors import UserError, reason
from dataset.json_values import BOM, TOO_DEEP, BadRecord, check_value, kind_of, not_json, not_utf8
from dataset.plain_text import read_text
from dataset.tables import read_arrow, read_csv, read_parquet

JSON_LINES = ".jsonl"
PLAIN_TEXT = ".txt"
GZIP = ".gz"
BLANKS = b" \t\r\n"  # of JSON
BLOCK_BYTES = 1 << 20  # of a file: outweighs the cost of handing a block on, and fits the memory
BLOCK_RECORDS = 1024
FIRST_ELEMENT = 1 << 40  # line FIRST_ELEMENT + i stands for element i of a JSON array
DAMAGED = "the compressed file is damaged or cut off"
# written by `datasets` beside the data
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Block:
    """Consecutive records of one file, which are tokenised at a time."""

    file: int  # index into the list of files
    path: str
    records: list[tuple[int, Any]]  # (line, record): raw JSON, parsed, or a BadRecord in its place
    size: int  # bytes of the file that it covers, for the progress


def place(path: str, line: int) -> str:
    """Where a record stands, for messages: FILE:LINE (of a table FILE:ROW), or FILE[INDEX] in a JSON array.
    Lines and rows count from 1, indices from 0."""
    if line < FIRST_ELEMENT:
        return f"{path}:{line}"
    return f"{path}[{line - FIRST_ELEMENT}]"


def read_json(content: Any, path: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, record) of a file that holds one array, else the lines of JSON Lines. Raises UserError
    where an array is not valid JSON."""
    if not content.peek(4096)[:4096].removeprefix(BOM).lstrip(BLANKS).startswith(b"["):
        yield from enumerate(content, 1)
        return
    import ijson  # only where arrays are read

    if content.peek(len(BOM)).startswith(BOM):
        content.read(len(BOM))
    line = FIRST_ELEMENT
    depth = 0  # 1: in the array itself, above: in an element
    builder = ijson.ObjectBuilder()  # ijson's own `items` needs memory that grows with the depth squared
    try:
        for event, value in ijson.basic_parse(content, use_float=True):
            if event in ("end_map", "end_array"):
                depth -= 1
            if depth > 0:
                builder.event(event, value)
            if event in ("start_map", "start_array"):
                depth += 1
            elif depth == 1:  # an element is complete
                yield line, checked_value(builder.value)
                line += 1
                builder = ijson.ObjectBuilder()
    except (ijson.JSONError, UnicodeDecodeError) as error:
        message = str(error).splitlines()[0].strip("b\"'")
        raise UserError(
            f"{place(path, line)}: from this element on the array cannot be read ({message}); mend the JSON, "
            "or write JSON Lines"
        ) from error


def checked_value(value: Any) -> Any:
    """An element of a JSON array, or the BadRecord in its place."""
    try:
        check_value(value)
    except BadRecord as error:
        return error
    return value


# Suffix -> what yields (line, record) of an open file (decompressed) and its path. A record is a dict, a
# BadRecord, or raw JSON, which the processes that tokenise parse, as they do each line of JSON Lines.
READERS: dict[str, Callable[[Any, str], Iterator[tuple[int, Any]]]] = {
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}


def file_kind(path: str | os.PathLike) -> str:
    """The suffix that decides how a file is read, without `.gz`; "" for other files, read as JSON Lines."""
    suffix = os.path.splitext(os.fspath(path).lower().removesuffix(GZIP))[1]
    return suffix if suffix in (JSON_LINES, PLAIN_TEXT, *READERS) else ""


def parts_of(data_path: str | os.PathLike) -> list[str]:
    """The files, globs and folders of a data path without weights, as typed; empty parts, as in `a.jsonl,`,
    are left out. A path that exists as typed is a single part."""
    typed = os.fspath(data_path)
    if os.path.exists(typed):
        return [typed]
    return [part.strip() for part in typed.split(",") if part.strip()]


def expand_paths(data_path: str | os.PathLike, plain_text: bool = True) -> list[str]:
    """The files of `data_path`: files, globs and folders (searched recursively), separated by commas.

    The parts keep their order; within a glob or folder the paths are sorted. A file named twice is read once.
    A path that exists as typed is never read as a pattern or a list. A folder that holds both plain text and
    records is refused, or without `plain_text` only its records are taken.
    Raises UserError for a missing or empty file, for a pattern or folder without data, and for unwanted plain
    text.
    """
    parts = parts_of(data_path)
    if not parts:
        raise UserError("--data_path is empty; give a file, a folder or a pattern such as 'data/*.jsonl'")
    files: dict[str, str] = {}
    for part in parts:
        typed = os.path.expanduser(part)
        try:
            if os.path.isdir(typed):
                paths = _files_of_folder(typed, plain_text)
            elif os.path.lexists(typed):
                paths = [typed]
            else:
                paths = [path for path in glob.glob(typed, recursive=True) if not os.path.isdir(path)]
        except OSError as error:
            where = error.filename or part
            raise UserError(f"{where} cannot be read ({error.strerror}); check --data_path") from error
        if not paths:
            raise UserError(f"{part}: no such file; check --data_path")
        for path in sorted(paths):
            files.setdefault(os.path.realpath(path), path)
    for path in files.values():
        if not os.path.isfile(path):
            what = "a pipe, a device or a link to nothing"
            raise UserError(f"{path} is {what}; data are read more than once, so give a file, or remove it")
        if os.path.getsize(path) == 0:
            raise UserError(f"{path} is an empty file; remove it from --data_path or write it again")
        if not plain_text and file_kind(path) == PLAIN_TEXT:
            raise UserError(f"{path} is plain text, which only pretraining takes; SFT needs conversations")
    return list(files.values())


def _files_of_folder(folder: str, plain_text: bool) -> list[str]:
    """The data files below a folder, without hidden ones and `datasets`' own; of a saved DatasetDict those of
    `train`. Refuses plain text beside records, so that a README.txt is not trained in silence."""
    texts: list[str] = []
    records: list[str] = []
    seen = set()
    for current, folders, names in os.walk(folder, onerror=_fail, followlinks=True):
        real = os.path.realpath(current)
        if real in seen:  # a link leads back here
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "dataset_dict.json" in names:
            folders[:] = ["train"]
        if "state.json" in names and _is_selection(os.path.join(current, "state.json")):
            raise UserError(
                f"{current} holds a selection of rows beside all of them (_indices_data_files in its "
                "state.json); save the selected rows alone: dataset.flatten_indices().save_to_disk(...)"
            )
        for name in names:
            kind = file_kind(name)
            if name.startswith(".") or name in DESCRIPTIONS or fnmatch(name, "cache-*.arrow"):
                continue
            if kind == PLAIN_TEXT:
                texts.append(os.path.join(current, name))
            elif kind:
                records.append(os.path.join(current, name))
    if not texts and not records:
        kinds = ", ".join(f"*{suffix}" for suffix in (JSON_LINES, *READERS, PLAIN_TEXT))
        raise UserError(f"{folder} is a folder without data; it must hold files named {kinds} (also {GZIP})")
    if texts and records and plain_text:
        record = min(records)
        wanted = os.path.join(folder, "**", f"*{file_kind(record)}")
        raise UserError(
            f"{folder} holds both plain text ({min(texts)}) and records ({record}); say which to read with a "
            f"pattern, such as --data_path '{wanted}'"
        )
    return records or texts


def _is_selection(state: str) -> bool:
    """Whether the description of a dataset names rows that were selected, which would be lost."""
    with suppress(ValueError, AttributeError), open(state, encoding="utf-8") as file:
        return bool(json.load(file).get("_indices_data_files"))
    return False


def _fail(error: OSError) -> None:
    raise error


def iter_blocks(paths: Sequence[str], text_separator: str = "") -> Iterator[Block]:
    """Read the files one after another as blocks of records. Raises UserError where a file cannot be read.

    text_separator: the line that separates documents in plain text; empty for one document per file.
    """
    for index, path in enumerate(paths):
        is_compressed = path.lower().endswith(GZIP)
        records: list[tuple[int, Any]] = []
        line = begin = 0  # the last line with a record; where in the file the block begins
        try:
            with open(path, "rb") as file:
                content = gzip.GzipFile(fileobj=file) if is_compressed else file
                kind = file_kind(path)
                reader: Iterator[tuple[int, Any]] = enumerate(content, 1)
                if kind == PLAIN_TEXT:
                    reader = read_text(content, text_separator)
                elif kind in READERS:
                    reader = READERS[kind](content, path)
                for number, record in reader:
                    if isinstance(record, bytes) and not record.removeprefix(BOM).strip(BLANKS):
                        continue
                    line = number
                    records.append((line, record))
                    position = file.tell()
                    if len(records) == BLOCK_RECORDS or position - begin >= BLOCK_BYTES:
                        yield Block(index, path, records, max(0, position - begin))
                        records, begin = [], position
        except (EOFError, OSError, zlib.error) as error:
            if is_compressed and getattr(error, "errno", None) is None:
                where = place(path, line or 1)
                raise UserError(
                    f"{where}: after this line {DAMAGED} ({reason(error)}); get it again"
                ) from error
            why = getattr(error, "strerror", None) or reason(error)
            raise UserError(
                f"{path} cannot be read ({why}); check the file or remove it from --data_path"
            ) from error
        if line == 0:
            raise UserError(f"{path} holds no record; leave it out or write it again")
        yield Block(index, path, records, max(0, os.path.getsize(path) - begin))


def parse_block(block: Block) -> Iterator[tuple[int, dict | BadRecord]]:
    """Yield (line, record) for each record of a block; an unusable one is replaced by its BadRecord.
    A byte order mark and escaped NULs (\\u0000) are accepted, half a character (\\ud83d) is not: no tokenizer
    takes it. Raises UserError where a compressed file is damaged."""
    for line, record in block.records:
        if isinstance(record, bytes):
            raw = record.removeprefix(BOM).strip(BLANKS)
            try:
                record = json.loads(raw.decode("utf-8"))
                if b"\\ud" in raw or b"\\uD" in raw:
                    check_value(record)
            except BadRecord as error:
                record = error
            except UnicodeDecodeError as error:
                record = BadRecord(not_utf8(raw, error.start))
            except json.JSONDecodeError as error:
                record = BadRecord(not_json(error))
            except RecursionError:
                record = BadRecord(TOO_DEEP)
            except ValueError as error:  # a number with thousands of digits
                record = BadRecord(f"JSON that cannot be read ({error})")
            if isinstance(record, BadRecord) and block.path.lower().endswith(GZIP):
                check_compressed(block.path)
        if not isinstance(record, dict | BadRecord):
            record = BadRecord(f"{kind_of(record)} instead of a JSON object; write {{...}}")
        yield line, record


@cache
def check_compressed(path: str) -> None:
    """Read a compressed file to its end, where its checksum is. Raises UserError if it is damaged."""
    try:
        with gzip.open(path) as content:
            while content.read(BLOCK_BYTES):
                pass
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path}: {DAMAGED} ({reason(error)}); get it again") from error
