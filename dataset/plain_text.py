"""Reads plain text: each file is one document, or several, between lines that hold only a separator.

A document longer than PART_BYTES is read in parts, so that neither memory nor the number of processes at work
depends on how long a document is. Each part brings the end of the one before, for the token that its first
sample begins with: as everywhere in a document, each token is a target once. (The tokens are those of the
whole document, except where two parts meet and a line end does not separate tokens.)

Line ends become \\n, as everywhere in Python; blank lines around a document are not part of it.
"""

import re
from collections.abc import Iterator
from typing import Any

from dataset.json_values import BOM, BadRecord, not_utf8

PART_BYTES = 1 << 20
CONTEXT_BYTES = 1 << 10
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # of UTF-8: not the first of a character
# Where a long document is divided, best place first: before a line (a whole one, so that it can be told from
# a separator), before a blank, before a character.
DIVISIONS = (
    re.compile(rb"\s*\S.*\n(?=\S[^\n]*\n)", re.DOTALL),
    re.compile(rb"\s*\S.*(?= \S)", re.DOTALL),
    re.compile(rb"\s*\S.*(?=[^\s\x80-\xbf])", re.DOTALL),
)


class DocumentPart(dict):
    """A record {"text"} that holds a document or a part of one.

    begins, ends: whether the document begins and ends with this part. context: the end of the part before.
    num_records: for how many records it counts.
    """

    def __init__(self, text: str, begins: bool = True, ends: bool = True, context: str = ""):
        super().__init__(text=text)
        self.begins, self.ends, self.context = begins, ends, context
        self.num_records = int(begins)


def read_text(content: Any, separator: str) -> Iterator[tuple[int, DocumentPart | BadRecord]]:
    """Yield (line, {"text": ...}) for each document, or each part of one that is longer than PART_BYTES.

    Of what was read, whole documents are taken, or a part of the only one; the rest waits for what follows.
    With the separator `--` and a short PART_BYTES: read `a\\n--\\nb\\nc`, take `a\\n--\\n`, keep
    `b\\nc`; read `d\\ne\\nf\\n`, take `b\\ncd\\ne\\n` as a part that goes on, keep `f\\n`; read nothing,
    take `f\\n`, whose context is `b\\ncd\\ne\\n`.
    """
    line = 1
    context = rest = b""
    is_start = True
    while True:
        read = content.read(PART_BYTES)
        is_end = not read
        if is_start:
            read, is_start = read.removeprefix(BOM), False
        data = rest + read
        half = b""
        if data.endswith(b"\r") and not is_end:  # perhaps half of a line end
            data, half = data[:-1], b"\r"
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        separators = _separators(data, separator)
        # the last line may be only the beginning of a line
        ends = [end for _, end in separators if data[end - 1 : end] == b"\n"]
        if is_end:
            length = len(data)
        elif ends:
            length = ends[-1]
        else:
            length = _division(data)
        taken, rest = data[:length], data[length:] + half
        goes_on = not is_end and not ends
        if taken and goes_on:
            yield _document(taken, line, context, goes_on)
            context = taken[-CONTEXT_BYTES:].lstrip(CONTINUATION_BYTES)  # whole characters
            line += taken.count(b"\n")
        elif taken:
            begin = 0
            for start, end in [*separators, (length, length)]:
                if end <= length:
                    if context or taken[begin:start].strip():
                        yield _document(taken[begin:start], line, context, goes_on)
                    line += taken.count(b"\n", begin, end)
                    context, begin = b"", end
        if is_end:
            return


def _separators(data: bytes, separator: str) -> list[tuple[int, int]]:
    """[start, end) of the lines that hold `separator` and nothing else; the last line may lack its line
    end."""
    if not separator:
        return []
    line = rb"^" + re.escape(separator.strip().encode()) + rb"[ \t]*(?:\n|\Z)"
    return [match.span() for match in re.finditer(line, data, re.MULTILINE)]


def _division(data: bytes) -> int:
    """How much of an unfinished document to take; what remains is never empty and begins with a character."""
    if len(data) < PART_BYTES:
        return 0
    for pattern in DIVISIONS:
        match = pattern.match(data)
        if match:
            return match.end()
    return 0


def _document(raw: bytes, line: int, context: bytes, goes_on: bool) -> tuple[int, DocumentPart | BadRecord]:
    """The document, or part of one, in these bytes, and its first line. `context`: the end of the part
    before; `goes_on`: another part follows."""
    if not goes_on:
        raw = raw.rstrip(b"\n")
    if not context:
        text = raw.lstrip(b"\n")
        line += len(raw) - len(text)
        raw = text
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return line + raw.count(b"\n", 0, error.start), BadRecord(not_utf8(raw, error.start))
    if "\0" in text:
        line += text.count("\n", 0, text.index("\0"))
        return line, BadRecord(
            "a NUL character, so this is not plain text in UTF-8; save the file as UTF-8 text"
        )
    return line, DocumentPart(text, not context, not goes_on, context.decode("utf-8", "ignore"))
