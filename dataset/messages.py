"""Messages of a conversation, in any spelling, as chat templates take them.

A message is one of
OpenAI    {"role": "system" | "user" | "assistant" | "tool", "content"}, optional "reasoning_content",
          "tool_calls", "tools", "name", "tool_call_id"; also role "developer" (system), "function" (tool),
          and "function_call"
ShareGPT  {"from": "human" | "gpt" | "function_call" | "observation" | ..., "value"}, and the same beside it
whose content is text, or a list of parts: text or {"type", "text" or "value"} with a type of PARTS. One of
TRAIN_FLAGS says whether a turn of the assistant is trained.
"""

from typing import Any, NamedTuple

from dataset.json_values import BadRecord, keys_of, kind_of, objects_of, short, switch_of, text_of

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "developer": "system",
    "function": "tool",
}
# LLaMA-Factory, OpenAI, ms-swift and Axolotl, in this order.
TRAIN_FLAGS = frozenset({"loss_weight", "weight", "loss", "train", "training", "train_on_turn"})
EXTRAS = ("name", "tool_call_id")
# The type of a part of the content -> the field of the message that it belongs to.
PARTS = {
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
    "text": "content",
    "tool_call": "tool_calls",
}
FIELD_ORDER = ("reasoning_content", "content", "tool_calls")  # in which chat templates write them
PLAIN = frozenset({"role", "content", "from", "value"})
NO_MEDIA = "the model reads text only; leave the record out, or this field where the text stands on its own"
NO_INPUTS = "only the assistant's turns are trained; remove this field"
# Fields of a message or beside the conversation that would be lost in silence -> why they are refused.
REFUSED = dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), NO_MEDIA) | {
    "train_detail": "a turn is trained as a whole or not; remove this field, or write 'train'",
    "train_on_inputs": NO_INPUTS,
    "train_on_prompt": NO_INPUTS,
}
MESSAGE_FIELDS = PLAIN.union(
    ["reasoning_content", "tool_calls", "function_call", "tools"], EXTRAS, TRAIN_FLAGS, REFUSED
)


class Turn(NamedTuple):
    """A message as chat templates take it."""

    message: dict
    tools: list[dict]  # that stand on it
    is_masked: bool = False  # not trained


class Chat(NamedTuple):
    """A conversation as chat templates take it: messages with `role` and `content`, and the tools' JSON
    schemas."""

    messages: list[dict]
    tools: list[dict] | None
    masked: tuple[int, ...] = ()  # indices of the assistant's messages that are no targets


def text_turn(role: str, text: str) -> Turn:
    """A turn with a text alone."""
    return Turn({"role": role, "content": text}, [])


def parse_message(item: object, where: str) -> Turn:
    """A message in any spelling; `where`: "message 2", for messages. Raises BadRecord."""
    if not isinstance(item, dict):
        raise BadRecord(f"{where} is {kind_of(item)} instead of an object with 'role' and 'content'")
    if item.get("role") is None and item.get("from") is not None:  # ShareGPT
        typed, key = item["from"], "value"
    else:
        typed, key = item.get("role"), "content"
    role = OTHER_ROLES.get(typed, typed) if isinstance(typed, str) else typed
    if role is None:
        raise BadRecord(f"{where} has no 'role' (its keys: {keys_of(item)}); write one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise BadRecord(f"{where} has the unknown role {short(typed)}; known are {', '.join(ROLES)}")
    content = item.get(key)
    if isinstance(content, str) and PLAIN.issuperset(item) and typed != "function_call":
        return Turn({"role": role, "content": content}, [])  # most messages
    message: dict[str, Any] = {"role": role, "content": ""}
    beside = _fields_beside_content(item, where)
    if typed == "function_call":
        message["tool_calls"] = _tool_calls(content, f"'{key}' of {where}")
    elif isinstance(content, list):
        message |= _join_parts(content, f"'{key}' of {where}")
    elif content is not None or "tool_calls" not in beside:
        message["content"] = text_of(item, key, f" of {where}")
    for field in beside:
        if field in message:
            raise BadRecord(f"{where} gives its '{field}' in '{key}' and beside it; keep one of them")
    message |= beside
    for field, does in (("tool_calls", "calls tools"), ("reasoning_content", "reasons")):
        if message.get(field) and role != "assistant":
            raise BadRecord(f"{where} has '{field}' but the role {role}; only the assistant {does}")
    refuse_fields(item, f"of {where}")
    tools = objects_of(item.get("tools"), f"'tools' of {where}")
    return Turn(message, tools, _is_masked(item, role, where))


def _fields_beside_content(item: dict, where: str) -> dict[str, Any]:
    """The fields of a message that stand beside its content."""
    fields: dict[str, Any] = {}
    for field in ("tool_calls", "function_call"):
        calls = objects_of(item.get(field), f"'{field}' of {where}", "name")
        if calls and "tool_calls" not in fields:
            fields["tool_calls"] = calls
    for field in ("reasoning_content", *EXTRAS):
        if item.get(field) is not None:
            fields[field] = text_of(item, field, f" of {where}")
    return fields


def _tool_calls(value: object, where: str) -> list[dict]:
    """Tool calls where there must be one."""
    calls = objects_of(value, where, "name")
    if not calls:
        raise BadRecord(f'{where} holds no call; write {{"name": ..., "arguments": {{...}}}}')
    return calls


def _join_parts(parts: list, where: str) -> dict[str, Any]:
    """The fields of a message whose content is a list of parts: texts are joined as they are, calls in one
    list."""
    if not parts:
        raise BadRecord(f"{where} is an empty list; write the text")
    fields: dict[str, Any] = {}
    latest = 0
    for number, part in enumerate(parts, 1):
        place = f"part {number} of {where}"
        if isinstance(part, str):
            part = {"text": part}
        if not isinstance(part, dict):
            raise BadRecord(f"{place} is {kind_of(part)} instead of an object with 'type' and 'text'")
        kind = "text" if part.get("type") is None else part["type"]
        if not isinstance(kind, str) or kind not in PARTS:
            raise BadRecord(f"{place} is of type {short(kind)}: the model reads text only; leave it out")
        field = PARTS[kind]
        if FIELD_ORDER.index(field) < latest:
            raise BadRecord(f"{place} comes too late; write reasoning, then text, then tool calls")
        latest = FIELD_ORDER.index(field)
        key = "text"
        for name in ("value", kind):
            if part.get(name) is not None:
                key = name
        if kind == "tool_call":
            fields.setdefault(field, []).extend(_tool_calls(part.get(key), f"'{key}' of {place}"))
        else:
            fields[field] = fields.get(field, "") + text_of(part, key, f" of {place}")
    return fields


def refuse_fields(record: dict, where: str) -> None:
    """Raise BadRecord if a record or message has a field of REFUSED, such as a picture, which would be
    lost."""
    for key, why in REFUSED.items():
        if record.get(key):
            raise BadRecord(f"'{key}' {where}: {why}")


def _is_masked(item: dict, role: str, where: str) -> bool:
    """Whether TRAIN_FLAGS of a message leave the assistant's turn out of training."""
    asked = {}
    for key in sorted(TRAIN_FLAGS):
        switch = switch_of(item, key, f" of {where}")
        if switch is not None:
            asked[key] = switch
    if True in asked.values() and False in asked.values():
        what = f"is to be trained and not to be trained ({', '.join(asked)})"
        raise BadRecord(f"{where} {what}; keep one of them")
    if role != "assistant" and True in asked.values():
        what = f"asks to train the role {role}; only the assistant is trained"
        raise BadRecord(f"'{min(asked)}' of {where} {what}")
    return role == "assistant" and False in asked.values()
