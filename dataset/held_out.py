"""Held-out data split off by a hash of what a record says: the same records for any order of records and files, and for
any form that a record is written in. Equal records are all held out, or none of them; a larger share holds out the
records of a smaller one, and more.

A long document of plain text, such as a book, has no records to choose from. Its passages are chosen instead: whole
lines of about 2,000 characters in all. Passages that follow one another stay together.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from common.errors import UserError
from dataset.json_records import BadRecord
from dataset.text_files import DocumentPart

# Up to 2,000 characters: the rest of the text, or whole lines, else words, else characters.
PASSAGE = re.compile(r".{1,2000}\Z|.{0,1999}\n|.{0,1999}\s|.{1,2000}", re.DOTALL)


class Part(NamedTuple):
    """The records to read: all of them (share 0), those that are held out, or the others, to train on."""

    share: float = 0.0  # of the records, that is held out
    held_out: bool = False

    def takes(self, record: dict | BadRecord, content: Callable[[dict], Any]) -> bool:
        """Whether the part has a record; `content`: what a record says (`has`). A bad record is training data."""
        try:
            if isinstance(record, BadRecord):
                raise record
            return not self.share or self.has(content(record))
        except (BadRecord, RecursionError):
            return not self.held_out

    def has(self, content: Any) -> bool:
        """Whether the part has what says this: a JSON value, the same in whatever form it was written."""
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
        return (int.from_bytes(digest[:8]) < self.share * 2**64) == self.held_out

    def fingerprint(self) -> dict[str, float]:
        """The share, where there is one, for the run fingerprint."""
        return {"eval_share": self.share} if self.share else {}

    def is_empty(self, where: str) -> UserError:
        """The error for a part that has no record of `where`."""
        amount, other = ("none", "larger") if self.held_out else ("all", "smaller")
        return UserError(
            f"--eval_share {self.share:g} holds out {amount} of the records of {where}; give a {other} share, or "
            "held-out data in files of their own (--eval_data_path)"
        )

    def passages(self, document: DocumentPart) -> Iterator[tuple[DocumentPart, int]]:
        """The stretches of a document (or a part of one) that the part has, and the number of passages of each. They do
        not bring what stands before them, which may be of the other part."""
        passages, position = PASSAGE.findall(document["text"]), 0
        for is_mine, group in itertools.groupby(passages, self.has):
            count = len(list(group))
            begins, ends = position == 0 and document.begins, position + count == len(passages) and document.ends
            stretch = DocumentPart(begins=begins, ends=ends)
            stretch["text"] = "".join(passages[position : position + count])
            position += count
            if is_mine:
                yield stretch, count


ALL = Part()
