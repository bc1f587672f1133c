"""Reads JSON Lines, and `.json` files that hold one array of records, which are read piece by piece as well."""

import io
import re
from collections.abc import Iterator
from typing import BinaryIO, cast

from common.errors import UserError
from dataset import blocks
from dataset.blocks import DAMAGED, Block, opened, read_on
from dataset.json_records import BOM, TOO_DEEP, BadRecord, check_element, decoder, escaped_bytes, parse_line

BLANKS = re.compile(r"[ \t\r\n]*")
# What a JSON text is made of, as far as brackets matter. A line end inside quotes is none of it.
PARTS = re.compile(r'"[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*"|[\[\]{},]|[^"\[\]{},]+')
CLOSING = {"[": "]", "{": "}"}


def line_blocks(index: int, path: str) -> Iterator[Block]:
    """Blocks that end at a line end."""
    line, done = 1, 0
    with opened(path) as (file, position):
        while data := read_on(file, path, line, blocks.BLOCK_BYTES, whole_lines=True):
            yield Block(index, path, line, data, position() - done)
            done, line = position(), line + data.count(b"\n")


def line_records(block: Block) -> Iterator[tuple[int, dict | BadRecord]]:
    """Yield (line, record) for each line of a block that is not blank."""
    lines = cast(bytes, block.data).split(b"\n")
    for offset, raw in enumerate(lines):
        raw = raw.removeprefix(BOM).strip(b" \t\r")
        if not raw:
            continue
        try:
            yield block.first + offset, parse_line(raw, last=offset == len(lines) - 1)
        except BadRecord as error:
            yield block.first + offset, error


def starts_an_array(path: str) -> bool:
    """Whether a `.json` file holds one array, rather than JSON Lines."""
    try:
        with opened(path) as (file, _):
            return file.read(4096).removeprefix(BOM).lstrip().startswith(b"[")
    except DAMAGED:
        return False  # reading it as lines reports the damage


def array_blocks(index: int, path: str) -> Iterator[Block]:
    """Blocks of parsed records of a `.json` array."""
    with opened(path) as (file, position):
        text, rows, first, done = _Text(path, file), [], 0, 0
        for row in _array_rows(text):
            rows.append(row)
            if len(rows) == blocks.BLOCK_ROWS or text.passed - first > blocks.BLOCK_BYTES:
                yield Block(index, path, rows[0][0], rows, position() - done)
                rows, first, done = [], text.passed, position()
        if rows:
            yield Block(index, path, rows[0][0], rows, position() - done)


class _Text:
    """The text of a file, of which `more` reads the next piece and forgets what is behind `position`."""

    def __init__(self, path: str, file: BinaryIO):
        self.path = path
        # What is not UTF-8 becomes lone surrogates, so that only the records that hold it are bad.
        self.file = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self.text, self.position, self.line, self.counted, self.forgotten = "", 0, 1, 0, 0

    @property
    def passed(self) -> int:
        """Characters before the position."""
        return self.forgotten + self.position

    def at_line(self) -> int:
        """The line of the position."""
        self.line += self.text.count("\n", self.counted, self.position)
        self.counted = self.position
        return self.line

    def more(self) -> bool:
        """Read on, twice as far each time; False at the end of the file."""
        line = self.at_line()
        try:
            read = self.file.read(max(blocks.BLOCK_BYTES, len(self.text) - self.position))
        except DAMAGED as error:
            raise UserError(f"{self.path}:{line}: {blocks.damage(self.path, error)}") from error
        self.forgotten += self.position
        self.text = self.text[self.position :] + read
        self.position = self.counted = 0
        return bool(read)

    def next_character(self) -> str:
        """The character after the blanks, to which the position moves; empty at the end."""
        while True:
            self.position = BLANKS.match(self.text, self.position).end()  # pyrefly: ignore[missing-attribute]
            if self.position < len(self.text) or not self.more():
                return self.text[self.position : self.position + 1]


def _array_rows(text: _Text) -> Iterator[tuple[int, object]]:
    """Yield (line, record or BadRecord) of a JSON array. Raises UserError where it is unclear what a record is."""
    text.next_character()
    line = text.at_line()
    text.position += 1  # the opening bracket
    if text.next_character() != "]":
        while True:
            text.next_character()
            line = text.at_line()
            yield line, _element(text)
            if text.next_character() != ",":
                break
            text.position += 1
    if text.next_character() != "]":
        why = "after this record a ',' or ']' is missing; the array looks cut off"
        raise UserError(f"{text.path}:{line}: {why}")
    text.position += 1
    if text.next_character():
        why = "the array has ended before this; a .json file holds one array, or JSON Lines"
        raise UserError(f"{text.path}:{text.at_line()}: {why}")


def _element(text: _Text) -> object:
    """The record at the position, which moves behind it; a BadRecord if only this one is bad."""
    while True:
        problem: Exception | None = None
        try:
            record, end = decoder.raw_decode(text.text, text.position)
        except (BadRecord, ValueError, RecursionError) as error:
            record, end, problem = None, _end_of_value(text.text, text.position), error
        # At the end of what was read a number or a word may go on.
        if (end is None or end == len(text.text)) and text.more():
            continue
        if end is not None:
            break
        why = _reason(problem, text.text[text.position :])
        raise UserError(
            f"{text.path}:{text.at_line()}: not a valid JSON array from this line on ({why}), "
            "so nothing that follows can be read; fix it"
        )
    raw, text.position = text.text[text.position : end], end
    try:
        if problem is not None:
            return BadRecord(_reason(problem, raw))
        check_element(record, raw)
    except BadRecord as error:
        return error
    return record


def _reason(problem: Exception | None, raw: str) -> str:
    """What is wrong with the text of a record."""
    if isinstance(problem, RecursionError):
        return TOO_DEEP
    if isinstance(problem, BadRecord):
        return str(problem)
    return escaped_bytes(raw) or f"not valid JSON: {str(problem).split(': line')[0]}"


def _end_of_value(text: str, start: int) -> int | None:
    """Where the ',' or ']' after a malformed value stands, by its brackets; None if quotes or brackets do not match."""
    expected: list[str] = []
    position = start
    while match := PARTS.match(text, position):
        part = match[0]
        if not expected and part in (",", "]"):
            return position
        if part in CLOSING:
            expected.append(CLOSING[part])
        elif part in ("]", "}") and (not expected or expected.pop() != part):
            return None
        position = match.end()
    return None
