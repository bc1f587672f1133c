"""A program that prints, as JSON, what the first records of an uploaded file are.

    python scripts/serve/look_at_file.py FILE NAME SCRATCH BYTES SECONDS

A stranger's small file may grow without bounds when it is decoded. So it is decoded in this process, apart
from the server and with limits of memory and time (limited.py). torch is not imported: a look takes a tenth
of a second.

NAME: name of the file in messages. SCRATCH: folder for a part of the file. BYTES, SECONDS: the limits.
"""

import json
import os
import re
import resource
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import UserError
from dataset.chat_exports import form_of, read_export, to_conversations
from dataset.documents import DOCUMENTS
from dataset.files import (
    TABLES,
    Gaps,
    NoRecord,
    file_kind,
    format_source,
    is_plain_text,
    open_file,
    read_records,
)
from dataset.messages import BadRecord
from dataset.records import Parsed, parse

LOOKED_AT, SHOWN, CHARACTERS = 200, 3, 300  # records read; records shown; characters of each
WHY_CHARACTERS = 500  # of an error message
EXPORT_BYTES = {".txt": 32 << 20, ".json": 128 << 20}  # a larger file is not read as an exported chat
SPEAKERS, TURNS, TURN_CHARACTERS, NAME_CHARACTERS = 12, 6, 160, 200  # of an exported chat, that are shown
HEAD_BYTES = 4 << 20  # records are looked for in this much of a file, after decompression
PART_OF_CHARACTER = re.compile(rb"[\xc0-\xff][\x80-\xbf]{0,2}$")  # a cut UTF-8 character at the end


def set_limits(memory: int, seconds: int) -> None:
    """Limit this process and lower its priority. macOS does not limit memory; there limited.py watches it."""
    os.nice(10)
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: seconds, resource.RLIMIT_CORE: 0}
    for kind, most in limits.items():
        with suppress(ValueError, OSError):  # a lower limit is set already, or the system has no such limit
            resource.setrlimit(kind, (most, most))


def head_of(path: Path, scratch: Path) -> tuple[Path, bool]:
    """A file with the first bytes of another one, and whether it was cut. Some kinds of files, and single
    lines, are read as a whole and may be larger than the memory."""
    head, kind = b"", file_kind(path.name)
    if kind not in (*TABLES, *DOCUMENTS):
        # read_records reports what is wrong
        with suppress(UserError, OSError, EOFError, zlib.error), open_file(str(path)) as file:
            head = file.read(HEAD_BYTES + 1)
    if len(head) <= HEAD_BYTES:
        return path, False
    part = scratch / f"head{kind}"
    part.write_bytes(head.rpartition(b"\n")[0] or PART_OF_CHARACTER.sub(b"", head))
    return part, True


def look_at(path: Path, name: str, scratch: Path) -> dict[str, Any]:
    """What a file is: `export` of an exported chat, otherwise the result of `look_at_records`. An exported
    chat in plain text has both, because it can be read as a text, too."""
    suffix = Path(name).suffix.lower()
    export = look_at_export(path) if path.stat().st_size <= EXPORT_BYTES.get(suffix, -1) else None
    if export and suffix == ".json":
        return {"kind": None, "export": export}
    found = look_at_records(path, name, scratch)
    return found | ({"export": export} if export else {})


def look_at_export(path: Path) -> dict[str, Any] | None:
    """The speakers of an exported chat, each with the first turns of the conversations in which this speaker
    is the assistant; None if the file is no such export."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES).decode(errors="ignore")
    if form_of(head) is None:
        return None
    try:
        export = read_export(str(path))
    except UserError:
        return None
    speakers = []
    for speaker, messages in export.speakers():
        conversations = list(to_conversations(export.chats, speaker)) if len(speakers) < SPEAKERS else []
        if conversations and len(speaker) <= NAME_CHARACTERS:
            turns = [(turn["role"], turn["content"][:TURN_CHARACTERS]) for turn in conversations[0][:TURNS]]
            about = {"name": speaker, "messages": messages, "conversations": len(conversations)}
            speakers.append(about | {"turns": turns})
    about = {"form": export.form, "assistant": export.assistant, "speakers": speakers}
    return about | {"messages": sum(map(len, export.chats))} if speakers else None


def look_at_records(path: Path, name: str, scratch: Path) -> dict[str, Any]:
    """What the first records of a file are: `kind` (text or chat), how many, the first of them, and for the
    first bad record its line (of a JSON array its number) and what is wrong with it. If there is no good
    record, the result has `error` and `code` instead."""
    head, is_cut = head_of(path, scratch)
    chats, texts, first, bad, place, count, size = 0, 0, [], None, "", 0, 0
    gaps: Gaps = {}
    try:
        for source, record in read_records([str(head)], gaps=gaps):
            count += 1
            try:
                if isinstance(record, BadRecord):
                    raise record
                parsed = parse(record, "pretrain")
                is_text = parsed.document is not None
                shown = spoken(parsed) if parsed.document is None else parsed.document
            except BadRecord as error:
                place = place or format_source(name, source.line)
                number = {"line" if source.line >= 0 else "record": abs(source.line)}
                bad = bad or {**number, "why": str(error)[:WHY_CHARACTERS]}
            else:
                texts, chats, size = texts + is_text, chats + (not is_text), size + len(shown.encode())
                if len(first) < SHOWN:
                    first.append(shown[:CHARACTERS])
            if count == LOOKED_AT:
                break
    except UserError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        if not is_cut or not texts + chats:
            text = str(error).replace(str(head), name)[:WHY_CHARACTERS]
            code = "no_record" if isinstance(error, NoRecord) else code_of(text, "other")
            return {"error": text, "code": code}
    if bad and not texts + chats:
        text = f"{place}: {bad['why']}"
        return {"error": text, "code": code_of(text, "bad_record")} | bad
    kind = "text" if texts >= chats else "chat"
    more = is_cut or count == LOOKED_AT
    if is_plain_text(name):  # one text, even if it is read in several parts
        count, more = 1, False
    found: dict[str, Any] = {"kind": kind, "records": count, "first": first, "more": more}
    if file_kind(name) in DOCUMENTS:  # its bytes are not those of its text
        found["text_bytes"] = size
        if gaps:
            (found["pages"],) = gaps.values()
    return found | ({"bad": bad} if bad else {})


def spoken(parsed: Parsed) -> str:
    """The messages of a conversation as text."""
    (chat,) = parsed.chats
    return "\n".join(f"{message['role']}: {message['content']}" for message in chat.messages)


def code_of(text: str, otherwise: str) -> str:
    """The code of an error: of its text, or another one."""
    if "not UTF-8" in text:
        return "not_utf8"
    if "file of subtitles" in text:
        return "subtitles"
    return "not_text" if "is binary" in text else otherwise


def main() -> None:
    """Look at a file."""
    path, name, scratch, memory, seconds = sys.argv[1:]
    if file_kind(path) in TABLES:
        with suppress(ImportError):  # read_records reports it
            import pyarrow.parquet  # noqa: F401 (before the limits, which are for the file alone)
    set_limits(int(memory), int(seconds))
    print(json.dumps(look_at(Path(path), name, Path(scratch))))


if __name__ == "__main__":
    main()
