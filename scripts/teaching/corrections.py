"""Reads corrections: the answers that a person would have liked, in any form that SFT reads."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from common.errors import UserError
from dataset.files import expand_paths, format_source, read_records
from dataset.held_out import normal_form
from dataset.messages import BadRecord
from dataset.records import assistant_turns, parse
from dataset.report import describe_error
from model.answers import CALL, END_CALL, parse_call

WORDINGS = "wordings"  # field of a record: other wordings of its last question, which are only asked


class Correction(NamedTuple):
    """What the assistant should answer. messages: the conversation up to the user's question. wordings: other
    wordings of the question. source: FILE:LINE."""

    messages: list[dict]
    answer: dict
    tools: list[dict] | None
    wordings: list[str]
    source: str

    @property
    def question(self) -> str:
        """The user's message that is answered."""
        return self.messages[-1]["content"]

    @property
    def text(self) -> str:
        """The answer, without thoughts."""
        return self.answer["content"]

    @property
    def written(self) -> str:
        """The answer as a model writes it, with its calls of tools, without thoughts."""
        given = [call.get("function", call) for call in self.answer.get("tool_calls") or []]
        calls = [json.dumps(parse_call(json.dumps(call)), ensure_ascii=False) for call in given]
        parts = [self.text] if self.text else []
        return "\n".join([*parts, *(f"{CALL}{call}{END_CALL}" for call in calls)])

    @property
    def key(self) -> str:
        """Equal for corrections of the same question in the same conversation."""
        said = [f"{message['role']}: {normal_form(message['content'])}" for message in self.messages]
        return "\n".join(said) or self.question

    def in_words(self, question: str) -> list[dict]:
        """The conversation with the question in other words."""
        return [*self.messages[:-1], {**self.messages[-1], "content": question}]

    def record(self) -> dict[str, Any]:
        """The correction as a record of SFT that trains this answer alone."""
        record: dict[str, Any] = {"messages": [*self.messages, self.answer], "mask_history": True}
        if self.tools:
            record["tools"] = self.tools
        return record | ({WORDINGS: self.wordings} if self.wordings else {})


def read_corrections(data_path: str) -> list[Correction]:
    """The corrections in files of SFT records: each answer that SFT would train. Equal ones count once.
    Raises UserError for a record that SFT cannot read, and if two answers to a question differ."""
    paths = expand_paths(data_path)
    found = []
    for source, record in read_records(paths):
        place = format_source(paths[source.file], source.line)
        try:
            if isinstance(record, BadRecord):
                raise record
            found += corrections_in(record, place)
        except BadRecord as error:
            raise UserError(f"{place}: {describe_error(error)}") from error
    if not found:
        raise UserError(f"{data_path} holds no corrections")
    return without_contradictions(found)


def corrections_in(record: dict, place: str) -> list[Correction]:
    """The corrections in a record. Raises BadRecord."""
    (chat,) = parse(record, "sft").chats
    wordings = record.get(WORDINGS) or []
    if not isinstance(wordings, list) or not all(isinstance(each, str) and each.strip() for each in wordings):
        raise BadRecord(f"'{WORDINGS}' must be a list of questions in other words")
    found = []
    for index in assistant_turns(chat):
        if index in chat.masked:
            continue
        if not index or chat.messages[index - 1]["role"] != "user":
            raise BadRecord("a corrected answer must follow a message of the user")
        is_last = index == assistant_turns(chat)[-1]
        answer = chat.messages[index]
        found.append(
            Correction(chat.messages[:index], answer, chat.tools, wordings if is_last else [], place)
        )
    if not found:
        raise BadRecord(
            "no answer is trained ('train': false); leave the mark out where it is the correction"
        )
    return found


def without_contradictions(corrections: Iterable[Correction]) -> list[Correction]:
    """The corrections, each once. Raises UserError if two answers to the same question differ."""
    found: dict[str, Correction] = {}
    for correction in corrections:
        first = found.setdefault(correction.key, correction)
        if first.answer != correction.answer:
            raise UserError(
                f"{first.source} and {correction.source} correct the same question "
                f"({correction.question[:60]!r}) in two ways; remove one of them"
            )
        wordings = list(dict.fromkeys(first.wordings + correction.wordings))
        found[correction.key] = first._replace(wordings=wordings)
    return list(found.values())


def merged(kept: list[Correction], new: list[Correction]) -> tuple[list[Correction], int]:
    """Earlier corrections with new ones, and how many new ones replace an earlier one of the same
    question."""
    found = {correction.key: correction for correction in kept}
    replaced = sum(each.key in found and found[each.key].answer != each.answer for each in new)
    for each in new:
        earlier = found.get(each.key)
        wordings = list(dict.fromkeys((earlier.wordings if earlier else []) + each.wordings))
        found[each.key] = each._replace(wordings=wordings)
    return list(found.values()), replaced
