"""Chooses what a model is trained on to learn corrections and to keep the rest (docs/dev/LOG.md, "Teaching").

Corrections   COPIES times each, and the same answer for old wordings of the same question.
Old records   conversations and texts that the model has learned; what they say against a correction is
              rewritten. Those that mention what is corrected come first.
New questions old wordings about other names, with the answers of the model before it is taught. They keep
              what the model knows from texts alone.

Texts are trained as records of the assistant alone, with a low weight.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from dataset.held_out import normal_form
from dataset.records import Chat, assistant_turns
from scripts.teaching.corrections import WORDINGS, Correction
from scripts.teaching.material import Material
from scripts.teaching.slots import PIECE, Names, Wording, find_names, sentences, split_name

Record = dict[str, Any]
Alike = dict[Wording, list[Wording]]  # the other wordings of the same question
Ask = Callable[[list[list[dict]]], list[str]]  # conversations -> answers of the model before it is taught


class Recipe(NamedTuple):
    """How much of each. Numbers are for each correction, and at least LEAST times that."""

    copies: int = 8
    rewordings: int = 4
    frames: int = 16  # parts of the question of a correction without a name, in the form of old ones
    conversations: int = 5
    near: int = 4  # of the conversations and of the texts, those that mention what is corrected
    talk: int = 6  # questions that share their answer with others, such as small talk and refusals
    questions: int = 18
    texts: int = 6
    text_weight: float = 0.4
    share: float = 0.25  # of the targets' weight, that corrections have
    most_weight: float = 4.0
    least: int = 16  # corrections that the old data are enough for, also with fewer
    most: int = 40


RECIPE = Recipe()
MAX_SEQ_LEN = 512  # where no run tells it
TRAINING = {  # settings of SFT
    "epochs": 4, "batch_size": 8, "accumulation_steps": 1, "learning_rate": 2e-4, "warmup_updates": 10,
    "save_interval": 100,
}  # fmt: skip


class Change(NamedTuple):
    """What a correction changes in old records. name: what it is about, if that is known. old: the answer
    before. like: other wordings of its question. same: normal forms of old questions that get its answer,
    too."""

    correction: Correction
    name: str
    old: str
    like: list[Wording]
    same: set[str]


MOST_SAME = 8  # different questions that an old answer has, if a correction of one is meant for all
MIN_SHARED_ANSWER = 4  # different questions
MIN_UNITS = 2  # of a question of which a part may stand for it
RARE = 2  # old questions, at most, that have the rarest words of a correction
MIN_ALIKE = 2  # names for which two wordings have the same answer


class Chosen(NamedTuple):
    """What a model is trained on. counts: the records of each kind."""

    records: list[Record]
    counts: dict[str, int]
    changes: list[Change]

    def is_meant(self, question: str, answer: str) -> bool:
        """Whether a correction says something else about an old question than its old answer."""
        return any(is_contradicted(change, question, answer) for change in self.changes)


def choose(
    corrections: list[Correction],
    before: list[str],
    material: Material,
    held_back: set[str],
    ask: Ask,
    seed: int,
    recipe: Recipe = RECIPE,
) -> Chosen:
    """Choose what to train on.

    before: the model's answers to the corrected questions. held_back: old questions that the model is asked
    afterwards, so they are not among the new ones."""
    rng = random.Random(seed)
    pairs = [pair for chat in material.conversations for pair in turns_of(chat)]
    names = find_names((question for question, _ in pairs), material.texts)
    alike = wordings_alike(pairs, names)
    shared = shared_answers(pairs)
    changes = [
        find_change(correction, old, pairs, names, alike)
        for correction, old in zip(corrections, before, strict=True)
    ]
    amount = min(max(len(corrections), recipe.least), recipe.most)
    parts: dict[str, list[Record]] = {
        "corrections": [each.record() for each in corrections for _ in range(recipe.copies)],
        "rewordings": [
            record for change in changes for record in rewordings(change, pairs, list(shared), recipe, rng)
        ],
        "conversations": old_conversations(material, changes, recipe, amount, rng),
        "talk": old_talk(shared, changes, amount * recipe.talk, rng),
        "questions": new_questions(changes, names, alike, held_back, ask, amount * recipe.questions, rng),
        "texts": old_texts(material, changes, recipe, amount, rng),
    }
    weigh(parts, recipe)
    records = [
        {name: value for name, value in record.items() if name != WORDINGS}
        for part in parts.values()
        for record in part
    ]
    return Chosen(records, {name: len(part) for name, part in parts.items()}, changes)


def rewordings(
    change: Change, pairs: list[tuple[str, str]], shared: list[str], recipe: Recipe, rng: random.Random
) -> list[Record]:
    """A correction for its question in other words: old wordings about its name, or without a name old
    questions that get its answer and parts of the question."""
    if change.name:
        wordings = rng.sample(change.like, min(len(change.like), recipe.rewordings))
        questions = [wording.about(change.name) for wording in wordings]
    else:
        own = normal_form(change.correction.question)
        same = {asked for asked, _ in pairs if normal_form(asked) in change.same - {own}}
        questions = sorted(same)[: recipe.rewordings]
        has_spaces = " " in change.correction.question
        others = [
            each for each in shared if (" " in each) == has_spaces and normal_form(each) not in change.same
        ]
        containing = units_of(asked for asked, _ in pairs)
        frames = recipe.frames if len(units(change.correction.question)) >= MIN_UNITS else 0
        questions += [in_frame(change.correction.question, others, containing, rng) for _ in range(frames)]
    records = []
    for question in questions:
        again = change.correction._replace(messages=change.correction.in_words(question))
        records.append(again.record())
    return records


# --- what a correction is about


def turns_of(chat: Chat) -> list[tuple[str, str]]:
    """The questions of a conversation with their answers."""
    found = []
    for index in assistant_turns(chat):
        if index and chat.messages[index - 1]["role"] == "user":
            found.append((chat.messages[index - 1]["content"], chat.messages[index]["content"]))
    return found


def wordings_alike(pairs: list[tuple[str, str]], names: Names) -> Alike:
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


def find_change(
    correction: Correction, old: str, pairs: list[tuple[str, str]], names: Names, alike: Alike
) -> Change:
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


def same_subject(question: str, old: str, pairs: list[tuple[str, str]]) -> set[str]:
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


def in_frame(question: str, others: list[str], containing: dict[str, set[str]], rng: random.Random) -> str:
    """The rarest word of a question with some of its neighbours, between the beginning and the end of another
    question: so its words decide about the answer, and not the form of the question."""
    pieces = PIECE.findall(question)
    known = {unit: len(containing[unit]) for unit in units(question) if unit in containing}
    least = min(known.values(), default=0)
    places = [
        (first, last)
        for first in range(len(pieces))
        for last in (first + 1, first + 2)
        if any(known.get(unit) == least for unit in units("".join(pieces[first:last])))
    ]
    first, last = rng.choice(places or [(0, len(pieces))])
    first, last = max(0, first - rng.randint(0, 3)), last + rng.randint(0, 3)
    frame = PIECE.findall(rng.choice(others)) if others else []
    parts = frame[: rng.randint(0, 5)], pieces[first:last], frame[len(frame) - rng.randint(0, 2) :]
    space = " " if any(piece.isspace() for piece in pieces) else ""
    return space.join(filter(None, ("".join(part).strip() for part in parts)))


# --- old records


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


def corrected(chat: Chat, changes: list[Change]) -> Record:
    """An old conversation as a record; what is corrected in it is rewritten."""
    messages = list(chat.messages)
    for index in assistant_turns(chat):
        if not index:
            continue
        question, answer = messages[index - 1]["content"], messages[index]["content"]
        for change in changes:
            if not messages[index].get("tool_calls") and is_contradicted(change, question, answer):
                messages[index] = change.correction.answer
    for index in chat.masked:
        messages[index] = messages[index] | {"train": False}
    return {"messages": messages} | ({"tools": chat.tools} if chat.tools else {})


def old_conversations(
    material: Material, changes: list[Change], recipe: Recipe, amount: int, rng: random.Random
) -> list[Record]:
    """Old conversations: for each correction some that mention what it is about or are rewritten by it, and
    others."""
    texts = ["\n".join(message["content"] for message in chat.messages) for chat in material.conversations]
    near: list[int] = []
    for change in changes:
        found = [
            i for i, chat in enumerate(material.conversations)
            if mentions(texts[i], change.name)
            or any(is_contradicted(change, *pair) for pair in turns_of(chat))
        ]  # fmt: skip
        near += rng.sample(found, min(len(found), recipe.near))
    near = list(dict.fromkeys(near))
    others = [i for i in range(len(texts)) if i not in set(near)]
    count = max(0, amount * recipe.conversations - len(near))
    chosen = near + rng.sample(others, min(len(others), count))
    return [corrected(material.conversations[i], changes) for i in chosen]


def shared_answers(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Old questions whose answer is that of several questions, such as small talk and refusals, with their
    answers."""
    questions: dict[str, set[str]] = defaultdict(set)
    for question, answer in pairs:
        questions[answer].add(question)
    several = {answer: found for answer, found in questions.items() if len(found) >= MIN_SHARED_ANSWER}
    return {question: answer for answer in sorted(several) for question in sorted(several[answer])}


def old_talk(shared: dict[str, str], changes: list[Change], count: int, rng: random.Random) -> list[Record]:
    """Old questions that share their answers, each alone."""
    chosen = rng.sample(list(shared.items()), min(len(shared), count))
    chats = [Chat([{"role": "user", "content": question}, assistant(answer)]) for question, answer in chosen]
    return [corrected(chat, changes) for chat in chats]


def new_questions(
    changes: list[Change],
    names: Names,
    alike: Alike,
    held_back: set[str],
    ask: Ask,
    count: int,
    rng: random.Random,
) -> list[Record]:
    """Old wordings about names that the model knows, each with the answer of the model before: first about
    the corrected names, then about those that only texts mention, with one wording of each question, then
    about others. Two of them make a conversation. An answer without the name is left out where others have
    it."""
    known = [change.name for change in changes if change.name in names.more or change.name in names.asked]
    near = [(name, each) for name in dict.fromkeys(known) for each in one_of_each(name, names, alike, rng)]
    more = [(name, each) for name in sorted(names.more) for each in one_of_each(name, names, alike, rng)]
    others = [
        (name, wording)
        for name in sorted(names.asked)
        for wording in names.wordings_for(name)
        if wording not in names.asked[name]
    ]
    chosen = list(dict.fromkeys(near + rng.sample(more, len(more)) + rng.sample(others, len(others))))
    chosen = [(name, wording) for name, wording in chosen if wording.about(name) not in held_back][:count]
    rng.shuffle(chosen)
    chats = [[{"role": "user", "content": wording.about(name)}] for name, wording in chosen]
    answers = ask(chats)
    usual = {wording: 0 for _, wording in chosen}
    for (name, wording), answer in zip(chosen, answers, strict=True):
        usual[wording] += 1 if mentions(answer, name) else -1
    usable = [
        [*chat, assistant(answer)]
        for (name, wording), chat, answer in zip(chosen, chats, answers, strict=True)
        if answer and (mentions(answer, name) or usual[wording] <= 0)
    ]
    pairs = [sum(usable[i : i + 2], []) for i in range(0, len(usable), 2)]
    return [corrected(Chat(chat), changes) for chat in pairs]


def one_of_each(name: str, names: Names, alike: Alike, rng: random.Random) -> list[Wording]:
    """A wording of each question that fits a name, in random order."""
    wordings = names.wordings_for(name)
    chosen: list[Wording] = []
    for wording in rng.sample(wordings, len(wordings)):
        if not any(each in alike.get(wording, ()) for each in chosen):
            chosen.append(wording)
    return chosen


def assistant(text: str) -> dict[str, str]:
    """A message of the assistant."""
    return {"role": "assistant", "content": text}


# --- texts

PASSAGE = 600  # characters of a long text that are replayed together


def passages(texts: Iterable[str]) -> list[str]:
    """Texts in parts of at most about PASSAGE characters, cut between sentences."""
    found: list[str] = []
    for text in texts:
        part = ""
        for sentence in sentences(text) if len(text) > PASSAGE else [text]:
            if part and len(part) + len(sentence) > PASSAGE:
                found.append(part)
                part = ""
            part += sentence[: 2 * PASSAGE]
        found.append(part)
    return [text for text in found if text.strip()]


def old_texts(
    material: Material, changes: list[Change], recipe: Recipe, amount: int, rng: random.Random
) -> list[Record]:
    """Texts: for each correction some that mention what it is about, without the old fact, and others."""
    texts = passages(material.texts)
    by_name: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        if change.name:
            by_name[change.name].append(change)
    near: list[int] = []
    for name in by_name:
        found = [i for i, text in enumerate(texts) if mentions(text, name)]
        near += rng.sample(found, min(len(found), recipe.near))
    near = list(dict.fromkeys(near))
    others = [i for i in range(len(texts)) if i not in set(near)]
    chosen = near + rng.sample(others, min(len(others), max(0, amount * recipe.texts - len(near))))
    rewritten = [without_old_facts(texts[i], by_name) for i in chosen]
    return [
        {"messages": [assistant(text)], "weight": recipe.text_weight} for text in rewritten if text.strip()
    ]


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


# --- weights


def weigh(parts: dict[str, list[Record]], recipe: Recipe) -> None:
    """Give corrections the weight at which they have their share of the targets."""
    own = sum(map(target_size, parts["corrections"] + parts["rewordings"]))
    rest = sum(
        target_size(record)
        for name in ("conversations", "talk", "questions", "texts")
        for record in parts[name]
    )
    weight = recipe.share * rest / ((1 - recipe.share) * own)
    weight = round(min(max(weight, 1.0), recipe.most_weight), 2)
    for name in ("corrections", "rewordings"):
        parts[name][:] = [record | {"weight": weight} for record in parts[name]]


def target_size(record: Record) -> float:
    """About how much the targets of a record count: their characters, those of CJK threefold."""
    turns = [each for each in record["messages"] if each["role"] == "assistant" and each.get("train", True)]
    turns = turns[-1:] if record.get("mask_history") else turns
    size = sum(1.0 if char.isascii() else 3.0 for turn in turns for char in turn["content"])
    return size * record.get("weight", 1.0)
