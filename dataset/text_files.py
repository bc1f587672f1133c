"""Reads plain text: each file is one document, or several, between lines that hold only a separator.

A document longer than a block is read in parts, so that neither memory nor the number of processes at work
depends on how long a document is. Each part brings the end of the one before, for the token that its first
sample begins with: as everywhere in a document, each token is a target once. (The tokens are those of the
whole document, except where two parts meet and a line end does not separate tokens.)

Line ends become \\n, as everywhere in Python; blank lines around a document are not part of it.
"""

import re
from collections.abc import Iterator

from dataset import blocks
from dataset.blocks import DataFile
from dataset.json_records import BOM, BadRecord, not_utf8

CONTEXT_BYTES = 1 << 10
# Where a long document is divided, best place first: before a line (a whole one, so that it can be told from
# a separator), before a blank, before a character.
PLACES = (rb".*\n(?=\S[^\n]*\n)", rb".*(?= \S)", rb".*(?=[^\s\x80-\xbf])")
DIVISIONS = [re.compile(rb"\s*\S" + place, re.DOTALL) for place in PLACES]


class DocumentPart(dict):
    """A record {"text"} that holds a document or a part of one."""

    def __init__(self, context: bytes = b"", begins: bool = True, ends: bool = True):
        """`context`: the end of the part before; `begins`, `ends`: whether the document does, with this
        record."""
        super().__init__()
        self.context = "" if begins else context.decode("utf-8", "ignore")
        self.begins, self.ends = begins, ends


def read_text(file: DataFile) -> Iterator[tuple[int, DocumentPart | BadRecord]]:
    """Yield (line, {"text": ...}) for each document, or each part of one that is longer than a block.

    Of what was read, whole documents are taken, or a part of the only one; the rest waits for what follows.
    With the separator `--` and a short block: read `a\\n--\\nb\\nc`, take `a\\n--\\n`, keep `b\\nc`; read
    `d\\ne\\nf\\n`, take `b\\ncd\\ne\\n` as a part that goes on, keep `f\\n`; read nothing, take `f\\n`, whose
    context is `b\\ncd\\ne\\n`.
    """
    line, context, rest = 1, b"", b""
    at_start = True
    while True:
        read = file.content.read(blocks.BLOCK_BYTES)
        data = rest + (read.removeprefix(BOM) if at_start else read)
        half = b"\r" if read and data.endswith(b"\r") else b""  # perhaps half of a line end
        data = data.removesuffix(half).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        separators = _separators(data, file.separator)
        ends = [end for _, end in separators if data[end - 1] == 10]
        length = len(data) if not read else ends[-1] if ends else _division(data)
        taken, rest, at_start = data[:length], data[length:] + half, False
        goes_on = bool(read) and not ends
        if taken:
            yield from _documents(taken, line, [] if goes_on else separators, context, goes_on)
            # whole characters
            context = taken[-CONTEXT_BYTES:].lstrip(bytes(range(0x80, 0xC0))) if goes_on else b""
            line += taken.count(b"\n")
        if not read:
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
    if len(data) < blocks.BLOCK_BYTES:
        return 0
    divided = (pattern.match(data) for pattern in DIVISIONS)
    return next((match.end() for match in divided if match), 0)


def _documents(
    data: bytes, line: int, separators: list[tuple[int, int]], context: bytes, goes_on: bool
) -> Iterator[tuple[int, DocumentPart | BadRecord]]:
    """The documents between the separators, unless they are blank; `context`, `goes_on`: the first one has
    begun before, the last one does not end here."""
    position = 0
    for start, end in [*(span for span in separators if span[1] <= len(data)), (len(data), len(data))]:
        part = DocumentPart(context, position > 0 or not context, not goes_on)
        raw = data[position:start]
        raw = raw.rstrip(b"\n") if part.ends else raw
        text = raw.lstrip(b"\n") if part.begins else raw
        if text.strip() or not (part.begins and part.ends):
            yield _decoded(text, line + len(raw) - len(text), part)
        line += data.count(b"\n", position, end)
        position = end


def _decoded(raw: bytes, line: int, part: DocumentPart) -> tuple[int, DocumentPart | BadRecord]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return line + raw.count(b"\n", 0, error.start), BadRecord(not_utf8(raw, error.start))
    if "\0" in text:
        line += text.count("\n", 0, text.index("\0"))
        return line, BadRecord(
            "a NUL character, so this is not plain text in UTF-8; save the file as UTF-8 text"
        )
    part["text"] = text
    return line, part
