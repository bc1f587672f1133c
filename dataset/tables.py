"""Reads tables: Parquet and Arrow with pyarrow, CSV with Python's `csv`. A row is a record.

Columns have the names that keys have in JSON. Conversations and histories may also be JSON text, as CSV needs
it.
"""

import csv
import sys
from collections.abc import Iterator
from typing import Any

from common.errors import UserError, reason
from dataset.json_values import BOM, BadRecord, json_of, not_utf8, short
from dataset.records import known_fields, list_fields

BATCH_ROWS = 1024


def read_parquet(content: Any, path: str) -> Iterator[tuple[int, Any]]:
    """Yield (row, record) of a Parquet file."""
    import pyarrow.parquet  # only where Parquet is used

    def batches() -> Iterator:
        yield from pyarrow.parquet.ParquetFile(content).iter_batches(BATCH_ROWS)

    return _rows(path, "Parquet", batches())


def read_arrow(content: Any, path: str) -> Iterator[tuple[int, Any]]:
    """Yield (row, record) of an Arrow file: the file format or the streaming format (of `datasets`)."""
    import pyarrow.ipc

    def parts() -> Iterator:
        is_file = content.read(6) == b"ARROW1"
        content.seek(0)
        if is_file:
            table = pyarrow.ipc.open_file(content)
            for index in range(table.num_record_batches):
                yield table.get_batch(index)
        else:
            yield from pyarrow.ipc.open_stream(content)

    def batches() -> Iterator:
        for part in parts():
            part.validate(full=True)
            for start in range(0, len(part), BATCH_ROWS):
                yield part.slice(start, BATCH_ROWS)

    return _rows(path, "Arrow", batches())


def _rows(path: str, kind: str, batches: Iterator) -> Iterator[tuple[int, Any]]:
    """Yield (row, record) of batches of rows."""
    import pyarrow

    row = 1
    try:
        for batch in batches:
            _check_names(path, batch.schema.names)
            for record in batch.to_pylist():
                yield row, _parse_lists(_without_nulls(record))
                row += 1
    # a damaged length asks for more memory than there is; a value may have no Python type
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file, not of its content
        what = f"unreadable {kind} from this row on ({reason(error)}); write it again"
        raise UserError(f"{path}:{row}: {what}") from error


def _check_names(path: str, names: list[str]) -> None:
    """Raise UserError if two columns that could be read have one name."""
    for name in names:
        if names.count(name) > 1 and name in known_fields():
            raise UserError(f"{path}:1: two columns are named {short(name)}; rename or remove one of them")


def _without_nulls(value: Any) -> Any:
    """The value without the keys that are null in its objects: typed files fill them in where a key is
    lacking."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def _parse_lists(record: dict) -> dict | BadRecord:
    """The record with lists in place of their JSON text."""
    try:
        for key in list_fields():
            value = record.get(key)
            if isinstance(value, str) and value.lstrip().startswith("["):
                record[key] = json_of(value, f"'{key}'")
    except BadRecord as error:
        return error
    return record


def read_csv(content: Any, path: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, record) of a CSV file, whose first line names the columns."""
    header: list[str] = []
    lists = list_fields()
    for line, cells in _csv_rows(content, path):
        if line == 1 and not isinstance(cells, BadRecord):
            header = [name.strip() for name in cells]
            _check_names(path, header)
            if known_fields().isdisjoint(header):
                names = ", ".join(map(short, header[:8]))
                wanted = "text, conversations, messages, instruction"
                raise UserError(
                    f"{path}:1: no known column in the header ({names}); name one of them {wanted}"
                )
        elif isinstance(cells, BadRecord):
            yield line, cells
        elif cells and len(cells) != len(header):
            what = f"{len(cells)} cells, but the header names {len(header)} columns"
            yield line, BadRecord(f"{what}; quote text with delimiters")
        elif cells:
            record = dict(zip(header, cells, strict=True))
            for key in lists & record.keys():
                if not record[key]:
                    del record[key]
            yield line, _parse_lists(record)


def _csv_rows(content: Any, path: str) -> Iterator[tuple[int, list[str] | BadRecord]]:
    """Yield (line, cells) of each row. Raises UserError where it is unclear where the next one begins."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(_text_lines(content, path), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            yield line, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                why = "a quote that this row opens is never closed, so nothing that follows can be read"
                how = 'close it, or double it if it is part of the text ("")'
                raise UserError(f"{path}:{line}: {why}; {how}") from error
            how = 'put text with quotes into quotes and double those inside ("")'
            yield line, BadRecord(f"not valid CSV ({error}); {how}")


def _text_lines(content: Any, path: str) -> Iterator[str]:
    """The lines of a file. Raises UserError where it is not UTF-8: a quote may hide the next row."""
    for number, raw in enumerate(content, 1):
        if number == 1:
            raw = raw.removeprefix(BOM)
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: {not_utf8(raw, error.start)}") from error
