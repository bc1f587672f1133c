"""One message of a conversation, in any of the usual spellings, becomes the form that chat templates take.

OpenAI     {"role": "system" | "user" | "assistant" | "tool", "content"}, optional "reasoning_content", "tool_calls",
           "tools", "name", "tool_call_id"; also role "developer" (system), "function" (tool), and "function_call"
ShareGPT   {"from": "human" | "gpt" | "function_call" | "observation" | ..., "value"}, and the same beside it

The content is text, or a list of parts, each of them text or {"type": "text", "text" or "value": ...}.
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
NO_MEDIA = "the model reads text only; leave the record out, or this field where the text stands on its own"
NO_INPUTS = "only the assistant's turns are trained; remove this field"
REFUSED = dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), NO_MEDIA) | {
    "train_detail": "a turn is trained as a whole or not; remove this field, or write 'train'",
    "train_on_inputs": NO_INPUTS,
    "train_on_prompt": NO_INPUTS,
}
FIELDS = PLAIN.union(["reasoning_content", "tool_calls", "function_call", "tools"], EXTRAS, SWITCHES, REFUSED)


class Turn(NamedTuple):
    """A message as chat templates take it, and what was said about it."""

    message: dict
    tools: list[dict]  # that stand on it
    is_masked: bool = False  # training must leave it out


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
    if isinstance(content, str) and PLAIN.issuperset(item) and typed != "function_call":
        return Turn({"role": role, "content": content}, [])  # most messages
    message: dict[str, Any] = {"role": role, "content": ""}
    calls: list[dict] = []
    if typed == "function_call":
        calls = objects_of(content, f"'{key}' of {where}", "name")
        if not calls:
            raise BadRecord(f'\'{key}\' of {where} holds no call; write {{"name": ..., "arguments": {{...}}}}')
    for field in ("tool_calls", "function_call"):
        calls = calls or objects_of(item.get(field), f"'{field}' of {where}", "name")
    if typed != "function_call" and (content is not None or not calls):
        message["content"] = _text(item, key, where)
    if calls:
        message["tool_calls"] = calls
    for field in ("reasoning_content", *EXTRAS):
        if item.get(field) is not None:
            message[field] = text_of(item, field, f" of {where}")
    for field, does in (("tool_calls", "calls tools"), ("reasoning_content", "reasons")):
        if message.get(field) and role != "assistant":
            raise BadRecord(f"{where} has '{field}' but the role {role}; only the assistant {does}")
    refuse(item, f"of {where}")
    return Turn(message, objects_of(item.get("tools"), f"'tools' of {where}"), _is_masked(item, role, where))


def _text(item: dict, key: str, where: str) -> str:
    """The content of a message: text, or parts, which are joined as they are."""
    parts = item.get(key)
    if not isinstance(parts, list):
        return text_of(item, key, f" of {where}")
    if not parts:
        raise BadRecord(f"'{key}' of {where} is an empty list; write the text")
    texts = []
    for number, part in enumerate(parts, 1):
        place = f"part {number} of '{key}' of {where}"
        part = {"text": part} if isinstance(part, str) else part
        if not isinstance(part, dict):
            raise BadRecord(f"{place} is {kind_of(part)} instead of an object with 'type' and 'text'")
        if part.get("type") not in (None, "text"):
            raise BadRecord(f"{place} is of type {short(part['type'])}: the model reads text only; leave it out")
        texts.append(text_of(part, "text" if part.get("value") is None else "value", f" of {place}"))
    return "".join(texts)


def refuse(record: dict, where: str) -> None:
    """Raise BadRecord if a record or message has a field of REFUSED, such as a picture, which would be lost."""
    for key, why in REFUSED.items():
        if record.get(key):
            raise BadRecord(f"'{key}' {where}: {why}")


def _is_masked(item: dict, role: str, where: str) -> bool:
    """Whether the switches of a message turn the training of the assistant's turn off."""
    asked = {key: switch_of(item, key, f" of {where}") for key in sorted(SWITCHES) if item.get(key) is not None}
    if len(set(asked.values())) > 1:
        raise BadRecord(f"{where} is to be trained and not to be trained ({', '.join(asked)}); keep one of them")
    if role != "assistant" and True in asked.values():
        raise BadRecord(f"'{min(asked)}' of {where} asks to train the role {role}; only the assistant is trained")
    return role == "assistant" and False in asked.values()
