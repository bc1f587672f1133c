"""Reads CSV and TSV as spreadsheets and csv.writer write them: a cell that contains the delimiter, a quote or
a line end is quoted, and a quote inside it is doubled.

Other programs write files in which a quote may be plain text. If such a quote begins a cell, csv.reader takes
all rows up to the next quote as the text of this cell. A cell of several lines is therefore accepted only if
these lines are not valid rows themselves, or if the file shows elsewhere that it writes quotes like a
spreadsheet.
"""

import csv
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

from common.encodings import NotUtf8
from dataset.messages import BadRecord

DELIMITERS = (",", ";", "\t", "|")  # of CSV: the first of these in the header line
SIGNS = {",": "commas", ";": "semicolons", "\t": "tabs"}
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)  # Excel's, in front of the header
LINE_END = re.compile("\r\n?")
HEAD_BYTES = 1 << 20  # of a file, in which it shows how it writes quotes
MANY_LINES = 1000  # of a cell: then they are looked at before it ends
AHEAD = 20  # lines that are looked at behind a broken one
ADVICE = 'double a quote in the text and put the cell in quotes: "say ""hi"""'


def read_rows(file: Any, delimiters: Iterable[str] = DELIMITERS) -> Iterator[tuple[int, Any]]:
    """The rows of CSV, each with the line where it begins. The first line names the columns. A bad row is
    yielded as BadRecord or NotUtf8. The delimiter is the first of `delimiters` that occurs in the header.
    Raises ValueError if it is unclear where the next row begins."""
    csv.field_size_limit(sys.maxsize)
    yield from Table(file, delimiters).rows()


class Table:
    """CSV that is being read.

    row: the lines of the present row. number: the line where it begins. waiting: lines that were read ahead.
    """

    def __init__(self, file: Any, delimiters: Iterable[str]):
        self.file, self.is_utf8, self.number = file, True, 1
        self.row: list[str] = []
        self.columns: list[str] = []
        self.head = [self.decode(raw) for raw in file.readlines(HEAD_BYTES)]
        self.waiting = deque(self.head)
        self.skip_blank_lines()
        if self.waiting and (match := SEPARATOR_LINE.fullmatch(self.waiting[0])):
            delimiters = (match[1],)
            self.waiting.popleft()
            self.number += 1
            self.skip_blank_lines()
        first = self.waiting[0] if self.waiting else ""
        self.delimiter = next((each for each in delimiters if each in first), ",")
        # strict: a quote that is never closed raises an error instead of swallowing the following rows
        self.options: dict[str, Any] = {"delimiter": self.delimiter, "strict": True}
        names = self.read_header()
        if any(name.startswith(" ") for name in names):  # a blank behind each delimiter, also of the rows
            self.options["skipinitialspace"] = True
            self.begin_row(0)
            names = self.read_header()
        self.begin_row(len(self.row))
        # a column whose name ends with blanks is padded
        self.padded = [index for index, name in enumerate(names) if name != name.rstrip()]
        self.columns = [name.strip() for name in names]
        if len(set(self.columns)) < len(self.columns):
            raise ValueError("two columns have the same name")

    def skip_blank_lines(self) -> None:
        """Skip to the first line that is not blank."""
        while self.waiting and not self.waiting[0].strip():
            self.waiting.popleft()
            self.number += 1

    def read_header(self) -> list[str]:
        """The names of the columns as they are written. Raises UnicodeDecodeError."""
        names = next(csv.reader(self.lines(), **self.options), [])
        if not self.is_utf8:
            "".join(self.row).encode("utf-8", "surrogateescape").decode()
        return names

    # --- lines

    def decode(self, raw: bytes) -> str:
        """A line as text with line ends `\n`. Bytes that are not UTF-8 become lone surrogates."""
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            line = raw.decode("utf-8", "surrogateescape")
            self.is_utf8 = False
        if "\r" in line:
            line = LINE_END.sub("\n", line)
        return line.removeprefix("\ufeff")

    def lines(self) -> Iterator[str]:
        """The lines; each one is also appended to `row`."""
        row, waiting = self.row, self.waiting
        while True:
            line = waiting.popleft() if waiting else self.decode(next(self.file, b""))
            if not line:
                return
            row.append(line)
            if len(row) == MANY_LINES and self.columns and self.hides_rows(row):
                raise csv.Error("a cell without end")
            yield line

    def ahead(self, count: int) -> list[str]:
        """The next `count` lines, without consuming them."""
        while len(self.waiting) < count and (raw := self.file.readline()):
            self.waiting.append(self.decode(raw))
        return list(islice(self.waiting, count))

    def begin_row(self, taken: int) -> None:
        """Start the next row after the first `taken` lines of the present one."""
        if taken < len(self.row):
            self.waiting.extendleft(reversed(self.row[taken:]))
        self.row.clear()
        self.number += taken

    # --- rows

    def rows(self) -> Iterator[tuple[int, Any]]:
        """The rows with their lines."""
        row, columns, count, is_plain = self.row, self.columns, len(self.columns), not self.padded
        is_end = False
        while not is_end:
            try:
                for cells in csv.reader(self.lines(), **self.options):
                    taken = len(row)
                    if taken > 1 and self.hides_rows(row) and self.is_row(row[-1]):
                        closing = f"which closes in line {self.number + taken - 1}, after other rows"
                        yield self.number, BadRecord(f"a quote opens a cell, {closing}; {ADVICE}")
                        taken = 1
                    elif len(cells) == count and is_plain and self.is_utf8:
                        yield self.number, dict(zip(columns, cells, strict=True))
                    elif cells:
                        yield self.number, self.record(cells)
                    if taken == len(row):
                        row.clear()
                        self.number += taken
                    else:
                        self.begin_row(taken)
                is_end = True
            except csv.Error as error:
                yield self.number, self.broken_row(error)
                self.begin_row(1)

    def record(self, cells: list[str]) -> dict | BadRecord | NotUtf8:
        """The record of a row."""
        raw = "".join(self.row).encode("utf-8", "surrogateescape")
        if raw != raw.decode("utf-8", "ignore").encode():
            return NotUtf8(raw, self.number)
        if len(cells) != len(self.columns):
            sign = SIGNS.get(self.delimiter, self.delimiter)
            what = f"{len(cells)} cells, but {len(self.columns)} columns"
            return BadRecord(f"{what}; put text with {sign} into quotes")
        for index in self.padded:
            cells[index] = cells[index].rstrip()
        return dict(zip(self.columns, cells, strict=True))

    def broken_row(self, error: csv.Error) -> BadRecord:
        """The error for the present row, whose first line is lost. Raises ValueError if it is unclear where
        the next row begins."""
        cause = "a quote opens a cell that does not end"
        if "expected after" in str(error):
            cause = "a quote inside a cell"
        elif "new-line" in str(error):
            cause = "a line end inside a cell without quotes"
        is_whole = len(self.row) == 1 and self.row[0].count('"') % 2 == 0
        following = self.row[1:] or self.ahead(AHEAD)
        if is_whole or not following or self.hides_rows([self.row[0], *following]):
            return BadRecord(f"{cause}; {ADVICE}")
        raise ValueError(f"line {self.number}: {cause}, and where the next row begins is unclear; {ADVICE}")

    # --- quotes that are text

    def hides_rows(self, lines: list[str]) -> bool:
        """Whether these lines, the first of which opens a quote, are each valid rows."""
        if self.quotes_as_spreadsheets:
            return False
        if len(self.columns) == 1:  # any line is a row
            return self.quotes_as_text
        first, *others = [self.is_row(line) for line in lines if line.strip()]
        return first and 2 * sum(others) >= len(others)

    def is_row(self, line: str) -> bool:
        """Whether a line alone is a valid row, whether its quotes are text or enclose cells."""
        cells = line.rstrip("\n").split(self.delimiter)
        if len(cells) != len(self.columns):
            cells = self.cells_alone(line)
        is_prose = "skipinitialspace" not in self.options and any(cell.startswith(" ") for cell in cells)
        return (
            len(cells) == len(self.columns) and bool(cells[0].strip()) and '"' not in cells and not is_prose
        )

    def cells_alone(self, line: str) -> list[str]:
        """The cells of a line read as one row; empty if it is not a valid row."""
        try:
            return next(csv.reader([line], **self.options), [])
        except csv.Error:
            return []

    @cached_property
    def quotes_as_spreadsheets(self) -> bool:
        """Whether the head of the file contains a doubled quote, or a quoted cell with the delimiter."""
        sign = re.escape(self.delimiter)
        twice = re.compile(rf'[^"\\{sign}\s]""(?!")|(?<!")""[^"{sign}\s]')
        if any('""' in line and twice.search(line) for line in self.head):
            return True
        count = len(self.columns)
        quoted = (line for line in self.head if '"' in line and line.count(self.delimiter) + 1 != count)
        return any(len(self.cells_alone(line)) == count for line in quoted)

    @cached_property
    def quotes_as_text(self) -> bool:
        """Whether the head of the file contains a single quote inside a text; no spreadsheet writes that."""
        sign = re.escape(self.delimiter)
        return bool(re.search(rf'[^"{sign}\n]"[^"{sign}\n]', "".join(self.head)))
