"""What a record must look like: a text (pretraining), a conversation (SFT) or two of them (DPO).

pretrain  {"text"}
SFT       {"conversations" | "messages": [...]}; or a question and its answer: {"instruction", "output"}
          (Alpaca), {"prompt", "completion"} (TRL) and the other pairs of FORMATS, optional "input" or
          "context" (below the question) and "history": [[question, answer], ...]; beside either, optional
          "system" or "system_prompt", "tools" or "functions"
DPO       {"chosen": [...], "rejected": [...]}, two conversations that begin alike, which may stand beside
          their beginning or a repetition of the chosen one; or a conversation or a question of SFT's forms,
          and "chosen" and "rejected", each of them a text, a message or a list of messages

A field that is null counts as absent: Parquet and other typed files fill in null wherever a record lacks a
key. Data of another stage or another kind of model (images) are refused. Unread fields are counted.

Messages are read in any spelling, and become what chat templates take. A message is one of
OpenAI    {"role": "system" | "user" | "assistant" | "tool", "content"}, optional "reasoning_content",
          "tool_calls", "tools", "name", "tool_call_id"; also role "developer" (system), "function" (tool),
          and "function_call"
ShareGPT  {"from": "human" | "gpt" | "function_call" | "observation" | ..., "value"}, and the same beside it
whose content is text, or a list of parts: text or {"type", "text" or "value"} with a type of PARTS. One of
TRAIN_FLAGS says whether a turn of the assistant is trained.
"""

from collections.abc import Callable, Iterator
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
INPUT_FIELDS = ("input", "context")  # what a question is about, written below it
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
LABELS = ("kto_tag", "label")  # of KTO: whether the answer is a good one
PAIR = ("chosen", "rejected")
PREFERENCE = (*PAIR, "chosen_messages", "rejected_messages", "rejected_response")
PREFERENCE += ("preferred_output", "non_preferred_output")
# Read beside the conversation, whatever its format.
COMPANION_FIELDS = frozenset(REFUSED).union(SYSTEM, TOOLS, LABELS, PREFERENCE, ["mask_history"])


# --- messages


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


# --- how a record holds its conversation


class RecordFormat(NamedTuple):
    """How a record holds its conversation, under a key of FORMATS.

    read: the turns, given the record and that key; of a format with answers those before the answer. answers:
    the fields of which one holds the answer. fields: the others that `read` reads.
    """

    read: Callable[[dict, str], list[Turn]]
    answers: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


def read_messages(record: dict, key: str, prefix: str = "") -> list[Turn]:
    """A list of messages; `prefix`: how error messages call one of them."""
    items = record[key]
    if not isinstance(items, list):
        raise BadRecord(f"'{key}' is {kind_of(items)} instead of a list of messages")
    if not items:
        raise BadRecord(f"'{key}' is an empty list; write messages into it or remove the line")
    return [parse_message(item, f"{prefix}message {number}") for number, item in enumerate(items, 1)]


def read_question(record: dict, key: str) -> list[Turn]:
    """The turns before an answer: a history and a question, or a list of messages, none of them trained."""
    turns = _read_history(record)
    below = [text_of(record, name) for name in INPUT_FIELDS if record.get(name)]
    if not isinstance(record[key], list):
        text = "\n".join([text_of(record, key), *below])
        return [*turns, text_turn("user", text)]
    if turns or below:
        raise BadRecord(f"'{key}' is a list of messages, so 'history', 'input' and 'context' belong into it")
    turns = read_messages(record, key, f"{key}'s ")
    return [turn._replace(is_masked=turn.message["role"] == "assistant") for turn in turns]


def _read_history(record: dict) -> list[Turn]:
    """Earlier questions and answers."""
    history = record.get("history") or []
    if not isinstance(history, list):
        raise BadRecord(f"'history' is {kind_of(history)} instead of a list of [question, answer]")
    turns = []
    for number, pair in enumerate(history, 1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise BadRecord(f"turn {number} of 'history' is not [question, answer], both of them text")
        turns += [text_turn("user", pair[0]), text_turn("assistant", pair[1])]
    return turns


def _read_answer(record: dict, key: str) -> list[Turn]:
    """The turns of an answer: a text, a message or a list of messages."""
    value = record.get(key)
    if isinstance(value, dict):
        return [parse_message(value, f"'{key}'")]
    if isinstance(value, list):
        return read_messages(record, key, f"{key}'s ")
    return [text_turn("assistant", text_of(record, key))]


QUESTION_FIELDS = (*INPUT_FIELDS, "history")
FORMATS: dict[str, RecordFormat] = {  # by the key that decides the format
    "conversations": RecordFormat(read_messages),
    "messages": RecordFormat(read_messages),
    "instruction": RecordFormat(read_question, ("output", "response"), QUESTION_FIELDS),
    "prompt": RecordFormat(read_question, ("completion", "response"), QUESTION_FIELDS),
    "question": RecordFormat(read_question, ("answer", "response"), QUESTION_FIELDS),
    "query": RecordFormat(read_question, ("response", "answer"), QUESTION_FIELDS),
}


def find_format(record: dict) -> tuple[str, str]:
    """The key of FORMATS that holds a record's conversation and the field of its answer, each "" if there is
    none. A question without an answer is only taken if there is no other conversation."""
    complete, unanswered = [], []
    for key, each in FORMATS.items():
        if record.get(key) is None:
            continue
        answers = [field for field in each.answers if record.get(field) is not None]
        if answers:
            complete.append((key, answers[0]))
        elif each.answers:
            unanswered.append((key, each.answers[0]))
        else:
            complete.append((key, ""))
    if len(complete) > 1:
        first, second = complete[0][0], complete[1][0]
        raise BadRecord(f"both '{first}' and '{second}' in one record; keep one of them")
    if complete:
        return complete[0]
    if unanswered:
        return unanswered[0]
    return "", ""


# --- records of each stage


def to_text(record: dict) -> str:
    """The document of a pretraining record. Raises BadRecord."""
    if "text" not in record:
        _refuse_preferences(record)
        raise BadRecord(
            f"no 'text' in this record (its keys: {keys_of(record)}); write {{\"text\": ...}}, or a "
            'conversation, {"conversations": [{"role": ..., "content": ...}, ...]}'
        )
    return text_of(record, "text")


def to_chat(record: dict, answered: bool = True) -> Chat:
    """The conversation of an SFT record in any form. `answered`: the assistant must speak. Raises
    BadRecord."""
    if not record.keys().isdisjoint(PREFERENCE):
        _refuse_preferences(record)
    if not record.keys().isdisjoint(REFUSED):
        refuse_fields(record, "beside the conversation")
    if answered and not record.keys().isdisjoint(LABELS):
        _refuse_bad_answers(record)
    key, answer = find_format(record)
    if not key:
        hint = "is this pretraining data? " if "text" in record else ""
        raise BadRecord(
            f"no 'conversations', 'messages' or 'instruction' in this record (its keys: {keys_of(record)}); "
            f'{hint}write {{"conversations": [{{"role": ..., "content": ...}}, ...]}}'
        )
    turns = FORMATS[key].read(record, key)
    if answer:
        turns = turns + _read_answer(record, answer)
    chat = _join_turns(record, turns)
    speakers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if answered and not speakers:
        raise BadRecord("no assistant turn, so nothing to learn; add the answer or remove the line")
    if record.get("mask_history") is not None and switch_of(record, "mask_history"):
        return chat._replace(masked=tuple(sorted({*chat.masked, *speakers[:-1]})))
    return chat


def to_pair(record: dict) -> tuple[Chat, Chat]:
    """The two conversations of a preference record, with the chosen and with the rejected answer; of both
    only what follows their common beginning is trained. Raises BadRecord."""
    for side in PAIR:
        if not record.get(side):
            how = 'write {"conversations": [...], "chosen": ..., "rejected": ...}'
            raise BadRecord(f"no '{side}' in this record (its keys: {keys_of(record)}); {how}")
    refuse_fields(record, "beside the conversation")
    key, _ = find_format(record)
    question = FORMATS[key].read(record, key) if key else []
    chosen, rejected = _read_answer(record, "chosen"), _read_answer(record, "rejected")
    if chosen[0].message["role"] != "assistant" and rejected[0].message["role"] != "assistant":
        _check_repeated_question(key, question, chosen, rejected)  # both are whole conversations
    elif question:
        chosen, rejected = question + chosen, question + rejected
    else:
        raise BadRecord("answers without a question; write it as 'prompt', 'conversations' or 'instruction'")
    first, second = _join_turns(record, chosen), _join_turns(record, rejected)
    for side, chat in (("chosen", first), ("rejected", second)):
        if chat.messages[-1]["role"] != "assistant":
            raise BadRecord(f"'{side}' does not end with a message of the assistant; remove what follows it")
    masked = _shared_answers(first.messages, second.messages)
    return first._replace(masked=masked), second._replace(masked=masked)


def _check_repeated_question(
    key: str, question: list[Turn], chosen: list[Turn], rejected: list[Turn]
) -> None:
    """Where both sides are whole conversations, what stands beside them must be their beginning, or repeat
    the chosen one."""
    asked = [turn.message for turn in question]
    in_chosen = [turn.message for turn in chosen]
    in_rejected = [turn.message for turn in rejected]
    if asked == in_chosen:
        return
    for message in asked:
        if message not in in_chosen or message not in in_rejected:
            raise BadRecord(
                f"'chosen' and 'rejected' do not begin with '{key}'; keep the answers in them alone"
            )


def _shared_answers(chosen: list[dict], rejected: list[dict]) -> tuple[int, ...]:
    """Indices of the assistant's messages in the common beginning of two conversations. The last message of
    each is not part of it: that is trained in any case."""
    indices = []
    for index, (one, other) in enumerate(zip(chosen[:-1], rejected[:-1], strict=False)):
        if one != other:
            break
        if one["role"] == "assistant":
            indices.append(index)
    return tuple(indices)


def _join_turns(record: dict, turns: list[Turn]) -> Chat:
    """The conversation of these turns, with the system message and the tools that stand beside them in the
    record."""
    for key in SYSTEM:
        if record.get(key):
            system = text_turn("system", text_of(record, key))
            if system.message not in [turn.message for turn in turns]:  # else it repeats one of them
                turns = [system, *turns]
    messages = [turn.message for turn in turns]
    roles = [message["role"] for message in messages]
    if roles.count("system") > 1:
        raise BadRecord("two system messages in one conversation; join them into one")
    if "system" in roles[1:]:
        raise BadRecord("the system message is not the first one; move it to the front")
    lists = [turn.tools for turn in turns if turn.tools]
    for key in TOOLS:
        if record.get(key):
            tools = objects_of(record[key], f"'{key}'")
            if tools:
                lists.append(tools)
    if len(lists) > 1:
        raise BadRecord("'tools' are given more than once; keep one list of them")
    masked = tuple(index for index, turn in enumerate(turns) if turn.is_masked)
    return Chat(messages, lists[0] if lists else None, masked)


# --- records of another stage


def _refuse_bad_answers(record: dict) -> None:
    """Raise BadRecord for an answer that KTO calls a bad one."""
    for key in LABELS:
        if str(record.get(key)).lower() == "false":
            how = "which SFT must not train; remove or skip such records"
            raise BadRecord(f"'{key}' is false: a bad answer (KTO), {how}")
    tag = record.get("kto_tag")
    if tag not in (None, "") and str(tag).lower() != "true":
        raise BadRecord(f"'kto_tag' is {short(tag)}; write true (a good answer) or false (a bad one)")


def _refuse_preferences(record: dict) -> None:
    """Raise BadRecord for a record of DPO."""
    names = [f"'{key}'" for key in PREFERENCE if record.get(key)]
    if names:
        raise BadRecord(
            f"{' and '.join(names)}: a preference file (DPO), which is another stage; "
            f"for SFT write the good answer as the last message and remove the other one"
        )


# --- names of fields


def known_fields() -> frozenset[str]:
    """All fields that are read in a record of some format."""
    fields = COMPANION_FIELDS.union(["text"], FORMATS)
    return fields.union(*(each.answers + each.fields for each in FORMATS.values()))


def list_fields() -> set[str]:
    """The fields that may hold a list, in a CSV file as JSON text."""
    return {"history", *PREFERENCE, *(key for key, each in FORMATS.items() if not each.answers)}


def unread_fields(record: dict) -> Iterator[str]:
    """Names of the fields of a conversation or a preference that nothing reads, and, as `messages.name`, of
    its messages."""
    key, answer = find_format(record)
    read = set(COMPANION_FIELDS)
    if key:
        read.update((key, answer), FORMATS[key].fields)
    for name, value in record.items():
        if value is None:
            continue
        is_class_number = name == "label" and str(value).lower() not in ("true", "false")  # not KTO's
        if name not in read or is_class_number:
            yield name
        elif isinstance(value, list) and name not in TOOLS:
            for item in value:
                if isinstance(item, dict):
                    for field in item:
                        if field not in MESSAGE_FIELDS and item[field] is not None:
                            yield f"{name}.{field}"
