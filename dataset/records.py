"""Reads records: a text (pretraining), a conversation (SFT), two conversations (DPO), or a prompt with the
reference answer (reinforcement learning). `parse` does this for every stage.

pretrain  {"text"}, or {"content"} that is no message, or a conversation
SFT       {"conversations" | "messages": [...]}; {"conversation": [...]} with turns of a question and its
          answer; or a question and its answer by the names of ANSWER_FIELDS, with optional "input" or
          "context" (below the question) and "history": [[question, answer], ...]; beside either, optional
          "system" or "system_prompt", "tools" or "functions"
DPO       {"chosen", "rejected"} or {"response_j", "response_k"}: two conversations that begin alike, which
          may stand beside their beginning; or the answers to a conversation or a question of SFT's forms:
          texts, messages or lists of messages
prompt    a conversation or a question of SFT's forms, with or without its answer; beside it the reference:
          "answer", MiniMind's "gt" or verl's "reward_model"

A field that is null counts as absent. Next to a text or a conversation, "weight" says how much its targets
count in the loss. A record is a BadRecord if its format is unknown, if it has blank answers, or if it has
fields that change the meaning but would be ignored. The reader of the file adds FILE:LINE.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from dataset.messages import (
    REFUSED,
    ROLES,
    BadRecord,
    check_has_text,
    describe_keys,
    find_speaker,
    get_flag,
    is_blank,
    is_masked,
    parse_tools,
    preview,
    refuse,
    to_message,
)

WEIGHTS = ("weight", "loss_weight")  # of a record
MAX_WEIGHT = 1_000_000
QUESTION_PARTS = ("input", "context")  # what a question is about
INPUT_FIELDS = (*QUESTION_PARTS, "history")  # beside a question
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
KTO_LABELS = ("kto_tag", "label")
COMPANION_FIELDS = {*SYSTEM, *TOOLS, *WEIGHTS, "mask_history"}  # next to a conversation
PAIR = ("chosen", "rejected")
PAIR_NAMES = (PAIR, ("response_j", "response_k"))  # names of the better and of the worse answer
UNSUPPORTED_PAIR_FIELDS = ("chosen_messages", "rejected_messages", "rejected_response")
UNSUPPORTED_PAIR_FIELDS += ("preferred_output", "non_preferred_output")
# Fields that are refused beside a conversation -> what to do instead.
REFUSED_IN_CHAT = REFUSED | dict.fromkeys(
    (*PAIR, *PAIR_NAMES[1], *UNSUPPORTED_PAIR_FIELDS),
    "a preference, for train_dpo.py; for SFT write the good answer as the last message, without the other",
)
REFERENCES = ("answer", "gt", "reward_model")  # what a reward compares with
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


class Chat(NamedTuple):
    """A conversation in the form that chat templates take: messages with `role` and `content`, and the tools'
    JSON schemas."""

    messages: list[dict]
    tools: list[dict] | None = None
    masked: tuple[int, ...] = ()  # indices of the assistant's messages that are no targets


class Format(NamedTuple):
    """The names of the fields that contain the content of a record, "" where there is none."""

    document: str = ""  # a text
    key: str = ""  # of FORMATS: a conversation, or a question
    answer: str = ""  # to the question


class Parsed(NamedTuple):
    """The content of a record, for one kind of training."""

    document: str | None  # its text; then there is no conversation
    chats: tuple[Chat, ...]  # the conversation; of a pair both, the chosen one first
    weight: float  # of its targets in the loss
    unread: set[str]  # its fields that are ignored, those of messages as `messages[].name`
    reference: Any = None  # of a prompt


# --- the records of each stage


def parse(record: dict, kind: str) -> Parsed:
    """Read a record for a kind of training: pretrain, sft, dpo or prompt. Raises BadRecord."""
    if kind == "dpo":
        return parse_pair(record)
    form = find_format(record, is_document=kind == "pretrain")
    if form.document:
        text = get_text(record, form.document)
        return Parsed(text, (), get_weight(record), unread_keys(record, {form.document, *WEIGHTS}))
    if form.key:
        return parse_chat(record, form, kind)
    if kind == "pretrain":
        if "text" in record:
            get_text(record, "text")
        raise BadRecord(f"no 'text' ({describe_keys(record)}); write {{\"text\": ...}} or a conversation")
    refuse(record, REFUSED_IN_CHAT)
    hint = 'write {"conversations": [{"role": ..., "content": ...}, ...]}'
    raise BadRecord(f"no 'conversations', 'messages' or 'instruction' ({describe_keys(record)}); {hint}")


def parse_chat(record: dict, form: Format, kind: str) -> Parsed:
    """The conversation in any format of SFT. Every user's turn and every trained turn must have text. The
    answer to a prompt may be missing or may not be text. Raises BadRecord."""
    refuse(record, REFUSED_IN_CHAT)
    key, answer = form.key, form.answer
    is_prompt = kind == "prompt"
    read = {key, answer, *COMPANION_FIELDS, *(REFERENCES if is_prompt else KTO_LABELS)}
    items = [(key, item) for item in FORMATS[key](record, key)]
    in_context = 0  # messages that are no targets
    if key in ANSWER_FIELDS:
        read.update(INPUT_FIELDS)
        if answer and not (is_prompt and is_no_turn(record[answer])):
            in_context = len(items) if isinstance(record[key], list) else 0
            items += [(answer, item) for item in read_answer(record, answer)]
        elif not is_prompt:
            names = " or ".join(map(repr, ANSWER_FIELDS[key]))
            raise BadRecord(f"no {names} ({describe_keys(record)}); write the answer to '{key}' there")
    for name in () if is_prompt else KTO_LABELS:
        if str(record.get(name)).lower() == "false":
            raise BadRecord(
                f"'{name}' is false: it marks a bad answer (KTO), which SFT must not train; remove the record"
            )
    unread = unread_keys(record, read)
    chat = make_chat(record, items, unread, in_context)
    if not is_prompt and not assistant_turns(chat):
        raise BadRecord(
            "no assistant turn, so there is nothing to learn; add the answer or remove the record"
        )
    is_text = answer and isinstance(record[answer], str)
    check_texts(chat, len(items), f"'{answer}'" if is_text else "", is_trained=not is_prompt)
    reference = find_reference(record, answer) if is_prompt else None
    return Parsed(None, (chat,), get_weight(record), unread, reference)


def parse_pair(record: dict) -> Parsed:
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
    if get_weight(record) != 1.0:
        raise weight_error(record, "a preference")
    refuse(record, REFUSED)
    key = find_format(record).key
    question = [(key, item) for item in FORMATS[key](record, key)] if key else []
    answers = [[(side, item) for item in read_answer(record, side)] for side in names]
    # conversations, with the question in them
    is_whole = all(ROLES[find_speaker(items[0][1], "message 1")[0]] != "assistant" for items in answers)
    if not is_whole and not question:
        raise BadRecord("answers without a question; write it as 'prompt' or 'conversations'")
    inputs = INPUT_FIELDS if key in ANSWER_FIELDS else ()
    unread = unread_keys(record, {key, *names, *COMPANION_FIELDS, *inputs})
    chats = []
    for side, items in zip(names, answers, strict=True):
        chat = make_chat(record, items if is_whole else question + items, unread)
        if chat.messages[-1]["role"] != "assistant":
            raise BadRecord(f"'{side}' does not end with the assistant; remove what follows")
        chats.append(chat)
    common = common_messages(chats[0], chats[1], names)
    if is_whole and question:
        repeated = make_chat(record, question, unread).messages
        in_both = [one for one in repeated if all(one in chat.messages for chat in chats)]
        if repeated not in (in_both, chats[0].messages):
            raise BadRecord(f"the two conversations do not begin with '{key}'; write only the answers")
    for number, (side, chat) in enumerate(zip(names, chats, strict=True)):
        masked = [index for index in assistant_turns(chat) if index < common or index in chat.masked]
        chats[number] = chat._replace(masked=tuple(masked))
        count = len(answers[number]) + (0 if is_whole else len(question))
        check_texts(chats[number], count, f"the last message of '{side}'")
    return Parsed(None, tuple(chats), 1.0, unread)


def common_messages(chosen: Chat, rejected: Chat, names: tuple[str, str]) -> int:
    """The number of messages at the beginning that both conversations of a pair have in common. The last
    message of each does not count, because it is always trained. Raises BadRecord if the rest is not two
    answers to the same question."""
    first, second = chosen.messages, rejected.messages
    shortest = min(len(first), len(second))
    common = 0
    while common < shortest - 1 and first[common] == second[common]:
        common += 1
    one, other = first[common], second[common]
    are_answers = one["role"] == other["role"] == "assistant"
    is_longer = one == other and len(first) != len(second)
    is_question_alike = (one["role"], one["content"]) == (other["role"], other["content"])
    why = ""
    if chosen.tools != rejected.tools:
        why = "their tools differ"
    elif is_longer:
        why = f"one of them continues after message {common + 1}"
    elif not (are_answers or is_question_alike):
        why = f"message {common + 1} differs and is not an answer"
    if why:
        raise BadRecord(
            f"'{names[0]}' and '{names[1]}' are not answers to the same question ({why}); write two "
            "conversations with the same beginning"
        )
    refuse_second_answer(first[: common + 1])
    return common


def make_chat(record: dict, items: list[tuple[str, Any]], unread: set[str], in_context: int = 0) -> Chat:
    """The conversation made of these messages (each with the record's field it comes from) and of the
    record's system prompt, tools and `mask_history`. unread: a set that receives the messages' ignored
    fields. in_context: how many messages at the beginning are not targets. Raises BadRecord."""
    messages, tools, masked = [], [], set()
    for index, (field, item) in enumerate(items):
        where = f"message {index + 1}"
        names: set[str] = set()
        message = to_message(item, where, names)
        unread.update(f"{field}[].{name}" for name in names)
        if is_masked(item, message["role"], where) or index < in_context:
            masked.add(index)
        tools.append(parse_tools(item.get("tools"), f"'tools' of {where}"))
        messages.append(message)
        if index and field != items[index - 1][0]:
            refuse_second_answer(messages)
    for name in SYSTEM:
        system = {"role": "system", "content": record.get(name)}
        if record.get(name) and system not in messages:  # else it repeats one of them
            get_text(record, name)
            messages.insert(0, system)
            masked = {index + 1 for index in masked}
    if any(message["role"] == "system" for message in messages[1:]):
        raise BadRecord("there must be one system message at most, and it must come first; join them there")
    tools += [parse_tools(record.get(name), f"'{name}'") for name in TOOLS]
    tools = [schemas for schemas in tools if schemas]
    if len(tools) > 1:
        raise BadRecord("'tools' are given more than once; keep one list of them")
    chat = Chat(messages, tools[0] if tools else None)
    turns = assistant_turns(chat)
    if get_flag(record, "mask_history"):
        masked.update(turns[:-1])
    return chat._replace(masked=tuple(index for index in turns if index in masked))


def check_texts(chat: Chat, count: int, last: str, is_trained: bool = True) -> None:
    """Raise BadRecord if a user's message or a trained turn has no text. count: the number of messages in the
    record, without an added system prompt. last: the name of the last message in errors, if it is not its
    number."""
    before = len(chat.messages) - count
    for index, message in enumerate(chat.messages):
        is_target = is_trained and message["role"] == "assistant" and index not in chat.masked
        if is_target or message["role"] == "user":
            is_named = last and index == len(chat.messages) - 1
            check_has_text(message, last if is_named else f"message {index + 1 - before}")


def refuse_second_answer(messages: list[dict]) -> None:
    """Raise BadRecord if the last message answers what the one before it has answered already."""
    both = messages[-2:]
    if len(both) == 2 and all(one["role"] == "assistant" and not one.get("tool_calls") for one in both):
        raise BadRecord(
            f"message {len(messages)} is an answer after an answer; remove one of them, or write the user's "
            "message between"
        )


def assistant_turns(chat: Chat) -> list[int]:
    """The indices of the assistant's messages."""
    return [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]


def turns_of(chat: Chat) -> list[tuple[str, str]]:
    """Each question of a conversation with the assistant's message after it, which may be empty."""
    return [
        (chat.messages[index - 1]["content"], chat.messages[index]["content"])
        for index in assistant_turns(chat)
        if index and chat.messages[index - 1]["role"] == "user"
    ]


def get_weight(record: dict) -> float:
    """The weight of a record's targets in the loss; 1 if it has none. Raises BadRecord."""
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
                f"{listed}; it sets how much the record counts in the loss: write a number from 0 to "
                f"{MAX_WEIGHT:,}, or remove it"
            )
    if len(weights) > 1:
        raise BadRecord(f"{' and '.join(map(repr, by_name))} differ; keep one of them")
    return weights.pop() if weights else 1.0


def weight_error(record: dict, what: str) -> BadRecord:
    """The error for a record that has a weight although `what` cannot have one."""
    names = " and ".join(f"'{name}'" for name in WEIGHTS if record.get(name) is not None)
    return BadRecord(f"{names}: {what} cannot have a weight; remove this field")


def pair_names(record: dict) -> tuple[str, str]:
    """The field names of the better and the worse answer in a preference record."""
    for names in PAIR_NAMES:
        if record.get(names[0]) is not None or record.get(names[1]) is not None:
            return names
    return PAIR


def find_reference(record: dict, answer: str) -> Any:
    """The reference for answers to a prompt, if it is not the last turn of the conversation: from a separate
    field, or from `answer` (the name of the answer's field) if that does not contain a turn."""
    gt, verl = record.get("gt"), record.get("reward_model")
    values = [
        record.get("answer"),
        gt[0] if isinstance(gt, list) and len(gt) == 1 else gt,
        verl.get("ground_truth") if isinstance(verl, dict) else None,
        record[answer] if answer and is_no_turn(record[answer]) else None,
    ]
    return next((value for value in values if value is not None and not holds_messages(value)), None)


def held_out_key(record: dict, is_document: bool) -> str:
    """The text whose hash decides whether a record is held out: the first question of its conversation (even
    if that is already rendered as ChatML), otherwise its text. Raises BadRecord.

    is_document: for pretraining, where a record's "text" comes first.
    """
    form = find_format(record, is_document)
    if form.document:
        text = get_text(record, form.document)
        question = CHATML_QUESTION.search(text)
        return question[1] if question else text
    key = form.key
    items = FORMATS[key](record, key) if key else read_answer(record, pair_names(record)[0])
    messages = [to_message(item, f"message {number}") for number, item in enumerate(items, 1)]
    for message in messages:
        if message["role"] == "user":
            return message["content"]
    return "\n".join(message["content"] for message in messages)


def unread_keys(record: dict, read: set[str]) -> set[str]:
    """The fields of a record that are not in `read`."""
    return {name for name, value in record.items() if value is not None and name not in read}


# --- record formats


def read_messages(record: dict, key: str) -> list:
    """A list of messages under a key."""
    messages = record[key]
    if not isinstance(messages, list) or not messages:
        raise BadRecord(f"'{key}' is {preview(messages)} instead of a list of messages")
    return messages


def read_turns(record: dict, key: str) -> list:
    """The messages of Firefly's {"human", "assistant"} and XTuner's {"system", "input", "output"} turns, each
    a question with its answer. Other fields of a turn go to its last message. Ordinary messages stay
    unchanged."""
    messages = []
    for turn in read_messages(record, key):
        if not isinstance(turn, dict) or turn.keys().isdisjoint(TURN_FIELDS):
            messages.append(turn)
            continue
        before = len(messages)
        for name, role in TURN_FIELDS.items():
            text = turn.get(name)
            if text is None or (role == "system" and not text):
                continue
            messages.append({"role": role, "content": text})
        others = {name: value for name, value in turn.items() if name not in TURN_FIELDS}
        if "output_with_loss" in others:  # XTuner's switch
            others["loss"] = others.pop("output_with_loss")
        if len(messages) > before:
            messages[-1] = others | messages[-1]
    return messages


def read_question(record: dict, key: str) -> list:
    """The messages before an answer: a history and a question, or a list of messages."""
    inputs = [get_text(record, name) for name in QUESTION_PARTS if record.get(name)]
    history = record.get("history") or []
    if isinstance(record[key], list):
        if history or inputs:
            raise BadRecord(f"'{key}' is a list of messages, so put 'history' and 'input' into it")
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
    """The messages of an answer: a text, a message or a list of messages; in a pair also a transcript."""
    value = record.get(key)
    if isinstance(value, dict | list):
        if not holds_messages(value):
            raise BadRecord(
                f"'{key}' is {preview(value)} instead of text; write one text, or messages with a role"
            )
        return value if isinstance(value, list) else [value]
    text = get_text(record, key)
    if key in PAIR and TRANSCRIPT.match(text):
        _, *pieces = TRANSCRIPT.split(text)
        return [
            {"role": ROLES[speaker.lower()], "content": turn_text.strip()}
            for speaker, turn_text in zip(pieces[::2], pieces[1::2], strict=True)
        ]
    return [{"role": "assistant", "content": text}]


def is_no_turn(value: Any) -> bool:
    """Whether an answer is only a reference to compare with: a number, or a list of texts."""
    return not isinstance(value, str) and not holds_messages(value)


def holds_messages(value: Any) -> bool:
    """Whether an answer is a message, or a list of messages."""
    messages = value if isinstance(value, list) else [value]
    return bool(messages) and all(isinstance(one, dict) and one.keys() & {"role", "from"} for one in messages)


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


def find_format(record: dict, is_document: bool = False) -> Format:
    """Find the fields with the content of a record. A question without an answer is only used if there is no
    other conversation. is_document: also accept a text, in `text` (which has priority) or in `content` if
    that is not part of a message or beside a conversation. Raises BadRecord."""
    if is_document and record.get("text") is not None:
        return Format(document="text")
    complete, unanswered = [], []
    for key in FORMATS:
        if record.get(key) is None:
            continue
        names = ANSWER_FIELDS.get(key, ())
        answers = [name for name in names if record.get(name) is not None]
        if answers or not names:
            complete.append(Format("", key, answers[0] if answers else ""))
        else:
            unanswered.append(Format("", key))
    if len(complete) > 1:
        raise BadRecord(f"both '{complete[0].key}' and '{complete[1].key}' in one record; keep one of them")
    if complete or unanswered:
        return (complete + unanswered)[0]
    is_content = is_document and record.get("content") is not None and "role" not in record
    return Format(document="content" if is_content else "")


def get_text(record: dict, key: str) -> str:
    """The text under a key. Raises BadRecord."""
    value = record.get(key)
    if not isinstance(value, str):
        raise BadRecord(f"'{key}' is {preview(value)} instead of text ({describe_keys(record)})")
    return value
