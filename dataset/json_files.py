"""Splits JSON Lines, and `.json` files that hold one array, into records; whoever tokenises these parses
them."""

import re
from collections.abc import Iterator

from common.errors import UserError
from dataset import blocks
from dataset.blocks import FIRST_INDEX, DataFile, place
from dataset.json_records import BLANKS, BOM

# A JSON text as far as brackets matter: a string (which never holds a line end), a bracket or comma, or
# anything else.
PART = re.compile(rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|[\[\]{},]|[^"\[\]{},]+', re.DOTALL)


def read_json_lines(file: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield (line, raw record) for each line that is not blank."""
    for number, raw in enumerate(file.content, 1):
        if raw.removeprefix(BOM).strip(BLANKS):
            yield number, raw


def read_json(file: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield (line, raw record) of a file that holds one array, or else JSON Lines."""
    start = file.content.peek(4096)[:4096]
    is_array = start.removeprefix(BOM).lstrip(BLANKS).startswith(b"[")
    return _array_elements(file) if is_array else read_json_lines(file)


def _array_elements(file: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield (line, text) of each element of an array: what is between the commas that stand in no string and
    in no bracket but the array's own. An element that does not begin a line has its index instead (`place`).
    Raises UserError where no element can be told from the next.

    A file with `[1, {"a": [2]}]` and where each of its parts leaves `depth`: `[` 1, `1` 1, `,` 1 (yields
    `1`), `{` 2, `"a"` 2, `:` 2, `[` 3, `2` 3, `]` 2, `}` 1, `]` 0 (yields `{"a": [2]}`).
    """
    text, begin, at = b"", 0, 0  # what was read; in it: where the element begins, what was looked at
    depth, line = 0, 1  # open brackets; the line at `begin`
    elements = 0
    while True:
        part = PART.match(text, at)
        if part is None or part.end() == len(text):  # the part may go on in what follows
            broken = part is None and text.find(b"\n", at) >= 0
            more = b"" if broken else file.content.read(max(blocks.BLOCK_BYTES, len(text) - begin))
            if more:
                text, at, begin = text[begin:] + more, at - begin, 0
                continue
        if part is None:
            why = (
                "a quote is not closed on its line"
                if at < len(text)
                else "the array is cut off, a ']' is missing"
            )
            where = place(file.path, _name(line, text[begin:], elements))
            raise UserError(f"{where}: in this record or after it {why}; nothing that follows can be read")
        at = part.end()
        if part[0] in (b"[", b"{"):
            depth += 1
            if depth == 1:
                line, begin = line + text.count(b"\n", begin, at), at
        elif part[0] in (b"]", b"}"):
            depth -= 1
        if depth == 0 or (depth == 1 and part[0] == b","):
            element = text[begin : part.start()]
            if depth == 1 or elements or element.strip(BLANKS):  # `[]` has no element
                yield _name(line, element, elements), element
                elements += 1
            line, begin = line + element.count(b"\n"), at
        if depth == 0:
            break
    rest = text[at:].lstrip(BLANKS) or file.content.read(blocks.BLOCK_BYTES).lstrip(BLANKS)
    if rest:
        line = _first_line(line, text[at:])
        why = "the array has ended before this; a .json file holds one array, or JSON Lines"
        raise UserError(f"{file.path}:{line}: {why}")


def _first_line(line: int, text: bytes) -> int:
    """The line of the first character that is not blank; `line`: that of the text."""
    return line + text.count(b"\n", 0, len(text) - len(text.lstrip(BLANKS)))


def _name(line: int, element: bytes, index: int) -> int:
    """What names an element in a message: its line if it begins one, else its index."""
    first = _first_line(line, element)
    return first if first > line else FIRST_INDEX + index
