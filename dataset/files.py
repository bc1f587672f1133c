"""Finds the files of a `--data_path` and reads their records.

Files: JSON Lines or one JSON array, CSV, TSV and plain text, each also compressed; Parquet and Arrow, also in
folders written by `datasets.save_to_disk`. A file of another name is read as JSON. What is none of these by
its first bytes is refused (common/contents.py). To support another kind of file, add an entry to READERS.
"""

import bz2
import codecs
import csv
import glob
import gzip
import io
import json
import lzma
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common.contents import HEAD, describe, foreign, is_binary, not_utf8
from common.errors import UserError, reason
from common.patterns import split_first, take_first
from dataset.messages import BadRecord, DataDecoder, parse_json
from dataset.records import ANSWER_FIELDS, FORMATS, PAIR

PLAIN_TEXT = (".txt", ".md")
TABLES = (".parquet", ".arrow")  # binary, read in batches
DELIMITERS = (",", ";", "\t", "|")  # of CSV: the first of these in the header line
PART_BYTES = 1 << 20  # a longer plain text is read in parts of about this size
BATCH_ROWS = 1024
LIST_FIELDS = {"history", *PAIR, *(FORMATS.keys() - ANSWER_FIELDS.keys())}  # in a table they may be JSON text
ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*\{")
SEPARATOR = re.compile(r"\s*(,\s*|\])")  # behind an element of an array
# files that `datasets` writes next to the data
DATASETS_METADATA = ("dataset_info*.json", "dataset_dict.json", "state.json", "cache-*.arrow")


class Source(NamedTuple):
    """The location of a record."""

    file: int  # index into the list of files
    line: int  # or row of a table, from 1; element i of a JSON array is line -1 - i


Record = tuple[Source, dict | BadRecord]  # BadRecord: it cannot be read


def format_source(path: str, line: int) -> str:
    """The location of a record, for messages: FILE:LINE, or FILE[INDEX] in a JSON array."""
    return f"{path}:{line}" if line >= 0 else f"{path}[{-1 - line}]"


# --- which files


def file_kind(path: str) -> str:
    """The suffix that decides how a file is read, without a compression suffix; "" for other files."""
    name = path.lower()
    for compressed in COMPRESSIONS:
        name = name.removesuffix(compressed)
    suffix = Path(name).suffix
    return suffix if suffix in READERS or suffix in (".jsonl", *PLAIN_TEXT) else ""


def is_plain_text(path: str) -> bool:
    """Whether a file holds documents rather than records."""
    return file_kind(path) in PLAIN_TEXT


def split_data_path(data_path: str) -> list[str]:
    """The files, globs and folders of a data path, as typed. A path that exists as typed is a single part."""
    if os.path.exists(data_path):
        return [data_path]
    return [part.strip() for part in data_path.split(",") if part.strip()]


def expand_paths(data_path: str) -> list[str]:
    """The files of `data_path`: files, globs (GLOB[:N]: its first N files) and folders (searched
    recursively), separated by commas. A file that is named twice is read once. Raises UserError where there
    are none."""
    files, _ = find_files(data_path)
    return files


def find_files(data_path: str) -> tuple[list[str], list[str]]:
    """The files to read, and the paths in folders that are skipped: files of other kinds, plain text next to
    records, and what cannot be opened. Raises UserError."""
    unique: dict[str, str] = {}  # real path -> the first name of it
    skipped: list[str] = []
    for part in split_data_path(data_path):
        typed, count = os.path.expanduser(part), None
        if not os.path.exists(typed):
            typed, count = split_first(typed)
        if os.path.isdir(typed):
            paths, others = list_data_files(typed)
            skipped += others
            if not paths and others:
                raise UserError(f"{part}: a folder without data, which holds {describe_suffixes(others)}")
        else:
            names = [typed] if os.path.exists(typed) else expand_pattern(typed)
            paths = [path for path in names if os.path.isfile(path)]
        if count is not None:
            paths = take_first(paths, count, typed)
        if not paths:
            raise UserError(f"{part}: no such file, or a folder without data; check the path")
        for path in sorted(paths):
            unique.setdefault(os.path.realpath(path), path)
    if not unique:
        raise UserError("--data_path is empty; give a file, a folder or a pattern such as 'data/*.jsonl'")
    return list(unique.values()), skipped


def expand_pattern(pattern: str) -> list[str]:
    """The paths that match a glob pattern. `**` visits each folder once: `glob` itself does not end where
    several links lead back to a parent folder."""
    parts = pattern.split("/")
    if "**" not in parts:
        return glob.glob(pattern)
    index = parts.index("**")
    head, tail = "/".join(parts[:index]), parts[index + 1 :] or ["*"]
    if index and not head:
        head = "/"
    paths = []
    for start in glob.glob(head or "."):
        for folder, _, _ in walk_once(start):
            paths += expand_pattern("/".join([glob.escape(folder), *tail]))
    return paths


def list_data_files(folder: str) -> tuple[list[str], list[str]]:
    """The data files in a folder and its subfolders, and the other files there. Hidden files and the metadata
    of `datasets` are in neither list; of a saved DatasetDict only `train` is read."""
    paths: list[str] = []
    skipped: list[str] = []
    for current, folders, names in walk_once(folder, lambda error: skipped.append(error.filename)):
        if "dataset_dict.json" in names:
            folders[:] = ["train"]
        for name in names:
            is_description = any(fnmatch(name, pattern) for pattern in DATASETS_METADATA)
            if not name.startswith(".") and not is_description:
                paths.append(os.path.join(current, name))
    data = [path for path in paths if file_kind(path) and os.path.isfile(path)]
    records = [path for path in data if not is_plain_text(path)]
    texts = [path for path in data if file_kind(path) == ".txt"]
    chosen = records or texts or data  # a README.txt beside records is not data, nor a README.md beside texts
    return chosen, sorted(skipped + list(set(paths) - set(chosen)))


def describe_suffixes(paths: list[str]) -> str:
    """How many files there are of each suffix, and which suffixes are read."""
    counts = Counter(Path(path).suffix or "without a suffix" for path in paths)
    files = ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(4))
    return f"{files}; data are .jsonl, {', '.join([*READERS, *PLAIN_TEXT])}, also compressed"


def walk_once(
    folder: str, on_error: Callable[[OSError], Any] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` that follows links, without hidden folders, and through each folder once."""
    visited = set()
    for current, folders, names in os.walk(folder, followlinks=True, onerror=on_error):
        real = os.path.realpath(current)
        if real in visited:  # a link leads back here
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield current, folders, names


# --- what is in them


def read_records(paths: list[str], separator: str = "") -> Iterator[Record]:
    """The records of the files, one file after another. Raises UserError if one cannot be read
    to its end.

    separator: the line between documents of plain text.
    """
    for number, path in enumerate(paths):
        line = 0
        try:
            for line, record in read_file(path, separator):
                if not isinstance(record, dict | BadRecord):
                    record = BadRecord(f"{JSON_KINDS.get(type(record), 'no JSON object')}; write {{...}}")
                yield Source(number, line), record
        except UserError:
            raise
        except Exception as error:  # a damaged file may raise anything
            why = not_utf8(error.object) if isinstance(error, UnicodeDecodeError) else reason(error)
            where = f"{format_source(path, line)}: after it the file" if line else f"{path}: it"
            raise UserError(f"{where} cannot be read ({why}); mend the file or leave it out") from error
        if line == 0:
            raise UserError(f"{path} holds no record; leave it out or write it again")


def read_file(path: str, separator: str) -> Iterator[tuple[int, Any]]:
    """The records of a file with their lines (of `Source`)."""
    with open_file(path) as file:
        kind = file_kind(path)
        if kind not in TABLES:
            check_text(path, file.peek(HEAD)[:HEAD], kind in PLAIN_TEXT)
        if kind in PLAIN_TEXT:
            yield from read_text(file, separator)
        else:
            yield from READERS.get(kind, read_lines_or_array)(file)


def open_file(path: str) -> Any:
    """The open file, decompressed. Raises UserError if its first bytes are not those of a data file."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
    if other_kind := describe(path, head):
        raise UserError(foreign(path, other_kind))
    for suffix, (magic, open_compressed) in COMPRESSIONS.items():
        if head.startswith(magic) or path.lower().endswith(suffix):
            return open_compressed(path)
    return open(path, "rb")  # closed by whoever reads it


def open_zstd(path: str) -> Any:
    """A file compressed by zstd."""
    import pyarrow  # only where such files are read

    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))  # type: ignore[arg-type]


def check_text(path: str, head: bytes, is_text: bool) -> None:
    """Raise UserError if the head of a file is of another kind than text (is_text) or records of text."""
    other_kind = describe(path, head)  # `head` is decompressed
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path} is {not_utf8(head)}")
    if head.startswith((b"PAR1", b"ARROW1")):
        kind = "parquet" if head.startswith(b"PAR1") else "arrow"
        other_kind = f"a {kind.capitalize()} file", f"name it {path}.{kind}"
    elif is_text and holds_json(head):
        other_kind = "JSON, not plain text", f"name it {Path(path).stem}.jsonl"
    elif other_kind is None and is_binary(head):
        other_kind = (
            "binary, perhaps tokens of another trainer",
            "give the text or records that it was made of",
        )
    if other_kind:
        raise UserError(foreign(path, other_kind))


def holds_json(head: bytes) -> bool:
    """Whether a text with these first bytes is JSON Lines, or an array of objects."""
    if ARRAY_OF_OBJECTS.match(head):
        return True
    first, end, _ = head.lstrip().partition(b"\n")
    if not first.startswith(b'{"'):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return not end  # a line longer than the head


def read_lines_or_array(file: Any) -> Iterator[tuple[int, Any]]:
    """JSON Lines, unless the file begins with an array of objects. A line that holds a whole array, followed
    by another such line, is JSON Lines, too: each line is then a bad record."""
    head = file.peek(HEAD)[:HEAD].removeprefix(codecs.BOM_UTF8)
    first, _, following = head.strip().partition(b"\n")
    is_lines = first.rstrip().endswith(b"]") and following.lstrip().startswith(b"[")
    is_array = ARRAY_OF_OBJECTS.match(head) and not is_lines
    yield from read_json(file) if is_array else read_json_lines(file)


def read_json_lines(file: Any) -> Iterator[tuple[int, Any]]:
    """JSON Lines. A byte order mark and blank lines are skipped."""
    decoder = DataDecoder()
    for line, raw in enumerate(file, 1):
        try:
            text = raw.decode("utf-8-sig").strip()
            if text:
                yield line, decoder.decode(text)
        except UnicodeDecodeError:
            yield line, BadRecord(not_utf8(raw))
        except (ValueError, RecursionError) as error:
            yield line, BadRecord(f"not valid JSON ({error}); write one object a line, or one array")


def read_json(file: Any) -> Iterator[tuple[int, Any]]:
    """JSON Lines, or one array, decoded element by element. After a broken element reading continues at the
    next line that begins as the line of the first element does; without one, raises ValueError."""
    if not file.peek(HEAD)[:HEAD].removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from read_json_lines(file)
        return
    # a byte that is not UTF-8 becomes a lone surrogate, which is_utf8 detects below
    text = file.read().decode("utf-8-sig", "surrogateescape")
    decoder = DataDecoder()
    at = len(text) - len(text.partition("[")[2].lstrip())
    indent = text[text.rfind("\n", 0, at) + 1 : at]
    next_line = "\n{" if indent.strip() else f"\n{indent}{{"
    line, is_end = 0, text[at : at + 1] == "]"
    while not is_end:
        line -= 1
        try:
            record, end = decoder.raw_decode(text, at)
            separator = SEPARATOR.match(text, end)
            if not separator:
                raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
            following, is_end = separator.end(), separator[1] == "]"
        except (ValueError, RecursionError) as error:
            record = BadRecord(f"not valid JSON ({error})")
            next_element = text.find(next_line, at)
            if next_element < 0:
                rest = text[at:]
                raise ValueError(error if is_utf8(rest) else not_utf8(original_bytes(rest))) from None
            following = next_element + len(next_line) - 1
        if not is_utf8(text[at:following]):
            record = BadRecord(not_utf8(original_bytes(text[at:following])))
        yield line, record
        at = following
    if text[at:].strip("] \t\r\n"):
        raise ValueError("more follows the end of the array")


def is_utf8(text: str) -> bool:
    """Whether a text that was decoded with surrogateescape was UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def original_bytes(text: str) -> bytes:
    """The bytes of a text that was decoded with surrogateescape."""
    return text.encode("utf-8", "surrogateescape")


def read_text(file: Any, separator: str) -> Iterator[tuple[int, dict | BadRecord]]:
    """The documents of plain text, divided by lines that hold only the separator. A document of more than
    PART_BYTES is divided after a whole line."""
    lines: list[bytes] = []
    first = size = 0  # line of the document or part, and its bytes
    for number, raw in enumerate(file, 1):
        is_separator = bool(separator) and raw.rstrip() == separator.strip().encode()
        if not is_separator and (lines or raw.strip()):
            first = first if lines else number
            lines.append(raw)
            size += len(raw)
        if lines and (is_separator or size >= PART_BYTES):
            yield first, document_record(lines)
            lines, size = [], 0
    if lines:
        yield first, document_record(lines)


def document_record(lines: list[bytes]) -> dict | BadRecord:
    """The record of a document."""
    raw = b"".join(lines)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return BadRecord(not_utf8(raw))
    return {"text": text.replace("\r\n", "\n").strip("\n")}


def read_csv(file: Any, delimiters: Iterable[str] = DELIMITERS) -> Iterator[tuple[int, Any]]:
    """The rows of CSV, whose first line names the columns. The delimiter is the first of `delimiters` that
    occurs in this line."""
    csv.field_size_limit(sys.maxsize)
    names, _, _ = file.peek(HEAD)[:HEAD].partition(b"\n")
    delimiter = next((each for each in delimiters if each.encode() in names), ",")
    # strict: a quote that is never closed raises an error instead of swallowing the following rows
    lines = (raw.decode("utf-8-sig") for raw in file)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    header = [name.strip() for name in next(rows, [])]
    if len(set(header)) < len(header):
        raise ValueError("two columns have the same name")
    line = rows.line_num + 1
    for cells in rows:
        if len(cells) == len(header):
            yield line, parse_json_cells(dict(zip(header, cells, strict=True)))
        elif cells:
            what = f"{len(cells)} cells, but {len(header)} columns"
            sign = {",": "commas", ";": "semicolons", "\t": "tabs"}.get(delimiter, delimiter)
            yield line, BadRecord(f"{what}; put text with {sign} into quotes")
        line = rows.line_num + 1


def read_parquet(file: Any) -> Iterator[tuple[int, Any]]:
    """The rows of a Parquet file."""
    from pyarrow.parquet import ParquetFile  # only where such tables are read

    return table_records(ParquetFile(file).iter_batches(BATCH_ROWS))


def read_arrow(file: Any) -> Iterator[tuple[int, Any]]:
    """The rows of an Arrow file, of the file format or the streaming format (of `datasets`)."""
    from pyarrow import ipc

    if not file.peek(6).startswith(b"ARROW1"):
        return table_records(ipc.open_stream(file))
    table = ipc.open_file(file)
    return table_records(table.get_batch(index) for index in range(table.num_record_batches))


def table_records(batches: Iterable) -> Iterator[tuple[int, Any]]:
    """The rows of batches of a table."""
    row = 0
    for batch in batches:
        batch.validate(full=True)  # damaged offsets would end the process
        for start in range(0, len(batch), BATCH_ROWS):
            for record in batch.slice(start, BATCH_ROWS).to_pylist():
                row += 1
                yield row, parse_json_cells(drop_nulls(record))


def parse_json_cells(row: dict) -> dict | BadRecord:
    """The row with the JSON text of list fields parsed; empty ones are removed. A CSV cell is always text."""
    for key in LIST_FIELDS & row.keys():
        text = row[key]
        if text == "":
            del row[key]
        elif isinstance(text, str) and text.lstrip().startswith("["):
            try:
                row[key] = parse_json(text, f"'{key}'")
            except BadRecord as error:
                return error
    return row


def drop_nulls(value: Any) -> Any:
    """The value without null fields in its objects: in a table with a schema, a missing field is null."""
    if isinstance(value, dict):
        return {key: drop_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [drop_nulls(entry) for entry in value]
    return value


# Suffix -> what yields (line, record) of an open file, decompressed; an unusable record as a BadRecord.
READERS: dict[str, Callable[[Any], Iterator[tuple[int, Any]]]] = {
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiters=("\t",)),
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
# Suffix of a compressed file -> what it begins with, and what opens it.
COMPRESSIONS: dict[str, tuple[bytes, Callable[[str], Any]]] = {
    ".gz": (b"\x1f\x8b", gzip.open),
    ".bz2": (b"BZh", bz2.open),
    ".xz": (b"\xfd7zXZ\0", lzma.open),
    ".zst": (b"\x28\xb5\x2f\xfd", open_zstd),
}
JSON_KINDS = {list: "a JSON list, not an object", str: "a JSON text, not an object"}
