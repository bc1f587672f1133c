"""What a record must look like: one line of JSON, checked, as a text (pretraining) or as a conversation (SFT).

pretrain  {"text": str}
SFT       {"conversations" | "messages": [{"role", "content", optional "reasoning_content", "tools", "tool_calls"}]}
          ShareGPT: {"conversations": [{"from", "value"}]}, optional "system" and "tools" beside it
          Alpaca: {"instruction", "output", optional "input", "system", "history": [[question, answer], ...]}

Fine without a word: a UTF-8 byte order mark, CRLF line ends, blank lines, a last line without a line end, other keys.
Decided here: an escaped NUL (\\u0000) is a character like any other. A key that stands twice in one object is refused,
because JSON readers silently keep only the last. A lone surrogate (half a character: \\ud83d) is refused anywhere.
So is nesting deeper than MAX_DEPTH: the depth that Python itself bears depends on who calls.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dataset.data_files import Block

BOM = b"\xef\xbb\xbf"
MAX_DEPTH = 100
TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} deep; make the record flatter"
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


class BadRecord(Exception):
    """A record that cannot be used. The message says what is wrong and the way out, without FILE:LINE."""


class Chat(NamedTuple):
    """A conversation as chat templates take it: messages with `role` and `content`, and the tools' JSON schemas."""

    messages: list[dict]
    tools: list[dict] | None


# --- from bytes to a record ----------------------------------------------------------------------------------------


def parse_block(block: "Block") -> Iterator[tuple[int, dict | BadRecord]]:
    """Yield (line or row, record) for each record of a block; one that is not an object comes as a BadRecord."""
    if isinstance(block.data, list):
        for line, record in block.data:
            yield line, record if isinstance(record, dict) else BadRecord(_not_an_object(record))
        return
    lines = block.data.split(b"\n")
    for offset, raw in enumerate(lines):
        raw = raw.removeprefix(BOM).strip(b" \t\r")
        if not raw:
            continue
        try:
            yield block.first + offset, parse_line(raw, last=offset == len(lines) - 1)
        except BadRecord as error:
            yield block.first + offset, error


def parse_line(raw: bytes, last: bool = False) -> dict:
    """One line of JSONL as a record; `last` says that no line end follows it. Raises BadRecord."""
    try:
        record = decoder.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord(not_utf8(error)) from None
    except json.JSONDecodeError as error:
        cut = ", and the file ends here, so it looks cut off" if last else ""
        reason = f"{error.msg} at column {error.colno}"
        raise BadRecord(f"not valid JSON ({reason}{cut}); each line must hold one JSON object") from None
    except RecursionError:
        raise BadRecord(TOO_DEEP) from None
    except ValueError as error:  # a number of thousands of digits
        raise BadRecord(f"JSON that cannot be read ({error}); each line must hold one JSON object") from None
    if not isinstance(record, dict):
        raise BadRecord(_not_an_object(record))
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        check_depth(record)
    if b"\\ud" in raw or b"\\uD" in raw:  # only such an escape can stand for half a character
        check_characters(record)
    return record


def check_depth(record: object) -> None:
    """Raise BadRecord if lists and objects are nested deeper than MAX_DEPTH."""
    level = [record]
    for _ in range(MAX_DEPTH):
        nested = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list)))
        level = [child for children in nested for child in children]
    if any(isinstance(node, (dict, list)) for node in level):
        raise BadRecord(TOO_DEEP)


def check_characters(record: object) -> None:
    """Raise BadRecord if any text in the record, whose depth is checked, holds a lone surrogate: half a character."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise BadRecord(f"lone surrogate {half} (half a character); write the whole character or none") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRecord(f"the key {_short(twice)} stands twice in one object; keep one of them")
    return record


decoder = json.JSONDecoder(object_pairs_hook=_unique_keys)


# --- from a record to a text or a conversation ---------------------------------------------------------------------


def to_text(record: dict) -> str:
    """The document of a pretraining record. Raises BadRecord."""
    if "text" not in record:
        hint = (
            "is this SFT data? " if any(key in record for key in ("conversations", "messages", "instruction")) else ""
        )
        raise BadRecord(f"no 'text' in this record (its keys: {_keys(record)}); {hint}write {{\"text\": ...}}")
    return _text(record, "text")


def to_chat(record: dict) -> Chat:
    """The conversation of an SFT record, whichever of the formats it has. Raises BadRecord."""
    present = [key for key in ("conversations", "messages", "instruction") if record.get(key) is not None]
    if len(present) > 1:
        raise BadRecord(f"both '{present[0]}' and '{present[1]}' in one record; keep one of them")
    if not present:
        hint = "is this pretraining data? " if "text" in record else ""
        raise BadRecord(
            f"no 'conversations', 'messages' or 'instruction' in this record (its keys: {_keys(record)}); "
            f'{hint}write {{"conversations": [{{"role": ..., "content": ...}}, ...]}}'
        )
    if present == ["instruction"]:
        return Chat(_check_order(_from_alpaca(record)), None)
    items = record[present[0]]
    if not isinstance(items, list):
        raise BadRecord(f"'{present[0]}' is {_kind(items)} instead of a list of messages")
    if not items:
        raise BadRecord(f"'{present[0]}' is an empty list; write messages into it or remove the line")
    messages = [_message(item, f"message {number}") for number, item in enumerate(items, 1)]
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": _text(record, "system")})
    tools = [message.pop("tools") for message in messages if "tools" in message]
    if record.get("tools"):
        tools.append(_objects(record["tools"], "'tools'"))
    if len(tools) > 1:
        raise BadRecord("'tools' are given more than once; keep one list of them")
    return Chat(_check_order(messages), tools[0] if tools else None)


def _message(item: object, where: str) -> dict:
    """One message of either spelling (`role`/`content` or ShareGPT's `from`/`value`) as role, content and extras."""
    if not isinstance(item, dict):
        raise BadRecord(f"{where} is {_kind(item)} instead of an object with 'role' and 'content'")
    is_sharegpt = item.get("role") is None and item.get("from") is not None
    spoken = item.get("from" if is_sharegpt else "role")
    role = SHAREGPT_ROLES.get(spoken, spoken) if isinstance(spoken, str) else spoken
    if role is None:
        raise BadRecord(f"{where} has no 'role' (its keys: {_keys(item)}); write one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise BadRecord(f"{where} has the unknown role {_short(spoken)}; known are {', '.join(ROLES)}")
    key = "value" if is_sharegpt else "content"
    if spoken == "function_call":
        return {"role": role, "content": "", "tool_calls": _objects(item.get(key), f"'{key}' of {where}", "name")}
    calls = _objects(item["tool_calls"], f"'tool_calls' of {where}", "name") if item.get("tool_calls") else None
    if calls and role != "assistant":
        raise BadRecord(f"{where} has 'tool_calls' but the role {role}; only the assistant calls tools")
    silent = bool(calls) and item.get(key) is None  # a turn that only calls tools may come without content
    message = {"role": role, "content": "" if silent else _text(item, key, f" of {where}")}
    if calls:
        message["tool_calls"] = calls
    if item.get("reasoning_content") is not None:
        message["reasoning_content"] = _text(item, "reasoning_content", f" of {where}")
    if item.get("tools"):
        message["tools"] = _objects(item["tools"], f"'tools' of {where}")
    for extra in ("name", "tool_call_id"):
        if item.get(extra) is not None:
            message[extra] = _text(item, extra, f" of {where}")
    return message


def _from_alpaca(record: dict) -> list[dict]:
    messages = [{"role": "system", "content": _text(record, "system")}] if record.get("system") else []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise BadRecord(f"'history' is {_kind(history)} instead of a list of [question, answer]")
    for number, turn in enumerate(history, 1):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn)):
            raise BadRecord(f"turn {number} of 'history' is not [question, answer], both of them text")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = _text(record, "instruction")
    if record.get("input"):
        question += "\n" + _text(record, "input")
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": _text(record, "output")}]


def _check_order(messages: list[dict]) -> list[dict]:
    roles = [message["role"] for message in messages]
    if roles.count("system") > 1:
        raise BadRecord("two system messages in one conversation; join them into one")
    if "system" in roles[1:]:
        raise BadRecord("the system message is not the first one; move it to the front")
    if "assistant" not in roles:
        raise BadRecord("no assistant turn, so nothing to learn; add the answer or remove the line")
    return messages


def _text(record: dict, key: str, where: str = "") -> str:
    if key not in record:
        raise BadRecord(f"no '{key}'{where} (its keys: {_keys(record)}); add it")
    value = record[key]
    if not isinstance(value, str):
        raise BadRecord(f"'{key}'{where} is {_kind(value)} instead of text; write it as a string or remove the line")
    return value


def _objects(value: object, where: str, name: str | None = None) -> list[dict]:
    """A list of JSON objects, given as such or as a string of JSON; `name`: a key that each (or its function) needs."""
    if isinstance(value, str):
        try:
            value = decoder.decode(value)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"{where} does not parse as JSON ({str(error).split(': line')[0]})") from None
        check_depth(value)
        check_characters(value)
    value = [value] if isinstance(value, dict) else value
    if not (isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value)):
        raise BadRecord(f"{where} is {_kind(value)} instead of a list of JSON objects")
    for entry in value:
        function = entry.get("function", entry)
        if name and not (isinstance(function, dict) and isinstance(function.get(name), str)):
            raise BadRecord(f'{where} holds a call without a \'{name}\'; write {{"name": ..., "arguments": {{...}}}}')
    return value


class BadRecords:
    """Counts the records that cannot be used and lists each of them in a file."""

    def __init__(self, path: Path):
        self.path, self.file = path, None
        self.count = 0
        self.first: tuple[int, int, str] | None = None  # index of the file, line, reason

    def add(self, block: "Block", bad: list[tuple[int, str]]) -> None:
        """Note (line, reason) of each bad record of one block."""
        if bad and self.file is None:
            self.first = (block.file, *bad[0])
            self.file = open(self.path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        for line, reason in bad:
            self.file.write(f"{block.path}:{line}: {reason}\n")
        self.count += len(bad)

    def first_text(self, paths: list[str]) -> str:
        """FILE:LINE and reason of the first of them; there must be one."""
        file, line, reason = self.first
        return f"{paths[file]}:{line}: {reason}"

    def close(self) -> None:
        """Finish the list."""
        if self.file:
            self.file.close()


def bad_records_message(first: str, count: int) -> str:
    """The first of `count` bad records, how many follow, and the way out."""
    more = count - 1
    follow = f"; {more} more bad record{'s' * (more > 1)} follow{'s' * (more == 1)}" if more else ""
    return f"{first}{follow} (--on_bad_data skip leaves bad records out and lists them)"


# --- words for messages --------------------------------------------------------------------------------------------


def not_utf8(error: UnicodeDecodeError) -> str:
    """What to say about bytes that are not UTF-8."""
    hint = "it looks like UTF-16, " if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    return f"not UTF-8 ({hint}byte 0x{error.object[error.start]:02x}); save the file as UTF-8"


def _not_an_object(value: object) -> str:
    return f"{_kind(value)} instead of a JSON object; each line must hold one {{...}}"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "true/false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def _keys(record: dict) -> str:
    keys = [_short(key) for key in list(record)[:8]]
    return ", ".join(keys) + (", ..." if len(record) > 8 else "") if keys else "none"


def _short(value: object) -> str:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
