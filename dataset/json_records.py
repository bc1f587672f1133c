"""Decodes and checks one record of JSON, with a readable error message for a bad record.

Accepted silently: a UTF-8 byte order mark, CRLF line ends, blank lines, a last line without a line end.
An escaped NUL (\\u0000) is a character like any other. Refused: a duplicate key in an object, of which JSON readers
silently keep the last; a lone surrogate (half a character: \\ud83d); and nesting deeper than MAX_DEPTH (Python's own
limit depends on the depth of the call stack).
"""

import json
import re
from contextlib import suppress
from typing import Any

CHINESE = re.compile("[\u4e00-\u9fff]")
BOM = b"\xef\xbb\xbf"
MAX_DEPTH = 100
TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} deep; make the record flatter"


class BadRecord(Exception):
    """A bad record. The message says what is wrong and what to do, without FILE:LINE."""


def parse_line(raw: bytes, last: bool = False) -> dict:
    """One line of JSONL as a record; `last`: no line end follows. Raises BadRecord."""
    try:
        record = decoder.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord(not_utf8(raw, error.start)) from None
    except json.JSONDecodeError as error:
        cut = ", and the file ends here, so it looks cut off" if last else ""
        reason = f"{error.msg} at column {error.colno}"
        raise BadRecord(f"not valid JSON ({reason}{cut}); each line must hold one JSON object") from None
    except RecursionError:
        raise BadRecord(TOO_DEEP) from None
    except ValueError as error:  # a number with thousands of digits
        raise BadRecord(f"JSON that cannot be read ({error}); each line must hold one JSON object") from None
    if not isinstance(record, dict):
        raise BadRecord(not_an_object(record))
    # Only these escapes can be half a character.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH or b"\\ud" in raw or b"\\uD" in raw:
        check_value(record)
    return record


def check_element(record: object, raw: str) -> None:
    """Check a record that was decoded from `raw`, in which bytes other than UTF-8 are escaped. Raises BadRecord."""
    if not_text := escaped_bytes(raw):
        raise BadRecord(not_text)
    if raw.count("[") + raw.count("{") > MAX_DEPTH or "\\ud" in raw or "\\uD" in raw:
        check_value(record)


def check_value(value: object) -> None:
    """Raise BadRecord if lists and objects are nested deeper than MAX_DEPTH, or any text holds a lone surrogate."""
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list)))
        level = [child for children in nested for child in children]
    if any(isinstance(node, (dict, list)) for node in level):
        raise BadRecord(TOO_DEEP)
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise BadRecord(f"lone surrogate {half} (half a character); write the whole character or none") from None


def without_nulls(value: object) -> object:
    """The value without the keys that are null in its objects: typed files fill them in where a key is lacking."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    """A JSON object as a dict. Raises BadRecord for duplicate keys."""
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRecord(f"the key {short(twice)} occurs twice in one object; keep one of them")
    return record


decoder = json.JSONDecoder(object_pairs_hook=unique_keys)


# --- parts of error messages ---------------------------------------------------------------------------------------


def not_utf8(raw: bytes, at: int) -> str:
    """The message for bytes of which the one at `at` is not UTF-8, with a guess what they are."""
    guess = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    if not guess:
        with suppress(UnicodeDecodeError):
            found, read_so_far = (len(CHINESE.findall(raw.decode(*how))) for how in (("gb18030",), ("utf-8", "ignore")))
            guess = "GB18030" if found > 1 + 2 * read_so_far else ""
    hint, change = (f"it looks like {guess}, ", f": iconv -f {guess} -t UTF-8 OLD > NEW") if guess else ("", "")
    return f"not UTF-8 ({hint}byte 0x{raw[at]:02x}); save the file as UTF-8{change}"


def escaped_bytes(text: str) -> str | None:
    """The message for text decoded with `surrogateescape` from bytes that are not UTF-8; None if they are."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raw = text.encode("utf-8", "surrogateescape")
        return not_utf8(raw, len(text[: error.start].encode("utf-8")))
    return None


def not_an_object(value: object) -> str:
    """The message for a JSON value other than an object."""
    return f"{kind_of(value)} instead of a JSON object; each line must hold one {{...}}"


def kind_of(value: object) -> str:
    """The JSON type of a value in words."""
    if value is None:
        return "null"
    names: dict[type, str] = {
        bool: "true/false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def keys_of(record: dict) -> str:
    """The first keys of a record that are not null."""
    names = [short(key) for key, value in record.items() if value is not None]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "none"


def short(value: object) -> str:
    """A value in printable form, cut to 40 characters."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
