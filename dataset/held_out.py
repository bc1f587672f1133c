"""Held-out data, chosen by a hash of a record's first question or text. The choice is the same for any order
of records and files, in every stage and in any record format. A larger share holds out all records of a
smaller one, and more.

For a long document of plain text, such as a book, the end is held out.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dataset.files import Record, is_plain_text
from dataset.messages import BadRecord
from dataset.records import held_out_key

NGRAM = 4  # characters, by which questions are compared
LEAK_OVERLAP = 0.8  # of the n-grams, from which on two questions are nearly equal
MIN_SPLIT_CHARACTERS = (
    10_000  # characters of a plain text that is divided; a shorter one is a record like others
)
# not the sign, point or comma of a number
PUNCTUATION_AND_SPACE = re.compile(r"""\s+|(?<!\d)[.,]|[.,](?!\d)|[;:!?'"()。、“”‘’《》「」…]""")


def normal_form(text: str) -> str:
    """A text in lower case and NFKC normalisation, without punctuation and white space."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return PUNCTUATION_AND_SPACE.sub("", folded) or "".join(folded.split())


def count_leaks(trained: Iterable[str], held_out: Iterable[str]) -> int:
    """How many held-out questions nearly equal a trained one. Two questions count as nearly equal if they
    share at least LEAK_OVERLAP of the n-grams of the longer one, so they differ by a word or a number."""
    ngrams_of = [character_ngrams(question) for question in held_out]
    questions_with: dict[str, list[int]] = {}  # n-gram -> held-out questions that have it
    for index, ngrams in enumerate(ngrams_of):
        for ngram in ngrams:
            questions_with.setdefault(ngram, []).append(index)
    leaked: set[int] = set()
    for question in trained:
        ngrams = character_ngrams(question)
        shared = Counter(index for ngram in ngrams for index in questions_with.get(ngram, ()))
        for index, count in shared.items():
            if count >= LEAK_OVERLAP * max(len(ngrams), len(ngrams_of[index])):
                leaked.add(index)
    return len(leaked)


def character_ngrams(text: str) -> set[str]:
    """The n-grams of NGRAM characters in the normal form of a text."""
    form = normal_form(text)
    return {form[i : i + NGRAM] for i in range(max(1, len(form) - NGRAM + 1))}


class Split(NamedTuple):
    """Selects either the held-out records or the others, to train on."""

    share: float  # of the records, that is held out: above 0
    held_out: bool = False

    def choose(self, records: Iterator[Record], paths: list[str], is_document: bool) -> Iterator[Record]:
        """The records in this split. A bad record is training data. is_document: of `held_out_key`."""
        for source, record in records:
            if isinstance(record, BadRecord):
                is_included = not self.held_out
            elif is_plain_text(paths[source.file]) and len(record["text"]) > MIN_SPLIT_CHARACTERS:
                record = {"text": self.split_text(record["text"])}
                is_included = True
            else:
                is_included = self.includes_record(record, is_document)
            if is_included:
                yield source, record

    def includes_record(self, record: dict, is_document: bool) -> bool:
        """Whether a record belongs to this split."""
        try:
            return self.includes(held_out_key(record, is_document))
        except Exception:  # it will be reported as a bad record
            return not self.held_out

    def includes(self, key: str) -> bool:
        """Whether a record with this `held_out_key` belongs to this split."""
        digest = hashlib.sha256(normal_form(key).encode()).digest()
        is_held_out = int.from_bytes(digest[:8]) < self.share * 2**64
        return is_held_out == self.held_out

    def split_text(self, text: str) -> str:
        """This split's part of a long text: the beginning for training, or the held-out end. The text is
        divided at a line end, unless very long lines would make the held-out part more than twice the
        share."""
        limit = round(len(text) * (1 - self.share))
        at = text.rfind("\n", 2 * limit - len(text), limit) + 1 or limit
        return text[at:] if self.held_out else text[:at]
