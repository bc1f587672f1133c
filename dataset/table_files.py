"""Reads tables: Parquet, Arrow and Feather with pyarrow, CSV and TSV with Python's `csv`. A row is a record.

Columns have the names that keys have in JSON. Conversations and histories may also be JSON text, as CSV needs it.
"""

import csv
import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from common.errors import UserError, reason
from dataset import blocks
from dataset.blocks import Block, opened, read_on
from dataset.formats import ANSWERS, COLUMNS, LISTS, PREFERENCE
from dataset.json_records import BOM, BadRecord, check_value, decoder, escaped_bytes, short, without_nulls

FORMS = ("text", *LISTS, *ANSWERS)  # one of them is needed
AS_JSON = (*LISTS, "history", *PREFERENCE)  # may be JSON text
Batches = Iterator[tuple[Any, float, tuple[str, ...]]]  # a batch, the bytes of the file that it covers, columns unread


def parquet_blocks(index: int, path: str) -> Iterator[Block]:
    """Blocks of rows of a Parquet file."""
    import pyarrow.parquet  # only where Parquet is used

    def batches() -> Batches:
        with pyarrow.parquet.ParquetFile(path) as table:
            bytes_per_row = os.path.getsize(path) / max(1, table.metadata.num_rows)
            columns, unread = _columns(path, table.schema_arrow.names)
            for batch in table.iter_batches(blocks.BLOCK_ROWS, columns=columns or None):
                yield batch, bytes_per_row * len(batch), unread

    return _rows(index, path, "Parquet", batches())


def arrow_blocks(index: int, path: str) -> Iterator[Block]:
    """Blocks of rows of an Arrow file: the file format (also Feather) or the streaming format (also of `datasets`)."""
    import pyarrow.ipc

    def batches() -> Batches:
        with pyarrow.memory_map(path) as source:
            if source.read(6) == b"ARROW1":
                table = pyarrow.ipc.open_file(source)
                parts = (table.get_batch(i) for i in range(table.num_record_batches))
            else:
                source.seek(0)
                table = parts = pyarrow.ipc.open_stream(source)
            columns, unread = _columns(path, table.schema.names)
            for part in parts:
                part = part.select(columns) if columns else part
                part.validate(full=True)
                for start in range(0, len(part), blocks.BLOCK_ROWS):
                    rows = part.slice(start, blocks.BLOCK_ROWS)
                    yield rows, rows.nbytes, unread

    return _rows(index, path, "Arrow", batches())


def _columns(path: str, names: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The known columns, and the others; where none is known all are read, so that the error can list them."""
    columns = [name for name in names if name in COLUMNS]
    _check_unique(f"{path}: ", columns)
    return columns, tuple(name for name in names if columns and name not in columns)


def _check_unique(where: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise UserError(f"{where}two columns have the same name ({', '.join(names)}); write it again")


def _rows(index: int, path: str, kind: str, batches: Batches) -> Iterator[Block]:
    """Blocks of the rows of batches."""
    import pyarrow

    row = 1
    try:
        for batch, size, unread in batches:
            records = (_with_lists(cast(dict, without_nulls(record))) for record in batch.to_pylist())
            rows = list(enumerate(records, row))
            yield Block(index, path, row, rows, round(size), unread)
            row += len(rows)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # or no Python type for a value
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file, not of what is in it
        raise UserError(
            f"{path}:{row}: unreadable {kind} from this row on ({reason(error)}); write it again"
        ) from error


def _with_lists(record: dict) -> dict | BadRecord:
    """The record with lists in place of their JSON text."""
    for key in AS_JSON:
        value = record.get(key)
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                record[key] = decoder.decode(value)
                check_value(record[key])
            except BadRecord as error:
                return error
            except (ValueError, RecursionError) as error:
                hint = "; Python's own notation is not JSON, write json.dumps(...)" if "'" in value[:4] else ""
                return BadRecord(f"'{key}' does not parse as JSON ({str(error).split(': line')[0]}){hint}")
    return record


def csv_blocks(index: int, path: str, delimiter: str) -> Iterator[Block]:
    """Blocks of rows of a CSV or TSV file, whose first line names the columns. Rows have the number of a line."""
    csv.field_size_limit(sys.maxsize)
    with opened(path) as (file, position):
        reader = csv.reader(_lines(path, file), delimiter=delimiter, strict=True)
        header, rows, done = _header(path, reader), [], 0
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                cells = _csv_error(path, line, error)
            if cells:
                rows.append((line, _row(header, cells) if isinstance(cells, list) else cells))
            if len(rows) == blocks.BLOCK_ROWS or (rows and position() - done > blocks.BLOCK_BYTES):
                yield Block(index, path, rows[0][0], rows, position() - done)
                rows, done = [], position()
        if rows:
            yield Block(index, path, rows[0][0], rows, position() - done)


def _lines(path: str, file: BinaryIO) -> Iterator[str]:
    """The lines of a file; what is not UTF-8 becomes lone surrogates, so that only the rows that hold it are bad."""
    line = 1
    while raw := read_on(file, path, line, 1, whole_lines=True):
        raw = raw.removeprefix(BOM) if line == 1 else raw
        yield raw.decode("utf-8", "surrogateescape")
        line += 1


def _header(path: str, reader) -> list[str]:
    """The names of the columns. Raises UserError if no record can be made of them."""
    try:
        header = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise UserError(f"{path}:1: the header cannot be read ({error}); it must name the columns") from error
    if not_text := escaped_bytes(",".join(header)):
        raise UserError(f"{path}:1: {not_text}")
    if not set(header) & set(FORMS):
        names = ", ".join(map(short, header[:8]))
        raise UserError(f"{path}:1: no known column in the header ({names}); name one of them {', '.join(FORMS[:4])}")
    _check_unique(f"{path}:1: ", header)
    return header


def _csv_error(path: str, line: int, error: csv.Error) -> BadRecord:
    if "unexpected end" in str(error):
        raise UserError(
            f"{path}:{line}: a quote that this row opens is never closed, so nothing that follows can be read; "
            'close it, or double it if it is part of the text ("")'
        ) from error
    return BadRecord(f'not valid CSV ({error}); put text with quotes into quotes and double those inside ("")')


def _row(header: list[str], cells: list[str]) -> dict | BadRecord:
    if len(cells) != len(header):
        return BadRecord(f"{len(cells)} cells, but the header names {len(header)} columns; quote text with delimiters")
    if not_text := escaped_bytes("\n".join(cells)):
        return BadRecord(not_text)
    record = dict(zip(header, cells, strict=True))
    return _with_lists({key: value for key, value in record.items() if value or key not in AS_JSON})
