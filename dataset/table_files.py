"""Reads tables: Parquet, Arrow and Feather with pyarrow, CSV and TSV with Python's `csv`. A row is a record.

Columns have the names that keys have in JSON. Conversations and histories may also be JSON text, as CSV needs
it.
"""

import csv
import sys
from collections.abc import Iterator
from typing import Any

from common.errors import UserError, reason
from dataset import blocks
from dataset.blocks import DataFile
from dataset.formats import known_fields, list_fields
from dataset.json_records import BOM, BadRecord, json_of, not_utf8, short


def read_parquet(file: DataFile) -> Iterator[tuple[int, Any]]:
    """Yield (row, record) of a Parquet file."""
    import pyarrow.parquet  # only where Parquet is used

    def batches() -> Iterator:
        yield from pyarrow.parquet.ParquetFile(file.stored).iter_batches(blocks.BLOCK_ROWS)

    return _rows(file, "Parquet", batches())


def read_arrow(file: DataFile) -> Iterator[tuple[int, Any]]:
    """Yield (row, record) of an Arrow file: the file format (also Feather) or the streaming format (of
    `datasets`)."""
    import pyarrow.ipc

    def batches() -> Iterator:
        is_file = file.stored.read(6) == b"ARROW1"
        file.stored.seek(0)
        table = pyarrow.ipc.open_file(file.stored) if is_file else pyarrow.ipc.open_stream(file.stored)
        for part in (table.get_batch(i) for i in range(table.num_record_batches)) if is_file else table:
            part.validate(full=True)
            for start in range(0, len(part), blocks.BLOCK_ROWS):
                yield part.slice(start, blocks.BLOCK_ROWS)

    return _rows(file, "Arrow", batches())


def _rows(file: DataFile, kind: str, batches: Iterator) -> Iterator[tuple[int, Any]]:
    """Yield (row, record) of batches of rows."""
    import pyarrow

    row = 1
    try:
        for batch in batches:
            _check_names(file, batch.schema.names)
            for record in batch.to_pylist():
                yield row, _with_lists(_without_nulls(record))
                row += 1
    # a damaged length asks for more memory than there is; a value may have no Python type
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file, not of what is in it
        what = f"unreadable {kind} from this row on ({reason(error)}); write it again"
        raise UserError(f"{file.path}:{row}: {what}") from error


def _check_names(file: DataFile, names: list[str]) -> None:
    """Raise UserError if two columns that could be read have one name."""
    twice = [name for name in names if names.count(name) > 1 and name in known_fields()]
    if twice:
        raise UserError(
            f"{file.path}:1: two columns are named {short(twice[0])}; rename or remove one of them"
        )


def _without_nulls(value: Any) -> Any:
    """The value without the keys that are null in its objects: typed files fill them in where a key is
    lacking."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _with_lists(record: dict) -> dict | BadRecord:
    """The record with lists in place of their JSON text."""
    try:
        for key in list_fields():
            value = record.get(key)
            if isinstance(value, str) and value.lstrip().startswith("["):
                record[key] = json_of(value, f"'{key}'")
    except BadRecord as error:
        return error
    return record


def read_csv(file: DataFile, delimiter: str = ",") -> Iterator[tuple[int, Any]]:
    """Yield (line, record) of a CSV file, whose first line names the columns."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(_lines(file), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if "unexpected end" in str(error):
                why = "a quote that this row opens is never closed, so nothing that follows can be read; close it"
                raise UserError(
                    f'{file.path}:{line}: {why}, or double it if it is part of the text ("")'
                ) from error
            how = 'put text with quotes into quotes and double those inside ("")'
            yield line, BadRecord(f"not valid CSV ({error}); {how}")
            continue
        if cells is None:
            return
        if line == 1:
            header = [name.strip() for name in cells]
            _check_names(file, header)
            if known_fields().isdisjoint(header):
                names = ", ".join(map(short, header[:8]))
                wanted = "text, conversations, messages, instruction"
                raise UserError(
                    f"{file.path}:1: no known column in the header ({names}); name one of them {wanted}"
                )
        elif cells and len(cells) != len(header):
            what = f"{len(cells)} cells, but the header names {len(header)} columns"
            yield line, BadRecord(f"{what}; quote text with delimiters")
        elif cells:
            lists = list_fields()
            record = {
                key: value for key, value in zip(header, cells, strict=True) if value or key not in lists
            }
            yield line, _with_lists(record)


def read_tsv(file: DataFile) -> Iterator[tuple[int, Any]]:
    """Yield (line, record) of a TSV file."""
    return read_csv(file, delimiter="\t")


def _lines(file: DataFile) -> Iterator[str]:
    """The lines of a file. Raises UserError where it is not UTF-8: a quote may hide the next row."""
    for number, raw in enumerate(file.content, 1):
        try:
            yield (raw if number > 1 else raw.removeprefix(BOM)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file.path}:{number}: {not_utf8(raw, error.start)}") from error
