"""Reading the fields of a JSON record with checks.

A user's mistake is a BadRecord; whoever reads the file adds FILE:LINE.
"""

import json
import pickle

BOM = b"\xef\xbb\xbf"
TOO_DEEP = "lists and objects are nested too deep; make the record flatter"


class BadRecord(Exception):
    """A bad record. The message says what is wrong and what to do, without FILE:LINE."""


def check_value(value: object) -> None:
    """Raise BadRecord if any text in a JSON value holds a lone surrogate, or it is nested too deep for Python
    to write it or to hand it to another process."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
        pickle.dumps(value)
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise BadRecord(
            f"lone surrogate {half} (half a character); write the whole character or none"
        ) from None
    except RecursionError:
        raise BadRecord(TOO_DEEP) from None


def text_of(record: dict, key: str, where: str = "") -> str:
    """The text under a key; `where`: " of message 2". Raises BadRecord."""
    if key not in record:
        raise BadRecord(f"no '{key}'{where} (its keys: {keys_of(record)}); add it")
    value = record[key]
    if not isinstance(value, str):
        what = f"{kind_of(value)} instead of text"
        raise BadRecord(f"'{key}'{where} is {what}; write it as a string or remove the line")
    return value


def json_of(text: str, where: str) -> object:
    """The value of a field that holds JSON text; `where` names the field. Raises BadRecord."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = ""
        if "'" in text[:4]:
            hint = "; Python's own notation is not JSON, write json.dumps(...)"
        raise BadRecord(f"{where} does not parse as JSON ({str(error).split(': line')[0]}){hint}") from None
    check_value(value)
    return value


def objects_of(value: object, where: str, name: str | None = None) -> list[dict]:
    """JSON objects, given as a list, as a single one or as JSON text of either; an empty list if none are
    given: None, blank text, `[]`, `{}`, and the text "[]", "{}" or "null".

    `where`: of which field, for messages. `name`: a key that each object (or its "function") must have.
    Raises BadRecord.
    """
    if isinstance(value, str):
        value = json_of(value, where) if value.strip() else None
    if not value:
        return []
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRecord(f"{where} is {kind_of(value)} instead of a list of JSON objects")
    objects = []
    for number, item in enumerate(value, 1):
        if isinstance(item, str):
            item = json_of(item, f"entry {number} of {where}")
        if not isinstance(item, dict):
            raise BadRecord(f"entry {number} of {where} is {kind_of(item)} instead of a JSON object")
        function = item.get("function", item)
        if name and not (isinstance(function, dict) and isinstance(function.get(name), str)):
            how = f'write {{"{name}": ..., "arguments": {{...}}}}'
            raise BadRecord(f"{where} holds a call without a '{name}'; {how}")
        objects.append(item)
    return objects


def switch_of(record: dict, key: str, where: str = "") -> bool | None:
    """True or false (or 1 or 0) under a key; None if it is absent. Raises BadRecord for any other value."""
    value = record.get(key)
    if value is None:
        return None
    if not (isinstance(value, (bool, int, float)) and value in (0, 1)):
        how = "it is a switch: write true or 1, false or 0, or remove it"
        raise BadRecord(f"'{key}'{where} is {short(value)}; {how}")
    return bool(value)


# --- parts of error messages


def not_utf8(raw: bytes, at: int) -> str:
    """The message for bytes of which the one at `at` is not UTF-8."""
    convert = "iconv -f GB18030 -t UTF-8 OLD > NEW, with the encoding that it has (GB18030, UTF-16 ...)"
    return f"not UTF-8 (byte 0x{raw[at]:02x}); save the file as UTF-8: {convert}"


def not_json(error: json.JSONDecodeError) -> str:
    """The message for a line that is not JSON."""
    where = f"column {error.colno}"
    if error.lineno > 1:
        where += f" of its line {error.lineno}"
    what = "each line must hold one JSON object, or the file one array of them"
    return f"not valid JSON ({error.msg} at {where}); {what}"


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
    if not names:
        return "none"
    if len(names) > 8:
        names[8:] = ["..."]
    return ", ".join(names)


def short(value: object) -> str:
    """A value in printable form, cut to 40 characters."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
