"""What a record must look like: a text (pretraining) or a conversation (SFT).

pretrain  {"text": str}
SFT       {"conversations" | "messages": [{"role", "content", optional "reasoning_content", "tools", "tool_calls"}]}
          ShareGPT: {"conversations": [{"from", "value"}]}, optional "system" and "tools" beside it
          Alpaca: {"instruction", "output", optional "input", "system", "history": [[question, answer], ...]}

Other keys are ignored.
"""

from typing import Any, NamedTuple

from dataset.json_records import BadRecord, check_value, decoder, keys_of, kind_of, short

CHAT_KEYS = ("conversations", "messages", "instruction")
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


class Chat(NamedTuple):
    """A conversation as chat templates take it: messages with `role` and `content`, and the tools' JSON schemas."""

    messages: list[dict]
    tools: list[dict] | None


def to_text(record: dict) -> str:
    """The document of a pretraining record. Raises BadRecord."""
    if "text" not in record:
        hint = "is this SFT data? " if any(key in record for key in CHAT_KEYS) else ""
        raise BadRecord(f"no 'text' in this record (its keys: {keys_of(record)}); {hint}write {{\"text\": ...}}")
    return _text(record, "text")


def to_chat(record: dict) -> Chat:
    """The conversation of an SFT record in any of the formats. Raises BadRecord."""
    present = [key for key in CHAT_KEYS if record.get(key) is not None]
    if len(present) > 1:
        raise BadRecord(f"both '{present[0]}' and '{present[1]}' in one record; keep one of them")
    if not present:
        hint = "is this pretraining data? " if "text" in record else ""
        raise BadRecord(
            f"no 'conversations', 'messages' or 'instruction' in this record (its keys: {keys_of(record)}); "
            f'{hint}write {{"conversations": [{{"role": ..., "content": ...}}, ...]}}'
        )
    if present == ["instruction"]:
        return Chat(_check_order(_from_alpaca(record)), None)
    items = record[present[0]]
    if not isinstance(items, list):
        raise BadRecord(f"'{present[0]}' is {kind_of(items)} instead of a list of messages")
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
    """A message (`role`/`content`, or ShareGPT's `from`/`value`) as role, content and extras."""
    if not isinstance(item, dict):
        raise BadRecord(f"{where} is {kind_of(item)} instead of an object with 'role' and 'content'")
    is_sharegpt = item.get("role") is None and item.get("from") is not None
    typed = item.get("from" if is_sharegpt else "role")
    role = SHAREGPT_ROLES.get(typed, typed) if isinstance(typed, str) else typed
    if role is None:
        raise BadRecord(f"{where} has no 'role' (its keys: {keys_of(item)}); write one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise BadRecord(f"{where} has the unknown role {short(typed)}; known are {', '.join(ROLES)}")
    key = "value" if is_sharegpt else "content"
    if typed == "function_call":
        return {"role": role, "content": "", "tool_calls": _objects(item.get(key), f"'{key}' of {where}", "name")}
    calls = _objects(item["tool_calls"], f"'tool_calls' of {where}", "name") if item.get("tool_calls") else None
    if calls and role != "assistant":
        raise BadRecord(f"{where} has 'tool_calls' but the role {role}; only the assistant calls tools")
    only_calls = bool(calls) and item.get(key) is None  # such a turn may lack the content
    message: dict[str, Any] = {"role": role, "content": "" if only_calls else _text(item, key, f" of {where}")}
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
        raise BadRecord(f"'history' is {kind_of(history)} instead of a list of [question, answer]")
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
        raise BadRecord(f"no '{key}'{where} (its keys: {keys_of(record)}); add it")
    value = record[key]
    if not isinstance(value, str):
        raise BadRecord(f"'{key}'{where} is {kind_of(value)} instead of text; write it as a string or remove the line")
    return value


def _objects(value: object, where: str, name: str | None = None) -> list[dict]:
    """A list of JSON objects, given as such or as JSON text; `name`: a key that each (or its function) must have."""
    if isinstance(value, str):
        try:
            value = decoder.decode(value)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"{where} does not parse as JSON ({str(error).split(': line')[0]})") from None
        check_value(value)
    value = [value] if isinstance(value, dict) else value
    if not (isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value)):
        raise BadRecord(f"{where} is {kind_of(value)} instead of a list of JSON objects")
    for entry in value:
        function = entry.get("function", entry)
        if name and not (isinstance(function, dict) and isinstance(function.get(name), str)):
            raise BadRecord(f'{where} holds a call without a \'{name}\'; write {{"name": ..., "arguments": {{...}}}}')
    return value
