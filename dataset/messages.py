"""One message of a conversation, in any of the usual spellings, becomes the form that chat templates take.

OpenAI     {"role": "system" | "user" | "assistant" | "tool", "content"}, optional "reasoning_content", "tool_calls",
           "tools", "name", "tool_call_id"; also role "developer" (system), "function" (tool), and "function_call"
ShareGPT   {"from": "human" | "gpt" | "function_call" | "observation" | ..., "value"}, and the same beside it

The content is text, or a list of parts: {"type": "text" | "reasoning" | "tool_call", "text" or "value": ...}.
A switch (`SWITCHES`) says whether a turn of the assistant is trained.
"""

from typing import Any, NamedTuple

from dataset.json_records import BadRecord, keys_of, kind_of, objects_of, short, switch_of, text_of

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
SWITCHES = frozenset({"loss_weight", "weight", "loss", "train", "training", "train_on_turn"})
EXTRAS = ("name", "tool_call_id")
PLAIN = frozenset({"role", "content", "from", "value"})
MEDIA = frozenset({"image", "images", "audio", "audios", "video", "videos"})
TRAINING = SWITCHES | {"train_detail"}
MESSAGE_FIELDS = PLAIN.union(["reasoning_content", "tool_calls", "function_call", "tools"], EXTRAS, TRAINING, MEDIA)

# Part of a content -> the field of the message that it belongs to.
PARTS = {
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
    "text": "content",
    "tool_call": "tool_calls",
}
PART_FIELDS = frozenset({"type", "value", *PARTS})


class Turn(NamedTuple):
    """A message as chat templates take it, and what was said about it."""

    message: dict
    tools: list[dict]  # that stand on it
    is_masked: bool = False  # training must leave it out
    unused: tuple[str, ...] = ()  # its fields, and those of the parts of its content, that nothing reads


def parse_message(item: object, where: str) -> Turn:
    """A message in any spelling; `where`: "message 2", for messages. Raises BadRecord."""
    if not isinstance(item, dict):
        raise BadRecord(f"{where} is {kind_of(item)} instead of an object with 'role' and 'content'")
    is_sharegpt = item.get("role") is None and item.get("from") is not None
    typed = item.get("from" if is_sharegpt else "role")
    role = OTHER_ROLES.get(typed, typed) if isinstance(typed, str) else typed
    if role is None:
        raise BadRecord(f"{where} has no 'role' (its keys: {keys_of(item)}); write one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise BadRecord(f"{where} has the unknown role {short(typed)}; known are {', '.join(ROLES)}")
    key = "value" if is_sharegpt else "content"
    content = item.get(key)
    if typed == "function_call":
        message = {"role": role, "content": "", "tool_calls": _calls(content, f"'{key}' of {where}")}
    elif isinstance(content, str) and PLAIN.issuperset(item):
        return Turn({"role": role, "content": content}, [])  # most messages
    else:
        message = {"role": role, **_said(item, key, where)}
    for field, does in (("tool_calls", "calls tools"), ("reasoning_content", "reasons")):
        if message.get(field) and role != "assistant":
            raise BadRecord(f"{where} has '{field}' but the role {role}; only the assistant {does}")
    for extra in EXTRAS:
        if item.get(extra) is not None:
            message[extra] = text_of(item, extra, f" of {where}")
    refuse_media(item, f"of {where}")
    tools = objects_of(item.get("tools"), f"'tools' of {where}")
    return Turn(message, tools, _is_masked(item, role, where), _unused_fields(item, content))


def _unused_fields(item: dict, content: object) -> tuple[str, ...]:
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    of_parts = [(f"content.{key}", part[key]) for part in parts for key in part if key not in PART_FIELDS]
    of_message = [(key, value) for key, value in item.items() if key not in MESSAGE_FIELDS]
    return tuple(name for name, value in of_message + of_parts if value is not None)


def refuse_media(record: dict, where: str) -> None:
    """Raise BadRecord if a record or message comes with pictures, sound or film."""
    if media := sorted(key for key in MEDIA if record.get(key)):
        why = "the model reads text only; leave the record out, or this field where the text stands on its own"
        raise BadRecord(f"'{media[0]}' {where}: {why}")


def _calls(value: object, where: str) -> list[dict]:
    """Tool calls where there must be one."""
    calls = objects_of(value, where, "name")
    if not calls:
        raise BadRecord(f'{where} holds no call; write {{"name": ..., "arguments": {{...}}}}')
    return calls


def _said(item: dict, key: str, where: str) -> dict[str, Any]:
    """Content, reasoning and calls of a message; the content may be text, parts, or lacking beside a call."""
    said: dict[str, Any] = {}
    for field in ("tool_calls", "function_call"):
        if calls := objects_of(item.get(field), f"'{field}' of {where}", "name"):
            said["tool_calls"] = said.get("tool_calls", calls)
    if item.get("reasoning_content") is not None:
        said["reasoning_content"] = text_of(item, "reasoning_content", f" of {where}")
    content = item.get(key)
    if isinstance(content, list):
        if not content:
            raise BadRecord(f"'{key}' of {where} is an empty list; write the text")
        for number, part in enumerate(content, 1):
            field, value = _part(part, f"part {number} of '{key}' of {where}")
            said[field] = said[field] + value if field in said else value  # texts as they are, calls in one list
    elif content is not None or not said.get("tool_calls"):
        said["content"] = text_of(item, key, f" of {where}")
    return {"content": "", **said}


def _part(part: object, where: str) -> tuple[str, Any]:
    """The field of the message that a part belongs to, and what it adds there."""
    if isinstance(part, str):
        return "content", part
    if not isinstance(part, dict):
        raise BadRecord(f"{where} is {kind_of(part)} instead of an object with 'type' and 'text'")
    kind = "text" if part.get("type") is None and part.get("text") is not None else part.get("type")
    if isinstance(kind, str) and any(medium in kind for medium in ("image", "audio", "video")):
        raise BadRecord(f"{where} is of type {short(kind)}: the model reads text only; leave such records out")
    field = PARTS.get(kind) if isinstance(kind, str) else None
    if not isinstance(kind, str) or field is None:
        raise BadRecord(f"{where} has the unknown type {short(kind)}; known are {', '.join(PARTS)}")
    key = next((key for key in (kind, "value", "text") if part.get(key) is not None), kind)
    if field != "tool_calls":
        return field, text_of(part, key, f" of {where}")
    return field, _calls(part.get(key), f"'{key}' of {where}")


def _is_masked(item: dict, role: str, where: str) -> bool:
    """Whether the switches of a message turn the training of the assistant's turn off."""
    if item.get("train_detail"):
        raise BadRecord(f"{where} has 'train_detail', but turns are trained as a whole; write 'train' and remove it")
    asked = {key: switch_of(item, key, f" of {where}") for key in sorted(SWITCHES) if item.get(key) is not None}
    if len(set(asked.values())) > 1:
        raise BadRecord(f"{where} is to be trained and not to be trained ({', '.join(asked)}); keep one of them")
    if role != "assistant" and True in asked.values():
        raise BadRecord(f"'{min(asked)}' of {where} asks to train the role {role}; only the assistant is trained")
    return role == "assistant" and False in asked.values()
