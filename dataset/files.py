"""Finds the files of a `--data_path` and reads their records.

Files: JSON (Lines, an array, or objects over several lines), CSV, TSV, plain text and documents such as .docx
and .pdf (documents.py), each also compressed; Parquet and Arrow, also in folders written by
`datasets.save_to_disk`. A file with another suffix is read as
JSON. A file whose first bytes show that it is something else is refused (common/contents.py). To support
another kind of file, add an entry to READERS.
"""

import bz2
import codecs
import glob
import gzip
import io
import json
import lzma
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from common.contents import HEAD, describe, foreign, is_binary, is_pointer
from common.encodings import NotUtf8, conversion, not_utf8, wide_encoding
from common.errors import UserError, reason
from common.files import is_file, is_folder, is_there, read_errors
from common.patterns import split_first, take_first
from dataset.delimited import DELIMITERS, read_rows
from dataset.documents import DOCUMENTS, SUBTITLES, WEBVTT, PartialText, Unreadable
from dataset.messages import BadRecord, DataDecoder, parse_json
from dataset.records import ANSWER_FIELDS, FORMATS, PAIR

PLAIN_TEXT = (".txt", ".md")
TABLES = (".parquet", ".arrow")  # binary, read in batches
PART_BYTES = 1 << 20  # a longer plain text is read in parts of about this size
SAMPLE_BYTES = 1 << 16  # of a file, by which its encoding is found
BATCH_ROWS = 1024
LIST_FIELDS = {"history", *PAIR, *(FORMATS.keys() - ANSWER_FIELDS.keys())}  # in a table they may be JSON text
ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*\{")
ARRAY = re.compile(rb"\s*\[\s*[\[{]")  # also of lists
AFTER_ELEMENT = re.compile(r"\s*(,\s*|\])")  # of an array
AFTER_VALUE = re.compile(r"\s*(,\s*)?")  # of several in a file
JSON_LINE = re.compile(rb"^(\xef\xbb\xbf)?\s*[{\[]", re.MULTILINE)
LONE_SURROGATE = re.compile("[\udc80-\udcff]")  # of a byte that is not UTF-8
LINE_END = re.compile("\r\n?")
# files that `datasets` writes next to the data
DATASETS_METADATA = ("dataset_info*.json", "dataset_dict.json", "state.json", "cache-*.arrow")


class NoRecord(UserError):
    """A file holds no record."""


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
    return suffix if suffix in READERS or suffix in (".jsonl", *PLAIN_TEXT, *DOCUMENTS) else ""


def is_plain_text(path: str) -> bool:
    """Whether a file holds documents rather than records."""
    return file_kind(path) in (*PLAIN_TEXT, *DOCUMENTS)


def split_data_path(data_path: str) -> list[str]:
    """The files, globs and folders of a data path, as typed. A path that exists exactly as typed counts as
    one part."""
    if is_there(data_path):
        return [data_path]
    return [part.strip() for part in data_path.split(",") if part.strip()]


def expand_paths(data_path: str) -> list[str]:
    """The files of `data_path`: files, globs (GLOB[:N]: its first N files) and folders (searched
    recursively), separated by commas. A file that is named twice is read once. Raises UserError if there are
    no files."""
    files, _ = find_files(data_path)
    return files


def find_files(data_path: str) -> tuple[list[str], list[str]]:
    """The files to read, and the paths in folders that are skipped: files of other kinds, plain text next to
    records, and files that cannot be opened. Raises UserError."""
    unique: dict[str, str] = {}  # real path -> the first name of it
    skipped: list[str] = []
    for part in split_data_path(data_path):
        typed, count = os.path.expanduser(part), None
        os.fsencode(typed)  # a name that the locale has no bytes for is an error, not absent as it is below
        if not is_there(typed):
            typed, count = split_first(typed)
        if is_folder(typed):
            paths, others = list_data_files(typed)
            skipped += others
            if not paths and others:
                raise UserError(f"{part}: a folder without data; it contains {describe_suffixes(others)}")
        else:
            names = [typed] if is_there(typed) else expand_pattern(typed)
            paths = [path for path in names if is_file(path)]
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
    """The paths that match a glob pattern. `**` visits each folder once; `glob` itself never ends if several
    links lead back to a parent folder."""
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
    of `datasets` are in neither list. From a saved DatasetDict only `train` is read."""
    paths: list[str] = []
    skipped: list[str] = []

    def skip_forbidden(error: OSError) -> None:
        if not isinstance(error, PermissionError):
            with read_errors(Path(error.filename)):
                raise error
        skipped.append(error.filename)

    for current, folders, names in walk_once(folder, skip_forbidden):
        if "dataset_dict.json" in names:
            check_has_train(current, folders)
            folders[:] = ["train"]
        for name in names:
            is_description = any(fnmatch(name, pattern) for pattern in DATASETS_METADATA)
            if not name.startswith(".") and not is_description:
                paths.append(os.path.join(current, name))
    data = [path for path in paths if file_kind(path) and is_file(path)]
    records = [path for path in data if not is_plain_text(path)]
    texts = [path for path in data if is_plain_text(path) and file_kind(path) != ".md"]
    chosen = records or texts or data  # a README.txt beside records is not data, nor a README.md beside texts
    return chosen, sorted(skipped + list(set(paths) - set(chosen)))


def check_has_train(folder: str, splits: list[str]) -> None:
    """Raise UserError if a saved DatasetDict has no split `train`."""
    if "train" not in splits:
        names = ", ".join(sorted(splits)) or "none"
        example = os.path.join(folder, min(splits, default="train"))
        raise UserError(
            f"{folder}: a dataset without the split train (its splits: {names}); name one: {example}"
        )


def describe_suffixes(paths: list[str]) -> str:
    """Describes how many files have each suffix, and which suffixes are read."""
    counts = Counter(Path(path).suffix or "without a suffix" for path in paths)
    files = ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(4))
    return f"{files}; data are .jsonl, {', '.join([*READERS, *PLAIN_TEXT, *DOCUMENTS])}, also compressed"


def walk_once(
    folder: str, on_error: Callable[[OSError], Any] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like `os.walk`, but it follows links, skips hidden folders and visits each folder once."""
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


# path -> the pages of a document that have no text ("2, 5-7"), and how many it has
Gaps = dict[str, tuple[str, int]]


def read_records(paths: list[str], separator: str = "", gaps: Gaps | None = None) -> Iterator[Record]:
    """The records of the files, one file after another. Raises UserError if a file cannot be read to its end.

    separator: the line between documents of plain text. gaps: gets the documents that have pages without
    text.
    """
    for number, path in enumerate(paths):
        line, sample = 0, b""
        try:
            for line, value in read_file(path, separator, {} if gaps is None else gaps):
                if isinstance(value, NotUtf8):
                    sample = sample or read_sample(path)
                    value = BadRecord(not_utf8(value.raw, value.line, sample))
                elif not isinstance(value, dict | BadRecord):
                    value = other_value(value)
                yield Source(number, line), value
        except UserError:
            raise
        except UnicodeDecodeError as error:
            why = not_utf8(error.object, sample=read_sample(path))
            raise unreadable(path, line, why) from error
        except Exception as error:  # a damaged file may raise anything
            raise unreadable(path, line, reason(error)) from error
        if line == 0:
            raise NoRecord(f"{path} holds no record; leave it out or write it again")


def unreadable(path: str, line: int, why: str) -> UserError:
    """The error for a file that cannot be read after this line."""
    where = f"{format_source(path, line)}: after it the file" if line else f"{path}: it"
    return UserError(f"{where} cannot be read ({why}); repair the file or leave it out")


def read_sample(path: str) -> bytes:
    """The first lines of a file, decompressed."""
    with open_file(path) as file:
        sample = file.read(SAMPLE_BYTES)
    return sample.rpartition(b"\n")[0] or sample


def other_value(value: Any) -> dict | BadRecord:
    """The record for a JSON value that is not an object: a list of messages is a conversation."""
    if isinstance(value, list) and value and is_message(value[0]):
        return {"messages": value}
    return BadRecord(f"{JSON_KINDS.get(type(value), 'no JSON object')}; write {{...}}")


def is_message(value: Any) -> bool:
    """Whether a JSON value is a message of a conversation."""
    return isinstance(value, dict) and any(names <= value.keys() for names in MESSAGE_NAMES)


def read_file(path: str, separator: str, gaps: Gaps) -> Iterator[tuple[int, Any]]:
    """The records of a file with their lines (of `Source`). gaps: of `read_records`."""
    with open_file(path) as file:
        kind = file_kind(path)
        if kind in DOCUMENTS:
            text = document_text(path, file.read())
            if isinstance(text, PartialText) and text.without_text:
                gaps[path] = text.without_text, text.pages
            yield from read_text(io.BytesIO(text.encode(errors="replace")), separator)
            return
        if kind not in TABLES:
            head = file.peek(HEAD)[:HEAD]
            check_text(path, head, kind)
            if b"\r" in head and b"\n" not in head:  # the line ends of old Macs
                file = io.BufferedReader(
                    io.BytesIO(file.read().replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
                )
        if kind in PLAIN_TEXT:
            yield from read_text(file, separator)
        else:
            yield from READERS.get(kind, read_lines_or_array)(file)


def open_file(path: str) -> Any:
    """The open file, decompressed. Raises UserError if its first bytes are not those of a data file."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
    is_document = file_kind(path) in DOCUMENTS and not is_pointer(head)
    if not is_document and (other_kind := describe(path, head)):
        raise UserError(foreign(path, other_kind))
    for suffix, (magic, open_compressed) in COMPRESSIONS.items():
        if head.startswith(magic) or path.lower().endswith(suffix):
            return open_compressed(path)
    return open(path, "rb")  # closed by whoever reads it


def open_zstd(path: str) -> Any:
    """A file compressed by zstd."""
    import pyarrow  # only where such files are read

    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))  # type: ignore[arg-type]


def check_text(path: str, head: bytes, kind: str) -> None:
    """Raise UserError if the head of a file is not text, or not records of text. kind: of `file_kind`."""
    found = describe(path, head)  # `head` is decompressed
    if wide := wide_encoding(head):
        raise UserError(f"{path} is {conversion([wide])}")
    if head.startswith((b"PAR1", b"ARROW1")):
        suffix = "parquet" if head.startswith(b"PAR1") else "arrow"
        found = f"a {suffix.capitalize()} file", f"name it {path}.{suffix}"
    elif kind not in ("", ".json", ".jsonl") and holds_json(head):
        what = "plain text" if kind in PLAIN_TEXT else kind[1:].upper()
        found = f"JSON, not {what}", f"name it {Path(path).stem}.jsonl"
    elif kind in PLAIN_TEXT and (start := SUBTITLES.match(head.decode(errors="ignore"))):
        suffix = "vtt" if start[1] == WEBVTT else "srt"
        found = "a file of subtitles, not plain text", f"name it {Path(path).stem}.{suffix}"
    elif found is None and is_binary(head):
        found = "binary, perhaps tokens of another trainer", "give the text or records that it was made of"
    elif found is None and kind == "" and head.strip() and not JSON_LINE.search(head):
        found = (
            "no JSON",
            f"name it {Path(path).stem}.txt if it is plain text, or .csv or .tsv if it is a table",
        )
    if found:
        raise UserError(foreign(path, found))


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
    """JSON Lines, unless the file begins with an array of objects."""
    head = file.peek(HEAD)[:HEAD].removeprefix(codecs.BOM_UTF8)
    yield from read_json(file) if ARRAY.match(head) or is_spread(head) else read_json_lines(file)


def is_spread(head: bytes) -> bool:
    """Whether JSON with these first bytes spreads an object over several lines: neither of its first two
    lines is valid alone, and the first one ends too early."""
    first, second, *_ = [*(line for line in head.split(b"\n")[:-1] if line.strip()), b"", b""]
    if not first.lstrip().startswith(b"{"):
        return False
    try:
        json.loads(first)
        return False
    except (ValueError, RecursionError) as error:
        if getattr(error, "pos", -1) < len(first.decode(errors="replace").rstrip()):
            return False
    try:
        return not isinstance(json.loads(second), dict)
    except (ValueError, RecursionError):
        return True


def read_json_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    """JSON Lines. A byte order mark and blank lines are skipped."""
    decoder = DataDecoder()
    for line, raw in enumerate(lines, 1):
        try:
            text = raw.decode().removeprefix("\ufeff").strip()
            if text:
                yield line, decoder.decode(text)
        except UnicodeDecodeError:
            yield line, NotUtf8(raw, line)
        except (ValueError, RecursionError) as error:
            yield line, BadRecord(f"not valid JSON ({error}); write one object per line, or one array")


def read_json(file: Any) -> Iterator[tuple[int, Any]]:
    """Reads JSON Lines, the elements of one array, or values over several lines. Lines that each contain a
    whole array are also JSON Lines."""
    head = file.peek(HEAD)[:HEAD].removeprefix(codecs.BOM_UTF8)
    if not head.lstrip().startswith(b"[") and not is_spread(head):
        yield from read_json_lines(file)
        return
    before = [file.readline()]
    while not before[-1].removeprefix(codecs.BOM_UTF8).strip():
        before.append(file.readline())
    if before[-1].rstrip().endswith(b"]") and file.peek(HEAD).lstrip().startswith(b"["):
        yield from read_json_lines(chain(before, file))
        return
    raw = b"".join([*before, file.read()])
    try:
        text, is_damaged = raw.decode("utf-8-sig"), False
    except UnicodeDecodeError:
        text, is_damaged = raw.decode("utf-8-sig", "surrogateescape"), True
    start = len(text) - len(text.lstrip())
    at = len(text) - len(text[start + 1 :].lstrip())
    is_array = text.startswith("[", start)
    with suppress(ValueError, RecursionError):
        # an array of messages is one conversation
        is_array = is_array and not is_message(json.JSONDecoder().raw_decode(text, at)[0])
    yield from read_values(text, at if is_array else start, is_array, is_damaged)


def read_values(text: str, at: int, is_array: bool, is_damaged: bool) -> Iterator[tuple[int, Any]]:
    """The JSON values from a position on, decoded one by one: the elements of an array, or successive values.
    After a broken value, reading continues at the next line that begins like the line of the first value; if
    there is none, raises ValueError. is_damaged: bytes that are not UTF-8 have become lone surrogates."""
    decoder, after = DataDecoder(), AFTER_ELEMENT if is_array else AFTER_VALUE
    indent = text[text.rfind("\n", 0, at) + 1 : at]
    opening = "[" if text.startswith("[", at) else "{"
    next_line = f"\n{opening}" if indent.strip() else f"\n{indent}{opening}"
    number, line, counted = 0, 1, 0  # of the element; of the text up to the character `counted`
    is_end = text.startswith("]", at)
    while not is_end:
        number += 1
        if not is_array or is_damaged:
            line, counted = line + text.count("\n", counted, at), at
        try:
            record, end = decoder.raw_decode(text, at)
            separator = after.match(text, end)
            if not separator:
                raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
            following = separator.end()
            is_end = separator[1] == "]" if is_array else following == len(text)
        except (ValueError, RecursionError) as error:
            record = BadRecord(f"not valid JSON ({error})")
            next_element = text.find(next_line, at)
            if next_element < 0:
                original_bytes(text).decode()  # the cause may be bytes that are not UTF-8
                raise ValueError(error) from None
            following = next_element + len(next_line) - 1
        if not is_array and isinstance(record, dict) and (names := sets_of_records(record)):
            what = f"an object over several lines that holds records under {', '.join(map(repr, names))}"
            record = BadRecord(f"{what}; write one of them as a file: jq '.[\"{names[0]}\"]' OLD > NEW")
        if is_damaged and LONE_SURROGATE.search(text, at, following):
            record = NotUtf8(original_bytes(text[text.rfind("\n", 0, at) + 1 : following]), line)
        yield -number if is_array else line, record
        at = following
    if is_array and text[at:].strip("] \t\r\n"):
        raise ValueError("more follows the end of the array")


def sets_of_records(value: dict) -> list[str]:
    """The keys of an object that contain lists of objects, if the object is not a record itself."""
    if not value.keys().isdisjoint({*LIST_FIELDS, *FORMATS, "text", "content"}):
        return []
    lists = {key: entry for key, entry in value.items() if isinstance(entry, list) and entry}
    return [key for key, entry in lists.items() if all(isinstance(item, dict) for item in entry)]


def original_bytes(text: str) -> bytes:
    """The bytes of a text that was decoded with surrogateescape."""
    return text.encode("utf-8", "surrogateescape")


def document_text(path: str, data: bytes) -> str:
    """The text of a document. Raises UserError."""
    try:
        return DOCUMENTS[file_kind(path)](data)
    except Unreadable as error:
        raise UserError(f"{path}: {error}") from error


def read_text(file: Any, separator: str) -> Iterator[tuple[int, dict | NotUtf8]]:
    """The documents of a plain text file, separated by lines that contain only the separator. A document
    longer than PART_BYTES is split at a line end."""
    lines: list[bytes] = []
    first = size = 0  # line of the document or part, and its bytes
    for number, raw in enumerate(file, 1):
        is_separator = bool(separator) and raw.rstrip() == separator.strip().encode()
        if not is_separator and (lines or raw.strip()):
            first = first if lines else number
            lines.append(raw)
            size += len(raw)
        if lines and (is_separator or size >= PART_BYTES):
            yield first, document_record(lines, first)
            lines, size = [], 0
    if lines:
        yield first, document_record(lines, first)


def document_record(lines: list[bytes], number: int) -> dict | NotUtf8:
    """The record for a document that begins at this line."""
    raw = b"".join(lines)
    try:
        text = raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        return NotUtf8(raw, number)
    return {"text": LINE_END.sub("\n", text).strip("\n")}


def read_csv(file: Any, delimiters: Iterable[str] = DELIMITERS) -> Iterator[tuple[int, Any]]:
    """The rows of CSV, whose first line names the columns."""
    for line, row in read_rows(file, delimiters):
        yield line, parse_json_cells(row) if isinstance(row, dict) else row


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
    """The rows of a table's batches."""
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
    """The value without null fields in its objects, because a table with a schema writes null for a missing
    field."""
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
MESSAGE_NAMES = ({"role", "content"}, {"from", "value"})
JSON_KINDS = {list: "a JSON list, not an object", str: "a JSON text, not an object"}
