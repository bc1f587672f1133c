"""Finds names and the wordings around them, by nothing but their distribution: "Where does _ live?" is a
wording if several old questions differ only in one place, and what stands in that place is a name. Names that
only texts mention are found by the sentences that they share with these names.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from statistics import median
from typing import NamedTuple

# a word, a number, white space, or one character; Chinese and Japanese have no border between words
CJK = r"\u3040-\u30ff\u3400-\u9fff"
PIECE = re.compile(rf"[^\W\d_{CJK}]+|\d+|\s+|.", re.DOTALL)
SENTENCE = re.compile(r"[^.!?。！？\n]*[.!?。！？\n]?")
MOST_PIECES = 4  # of a name
MIN_FILLERS = 4  # different names in a wording
MIN_SHARED = 2  # wordings in texts that a new name shares with known ones
LONGEST = 200  # characters of a question or a sentence that is compared
PIECE_COST = 1.6  # a name that is longer by one piece must occur in a wording with so many times the names


def has_cjk(text: str) -> bool:
    """Whether a text is in a language without borders between words."""
    return re.search(f"[{CJK}]", text) is not None


class Wording(NamedTuple):
    """A text with a place for a name."""

    before: str
    after: str

    def about(self, name: str) -> str:
        """The text about a name."""
        return f"{self.before}{name}{self.after}"


Fillers = dict[Wording, set[str]]


def spans(text: str) -> Iterator[tuple[Wording, str]]:
    """Each way to see a text as a name in a wording."""
    pieces = PIECE.findall(text)
    for first in range(len(pieces)):
        for last in range(first + 1, min(first + MOST_PIECES, len(pieces)) + 1):
            name = pieces[first:last]
            before, after = "".join(pieces[:first]), "".join(pieces[last:])
            if name[0].isalnum() and name[-1].isalnum() and is_wording(before, after):
                yield Wording(before, after), "".join(name)


def is_wording(before: str, after: str) -> bool:
    """Whether so much stands around a name that the rest is a wording: two words, or three characters of a
    language without borders between words."""
    pieces = [piece for piece in PIECE.findall(before) + PIECE.findall(after) if piece.isalnum()]
    return len(pieces) >= 2 and sum(map(len, pieces)) >= 3


def find_wordings(texts: Iterable[str]) -> Fillers:
    """The wordings that occur with MIN_FILLERS names in these texts, and their names."""
    found: Fillers = defaultdict(set)
    for text in texts:
        if len(text) <= LONGEST:
            for wording, name in spans(text):
                found[wording].add(name)
    return {wording: names for wording, names in found.items() if len(names) >= MIN_FILLERS}


def split_name(text: str, wordings: Fillers) -> tuple[Wording, str] | None:
    """A text as a name in the wording that occurs with the most names, where longer names count less. None if
    no wording fits."""

    def score(found: tuple[Wording, str]) -> float:
        return len(wordings[found[0]]) / PIECE_COST ** len(PIECE.findall(found[1]))

    fitting = [each for each in spans(text[:LONGEST]) if each[0] in wordings]
    return max(fitting, key=score, default=None)


class Names(NamedTuple):
    """The names of a set of questions. asked: name -> the wordings in which it is asked about. more: names
    that only texts mention -> known names that occur in the same sentences."""

    wordings: Fillers
    asked: dict[str, set[Wording]]
    more: dict[str, set[str]]

    def wordings_for(self, name: str) -> list[Wording]:
        """The wordings that fit a name: its own and those of the names that are like it."""
        names = {name} & self.asked.keys() | self.more.get(name, set())
        return sorted({wording for each in names for wording in self.asked[each]})


def find_names(questions: Iterable[str], texts: Iterable[str], most_texts: int = 3000) -> Names:
    """The names in questions, and names like them in texts."""
    questions = list(dict.fromkeys(questions))
    wordings = find_wordings(questions)
    asked: dict[str, set[Wording]] = defaultdict(set)
    for question in questions:
        if found := split_name(question, wordings):
            asked[found[1]].add(found[0])
    used = {wording: {name for name in asked if wording in asked[name]} for wording in wordings}
    used = {wording: names for wording, names in used.items() if len(names) >= MIN_FILLERS}
    kept = {name: found & used.keys() for name, found in asked.items()}
    # "Tell me about yourself" has the form of a question about a place, but yourself is asked in no other one
    usual = median(map(len, kept.values())) if kept else 0
    asked = {name: found for name, found in kept.items() if len(found) >= min(2, usual) and found}
    return Names(used, asked, names_in_texts(asked, islice(texts, most_texts)))


def names_in_texts(known: Iterable[str], texts: Iterable[str]) -> dict[str, set[str]]:
    """Names that occur in the same sentences as known ones, each with the names that it is like."""
    known = set(known)
    found: Fillers = defaultdict(set)
    for sentence in dict.fromkeys(each for text in texts for each in sentences(text)):
        for wording, name in spans(sentence.strip()[:LONGEST]):
            found[wording].add(name)
    like: dict[str, list[set[str]]] = defaultdict(list)
    for names in found.values():
        both = names & known
        if len(both) >= MIN_FILLERS // 2 and 2 * len(both) >= len(names) / 2:
            for name in names - known:
                like[name].append(both)
    return {name: set().union(*several) for name, several in like.items() if len(several) >= MIN_SHARED}


def sentences(text: str) -> list[str]:
    """The sentences of a text, with their ends."""
    return [found for found in SENTENCE.findall(text) if found.strip()]
