"""The values of a record's fields: text, JSON objects and switches, each checked when it is read.

A field that is null counts as absent: Parquet and other typed files fill in null wherever a record lacks a key.
"""

from dataset.json_records import BadRecord, check_value, decoder, keys_of, kind_of, short


def text_of(record: dict, key: str, where: str = "") -> str:
    """The text under a key; `where`: " of message 2". Raises BadRecord."""
    if key not in record:
        raise BadRecord(f"no '{key}'{where} (its keys: {keys_of(record)}); add it")
    value = record[key]
    if not isinstance(value, str):
        raise BadRecord(f"'{key}'{where} is {kind_of(value)} instead of text; write it as a string or remove the line")
    return value


def objects_of(value: object, where: str, name: str | None = None) -> list[dict]:
    """JSON objects, given as a list, as a single one or as JSON text of either; an empty list if none are given.

    None, blank text, `[]`, `{}`, and the text "[]", "{}" or "null" all mean that none are given. `where`: of which
    field, for messages. `name`: a key that each object (or its "function") must have. Raises BadRecord.
    """
    value = _decoded(value, where) if isinstance(value, str) else value
    if not value:
        return []
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list):
        raise BadRecord(f"{where} is {kind_of(value)} instead of a list of JSON objects")
    objects = []
    for number, entry in enumerate(value, 1):
        found = _decoded(entry, f"entry {number} of {where}") if isinstance(entry, str) else entry
        if not isinstance(found, dict):
            raise BadRecord(f"entry {number} of {where} is {kind_of(found)} instead of a JSON object")
        function = found.get("function", found)
        if name and not (isinstance(function, dict) and isinstance(function.get(name), str)):
            raise BadRecord(f'{where} holds a call without a \'{name}\'; write {{"name": ..., "arguments": {{...}}}}')
        objects.append(found)
    return objects


def _decoded(text: str, where: str) -> object:
    """The value of JSON text; None for blank text."""
    if not text.strip():
        return None
    try:
        value = decoder.decode(text.strip())
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{where} does not parse as JSON ({str(error).split(': line')[0]})") from None
    check_value(value)
    return value


def switch_of(record: dict, key: str, where: str = "") -> bool | None:
    """True or false (or 1 or 0) under a key; None if it is absent. Raises BadRecord for any other value."""
    value = record.get(key)
    if value is None:
        return None
    if not (isinstance(value, (bool, int, float)) and value in (0, 1)):
        raise BadRecord(f"'{key}'{where} is {short(value)}; it is a switch: write true or 1, false or 0, or remove it")
    return bool(value)
