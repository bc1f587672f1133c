"""Held-out data split off by a hash of what a record asks or says: the same records for any order of records
and files, and for any form that a record is written in. A larger share holds out the records of a smaller
one, and more.

A conversation is chosen by its first question (`first_question`), whatever stands before and after it. So
samples of the same tokens are never on both sides, however their records spell tools, calls and reasoning,
and wherever they are cut. And a question is held out of all stages: of SFT, of pairs (DPO), of prompts (GRPO,
PPO, agents), and of pretraining on texts that the chat template made of conversations (`question_in`). Any
other text is chosen by all of itself.

A long document of plain text, such as a book, has no records to choose from. Its passages are chosen instead:
whole lines of about 2,000 characters in all. Passages that follow one another stay together. A shorter one is
a record like others.
"""

import hashlib
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import NamedTuple

from common.errors import UserError
from dataset.json_values import BadRecord
from dataset.plain_text import DocumentPart

# Up to 2,000 characters: the rest of the text, or whole lines, else words, else characters.
PASSAGE = re.compile(r".{1,2000}\Z|.{0,1999}\n|.{0,1999}\s|.{1,2000}", re.DOTALL)


class Split(NamedTuple):
    """The records that are held out, or the others, to train on."""

    share: float  # of the records, that is held out: above 0
    held_out: bool = False

    def includes_record(self, record: dict | BadRecord, key_of: Callable[[dict], str]) -> bool:
        """Whether a record belongs to this split; `key_of` gives the text that it is chosen by. A bad record
        is training data."""
        if isinstance(record, BadRecord):
            return not self.held_out
        try:
            key = key_of(record)
        except (BadRecord, RecursionError):
            return not self.held_out
        return self.includes(key)

    def includes(self, key: str) -> bool:
        """Whether what is chosen by this text belongs to this split. Differences of white space, case and
        Unicode form do not count, since a chat template or a tokenizer may remove them."""
        normal = " ".join(unicodedata.normalize("NFKC", key).casefold().split())
        digest = hashlib.sha256(normal.encode()).digest()
        is_held_out = int.from_bytes(digest[:8]) < self.share * 2**64
        return is_held_out == self.held_out

    def no_records_error(self, where: str) -> UserError:
        """The error for a split that has no record of `where`."""
        amount, other = ("none", "larger") if self.held_out else ("all", "smaller")
        return UserError(
            f"--eval_share {self.share:g} holds out {amount} of the records of {where}; give a {other} "
            "share, or held-out data in files of their own (--eval_data_path)"
        )

    def passages(self, document: DocumentPart) -> Iterator[DocumentPart]:
        """The stretches of a document (or a part of one) in this split; each counts for as many records as it
        has passages. They do not bring the text before them, which may belong to the other split."""
        passages = PASSAGE.findall(document["text"])
        position = 0
        for is_included, group in itertools.groupby(passages, self.includes):
            stretch = list(group)
            begins = document.begins and position == 0
            position += len(stretch)
            ends = document.ends and position == len(passages)
            if is_included:
                part = DocumentPart("".join(stretch), begins, ends)
                part.num_records = len(stretch)
                yield part


def is_one_passage(document: DocumentPart) -> bool:
    """Whether this is a whole document of plain text, no longer than a passage."""
    return document.begins and document.ends and len(PASSAGE.findall(document["text"])) == 1


def first_question(messages: list[dict]) -> str:
    """What a conversation is chosen by: its first message of the user, or without any the text of all
    messages."""
    for message in messages:
        if message["role"] == "user":
            return message["content"]
    return "\n".join(message["content"] for message in messages)


def question_in(text: str, around_question: tuple[str, str] | None) -> str | None:
    """The first question of a text that a chat template made of a conversation, else None. `around_question`:
    what the template writes before and after a user's message (`ChatTemplate.around_question`)."""
    if around_question is None:
        return None
    before, after = around_question
    begin = text.find(before)
    if begin < 0:
        return None
    begin += len(before)
    end = text.find(after, begin)
    return text[begin:] if end < 0 else text[begin:end]
