"""What a record must look like: a text (pretraining), a conversation (SFT) or two of them (DPO).

pretrain  {"text"}
SFT       {"conversations" | "messages": [...]}; or a question and its answer: {"instruction", "output"}
          (Alpaca), {"prompt", "completion"} (TRL) and the other pairs of ANSWERS, optional "input" or
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
TRAIN_FLAGS = ("loss_weight", "weight", "loss", "train", "training", "train_on_turn")
TEXT_FIELDS = ("reasoning_content", "name", "tool_call_id")  # of a message, beside its content
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
MESSAGE_FIELDS = PLAIN.union(TEXT_FIELDS, ["tool_calls", "function_call", "tools"], TRAIN_FLAGS, REFUSED)
INPUT_FIELDS = ("input", "context")  # what a question is about, written below it
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
LABELS = {"kto_tag": ("false", "0"), "label": ("false",)}  # of KTO -> values that mark a bad answer
PAIR = ("chosen", "rejected")
PREFERENCE = (*PAIR, "chosen_messages", "rejected_messages", "rejected_response")
PREFERENCE += ("preferred_output", "non_preferred_output")
NO_PREFERENCES = "a preference file (DPO), which is another stage; for SFT write the good answer as the last "
NO_PREFERENCES += "message and remove the other one"
REFUSED_IN_SFT = REFUSED | dict.fromkeys(PREFERENCE, NO_PREFERENCES)
# Read beside the conversation, whatever its form.
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


def parse_message(item: object, where: str) -> Turn:
    """A message in any spelling; `where`: "message 2", for errors. Raises BadRecord."""
    if not isinstance(item, dict):
        raise BadRecord(f"{where} is {kind_of(item)} instead of an object with 'role' and 'content'")
    speaker, key = item.get("role"), "content"
    if speaker is None and item.get("from") is not None:  # ShareGPT
        speaker, key = item["from"], "value"
    if speaker is None:
        raise BadRecord(f"{where} has no 'role' (its keys: {keys_of(item)}); write one of {', '.join(ROLES)}")
    role = OTHER_ROLES.get(speaker, speaker) if isinstance(speaker, str) else None
    if role not in ROLES:
        raise BadRecord(f"{where} has the unknown role {short(speaker)}; known are {', '.join(ROLES)}")
    content = item.get(key)
    if isinstance(content, str) and PLAIN.issuperset(item) and speaker != "function_call":
        return Turn({"role": role, "content": content}, [])  # most messages

    for field, why in REFUSED.items():
        if item.get(field):
            raise BadRecord(f"'{field}' of {where}: {why}")
    beside: dict[str, Any] = {}  # the content
    for field in TEXT_FIELDS:
        if item.get(field) is not None:
            beside[field] = text_of(item, field, f" of {where}")
    for field in ("function_call", "tool_calls"):
        calls = objects_of(item.get(field), f"'{field}' of {where}", "name")
        if calls:
            beside["tool_calls"] = calls
    message: dict[str, Any] = {"role": role, "content": ""}
    if speaker == "function_call":
        message["tool_calls"] = _tool_calls(content, f"'{key}' of {where}")
    elif isinstance(content, list):
        message |= _join_parts(content, f"'{key}' of {where}")
    elif content is not None or "tool_calls" not in beside:
        message["content"] = text_of(item, key, f" of {where}")
    for field in beside:
        if field in message:
            raise BadRecord(f"{where} gives its '{field}' in '{key}' and beside it; keep one of them")
    message |= beside
    for field, verb in (("tool_calls", "calls tools"), ("reasoning_content", "reasons")):
        if message.get(field) and role != "assistant":
            raise BadRecord(f"{where} has '{field}' but the role {role}; only the assistant {verb}")
    tools = objects_of(item.get("tools"), f"'tools' of {where}")
    return Turn(message, tools, _is_masked(item, role, where))


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


def _is_masked(item: dict, role: str, where: str) -> bool:
    """Whether TRAIN_FLAGS of a message leave the assistant's turn out of training."""
    asked = {}
    for key in TRAIN_FLAGS:
        switch = switch_of(item, key, f" of {where}")
        if switch is not None:
            asked[key] = switch
    if True in asked.values() and False in asked.values():
        what = f"is to be trained and not to be trained ({', '.join(asked)})"
        raise BadRecord(f"{where} {what}; keep one of them")
    if role != "assistant" and True in asked.values():
        what = f"asks to train the role {role}; only the assistant is trained"
        raise BadRecord(f"'{next(iter(asked))}' of {where} {what}")
    return role == "assistant" and False in asked.values()


# --- forms: how a record holds its messages, in any spelling


def read_messages(record: dict, key: str) -> list:
    """A list of messages."""
    messages = record[key]
    if not isinstance(messages, list):
        raise BadRecord(f"'{key}' is {kind_of(messages)} instead of a list of messages")
    if not messages:
        raise BadRecord(f"'{key}' is an empty list; write messages into it or remove the line")
    return messages


def read_question(record: dict, key: str) -> list:
    """What comes before an answer: a history and a question, or a list of messages."""
    history = record.get("history") or []
    if not isinstance(history, list):
        raise BadRecord(f"'history' is {kind_of(history)} instead of a list of [question, answer]")
    messages = []
    for number, pair in enumerate(history, 1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise BadRecord(f"turn {number} of 'history' is not [question, answer], both of them text")
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    below = [text_of(record, name) for name in INPUT_FIELDS if record.get(name)]
    if not isinstance(record[key], list):
        text = "\n".join([text_of(record, key), *below])
        return [*messages, {"role": "user", "content": text}]
    if messages or below:
        raise BadRecord(f"'{key}' is a list of messages, so 'history', 'input' and 'context' belong into it")
    return read_messages(record, key)


def read_answer(record: dict, key: str) -> list:
    """An answer: a text, a message or a list of messages."""
    if isinstance(record.get(key), list):
        return read_messages(record, key)
    if isinstance(record.get(key), dict):
        return [record[key]]
    return [{"role": "assistant", "content": text_of(record, key)}]


# The key that holds a conversation, or the question of one -> its messages, of that record and key.
FORMATS: dict[str, Callable[[dict, str], list]] = {
    "conversations": read_messages,
    "messages": read_messages,
    "instruction": read_question,
    "prompt": read_question,
    "question": read_question,
    "query": read_question,
}
# The key of a question -> the fields of which one holds the answer.
ANSWERS = {
    "instruction": ("output", "response"),
    "prompt": ("completion", "response"),
    "question": ("answer", "response"),
    "query": ("response", "answer"),
}


def find_format(record: dict) -> tuple[str, str]:
    """The key of FORMATS that holds a record's conversation and the field of its answer, each "" if there is
    none. A question without an answer is only taken if there is no other conversation."""
    complete, unanswered = [], []
    for key in FORMATS:
        if record.get(key) is None:
            continue
        if key not in ANSWERS:
            complete.append((key, ""))
            continue
        answers = [field for field in ANSWERS[key] if record.get(field) is not None]
        if answers:
            complete.append((key, answers[0]))
        else:
            unanswered.append((key, ANSWERS[key][0]))
    if len(complete) > 1:
        raise BadRecord(f"both '{complete[0][0]}' and '{complete[1][0]}' in one record; keep one of them")
    candidates = complete + unanswered
    return candidates[0] if candidates else ("", "")


# --- records of each stage


def to_text(record: dict) -> str:
    """The document of a pretraining record. Raises BadRecord."""
    if "text" not in record:
        raise BadRecord(
            f"no 'text' in this record (its keys: {keys_of(record)}); write {{\"text\": ...}}, or a "
            'conversation, {"conversations": [{"role": ..., "content": ...}, ...]}'
        )
    return text_of(record, "text")


def to_chat(record: dict, answered: bool = True) -> Chat:
    """The conversation of an SFT record in any form. `answered`: the assistant must speak, and KTO must not
    call the answer a bad one. Raises BadRecord."""
    for field, why in REFUSED_IN_SFT.items():
        if record.get(field):
            raise BadRecord(f"'{field}': {why}")
    for field, bad in LABELS.items():
        if answered and str(record.get(field)).lower() in bad:
            how = "which SFT must not train; remove or skip such records"
            raise BadRecord(f"'{field}' is false: a bad answer (KTO), {how}")
    key, answer = find_format(record)
    if not key:
        hint = "is this pretraining data? " if "text" in record else ""
        raise BadRecord(
            f"no 'conversations', 'messages' or 'instruction' in this record (its keys: {keys_of(record)}); "
            f'{hint}write {{"conversations": [{{"role": ..., "content": ...}}, ...]}}'
        )
    items = FORMATS[key](record, key)
    context = len(items) if answer and isinstance(record[key], list) else 0  # messages that are not trained
    if answer:
        items = items + read_answer(record, answer)
    turns = [parse_message(item, f"message {number}") for number, item in enumerate(items, 1)]
    for index in range(context):
        is_answer = turns[index].message["role"] == "assistant"
        turns[index] = turns[index]._replace(is_masked=is_answer)
    for field in SYSTEM:
        if record.get(field):
            system = {"role": "system", "content": text_of(record, field)}
            if system not in [turn.message for turn in turns]:  # else it repeats one of them
                turns = [Turn(system, []), *turns]
    messages = [turn.message for turn in turns]
    roles = [message["role"] for message in messages]
    if roles.count("system") > 1:
        raise BadRecord("two system messages in one conversation; join them into one")
    if "system" in roles[1:]:
        raise BadRecord("the system message is not the first one; move it to the front")
    tools = [turn.tools for turn in turns]
    for field in TOOLS:
        if record.get(field):
            tools.append(objects_of(record[field], f"'{field}'"))
    tools = [schemas for schemas in tools if schemas]
    if len(tools) > 1:
        raise BadRecord("'tools' are given more than once; keep one list of them")
    speakers = [index for index, role in enumerate(roles) if role == "assistant"]
    if answered and not speakers:
        raise BadRecord("no assistant turn, so nothing to learn; add the answer or remove the line")
    masked = {index for index, turn in enumerate(turns) if turn.is_masked}
    if record.get("mask_history") is not None and switch_of(record, "mask_history"):
        masked.update(speakers[:-1])
    return Chat(messages, tools[0] if tools else None, tuple(sorted(masked)))


def to_pair(record: dict) -> tuple[Chat, Chat]:
    """The two conversations of a preference record, with the chosen and with the rejected answer; of both
    only what follows their common beginning is trained. Raises BadRecord."""
    for side in PAIR:
        if not record.get(side):
            how = 'write {"conversations": [...], "chosen": ..., "rejected": ...}'
            raise BadRecord(f"no '{side}' in this record (its keys: {keys_of(record)}); {how}")
    key, _ = find_format(record)
    question = FORMATS[key](record, key) if key else []
    repeated: list = []  # the question, where it stands in both answers as well
    answers = {side: read_answer(record, side) for side in PAIR}
    first = [parse_message(items[0], f"message 1 of '{side}'").message for side, items in answers.items()]
    if all(message["role"] != "assistant" for message in first):  # both are whole conversations
        question, repeated = [], question
    elif not question:
        raise BadRecord("answers without a question; write it as 'prompt', 'conversations' or 'instruction'")
    beside = {field: record[field] for field in (*SYSTEM, *TOOLS, *REFUSED) if field in record}
    chats = []
    for side, items in answers.items():
        try:
            chat = to_chat(beside | {"messages": question + items}, answered=False)
        except BadRecord as error:
            raise BadRecord(f"with '{side}': {error}") from None
        if chat.messages[-1]["role"] != "assistant":
            raise BadRecord(f"'{side}' does not end with a message of the assistant; remove what follows it")
        chats.append(chat)
    chosen, rejected = chats
    if repeated:  # it must be their beginning, or repeat the chosen one
        asked = to_chat(beside | {"messages": repeated}, answered=False).messages
        in_both = [
            message for message in asked if message in chosen.messages and message in rejected.messages
        ]
        if asked not in (in_both, chosen.messages):
            raise BadRecord(
                f"'chosen' and 'rejected' do not begin with '{key}'; keep the answers in them alone"
            )
    masked = _shared_answers(chosen.messages, rejected.messages)
    return chosen._replace(masked=masked), rejected._replace(masked=masked)


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


# --- names of fields


def known_fields() -> frozenset[str]:
    """All fields that are read in a record of some form."""
    return COMPANION_FIELDS.union(["text", "history"], INPUT_FIELDS, FORMATS, *ANSWERS.values())


def list_fields() -> set[str]:
    """The fields that may hold a list, in a CSV file as JSON text."""
    return {"history", *PREFERENCE, *(FORMATS.keys() - ANSWERS.keys())}


def unread_fields(record: dict) -> Iterator[str]:
    """Names of the fields of a conversation or a preference that nothing reads, and, as `messages.name`, of
    its messages."""
    key, answer = find_format(record)
    read = COMPANION_FIELDS.union([key, answer])
    if answer:
        read = read.union(INPUT_FIELDS, ["history"])
    for name, value in record.items():
        if value is None:
            continue
        is_other_label = name in LABELS and str(value).lower() not in ("true", "false")  # not KTO's
        if name not in read or is_other_label:
            yield name
        elif isinstance(value, list) and name not in TOOLS:
            for item in value:
                if isinstance(item, dict):
                    for field in item:
                        if field not in MESSAGE_FIELDS and item[field] is not None:
                            yield f"{name}.{field}"
