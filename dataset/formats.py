"""What a record must look like: a text (pretraining), a conversation (SFT) or two of them (DPO).

pretrain  {"text"}
SFT       {"conversations" | "messages": [...]}, with messages in any spelling of dataset/messages.py;
          or a question and its answer: {"instruction", "output"} (Alpaca), {"prompt", "completion"} (TRL) and the
          other pairs of ANSWERS, optional "input" or "context" (below the question) and "history": [[question,
          answer], ...]; beside either, optional "system" or "system_prompt", "tools" or "functions"
DPO       {"chosen": [...], "rejected": [...]}, two conversations that begin alike; or a conversation or a question of
          SFT's forms, and "chosen" and "rejected", each of them a text, a message or a list of messages

Data of another stage or another kind of model (images) are refused. What nothing reads is counted.
"""

from functools import cache
from typing import NamedTuple

from dataset.fields import objects_of, switch_of, text_of
from dataset.json_records import BadRecord, keys_of, kind_of, short
from dataset.messages import MEDIA, Turn, parse_message, refuse_media, unused_message_fields

LISTS = ("conversations", "messages")
ANSWERS = {
    "instruction": ("output", "response"),
    "prompt": ("completion", "response"),
    "question": ("answer", "response"),
    "query": ("response", "answer"),
}
BELOW = ("input", "context")
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
LABELS = ("kto_tag", "label")  # of KTO: whether the answer is a good one
WIDER = ("train_on_inputs", "train_on_prompt")  # switches that would train more than the assistant's turns
PAIR = ("chosen", "rejected")
PREFERENCE = (*PAIR, "chosen_messages", "rejected_messages", "rejected_response")
PREFERENCE += ("preferred_output", "non_preferred_output")
BESIDE = MEDIA.union(SYSTEM, TOOLS, LABELS, WIDER, PREFERENCE, ["mask_history"])
COLUMNS = BESIDE.union(["text", "history"], LISTS, ANSWERS, BELOW, *ANSWERS.values())  # all that anything reads


class Chat(NamedTuple):
    """A conversation as chat templates take it: messages with `role` and `content`, and the tools' JSON schemas."""

    messages: list[dict]
    tools: list[dict] | None
    masked: tuple[int, ...] = ()  # indices of the assistant's messages that are no targets
    is_good: bool | None = None  # a KTO record's label; a bad answer must not be trained


def to_text(record: dict) -> str:
    """The document of a pretraining record. Raises BadRecord."""
    if "text" not in record:
        _refuse_preferences(record)
        is_chat = any(record.get(key) is not None for key in (*LISTS, *ANSWERS))
        hint = "is this SFT data? " if is_chat else ""
        raise BadRecord(f"no 'text' in this record (its keys: {keys_of(record)}); {hint}write {{\"text\": ...}}")
    return text_of(record, "text")


def to_chat(record: dict, answered: bool = True) -> Chat:
    """The conversation of an SFT record in any format. `answered`: the assistant must speak. Raises BadRecord."""
    is_alone = BESIDE.isdisjoint(record)  # nothing that matters stands beside the conversation
    if not is_alone:
        _refuse_preferences(record)
        refuse_media(record, "beside the conversation")
    form = _form_of(record)
    if not form:
        hint = "is this pretraining data? " if "text" in record else ""
        raise BadRecord(
            f"no 'conversations', 'messages' or 'instruction' in this record (its keys: {keys_of(record)}); "
            f'{hint}write {{"conversations": [{{"role": ..., "content": ...}}, ...]}}'
        )
    turns = _turns(record, form[0]) if len(form) == 1 else _from_pair(record, *form)
    tools = [turn.tools for turn in turns if turn.tools]
    if not is_alone:
        turns = _masked(record, _with_system(record, turns))
        tools += [found for key in TOOLS if (found := objects_of(record.get(key), f"'{key}'"))]
    if len(tools) > 1:
        raise BadRecord("'tools' are given more than once; keep one list of them")
    messages = [turn.message for turn in turns]
    _check_order(messages, answered)
    masked = tuple(index for index, turn in enumerate(turns) if turn.is_masked)
    return Chat(messages, tools[0] if tools else None, masked, None if is_alone else _label(record))


def to_pair(record: dict) -> tuple[Chat, Chat]:
    """The two conversations of a preference record, with the chosen and with the rejected answer; of both only what
    follows their common beginning is trained. Raises BadRecord."""
    for key in PAIR:
        if not record.get(key):
            raise BadRecord(
                f"no '{key}' in this record (its keys: {keys_of(record)}); write "
                '{"conversations": [...], "chosen": ..., "rejected": ...}'
            )
    refuse_media(record, "beside the conversation")
    form = _form_of(record)
    question = [] if not form else _turns(record, form[0]) if len(form) == 1 else _question(record, form[0])
    answers = [_answer(record, key) for key in PAIR]
    if all(answer[0].message["role"] != "assistant" for answer in answers):  # two whole conversations
        if not all(turn.message in [other.message for other in answer] for turn in question for answer in answers):
            raise BadRecord(f"'chosen' and 'rejected' do not begin with '{form[0]}'; keep the answers in them alone")
        question = []
    elif not question:
        raise BadRecord("answers without a question; write it as 'prompt', 'conversations' or 'instruction'")
    turns = [_with_system(record, question + answer) for answer in answers]
    tools = [found for key in TOOLS if (found := objects_of(record.get(key), f"'{key}'"))]
    shared = min(len(each) for each in turns) - 1  # the last message is always an answer
    shared = next((i for i in range(shared) if turns[0][i].message != turns[1][i].message), shared)
    chats = []
    for key, each in zip(PAIR, turns, strict=True):
        messages = [turn.message for turn in each]
        _check_order(messages)
        if messages[-1]["role"] != "assistant":
            raise BadRecord(f"'{key}' does not end with a message of the assistant; remove what follows it")
        masked = tuple(i for i, turn in enumerate(each) if turn.message["role"] == "assistant" and i < shared)
        chats.append(Chat(messages, tools[0] if tools else None, masked))
    return chats[0], chats[1]


def _answer(record: dict, key: str) -> list[Turn]:
    """The messages of a text, a message or a list of messages."""
    value = record[key]
    if isinstance(value, str):
        return [_text_turn("assistant", value)]
    return [parse_message(value, f"'{key}'")] if isinstance(value, dict) else _turns(record, key, f"{key}'s ")


def _form_of(record: dict) -> tuple[str, ...]:
    """The fields that hold the conversation: a list of messages, or a question and its answer; () if there is none."""
    found: list[tuple[str, ...]] = [(key,) for key in LISTS if record.get(key) is not None]
    unanswered: list[tuple[str, ...]] = []
    for question, answers in ANSWERS.items():
        if record.get(question) is not None:
            answer = next((key for key in answers if record.get(key) is not None), None)
            (found if answer else unanswered).append((question, answer or answers[0]))
    if len(found) > 1:
        raise BadRecord(f"both '{found[0][0]}' and '{found[1][0]}' in one record; keep one of them")
    return (*found, *unanswered, ())[0]


def _refuse_preferences(record: dict) -> None:
    found = [f"'{key}'" for key in PREFERENCE if record.get(key)]
    if found:
        raise BadRecord(
            f"{' and '.join(found)}: a preference file (DPO), which is another stage; "
            f"for SFT write the good answer as the last message and remove the other one"
        )


def _turns(record: dict, key: str, prefix: str = "") -> list[Turn]:
    """A list of messages."""
    items = record[key]
    if not isinstance(items, list):
        raise BadRecord(f"'{key}' is {kind_of(items)} instead of a list of messages")
    if not items:
        raise BadRecord(f"'{key}' is an empty list; write messages into it or remove the line")
    return [parse_message(item, f"{prefix}message {number}") for number, item in enumerate(items, 1)]


def _from_pair(record: dict, question: str, answer: str) -> list[Turn]:
    """The turns of a question and its answer. Of TRL's conversational pairs only the completion is trained."""
    turns = _question(record, question)
    if answer == "completion" and isinstance(record.get(answer), list):
        return turns + _turns(record, answer, "completion's ")
    return [*turns, _text_turn("assistant", text_of(record, answer))]


def _question(record: dict, question: str) -> list[Turn]:
    """The turns before the answer."""
    history = record.get("history") or []
    if not isinstance(history, list):
        raise BadRecord(f"'history' is {kind_of(history)} instead of a list of [question, answer]")
    turns = []
    for number, turn in enumerate(history, 1):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn)):
            raise BadRecord(f"turn {number} of 'history' is not [question, answer], both of them text")
        turns += [_text_turn("user", turn[0]), _text_turn("assistant", turn[1])]
    below = [text_of(record, key) for key in BELOW if record.get(key)]
    if question == "prompt" and isinstance(record[question], list):
        if turns or below:
            raise BadRecord("'prompt' is a list of messages, so 'history', 'input' and 'context' belong into it")
        return [
            turn._replace(is_masked=turn.message["role"] == "assistant")
            for turn in _turns(record, question, "prompt's ")
        ]
    return [*turns, _text_turn("user", "\n".join([text_of(record, question), *below]))]


def _text_turn(role: str, text: str) -> Turn:
    return Turn({"role": role, "content": text}, [])


def _with_system(record: dict, turns: list[Turn]) -> list[Turn]:
    """The turns with the system message that stands beside them, unless it repeats one of theirs."""
    for key in SYSTEM:
        if record.get(key):
            turn = _text_turn("system", text_of(record, key))
            turns = turns if turn.message in [other.message for other in turns] else [turn, *turns]
    return turns


def _check_order(messages: list[dict], answered: bool = True) -> None:
    roles = [message["role"] for message in messages]
    if roles.count("system") > 1:
        raise BadRecord("two system messages in one conversation; join them into one")
    if "system" in roles[1:]:
        raise BadRecord("the system message is not the first one; move it to the front")
    if answered and "assistant" not in roles:
        raise BadRecord("no assistant turn, so nothing to learn; add the answer or remove the line")


def _masked(record: dict, turns: list[Turn]) -> list[Turn]:
    """The turns after the switches that stand beside the conversation."""
    for key in WIDER:
        if switch_of(record, key):
            raise BadRecord(f"'{key}' asks to train the user's text too; only the assistant is trained: remove it")
    if switch_of(record, "mask_history"):
        spoken = [index for index, turn in enumerate(turns) if turn.message["role"] == "assistant"]
        turns = [turn._replace(is_masked=True) if index in spoken[:-1] else turn for index, turn in enumerate(turns)]
    return turns


def _label(record: dict) -> bool | None:
    """A KTO record's label; a `label` that is neither true nor false means something else and is not read."""
    for key in LABELS:
        value = record.get(key)
        if isinstance(value, str):  # of a CSV file
            value = {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(value, bool):
            return value
        if key == "kto_tag" and value not in (None, ""):
            raise BadRecord(f"'kto_tag' is {short(value)} instead of true (a good answer) or false (a bad one)")
    return None


@cache
def _known(form: tuple[str, ...]) -> frozenset[str]:
    """The fields that a record of this form may have."""
    return BESIDE.union(form, () if len(form) == 1 else (*BELOW, "history"))


def unused_fields(record: dict, kind: str) -> list[str]:
    """Names of the fields of an accepted record that nothing reads; those of its messages as `messages.name`."""
    if kind == "pretrain":
        return [key for key, value in record.items() if key != "text" and value is not None]
    form = _form_of(record)
    known = _known(form)
    form += PAIR if kind == "dpo" else ()
    names = [key for key, value in record.items() if key not in known and value is not None]
    if record.get("label") is not None and _label(record) is None:
        names.append("label")
    for key in form:
        if isinstance(record.get(key), list):
            names += [f"{key}.{name}" for name in unused_message_fields(record[key])]
    return names
