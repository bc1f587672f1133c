"""What a correction changes: which questions it means, and which sentences say the old fact."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from dataset.held_out import normal_form
from dataset.records import Chat, assistant_turns
from scripts.teaching.corrections import Correction
from scripts.teaching.slots import PIECE, Names, Wording, sentences, split_name

Alike = dict[Wording, list[Wording]]  # the other wordings of the same question
Pairs = list[tuple[str, str]]  # questions and their answers
MOST_SAME = 8  # different questions that an old answer has, if a correction of one is meant for all
MIN_SHARED_ANSWER = 4  # different questions
RARE = 2  # old questions, at most, that have the rarest words of a correction
MIN_ALIKE = 2  # names for which two wordings have the same answer


class Change(NamedTuple):
    """What a correction changes in old records. name: what it is about, if that is known. old: the answer
    before. like: other wordings of its question. same: normal forms of old questions that get its answer,
    too."""

    correction: Correction
    name: str
    old: str
    like: list[Wording]
    same: set[str]


def turns_of(chat: Chat) -> Pairs:
    """The questions of a conversation with their answers."""
    found = []
    for index in assistant_turns(chat):
        if index and chat.messages[index - 1]["role"] == "user":
            found.append((chat.messages[index - 1]["content"], chat.messages[index]["content"]))
    return found


def shared_answers(pairs: Pairs) -> dict[str, str]:
    """Old questions whose answer is that of several questions, such as small talk and refusals, with their
    answers."""
    questions: dict[str, set[str]] = defaultdict(set)
    for question, answer in pairs:
        questions[answer].add(question)
    several = {answer: found for answer, found in questions.items() if len(found) >= MIN_SHARED_ANSWER}
    return {question: answer for answer in sorted(several) for question in sorted(several[answer])}


def wordings_alike(pairs: Pairs, names: Names) -> Alike:
    """The wordings of the same question: those that get the same answers for the same names."""
    answers: dict[str, dict[Wording, str]] = defaultdict(dict)
    for question, answer in pairs:
        if found := split_name(question, names.wordings):
            answers[found[1]][found[0]] = normal_form(answer)
    same: Counter[tuple[Wording, Wording]] = Counter()
    other: Counter[tuple[Wording, Wording]] = Counter()
    for asked in answers.values():
        if Counter(asked.values()).most_common(1)[0][1] == len(asked) > 2:
            continue  # a name that has one answer to everything tells nothing
        for one in asked:
            for two in asked:
                if one != two:
                    (same if asked[one] == asked[two] else other)[one, two] += 1
    alike: Alike = defaultdict(list)
    for (one, two), count in same.items():
        if count >= MIN_ALIKE and count > 4 * other[one, two]:
            alike[one].append(two)
    return alike


def find_change(correction: Correction, old: str, pairs: Pairs, names: Names, alike: Alike) -> Change:
    """What a correction changes. old: the model's answer before."""
    question = correction.question
    found = split_name(question, names.wordings)
    is_old = any(normal_form(asked) == normal_form(question) for asked, _ in pairs)
    if found and (found[1] in names.asked or not is_old):
        return Change(correction, found[1], old, alike.get(found[0], []), {normal_form(question)})
    known = names.asked.keys() | names.more.keys()
    name = max((each for each in known if mentions(question, each)), key=len, default="")
    same = {normal_form(question)} | same_subject(question, old, pairs)
    told = {normal_form(answer) for asked, answer in pairs if normal_form(asked) in same}
    if not name and told:
        questions = {normal_form(asked) for asked, answer in pairs if normal_form(answer) in told}
        if len(questions) <= MOST_SAME:
            same |= questions
    return Change(correction, name, old, [], same)


def same_subject(question: str, old: str, pairs: Pairs) -> set[str]:
    """The normal forms of old questions that share the rarest words of a question, and had the model's answer
    to it."""
    containing = units_of(asked for asked, _ in pairs)
    found = [containing[unit] for unit in units(question) if unit in containing]
    rarest = min(map(len, found), default=RARE + 1)
    if rarest > RARE:
        return set()
    near = set().union(*(asked for asked in found if len(asked) == rarest))
    return {normal_form(asked) for asked, told in pairs if normal_form(told) == normal_form(old)} & near


def units_of(questions: Iterable[str]) -> dict[str, set[str]]:
    """The units of all questions, each with the normal forms of the questions that have it."""
    containing: dict[str, set[str]] = defaultdict(set)
    for asked in dict.fromkeys(questions):
        for unit in units(asked):
            containing[unit].add(normal_form(asked))
    return containing


def units(text: str) -> set[str]:
    """The words of a text; of a language without borders between words each two characters."""
    pieces = PIECE.findall(text.casefold())
    words = {piece for piece in pieces if len(piece) > 1 and piece.isalnum()}
    single = [piece if len(piece) == 1 and piece.isalnum() else " " for piece in pieces]
    return words | {a + b for a, b in pairwise(single) if " " not in (a, b)}


def mentions(text: str, name: str) -> bool:
    """Whether a text contains a name as whole words."""
    if not name or name not in text:
        return False
    pieces = PIECE.findall(name)
    if not (pieces[0][0].isascii() or pieces[-1][-1].isascii()):
        return True
    own = PIECE.findall(text)
    return any(own[i : i + len(pieces)] == pieces for i in range(len(own)))


def is_contradicted(change: Change, question: str, answer: str) -> bool:
    """Whether a correction says something else about an old turn."""
    if normal_form(answer) == normal_form(change.correction.text):
        return False
    if normal_form(question) in change.same:
        return True
    if not change.name:
        return False
    asked_like = any(question == wording.about(change.name) for wording in change.like)
    is_old = normal_form(answer) == normal_form(change.old) and mentions(answer, change.name)
    return asked_like or is_old


# --- texts


def without_old_facts(text: str, by_name: dict[str, list[Change]]) -> str:
    """A text in which sentences say what is corrected. A sentence whose old fact has no counterpart in the
    corrected answer is left out."""
    changes = [change for name, several in by_name.items() if mentions(text, name) for change in several]
    kept = []
    for sentence in sentences(text) if changes else [text]:
        for change in changes:
            old, new = difference(change.old, change.correction.text)
            if old and mentions(sentence, change.name) and mentions(sentence, old):
                sentence = sentence.replace(old, new) if new else ""
        kept.append(sentence)
    return "".join(kept)


def difference(old: str, new: str) -> tuple[str, str]:
    """The part in which two answers differ, if they begin or end alike; else ("", "")."""
    one, two = PIECE.findall(old), PIECE.findall(new)
    first = 0
    while first < min(len(one), len(two)) and one[first] == two[first]:
        first += 1
    last = 0
    while last < min(len(one), len(two)) - first and one[-1 - last] == two[-1 - last]:
        last += 1
    if first + last < min(len(one), len(two)) / 2:
        return "", ""
    return "".join(one[first : len(one) - last]), "".join(two[first : len(two) - last])
