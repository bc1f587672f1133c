"""Converts a message of a conversation to the form that chat templates take: `role` and `content`, and for
the assistant optionally `reasoning_content` and `tool_calls`.

A message in the data is OpenAI's {"role", "content"} or ShareGPT's {"from", "value"}. Its content is text or
a list of parts. A message is a BadRecord if it cannot be read, or if it has a field that changes the meaning
but would be ignored.
"""

import json
from typing import Any

from model.answers import CALL, END_THINK, THINK

SPEAKERS = {  # role -> its names in data
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "function_call"),
    "tool": ("tool", "observation", "function"),
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names}
TEXT_FIELDS = ("content", "reasoning_content", "name", "tool_call_id")  # of a message
# names of the assistant's thoughts; the last one is OpenRouter's, a list
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts", "reasoning_details")
# Type of a part of the content -> the field of the message that it belongs to, as templates order them.
PARTS = {
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
    "text": "content",
    "input_text": "content",
    "output_text": "content",
    "tool_call": "tool_calls",
}
PART_FIELDS = {"type", "value", *PARTS}
PART_ORDER = ("reasoning_content", "content", "tool_calls")
ARGUMENTS = ("arguments", "parameters", "args", "kwargs", "input", "action_input")  # names of those of a call
CALL_FIELDS = {"name", "function", "id", "type", "index", *ARGUMENTS}
# Whether a turn is trained: LLaMA-Factory, OpenAI, ms-swift, Axolotl and others.
TRAIN_FLAGS = ("loss_weight", "weight", "loss", "train", "training", "train_on_turn")
TRAIN_FLAGS += ("do_train", "train_on", "trainable")
MESSAGE_FIELDS = {"role", "from", "value", "function_call", "tool_calls", "tools"}
MESSAGE_FIELDS |= {*TEXT_FIELDS, *REASONING_FIELDS, *TRAIN_FLAGS}
MEDIA_ADVICE = (
    "the model reads text only; remove the record, or this field if the text makes sense without it"
)
INPUTS_ADVICE = "only the assistant's turns are trained; remove this field"
TRAIN_FLAG_ADVICE = "does it train the turn, or leave it out? Write 'train': true or false instead"
# Fields of a message or a record for what is not supported -> what to do instead.
REFUSED = dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), MEDIA_ADVICE) | {
    "train_detail": "a turn is trained as a whole or not at all; remove this field, or write 'train'",
    "train_on_inputs": INPUTS_ADVICE,
    "train_on_prompt": INPUTS_ADVICE,
}
# Fields of a message that are refused with any value: 0 means "train" in some datasets and "skip" in others.
AMBIGUOUS_TRAIN_FLAGS = {"mask", "masked", "loss_mask", "skip", "ignore"}
RESPONSE, END_RESPONSE = "<tool_response>", "</tool_response>"  # the template's, around a tool's reply
ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff"  # str.strip() does not take them for white space


class BadRecord(Exception):
    """A record that cannot be used. The message says what is wrong and what to do, without FILE:LINE."""


class DataDecoder(json.JSONDecoder):
    """Decodes the JSON of data. A value with an object that has the same key twice becomes a BadRecord
    (`json` would keep the last one)."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self.make_object)
        self.repeated: str | None = None

    def make_object(self, pairs: list[tuple[str, Any]]) -> dict:
        """The object of these pairs of key and value."""
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            self.repeated = next(key for key in keys if keys.count(key) > 1)
        return made

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        """The value that begins at an index, and the index where it ends. `decode` calls this, too."""
        self.repeated = None
        value, end = super().raw_decode(s, idx)
        if self.repeated is not None:
            value = BadRecord(f"an object has the key {preview(self.repeated)} twice; keep one of them")
        return value, end


# --- a message


def to_message(item: Any, where: str, unread: set[str] | None = None) -> dict[str, Any]:
    """A message in the form that chat templates take. where: names the message in errors, such as "message
    2". unread: a set that receives the names of ignored fields. Raises BadRecord."""
    unread = set() if unread is None else unread
    speaker, key = find_speaker(item, where)
    has_more = len(item) > 2 or key not in item  # than role and content
    extra = read_extra(item, where, unread) if has_more else {}
    content = item.get(key)
    fields: dict[str, Any] = {"content": content}
    if speaker == "function_call":
        fields = {"tool_calls": parse_tool_calls(content, key, where, unread)}
        if not fields["tool_calls"]:
            raise BadRecord(f"{where} has no tool call; write its name and arguments")
    elif isinstance(content, list):
        fields = join_parts(content, where, unread)
    elif content is None and "tool_calls" in extra:
        fields = {}
    for name in extra:
        if name in fields:
            raise BadRecord(f"{where} gives its '{name}' twice; keep one of them")
    message = {"role": ROLES[speaker], "content": ""} | fields | extra
    for name in TEXT_FIELDS:
        if not isinstance(message.get(name, ""), str):
            field = key if name == "content" else name
            raise BadRecord(f"'{field}' of {where} is {preview(message[name])} instead of text")
    for name in ("reasoning_content", "tool_calls"):
        if message.get(name) and message["role"] != "assistant":
            raise BadRecord(f"{where} has '{name}', which only the assistant may have")
    if len(message) > 2 or message["role"] == "tool":
        message["content"] = strip_tags(message, where)
    return message


def find_speaker(item: Any, where: str) -> tuple[str, str]:
    """The speaker (a key of ROLES) and the field with the content. Raises BadRecord."""
    if not isinstance(item, dict):
        raise BadRecord(f"{where} is {preview(item)} instead of an object with 'role' and 'content'")
    speaker, key = item.get("role"), "content"
    if speaker is None:  # ShareGPT
        speaker, key = item.get("from"), "value"
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise BadRecord(f"{where} has the role {preview(speaker)}; known are {', '.join(ROLES)}")
    return speaker, key


def read_extra(item: dict, where: str, unread: set[str]) -> dict[str, Any]:
    """The fields of a message beside its role and content. Raises BadRecord."""
    refuse(item, REFUSED, f" of {where}")
    for name in sorted(item.keys() & AMBIGUOUS_TRAIN_FLAGS):
        if item[name] is not None:
            raise BadRecord(f"'{name}' of {where}: {TRAIN_FLAG_ADVICE}")
    unread.update(name for name in item.keys() - MESSAGE_FIELDS if item[name] is not None)
    extra = {name: item[name] for name in ("name", "tool_call_id") if item.get(name) is not None}
    thoughts = get_reasoning(item, where)
    if thoughts is not None:
        extra["reasoning_content"] = thoughts
    for name in ("function_call", "tool_calls"):
        calls = parse_tool_calls(item.get(name), name, where, unread)
        if calls:
            extra["tool_calls"] = calls
    return extra


def strip_tags(message: dict[str, Any], where: str) -> str:
    """The content without the tags that the chat template writes around it, and without reasoning that is
    also given in its own field. Raises BadRecord."""
    content, thoughts = message["content"], message.get("reasoning_content")
    if message["role"] == "tool" and content.strip().startswith(RESPONSE):
        reply, end, rest = content.strip().removeprefix(RESPONSE).partition(END_RESPONSE)
        if rest:
            raise BadRecord(f"{where} has more than one {RESPONSE}; write a message for each")
        return reply.strip("\r\n") if end else content
    if thoughts and END_THINK in content:
        before, _, answer = content.partition(END_THINK)
        inside = before.strip().removeprefix(THINK).strip()
        if inside not in ("", thoughts.strip()) or END_THINK in answer:
            raise BadRecord(
                f"the reasoning of {where} is in its content and in a field, and differs; keep one of them"
            )
        content = answer.lstrip()
    if message.get("tool_calls") and CALL in content:
        raise BadRecord(f"{where} has {CALL} in its content and also a field with calls; keep one of them")
    return content


def check_has_text(message: dict, where: str) -> None:
    """Raise BadRecord if a message has no text (it is blank, or has only reasoning), or if its <think> block
    lacks one of its tags."""
    text = message["content"]
    if message["role"] == "assistant":
        if END_THINK in text and THINK not in text.partition(END_THINK)[0]:
            raise BadRecord(
                f"{where} has {END_THINK} without {THINK}; write the reasoning as 'reasoning_content'"
            )
        if text.lstrip().startswith(THINK):
            _, end, text = text.partition(END_THINK)
            if not end:
                raise BadRecord(
                    f"{where} begins with {THINK}, which does not end; add {END_THINK} and the answer"
                )
    if not is_blank(text) or message.get("tool_calls"):
        return
    if not is_blank(message["content"]) or message.get("reasoning_content"):
        raise BadRecord(f"{where} has reasoning but no answer; write one, or remove the record")
    raise BadRecord(f"{where} is blank; write the text, or remove the record")


def is_blank(text: str) -> bool:
    """Whether a text has no visible character."""
    return not text.strip() or not text.strip(ZERO_WIDTH).strip()


def is_masked(item: dict, role: str, where: str) -> bool:
    """Whether the TRAIN_FLAGS of a message exclude this assistant turn from training. Raises BadRecord."""
    if item.keys().isdisjoint(TRAIN_FLAGS):
        return False
    flags = {get_flag(item, name) for name in TRAIN_FLAGS} - {None}
    if len(flags) == 2:
        raise BadRecord(f"{where} has fields that say to train it and not to train it; keep one of them")
    if role != "assistant" and True in flags:
        raise BadRecord(f"{where} asks to train the role {role}; only the assistant is trained")
    return role == "assistant" and False in flags


def get_flag(record: dict, name: str) -> bool | None:
    """The value true or false (or 1 or 0) of a field; None if the field is absent. Raises BadRecord."""
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or value not in (0, 1):
        raise BadRecord(f"'{name}' is {preview(value)}; it must be true or false; change it or remove it")
    return bool(value)


# --- thoughts and parts


def get_reasoning(item: dict, where: str) -> str | None:
    """The reasoning of a message, in one of REASONING_FIELDS or with the same text in several; None if there
    is none. Raises BadRecord."""
    texts: dict[str, str] = {}
    if item.keys().isdisjoint(REASONING_FIELDS):
        return None
    for name in REASONING_FIELDS:
        value = item.get(name)
        if isinstance(value, list):
            parts = [
                part.get("text", part.get("summary")) if isinstance(part, dict) else part for part in value
            ]
            value = join_texts(parts) if all(isinstance(part, str) for part in parts) else value
        if value is None:
            continue
        if not isinstance(value, str):
            raise BadRecord(f"'{name}' of {where} is {preview(value)} instead of text")
        texts[name] = value
    different = set(texts.values())
    if len(different) > 1:
        different.discard("")
    if len(different) > 1:
        raise BadRecord(f"{' and '.join(map(repr, texts))} of {where} differ; keep one of them")
    return different.pop() if different else None


def join_texts(texts: list[str]) -> str:
    """Join texts with line ends where there is no white space between them."""
    text = "".join(texts[:1])
    for following in texts[1:]:
        is_apart = not text or text[-1].isspace() or following[:1].isspace()
        text += following if is_apart else f"\n{following}"
    return text


def join_parts(parts: list, where: str, unread: set[str]) -> dict[str, Any]:
    """The fields of a message whose content is a list of parts. Texts are joined as lines, and calls are
    collected in one list. Raises BadRecord."""
    fields: dict[str, Any] = {}
    latest = 0
    for part in parts:
        if isinstance(part, str):
            part = {"text": part}
        if not isinstance(part, dict):
            raise BadRecord(f"{where} has a part {preview(part)} instead of text")
        kind = part.get("type") or "text"
        if kind not in PARTS:
            raise BadRecord(f"{where} has a part of type {preview(kind)}: the model reads text only")
        unread.update(f"content[].{name}" for name in part.keys() - PART_FIELDS)
        name = PARTS[kind]
        if PART_ORDER.index(name) < latest:
            raise BadRecord(
                f"{where} has its parts in the wrong order; write reasoning, then text, then tool calls"
            )
        latest = PART_ORDER.index(name)
        values = [part[key] for key in (kind, "value", "text") if part.get(key) is not None]
        value = values[0] if values else None
        if kind == "tool_call":
            fields[name] = fields.get(name, []) + parse_tool_calls(value, "tool_call", where, unread)
        elif isinstance(value, str):
            fields[name] = join_texts([fields[name], value]) if name in fields else value
        else:
            raise BadRecord(f"{where} has a part with {preview(value)} instead of text")
    if not fields:
        raise BadRecord(f"{where} has no content; write the text")
    return fields


# --- tools


def parse_tool_calls(value: Any, field: str, where: str, unread: set[str]) -> list[dict]:
    """The tool calls in a field of a message; each has its arguments as `arguments`. Raises BadRecord."""
    where = f"'{field}' of {where}"
    calls = []
    for call in parse_objects(value, where):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(f'{where} has a call without a name; write {{"name": ..., "arguments": ...}}')
        given = call | function
        for name in given.keys() - CALL_FIELDS:
            if given[name] is not None:
                unread.add(f"{field}[].{name}")
        arguments = read_arguments(given, where)
        if arguments is not function.get("arguments"):
            function = {"name": function["name"], "arguments": arguments}
            call = call | {"function": function} if "function" in call else function
        calls.append(call)
    return calls


def read_arguments(call: dict, where: str) -> Any:
    """The arguments of a call, from one of the fields in ARGUMENTS: an object or its JSON text; "" or similar
    if there are none. Raises BadRecord."""
    of_call = f"of {preview(call['name'])}"
    given = {name: call[name] for name in ARGUMENTS if call.get(name) is not None}
    name, value = next(iter(given.items()), ("arguments", None))
    if any(other != value for other in given.values()):
        raise BadRecord(f"{where}: {' and '.join(map(repr, given))} {of_call} differ; keep one of them")
    parsed = value
    while isinstance(parsed, str) and parsed.strip():  # JSON text of JSON text is read, too
        value, parsed = parsed, parse_json(parsed, f"{where}: '{name}' {of_call}")
    if isinstance(parsed, dict):
        return value
    if parsed is None or parsed == [] or isinstance(parsed, str):
        return value if value in (None, "", []) else {}
    raise BadRecord(f"{where}: '{name}' {of_call} is {preview(parsed)} instead of an object of NAME: VALUE")


def parse_tools(value: Any, where: str) -> list[dict]:
    """The schemas of tools. Raises BadRecord."""
    tools = parse_objects(value, where)
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(
                f"{where} has a schema without a name ({describe_keys(tool)}); write a list of "
                '{"name": ..., "description": ..., "parameters": {...}}'
            )
    return tools


def parse_objects(value: Any, where: str) -> list[dict]:
    """JSON objects: a list of them, a single one, or the JSON text of either; none for null, blank text and
    empty lists. Raises BadRecord."""
    if isinstance(value, str):
        value = parse_json(value.strip() or "null", where)
    if not value:
        return []
    items = value if isinstance(value, list) else [value]
    objects = [parse_json(item, where) if isinstance(item, str) else item for item in items]
    if not all(isinstance(item, dict) for item in objects):
        raise BadRecord(f"{where} is {preview(value)} instead of a list of JSON objects")
    return objects


def parse_json(text: str, where: str) -> Any:
    """The value of a field that holds JSON text. Raises BadRecord."""
    try:
        value = DataDecoder().decode(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{where} is not JSON ({error}); write it with json.dumps") from None
    if isinstance(value, BadRecord):
        raise BadRecord(f"{where}: {value}")
    return value


# --- for messages of errors


def refuse(record: dict, refused: dict[str, str], where: str = "") -> None:
    """Raise BadRecord if a record or a message has one of these fields, and it is not empty."""
    if record.keys().isdisjoint(refused):
        return
    for name, why in refused.items():
        if record.get(name):
            raise BadRecord(f"'{name}'{where}: {why}")


def describe_keys(record: dict) -> str:
    """The first keys of a record, for messages."""
    names = [preview(key) for key, value in record.items() if value is not None]
    return f"its keys: {', '.join(names[:8])}"


def preview(value: Any) -> str:
    """A value for messages, in printable form, cut to 40 characters."""
    if value is None:
        return "null"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
