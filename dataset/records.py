"""What a record holds: a text (pretraining), a conversation (SFT) or two of them (DPO).

pretrain  {"text"}, or {"content"} that is no message, or a conversation
SFT       {"conversations" | "messages": [...]}; {"conversation": [...]} with turns of a question and its
          answer; or a question and its answer by the names of ANSWERS, with optional "input" or "context"
          (below the question) and "history": [[question, answer], ...]; beside either, optional "system" or
          "system_prompt", "tools" or "functions"
DPO       {"chosen", "rejected"} or {"response_j", "response_k"}: two conversations that begin alike, which
          may stand beside their beginning; or the answers to a conversation or a question of SFT's forms:
          texts, messages or lists of messages

A message is OpenAI's {"role", "content"} or ShareGPT's {"from", "value"}; its content is text, or a list of
parts. A field that is null counts as absent. Next to a text or a conversation, "weight" says how much its
targets count in the loss. A record of no known format, with blank answers, or with fields that would be
ignored although they change the meaning is a BadRecord, to which the reader of the file adds FILE:LINE.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from model.answers import END_THINK, THINK

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
# Whether a turn is trained: LLaMA-Factory, OpenAI, ms-swift, Axolotl and others.
TRAIN_FLAGS = ("loss_weight", "weight", "loss", "train", "training", "train_on_turn")
TRAIN_FLAGS += ("do_train", "train_on", "trainable")
MESSAGE_FIELDS = {"role", "from", "value", "function_call", "tool_calls", "tools"}
MESSAGE_FIELDS |= {*TEXT_FIELDS, *REASONING_FIELDS, *TRAIN_FLAGS}
WEIGHTS = ("weight", "loss_weight")  # of a record
MAX_WEIGHT = 1_000_000
INPUT_FIELDS = ("input", "context")  # what a question is about
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
KTO_LABELS = ("kto_tag", "label")
COMPANION_FIELDS = {*SYSTEM, *TOOLS, *KTO_LABELS, *WEIGHTS, "mask_history"}  # next to a conversation
PAIR = ("chosen", "rejected")
PAIR_NAMES = (PAIR, ("response_j", "response_k"))  # names of the better and of the worse answer
UNSUPPORTED_PAIR_FIELDS = ("chosen_messages", "rejected_messages", "rejected_response")
UNSUPPORTED_PAIR_FIELDS += ("preferred_output", "non_preferred_output")
MEDIA_ADVICE = "the model reads text only; leave the record out, or this field where the text stands alone"
INPUTS_ADVICE = "only the assistant's turns are trained; remove this field"
TRAIN_FLAG_ADVICE = "does it train the turn, or leave it out? Write 'train': true or false instead"
# Fields of a message or a record for what is not supported -> what to do instead.
REFUSED = dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), MEDIA_ADVICE) | {
    "train_detail": "a turn is trained as a whole or not; remove this field, or write 'train'",
    "train_on_inputs": INPUTS_ADVICE,
    "train_on_prompt": INPUTS_ADVICE,
}
# Fields of a message that are refused with any value: 0 means "train" in some datasets and "skip" in others.
AMBIGUOUS_TRAIN_FLAGS = {"mask", "masked", "loss_mask", "skip", "ignore"}
# the same for a conversation
REFUSED_IN_CHAT = REFUSED | dict.fromkeys(
    (*PAIR, *PAIR_NAMES[1], *UNSUPPORTED_PAIR_FIELDS),
    "a preference, for train_dpo.py; for SFT write the good answer as the last message, without the other",
)
ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff"  # str.strip() does not take them for white space
TRANSCRIPT = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")  # of Anthropic's hh-rlhf
# Fields of a turn in Firefly's and XTuner's conversations -> the speaker.
TURN_FIELDS = {
    "system": "system",
    "human": "user",
    "input": "user",
    "assistant": "assistant",
    "output": "assistant",
}
CHATML_QUESTION = re.compile(r"<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)


class BadRecord(Exception):
    """A record that cannot be used: what is wrong and what to do, without FILE:LINE."""


class Chat(NamedTuple):
    """A conversation as chat templates take it: messages with `role` and `content`, and the tools' JSON
    schemas."""

    messages: list[dict]
    tools: list[dict] | None = None
    masked: tuple[int, ...] = ()  # indices of the assistant's messages that are no targets
    weight: float = 1.0  # of its targets in the loss


# --- the records of each stage


def document_name(record: dict) -> str | None:
    """The field that holds a record's document, if there is one: `text`, or `content` where it belongs to no
    message and stands beside no conversation."""
    if record.get("text") is not None:
        return "text"
    is_document = record.get("content") is not None and "role" not in record and not find_format(record)[0]
    return "content" if is_document else None


def to_text(record: dict) -> str:
    """The document of a pretraining record. Raises BadRecord."""
    name = document_name(record) or "text"
    if name not in record:
        raise BadRecord(f"no 'text' ({describe_keys(record)}); write {{\"text\": ...}} or a conversation")
    return get_text(record, name)


def to_chat(record: dict, needs_answer: bool = True) -> Chat:
    """The conversation of an SFT record in any format. needs_answer: there must be an assistant turn, no
    trained turn may be blank, and a KTO label must not be false. Raises BadRecord."""
    for name, why in REFUSED_IN_CHAT.items():
        if record.get(name):
            raise BadRecord(f"'{name}': {why}")
    for name in KTO_LABELS:
        if needs_answer and str(record.get(name)).lower() == "false":
            raise BadRecord(f"'{name}' is false: a bad answer (KTO), which SFT must not train; remove it")
    key, answer = find_format(record)
    if not key:
        hint = 'write {"conversations": [{"role": ..., "content": ...}, ...]}'
        raise BadRecord(f"no 'conversations', 'messages' or 'instruction' ({describe_keys(record)}); {hint}")
    items = FORMATS[key](record, key)
    is_context = bool(answer) and isinstance(record[key], list)  # messages that are not trained
    masked_until = len(items) if is_context else 0
    if answer:
        items = items + read_answer(record, answer)
    messages, tools, masked = [], [], set()
    for index, item in enumerate(items):
        where = f"message {index + 1}"
        message = to_message(item, where)
        if is_masked(item, message["role"], where) or index < masked_until:
            masked.add(index)
        tools.append(parse_objects(item.get("tools"), f"'tools' of {where}"))
        messages.append(message)
    for name in SYSTEM:
        system = {"role": "system", "content": record.get(name)}
        if record.get(name) and system not in messages:  # else it repeats one of them
            get_text(record, name)
            messages.insert(0, system)
            masked = {index + 1 for index in masked}
    roles = [message["role"] for message in messages]
    if "system" in roles[1:]:
        raise BadRecord("a system message that is not the only one and the first; join them in front")
    tools += [parse_objects(record.get(name), f"'{name}'") for name in TOOLS]
    tools = [schemas for schemas in tools if schemas]
    if len(tools) > 1:
        raise BadRecord("'tools' are given more than once; keep one list of them")
    assistant_turns = [index for index, role in enumerate(roles) if role == "assistant"]
    if needs_answer and not assistant_turns:
        raise BadRecord("no assistant turn, so nothing to learn; add the answer or remove the record")
    if get_flag(record, "mask_history"):
        masked.update(assistant_turns[:-1])
    inserted = len(messages) - len(items)
    for index, message in enumerate(messages):
        where = f"message {index + 1 - inserted}"
        if answer and index == len(messages) - 1 and isinstance(record.get(answer), str):
            where = f"'{answer}'"
        is_trained = needs_answer and message["role"] == "assistant" and index not in masked
        if is_trained or message["role"] == "user":
            check_has_text(message, where)
    masked_turns = tuple(sorted(masked.intersection(assistant_turns)))
    return Chat(messages, tools[0] if tools else None, masked_turns, get_weight(record))


def check_has_text(message: dict, where: str) -> None:
    """Raise BadRecord if a message has no text (it is blank, or has only reasoning), or if its <think> block
    lacks one of its tags."""
    text = message["content"]
    if message["role"] == "assistant":
        if END_THINK in text and THINK not in text.partition(END_THINK)[0]:
            raise BadRecord(
                f"{where} has {END_THINK} without {THINK}; write the thoughts as 'reasoning_content'"
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
        raise BadRecord(f"{where} has thoughts but no answer; write it, or remove the record")
    raise BadRecord(f"{where} is blank; write the text, or remove the record")


def is_blank(text: str) -> bool:
    """Whether a text has no visible character."""
    return not text.strip() or not text.strip(ZERO_WIDTH).strip()


def get_weight(record: dict) -> float:
    """How much the targets of a record count in the loss; 1 without a weight. Raises BadRecord."""
    if record.keys().isdisjoint(WEIGHTS):
        return 1.0
    by_name = {name: record[name] for name in WEIGHTS if record.get(name) not in (None, "")}
    try:
        weights = {float(value) for value in by_name.values()}
    except (TypeError, ValueError):
        weights = {math.nan}
    for weight in weights:
        if not 0 <= weight <= MAX_WEIGHT:  # nor NaN
            listed = ", ".join(f"'{name}' is {preview(value)}" for name, value in by_name.items())
            raise BadRecord(
                f"{listed}; it is how much the record counts in the loss: write a number from 0 to "
                f"{MAX_WEIGHT:,}, or remove it"
            )
    if len(weights) > 1:
        raise BadRecord(f"{' and '.join(map(repr, by_name))} differ; keep one of them")
    return weights.pop() if weights else 1.0


def refuse_weight(record: dict, what: str) -> None:
    """Raise BadRecord if a record has a weight other than 1, which `what` cannot have."""
    if get_weight(record) != 1.0:
        names = " and ".join(f"'{name}'" for name in WEIGHTS if record.get(name) is not None)
        raise BadRecord(f"{names}: {what} cannot have a weight; remove this field")


def pair_names(record: dict) -> tuple[str, str]:
    """The names of the better and of the worse answer in a preference record."""
    for names in PAIR_NAMES:
        if record.get(names[0]) is not None or record.get(names[1]) is not None:
            return names
    return PAIR


def to_pair(record: dict) -> tuple[Chat, Chat]:
    """The conversations with the chosen and with the rejected answer; only messages after their common prefix
    are trained. Raises BadRecord."""
    names = pair_names(record)
    for side in names:
        if record.get(side) is None:
            raise BadRecord(
                f"no '{side}' ({describe_keys(record)}); a pair has '{names[0]}' and '{names[1]}'"
            )
        if not record[side] or (isinstance(record[side], str) and is_blank(record[side])):
            raise BadRecord(f"'{side}' is blank; write the answer, or remove the record")
    refuse_weight(record, "a preference")
    key, _ = find_format(record)
    question = FORMATS[key](record, key) if key else []
    answers = [read_answer(record, side) for side in names]
    first_roles = [to_message(items[0], "message 1")["role"] for items in answers]
    is_whole = "assistant" not in first_roles  # conversations, with the question in them
    if not is_whole and not question:
        raise BadRecord("answers without a question; write it as 'prompt' or 'conversations'")
    companions = {name: record[name] for name in (*SYSTEM, *TOOLS, *REFUSED) if name in record}
    chats = []
    for side, items in zip(names, answers, strict=True):
        messages = items if is_whole else question + items
        chats.append(to_chat(companions | {"messages": messages}, needs_answer=False))
        if chats[-1].messages[-1]["role"] != "assistant":
            raise BadRecord(f"'{side}' does not end with the assistant; remove what follows")
        check_has_text(chats[-1].messages[-1], f"the last message of '{side}'")
    chosen, rejected = chats
    common = 0  # messages; the last one of each is trained in any case
    while common < min(len(chosen.messages), len(rejected.messages)) - 1:
        if chosen.messages[common] != rejected.messages[common]:
            break
        common += 1
    if is_whole and question:
        repeated = to_chat(companions | {"messages": question}, needs_answer=False).messages
        common_messages = [one for one in repeated if one in chosen.messages and one in rejected.messages]
        if repeated not in (common_messages, chosen.messages):
            raise BadRecord(f"both conversations do not begin with '{key}'; write the answers alone")
    shared = [index for index in range(common) if chosen.messages[index]["role"] == "assistant"]
    return chosen._replace(masked=tuple(shared)), rejected._replace(masked=tuple(shared))


def held_out_key(record: dict, is_document: bool) -> str:
    """The text whose hash decides whether a record is held out: the first question of its conversation (also
    of one that is already rendered as ChatML), else its text. Raises BadRecord.

    is_document: for pretraining, where a record's "text" comes first.
    """
    if is_document and document_name(record):
        text = to_text(record)
        question = CHATML_QUESTION.search(text)
        return question[1] if question else text
    key, _ = find_format(record)
    items = FORMATS[key](record, key) if key else read_answer(record, pair_names(record)[0])
    messages = [to_message(item, f"message {number}") for number, item in enumerate(items, 1)]
    for message in messages:
        if message["role"] == "user":
            return message["content"]
    return "\n".join(message["content"] for message in messages)


def unread_fields(record: dict, is_document: bool) -> set[str]:
    """The fields of a record that are ignored, those of messages as `messages[].name`. is_document: as in
    `held_out_key`."""
    unread: set[str] = set()
    if is_document and (document := document_name(record)):
        read = {document, *WEIGHTS}
    else:
        key, answer = find_format(record)
        with_messages = (key, answer, *pair_names(record))
        read = {*with_messages, *COMPANION_FIELDS}
        if answer:
            read |= {*INPUT_FIELDS, "history"}
        for name in with_messages:
            if isinstance(record.get(name), dict | list):
                known = MESSAGE_FIELDS | TURN_FIELDS.keys() if name == "conversation" else MESSAGE_FIELDS
                for field in unread_message_fields(record[name], known):
                    unread.add(f"{name}[].{field}")
    return unread | ({name for name, value in record.items() if value is not None} - read)


def unread_message_fields(messages: dict | list, known: set[str]) -> set[str]:
    """The ignored fields of messages (not in `known`) and of the parts of their contents."""
    unread: set[str] = set()
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, dict):
            continue
        if not message.keys() <= known:
            unread.update(field for field in message.keys() - known if message[field] is not None)
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part in content:
            if isinstance(part, dict):
                unread.update(f"content[].{name}" for name in part.keys() - PART_FIELDS)
    return unread


# --- record formats


def read_messages(record: dict, key: str) -> list:
    """A list of messages under a key."""
    messages = record[key]
    if not isinstance(messages, list) or not messages:
        raise BadRecord(f"'{key}' is {preview(messages)} instead of a list of messages")
    return messages


def read_turns(record: dict, key: str) -> list:
    """Firefly's {"human", "assistant"} and XTuner's {"system", "input", "output"}, a question and its answer
    each; messages stay as they are."""
    messages = []
    for turn in read_messages(record, key):
        if not isinstance(turn, dict) or turn.keys().isdisjoint(TURN_FIELDS):
            messages.append(turn)
            continue
        for name, role in TURN_FIELDS.items():
            text = turn.get(name)
            if text is None or (role == "system" and not text):
                continue
            message = {"role": role, "content": text}
            if role == "assistant":
                message["loss"] = turn.get("output_with_loss")  # XTuner's switch
            messages.append(message)
    return messages


def read_question(record: dict, key: str) -> list:
    """The messages before an answer: a history and a question, or a list of messages."""
    inputs = [get_text(record, name) for name in INPUT_FIELDS if record.get(name)]
    history = record.get("history") or []
    if isinstance(record[key], list):
        if history or inputs:
            raise BadRecord(f"'{key}' is a list of messages, so 'history' and 'input' belong into it")
        return read_messages(record, key)
    messages = []
    for pair in history:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise BadRecord(f"'history' has {preview(pair)} instead of [question, answer]")
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    text = "\n".join([get_text(record, key), *inputs])
    return [*messages, {"role": "user", "content": text}]


def read_answer(record: dict, key: str) -> list:
    """An answer: a text, a message or a list of messages; of a pair also a transcript."""
    value = record.get(key)
    if isinstance(value, dict | list):
        messages = value if isinstance(value, list) else [value]
        if not messages or not all(
            isinstance(one, dict) and one.keys() & {"role", "from"} for one in messages
        ):
            raise BadRecord(
                f"'{key}' is {preview(value)} instead of text; write one text, or messages with a role"
            )
        return messages
    text = get_text(record, key)
    if key in PAIR and TRANSCRIPT.match(text):
        _, *pieces = TRANSCRIPT.split(text)
        return [
            {"role": ROLES[speaker.lower()], "content": turn_text.strip()}
            for speaker, turn_text in zip(pieces[::2], pieces[1::2], strict=True)
        ]
    return [{"role": "assistant", "content": text}]


# Key of a conversation or of a question -> function (record, key) that gives its messages.
FORMATS: dict[str, Callable[[dict, str], list]] = {
    "conversations": read_messages,
    "messages": read_messages,
    "conversation": read_turns,
    "instruction": read_question,
    "prompt": read_question,
    "question": read_question,
    "query": read_question,
}
# Key of a question -> possible fields of the answer.
ANSWER_FIELDS = {
    "instruction": ("output", "response"),
    "prompt": ("completion", "response"),
    "question": ("answer", "response"),
    "query": ("response", "answer"),
}


def find_format(record: dict) -> tuple[str, str]:
    """The key of FORMATS that holds a record's conversation and the field of its answer, each "" if there is
    none. A question without an answer is only taken if there is no other conversation. Raises BadRecord."""
    complete, unanswered = [], []
    for key in FORMATS:
        if record.get(key) is None:
            continue
        names = ANSWER_FIELDS.get(key, ())
        answers = [name for name in names if record.get(name) is not None]
        if answers or not names:
            complete.append((key, answers[0] if answers else ""))
        else:
            unanswered.append((key, names[0]))
    if len(complete) > 1:
        raise BadRecord(f"both '{complete[0][0]}' and '{complete[1][0]}' in one record; keep one of them")
    return (complete + unanswered + [("", "")])[0]


# --- messages


def to_message(item: Any, where: str) -> dict[str, Any]:
    """A message as chat templates take it. where: "message 2", for errors. Raises BadRecord."""
    if not isinstance(item, dict):
        raise BadRecord(f"{where} is {preview(item)} instead of an object with 'role' and 'content'")
    speaker, key = item.get("role"), "content"
    if speaker is None:  # ShareGPT
        speaker, key = item.get("from"), "value"
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise BadRecord(f"{where} has the role {preview(speaker)}; known are {', '.join(ROLES)}")
    for name, why in REFUSED.items():
        if item.get(name):
            raise BadRecord(f"'{name}' of {where}: {why}")
    for name in sorted(item.keys() & AMBIGUOUS_TRAIN_FLAGS):
        if item[name] is not None:
            raise BadRecord(f"'{name}' of {where}: {TRAIN_FLAG_ADVICE}")
    content = item.get(key)
    extra = {name: item[name] for name in TEXT_FIELDS[2:] if item.get(name) is not None}
    thoughts = get_reasoning(item, where)
    if thoughts is not None:
        extra["reasoning_content"] = thoughts
    for name in ("function_call", "tool_calls"):
        calls = parse_tool_calls(item.get(name), f"'{name}' of {where}")
        if calls:
            extra["tool_calls"] = calls
    fields: dict[str, Any] = {"content": content}
    if speaker == "function_call":
        fields = {"tool_calls": parse_tool_calls(content, f"'{key}' of {where}")}
        if not fields["tool_calls"]:
            raise BadRecord(f"{where} holds no call of a tool; write its name and arguments")
    elif isinstance(content, list):
        fields = join_parts(content, where)
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
    return message


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


def join_parts(parts: list, where: str) -> dict[str, Any]:
    """The fields of a message whose content is a list of parts: texts are joined as lines, calls in one list.
    Raises BadRecord."""
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
        name = PARTS[kind]
        if PART_ORDER.index(name) < latest:
            raise BadRecord(f"{where} must have reasoning, then text, then tool calls")
        latest = PART_ORDER.index(name)
        values = [part[key] for key in (kind, "value", "text") if part.get(key) is not None]
        value = values[0] if values else None
        if kind == "tool_call":
            fields[name] = fields.get(name, []) + parse_tool_calls(value, f"a call of {where}")
        elif isinstance(value, str):
            fields[name] = join_texts([fields[name], value]) if name in fields else value
        else:
            raise BadRecord(f"{where} has a part with {preview(value)} instead of text")
    if not fields:
        raise BadRecord(f"{where} has no content; write the text")
    return fields


def is_masked(item: dict, role: str, where: str) -> bool:
    """Whether the TRAIN_FLAGS of a message exclude the assistant's turn from training. Raises BadRecord."""
    flags = {get_flag(item, name) for name in TRAIN_FLAGS} - {None}
    if len(flags) == 2:
        raise BadRecord(f"{where} is to be trained and not to be trained; keep one of the switches")
    if role != "assistant" and True in flags:
        raise BadRecord(f"{where} asks to train the role {role}; only the assistant is trained")
    return role == "assistant" and False in flags


def get_flag(record: dict, name: str) -> bool | None:
    """True or false (or 1 or 0) under a name; None if it is absent. Raises BadRecord."""
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or value not in (0, 1):
        raise BadRecord(f"'{name}' is {preview(value)}; it is a switch: write true, false, or remove it")
    return bool(value)


def parse_tool_calls(value: Any, where: str) -> list[dict]:
    """Calls of tools. Raises BadRecord."""
    calls = parse_objects(value, where)
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(f'{where} holds a call without a name; write {{"name": ..., "arguments": ...}}')
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            parse_json(arguments, f"{where}: 'arguments' of {preview(function['name'])}")
    return calls


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
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{where} is not JSON ({error}); write it with json.dumps") from None


def get_text(record: dict, key: str) -> str:
    """The text under a key. Raises BadRecord."""
    value = record.get(key)
    if not isinstance(value, str):
        raise BadRecord(f"'{key}' is {preview(value)} instead of text ({describe_keys(record)})")
    return value


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
