"""Reads plain text: each file is one document, or several, between lines that hold only a separator.

A document longer than a block is read in parts, so that neither memory nor the number of processes at work depends on
how long a document is. Each part brings the end of the one before, for the token that its first sample begins with: as
everywhere in a document, each token is a target once. (The tokens are those of the whole document, except where two
parts meet and a line end does not separate tokens.)

Line ends become \\n, as everywhere in Python; blank lines around a document are not part of it.
"""

import re
from collections.abc import Iterator
from typing import cast

from dataset import blocks
from dataset.blocks import Block, opened, read_on
from dataset.json_records import BOM, BadRecord, not_utf8

CONTEXT_BYTES = 1 << 10
# Where a long document is divided, best place first: before a line (a whole one, so that it can be told from a
# separator), before a blank, before a character.
PLACES = (rb".*\n(?=\S[^\n]*\n)", rb".*(?= \S)", rb".*(?=[^\s\x80-\xbf])")
DIVISIONS = [re.compile(rb"\s*\S" + place, re.DOTALL) for place in PLACES]


class DocumentPart(dict):
    """A record {"text"} that holds a document or a part of one."""

    def __init__(self, context: bytes, begins: bool, ends: bool):
        """`context`: the end of the part before; `begins`, `ends`: whether the document does, with this record."""
        super().__init__()
        self.context = "" if begins else context.decode("utf-8", "ignore")
        self.begins, self.ends = begins, ends


def text_blocks(index: int, path: str, separator: str) -> Iterator[Block]:
    """Blocks of whole documents, or parts of one document where it is longer than a block."""
    line, done, context, rest = 1, 0, b"", b""
    with opened(path) as (file, position):
        file_begins = True
        while True:
            read = read_on(file, path, line + rest.count(b"\n"), blocks.BLOCK_BYTES)
            data = rest + (read.removeprefix(BOM) if file_begins else read)
            held = b"\r" if read and data.endswith(b"\r") else b""  # perhaps half of a line end
            data = data.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            ends = [end for _, end in _separators(data, separator) if data[end - 1] == 10]
            at = len(data) if not read else ends[-1] if ends else _division(data)
            part, rest, file_begins = data[:at], data[at:] + held, False
            if part:
                continues = bool(read) and not ends
                yield Block(index, path, line, part, position() - done, (), separator, context, continues)
                context = _end_of(part) if continues else b""
                done, line = position(), line + part.count(b"\n")
            if not read:
                return


def _separators(data: bytes, separator: str) -> list[tuple[int, int]]:
    """[start, end) of the lines that hold `separator` and nothing else; the last line may lack its line end."""
    if not separator:
        return []
    line = rb"^" + re.escape(separator.strip().encode()) + rb"[ \t]*(?:\n|\Z)"
    return [match.span() for match in re.finditer(line, data, re.MULTILINE)]


def _division(data: bytes) -> int:
    """How much of an unfinished document to take; what remains is never empty and begins with a character."""
    if len(data) < blocks.BLOCK_BYTES:
        return 0
    found = (pattern.match(data) for pattern in DIVISIONS)
    return next((match.end() for match in found if match), 0)


def _end_of(part: bytes) -> bytes:
    """The last characters of a part."""
    return part[-CONTEXT_BYTES:].lstrip(bytes(range(0x80, 0xC0)))


def text_records(block: Block) -> Iterator[tuple[int, DocumentPart | BadRecord]]:
    """Yield (line, {"text": ...}) for each document of a block, or its part of one, unless it is blank."""
    data, position, line = cast(bytes, block.data), 0, block.first
    found = [] if block.continues else _separators(data, block.separator or "")
    for start, end in [*found, (len(data), len(data))]:
        begins, ends = position > 0 or not block.context, not block.continues
        raw = data[position:start].rstrip(b"\n") if ends else data[position:start]
        text = raw.lstrip(b"\n") if begins else raw
        if text.strip() or not (begins and ends):
            yield _document(text, line + len(raw) - len(text), DocumentPart(block.context, begins, ends))
        line += data.count(b"\n", position, end)
        position = end


def _document(raw: bytes, line: int, record: DocumentPart) -> tuple[int, DocumentPart | BadRecord]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return line + raw.count(b"\n", 0, error.start), BadRecord(not_utf8(raw, error.start))
    if "\0" in text:
        line += text.count("\n", 0, text.index("\0"))
        return line, BadRecord("a NUL character, so this is not plain text in UTF-8; save the file as UTF-8 text")
    record["text"] = text
    return line, record
