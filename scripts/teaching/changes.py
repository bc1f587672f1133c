"""What a correction changes: which questions it means, and which sentences say the old fact."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache, partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from dataset.held_out import normal_form
from dataset.records import Chat, turns_of
from scripts.teaching.corrections import Correction
from scripts.teaching.slots import (
    LONGEST,
    PIECE,
    Names,
    Wording,
    find_names,
    has_cjk,
    sentences,
    spans,
    split_name,
)

Alike = dict[Wording, list[Wording]]  # the other wordings of the same question
Pairs = list[tuple[str, str]]  # questions and their answers
Splits = dict[str, tuple[Wording, str]]
MOST_SAME = 8  # different questions that an old answer has, if a correction of one is meant for all
MIN_SHARED_ANSWER = 4  # different questions
RARE = 2  # old questions, at most, that have the rarest words of a correction
# share of an answer's pieces that the answers to questions of its kind have, too, and how many are compared;
# share of the best share that other wordings of the question have
SAME_FORM, ANSWERS_COMPARED, NEARLY = 0.6, 20, 0.95
NAME = "\ue000"  # stands for a name; a character without meaning
MIN_ALIKE = 2  # names for which two wordings have the same answer


form = cache(normal_form)  # each text is compared many times


class Old(NamedTuple):
    """What the old conversations of a model say. splits: questions as a name in a wording. no_names: words in
    the place of a name that answers do not repeat, such as "she". alike: to each wording the others of the
    same question. shared: questions whose answer is that of several questions, such as small talk and
    refusals, with their answers. containing: to each unit the normal forms of the questions that have it."""

    pairs: Pairs
    names: Names
    splits: Splits
    no_names: set[str]
    alike: Alike
    shared: dict[str, str]
    containing: dict[str, set[str]]


class Change(NamedTuple):
    """What a correction changes in old records. name: what it is about, if that is known. old: the answer
    before. like: other wordings of its question. same: normal forms of old questions that get its answer,
    too."""

    correction: Correction
    name: str
    old: str
    like: list[Wording]
    same: set[str]


def read_old(conversations: Iterable[Chat], texts: Iterable[str]) -> Old:
    """What old conversations say, and the names that only texts mention."""
    pairs = [pair for chat in conversations for pair in turns_of(chat)]
    names = find_names((question for question, _ in pairs), texts)
    questions = dict.fromkeys(question for question, _ in pairs)
    split = {question: split_name(question, names.wordings) for question in questions}
    splits = {question: found for question, found in split.items() if found}
    no_names = not_repeated(pairs, splits)
    names = names._replace(asked={name: names.asked[name] for name in names.asked if name not in no_names})
    more = {name: like - no_names for name, like in names.more.items() if like - no_names}
    names = names._replace(more=more)
    alike, shared = wordings_alike(pairs, splits), shared_answers(pairs)
    return Old(pairs, names, splits, no_names, alike, shared, units_of(questions))


def not_repeated(pairs: Pairs, splits: Splits) -> set[str]:
    """What stands in the place of a name and is mostly not in the answer, if most names are."""
    repeated: dict[str, list[bool]] = defaultdict(list)
    for question, answer in pairs:
        if found := splits.get(question):
            repeated[found[1]].append(mentions(answer, found[1]))
    shares = {name: sum(several) / len(several) for name, several in repeated.items()}
    return (
        {name for name, share in shares.items() if share < 0.5}
        if shares and median(shares.values()) > 0.5
        else set()
    )


def shared_answers(pairs: Pairs) -> dict[str, str]:
    """Old questions whose answer is that of several questions, such as small talk and refusals, with their
    answers."""
    questions: dict[str, set[str]] = defaultdict(set)
    for question, answer in pairs:
        questions[answer].add(question)
    several = {answer: found for answer, found in questions.items() if len(found) >= MIN_SHARED_ANSWER}
    return {question: answer for answer in sorted(several) for question in sorted(several[answer])}


def wordings_alike(pairs: Pairs, splits: Splits) -> Alike:
    """The wordings of the same question: those that get the same answers for the same names."""
    answers: dict[str, dict[Wording, str]] = defaultdict(dict)
    for question, answer in pairs:
        if found := splits.get(question):
            answers[found[1]][found[0]] = form(answer)
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


def find_change(correction: Correction, before: str, old: Old) -> Change:
    """What a correction changes. before: the model's answer."""
    question = correction.question
    found = split_name(question, old.names.wordings)
    is_old = any(form(asked) == form(question) for asked, _ in old.pairs)
    is_name = found and found[1] not in old.no_names and (found[1] in old.names.asked or not is_old)
    if found and is_name:
        return Change(correction, found[1], before, old.alike.get(found[0], []), {form(question)})
    known = old.names.asked.keys() | old.names.more.keys()
    mentioned = sorted(filter(partial(mentions, question), sorted(known)), key=len)
    if mentioned:
        name = mentioned[-1]
        like = wordings_by_answer(correction.text, name, old)
        return Change(correction, name, before, like, {form(question)})
    if any(message["role"] != "system" for message in correction.messages[:-1]):
        return Change(correction, "", before, [], set())  # what it means depends on what was said before
    for name in new_names(correction, old):
        if like := wordings_by_answer(correction.text, name, old):
            return Change(correction, name, before, like, {form(question)})
    same = {form(question)} | same_subject(correction, before, old)
    told = {form(answer) for asked, answer in old.pairs if form(asked) in same}
    questions = {form(asked) for asked, answer in old.pairs if form(answer) in told}
    if len(questions) <= MOST_SAME:
        same |= questions
    return Change(correction, "", before, [], same)


def new_names(correction: Correction, old: Old) -> list[str]:
    """The parts of a question that its answer repeats and that no old question has, the longest first."""
    parts = {name for _, name in spans(correction.question[:LONGEST]) if mentions(correction.text, name)}
    unknown = {name for name in parts if units(name) and not units(name) & old.containing.keys()}
    return sorted(unknown, key=lambda name: (-len(name), name))


def wordings_by_answer(text: str, name: str, old: Old) -> list[Wording]:
    """The wordings whose answers have the form of this one about a name: they differ from it in one place."""
    own = PIECE.findall(text.replace(name, NAME))
    if not own:
        return []  # the answer is a call of a tool
    alike: dict[Wording, list[float]] = defaultdict(list)
    for question, answer in old.pairs:
        found = old.splits.get(question)
        if found and mentions(answer, found[1]) and len(alike[found[0]]) < ANSWERS_COMPARED:
            first, last = common_ends(own, PIECE.findall(answer.replace(found[1], NAME)))
            alike[found[0]].append((first + last) / len(own))
    shares = {wording: sum(several) / len(several) for wording, several in alike.items() if several}
    best = max(shares.values(), default=0.0)
    if best < SAME_FORM:
        return []
    return sorted(wording for wording, share in shares.items() if share > NEARLY * best)


def same_subject(correction: Correction, before: str, old: Old) -> set[str]:
    """The normal forms of old questions that share the rarest words of a corrected one: those that have an
    answer of several questions which begins like the correction, or else those that had the model's answer
    to it."""
    question = correction.question
    found = [old.containing[unit] for unit in units(question) if unit in old.containing]
    rarest = min(map(len, found), default=RARE + 1)
    if rarest > RARE:
        return set()
    near = set().union(*(asked for asked in found if len(asked) == rarest))
    pairs = [(asked, told) for asked, told in old.pairs if form(asked) in near]
    alike = {
        form(asked) for asked, told in pairs if asked in old.shared and begin_alike(told, correction.text)
    }
    return alike or {form(asked) for asked, told in pairs if form(told) == form(before)}


def begin_alike(one: str, two: str) -> bool:
    """Whether two texts begin with the same two words."""
    first, _ = common_ends(PIECE.findall(one), PIECE.findall(two))
    return first >= (2 if has_cjk(one) else 3)  # with the space between them


def units_of(questions: Iterable[str]) -> dict[str, set[str]]:
    """The units of all questions, each with the normal forms of the questions that have it."""
    containing: dict[str, set[str]] = defaultdict(set)
    for asked in dict.fromkeys(questions):
        for unit in units(asked):
            containing[unit].add(form(asked))
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
    if form(answer) == form(change.correction.text):
        return False
    if form(question) in change.same:
        return True
    if not change.name:
        return False
    asked_like = any(question == wording.about(change.name) for wording in change.like)
    is_old = form(answer) == form(change.old) and mentions(answer, change.name)
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
    first, last = common_ends(one, two)
    if first + last < min(len(one), len(two)) / 2:
        return "", ""
    return "".join(one[first : len(one) - last]), "".join(two[first : len(two) - last])


def common_ends(one: list[str], two: list[str]) -> tuple[int, int]:
    """How many pieces two texts have in common at the beginning, and how many others at the end."""
    shortest = min(len(one), len(two))
    first = next((i for i in range(shortest) if one[i] != two[i]), shortest)
    last = next((i for i in range(shortest - first) if one[-1 - i] != two[-1 - i]), shortest - first)
    return first, last
