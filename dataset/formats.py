"""What a record must look like: a text (pretraining), a conversation (SFT) or two of them (DPO).

pretrain  {"text"}
SFT       {"conversations" | "messages": [...]}, with messages in any spelling of dataset/messages.py;
          or a question and its answer: {"instruction", "output"} (Alpaca), {"prompt", "completion"} (TRL) and
          the other pairs of FORMATS, optional "input" or "context" (below the question) and "history":
          [[question, answer], ...]; beside either, optional "system" or "system_prompt", "tools" or
          "functions"
DPO       {"chosen": [...], "rejected": [...]}, two conversations that begin alike, which may stand beside their
          beginning or a repetition of the chosen one; or a conversation or a question of SFT's forms, and
          "chosen" and "rejected", each of them a text, a message or a list of messages

Another form of conversations is one more entry of FORMATS. Data of another stage or another kind of model
(images) are refused. What nothing reads is counted.
"""

from collections.abc import Callable, Iterator, Set
from typing import NamedTuple

from dataset.json_records import BadRecord, keys_of, kind_of, objects_of, short, switch_of, text_of
from dataset.messages import FIELDS, REFUSED, Turn, parse_message, refuse

INPUT_FIELDS = ("input", "context")  # what a question is about, written below it
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
LABELS = ("kto_tag", "label")  # of KTO: whether the answer is a good one
PAIR = ("chosen", "rejected")
PREFERENCE = (*PAIR, "chosen_messages", "rejected_messages", "rejected_response")
PREFERENCE += ("preferred_output", "non_preferred_output")
# Read beside the conversation, whatever its format.
COMPANION_FIELDS = frozenset(REFUSED).union(SYSTEM, TOOLS, LABELS, PREFERENCE, ["mask_history"])


class Chat(NamedTuple):
    """A conversation as chat templates take it: messages with `role` and `content`, and the tools' JSON
    schemas."""

    messages: list[dict]
    tools: list[dict] | None
    masked: tuple[int, ...] = ()  # indices of the assistant's messages that are no targets


class RecordFormat(NamedTuple):
    """How a record holds its conversation, under a key of FORMATS.

    read: the turns, given the record and that key; of a format with answers those before the answer. answers:
    the fields of which one holds the answer. fields: the others that `read` reads.
    """

    read: Callable[[dict, str], list[Turn]]
    answers: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


def _messages(record: dict, key: str, prefix: str = "") -> list[Turn]:
    """A list of messages; `prefix`: what to call one of them, for messages."""
    items = record[key]
    if not isinstance(items, list):
        raise BadRecord(f"'{key}' is {kind_of(items)} instead of a list of messages")
    if not items:
        raise BadRecord(f"'{key}' is an empty list; write messages into it or remove the line")
    return [parse_message(item, f"{prefix}message {number}") for number, item in enumerate(items, 1)]


def _question(record: dict, key: str) -> list[Turn]:
    """The turns before an answer: a history and a question, or a list of messages, of which none is
    trained."""
    history = record.get("history") or []
    if not isinstance(history, list):
        raise BadRecord(f"'history' is {kind_of(history)} instead of a list of [question, answer]")
    turns = []
    for number, turn in enumerate(history, 1):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn)):
            raise BadRecord(f"turn {number} of 'history' is not [question, answer], both of them text")
        turns += [text_turn("user", turn[0]), text_turn("assistant", turn[1])]
    below = [text_of(record, name) for name in INPUT_FIELDS if record.get(name)]
    if not isinstance(record[key], list):
        return [*turns, text_turn("user", "\n".join([text_of(record, key), *below]))]
    if turns or below:
        raise BadRecord(f"'{key}' is a list of messages, so 'history', 'input' and 'context' belong into it")
    turns = _messages(record, key, f"{key}'s ")
    return [turn._replace(is_masked=turn.message["role"] == "assistant") for turn in turns]


def text_turn(role: str, text: str) -> Turn:
    """A turn that is nothing but a text."""
    return Turn({"role": role, "content": text}, [])


FORMATS: dict[str, RecordFormat] = {  # by the key that tells the format
    "conversations": RecordFormat(_messages),
    "messages": RecordFormat(_messages),
    "instruction": RecordFormat(_question, ("output", "response"), (*INPUT_FIELDS, "history")),
    "prompt": RecordFormat(_question, ("completion", "response"), (*INPUT_FIELDS, "history")),
    "question": RecordFormat(_question, ("answer", "response"), (*INPUT_FIELDS, "history")),
    "query": RecordFormat(_question, ("response", "answer"), (*INPUT_FIELDS, "history")),
}


def known_fields() -> frozenset[str]:
    """All fields that are read in a record of some format."""
    fields = COMPANION_FIELDS.union(["text"], FORMATS)
    return fields.union(*(each.answers + each.fields for each in FORMATS.values()))


def list_fields() -> set[str]:
    """The fields that may hold a list, in a CSV file as JSON text."""
    return {"history", *PREFERENCE, *(key for key, each in FORMATS.items() if not each.answers)}


def conversation_fields(record: dict) -> frozenset[str]:
    """The fields that are read in this record of a conversation or a preference."""
    key, answer = _key_and_answer(record)
    fields = COMPANION_FIELDS.union([key, answer], FORMATS[key].fields) if key else COMPANION_FIELDS
    is_kto_label = str(record.get("label")).lower() in ("true", "false")  # not the number of a class
    return fields if is_kto_label else fields - {"label"}


def unread_fields(record: dict, fields: Set[str]) -> Iterator[str]:
    """Names of the fields of a record that are not among those that are read, and, as `messages.name`, of its
    messages."""
    for key, value in record.items():
        if key not in fields and value is not None:
            yield key
        for item in value if isinstance(value, list) and key in fields and key not in TOOLS else ():
            names = item if isinstance(item, dict) else {}
            yield from (f"{key}.{name}" for name in names if name not in FIELDS and names[name] is not None)


def to_text(record: dict) -> str:
    """The document of a pretraining record. Raises BadRecord."""
    if "text" not in record:
        _refuse_preferences(record)
        is_chat = any(record.get(key) is not None for key in FORMATS)
        hint = "is this SFT data? " if is_chat else ""
        raise BadRecord(
            f"no 'text' in this record (its keys: {keys_of(record)}); {hint}write {{\"text\": ...}}"
        )
    return text_of(record, "text")


def to_chat(record: dict, answered: bool = True) -> Chat:
    """The conversation of an SFT record in any form. `answered`: the assistant must speak. Raises
    BadRecord."""
    _refuse_preferences(record)
    refuse(record, "beside the conversation")
    if answered:
        _refuse_bad_answers(record)
    key, answer = _key_and_answer(record)
    if not key:
        hint = "is this pretraining data? " if "text" in record else ""
        raise BadRecord(
            f"no 'conversations', 'messages' or 'instruction' in this record (its keys: {keys_of(record)}); "
            f'{hint}write {{"conversations": [{{"role": ..., "content": ...}}, ...]}}'
        )
    turns = FORMATS[key].read(record, key)
    turns = _with_system(record, turns + _answer(record, answer) if answer else turns)
    messages = [turn.message for turn in turns]
    _check_order(messages, answered)
    masked = {index for index, turn in enumerate(turns) if turn.is_masked}
    if switch_of(record, "mask_history"):
        masked.update(
            [index for index, message in enumerate(messages) if message["role"] == "assistant"][:-1]
        )
    return Chat(messages, _tools(record, turns), tuple(sorted(masked)))


def to_pair(record: dict) -> tuple[Chat, Chat]:
    """The two conversations of a preference record, with the chosen and with the rejected answer; of both
    only what follows their common beginning is trained. Raises BadRecord."""
    for side in PAIR:
        if not record.get(side):
            raise BadRecord(
                f"no '{side}' in this record (its keys: {keys_of(record)}); write "
                '{"conversations": [...], "chosen": ..., "rejected": ...}'
            )
    refuse(record, "beside the conversation")
    key, _ = _key_and_answer(record)
    question = FORMATS[key].read(record, key) if key else []
    answers = [_answer(record, side) for side in PAIR]
    if all(answer[0].message["role"] != "assistant" for answer in answers):  # two whole conversations
        asked, *whole = ([turn.message for turn in turns] for turns in (question, *answers))
        if asked != whole[0] and not all(message in messages for message in asked for messages in whole):
            raise BadRecord(
                f"'chosen' and 'rejected' do not begin with '{key}'; keep the answers in them alone"
            )
        question = []
    elif not question:
        raise BadRecord("answers without a question; write it as 'prompt', 'conversations' or 'instruction'")
    turns = [_with_system(record, question + answer) for answer in answers]
    shared = min(len(each) for each in turns) - 1  # the last message is always an answer
    shared = next((i for i in range(shared) if turns[0][i].message != turns[1][i].message), shared)
    chats = []
    for side, each in zip(PAIR, turns, strict=True):
        messages = [turn.message for turn in each]
        _check_order(messages)
        if messages[-1]["role"] != "assistant":
            raise BadRecord(f"'{side}' does not end with a message of the assistant; remove what follows it")
        masked = tuple(i for i, turn in enumerate(each) if turn.message["role"] == "assistant" and i < shared)
        chats.append(Chat(messages, _tools(record, each), masked))
    return chats[0], chats[1]


def _key_and_answer(record: dict) -> tuple[str, str]:
    """The key of FORMATS that holds a record's conversation and the field of its answer, each "" if there is
    none. A question without an answer is only taken where nothing else is there."""
    answers = {}
    for key, each in FORMATS.items():
        if record.get(key) is not None:
            answers[key] = next((field for field in each.answers if record.get(field) is not None), "")
    complete = [key for key, answer in answers.items() if answer or not FORMATS[key].answers]
    if len(complete) > 1:
        raise BadRecord(f"both '{complete[0]}' and '{complete[1]}' in one record; keep one of them")
    if complete:
        return complete[0], answers[complete[0]]
    if answers:
        key = next(iter(answers))
        return key, FORMATS[key].answers[0]
    return "", ""


def _answer(record: dict, key: str) -> list[Turn]:
    """The turns of an answer: a text, a message or a list of messages."""
    value = record.get(key)
    if isinstance(value, dict):
        return [parse_message(value, f"'{key}'")]
    if isinstance(value, list):
        return _messages(record, key, f"{key}'s ")
    return [text_turn("assistant", text_of(record, key))]


def _refuse_bad_answers(record: dict) -> None:
    """Raise BadRecord for an answer that KTO calls a bad one."""
    for key in LABELS:
        if str(record.get(key)).lower() == "false":
            raise BadRecord(
                f"'{key}' is false: a bad answer (KTO), which SFT must not train; remove or skip such records"
            )
    tag = record.get("kto_tag")
    if tag not in (None, "") and str(tag).lower() != "true":
        raise BadRecord(f"'kto_tag' is {short(tag)}; write true (a good answer) or false (a bad one)")


def _refuse_preferences(record: dict) -> None:
    names = [f"'{key}'" for key in PREFERENCE if record.get(key)]
    if names:
        raise BadRecord(
            f"{' and '.join(names)}: a preference file (DPO), which is another stage; "
            f"for SFT write the good answer as the last message and remove the other one"
        )


def _with_system(record: dict, turns: list[Turn]) -> list[Turn]:
    """The turns with the system message that stands beside them, unless it repeats one of theirs."""
    for key in SYSTEM:
        if record.get(key):
            turn = text_turn("system", text_of(record, key))
            turns = turns if turn.message in [other.message for other in turns] else [turn, *turns]
    return turns


def _tools(record: dict, turns: list[Turn]) -> list[dict] | None:
    """The tools that stand beside a conversation or on one of its messages."""
    beside = [objects_of(record.get(key), f"'{key}'") for key in TOOLS]
    lists = [tools for tools in [*(turn.tools for turn in turns), *beside] if tools]
    if len(lists) > 1:
        raise BadRecord("'tools' are given more than once; keep one list of them")
    return lists[0] if lists else None


def _check_order(messages: list[dict], answered: bool = True) -> None:
    roles = [message["role"] for message in messages]
    if roles.count("system") > 1:
        raise BadRecord("two system messages in one conversation; join them into one")
    if "system" in roles[1:]:
        raise BadRecord("the system message is not the first one; move it to the front")
    if answered and "assistant" not in roles:
        raise BadRecord("no assistant turn, so nothing to learn; add the answer or remove the line")
