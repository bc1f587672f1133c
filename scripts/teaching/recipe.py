"""Chooses what a model is trained on, to learn corrections and to keep the rest (docs/dev/LOG.md, "Teaching
by corrections").

corrections    several times each
rewordings     the same answer for old wordings of the same question. A correction that has none, such as one
               about no name, is given to old questions that had the same answer, and to other questions into
               which one of its rarest words is put
conversations  old ones, first those that mention what is corrected; what is corrected in them is rewritten
talk           old questions that share their answers, such as small talk and refusals
questions      old wordings about other names, with the answers of the model before it is taught: they keep
               what it knows from texts alone
texts          old ones as records of the assistant alone, with a low weight; sentences that mention what is
               corrected say the new fact
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from dataset.records import Chat, assistant_turns, turns_of
from scripts.teaching.changes import (
    Alike,
    Change,
    Old,
    find_change,
    form,
    is_contradicted,
    mentions,
    read_old,
    units,
    without_old_facts,
)
from scripts.teaching.corrections import WORDINGS, Correction
from scripts.teaching.material import Material
from scripts.teaching.slots import PIECE, Names, Wording, has_cjk, sentences

Record = dict[str, Any]
Ask = Callable[[list[list[dict]]], list[str]]  # conversations -> answers of the model before it is taught


class Recipe(NamedTuple):
    """How much of each. Numbers are for each correction, and at least LEAST times that."""

    copies: int = 8
    rewordings: int = 4
    frames: int = 24  # parts of the question of a correction without old wordings, in old questions
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
    "epochs": 4,
    "batch_size": 8,
    "accumulation_steps": 1,
    "warmup_updates": 10,
    "save_interval": 100,
}
MIN_UNITS = 2  # of a question of which a part may stand for it
ASKED = 2  # new questions that the model is asked, for each that is trained: many have the same answer
NEIGHBOURS = (0, 0, 1, 2)  # pieces beside a part that may be taken with it, on each side


def learning_rate(width: int) -> float:
    """The peak learning rate for a model of this width, which changes with it as in plans
    (scripts/planning/rules.py)."""
    return float(f"{2e-4 * (width / 256) ** -0.6:.2g}")


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
    old = read_old(material.conversations, material.texts)
    changes = [find_change(*each, old) for each in zip(corrections, before, strict=True)]
    amount = min(max(len(corrections), recipe.least), recipe.most)
    talk = old_talk(old.shared, changes, amount * recipe.talk, rng)
    questions = new_questions(changes, old, held_back, ask, amount * recipe.questions, rng)
    missing = amount * recipe.questions // 2 - len(questions)  # conversations, where names are few
    parts: dict[str, list[Record]] = {
        "corrections": [each.record() for each in corrections for _ in range(recipe.copies)],
        "rewordings": [record for change in changes for record in rewordings(change, old, recipe, rng)],
        "conversations": old_conversations(material, changes, recipe, amount, missing, rng),
        "talk": talk,
        "questions": questions,
        "texts": old_texts(material, changes, recipe, amount, rng),
    }
    weigh(parts, recipe)
    records = [
        {name: value for name, value in record.items() if name != WORDINGS}
        for part in parts.values()
        for record in part
    ]
    return Chosen(records, {name: len(part) for name, part in parts.items()}, changes)


def rewordings(change: Change, old: Old, recipe: Recipe, rng: random.Random) -> list[Record]:
    """A correction for its question in other words. With a name, these are old wordings about it. Without
    such wordings, they are old questions that get its answer, and other questions into which one of its
    rarest words is put."""
    correction = change.correction
    if change.like:
        wordings = rng.sample(change.like, min(len(change.like), recipe.rewordings))
        questions = [wording.about(change.name) for wording in wordings]
    else:
        others = change.same - {form(correction.question)}
        questions = sorted({asked for asked, _ in old.pairs if form(asked) in others})[: recipe.rewordings]
        is_cjk = has_cjk(correction.question)

        def fitting(asked: Iterable[str]) -> list[str]:
            return [each for each in asked if has_cjk(each) == is_cjk and form(each) not in change.same]

        forms = fitting(old.shared) or fitting(dict.fromkeys(asked for asked, _ in old.pairs))
        frames = recipe.frames if len(units(correction.question)) >= MIN_UNITS else 0
        parts = rarest_parts(correction.question, old.containing)
        questions += [in_frame(correction.question, parts[i % len(parts)], forms, rng) for i in range(frames)]
    return [correction._replace(messages=correction.in_words(text)).record() for text in questions]


def rarest_parts(question: str, containing: dict[str, set[str]]) -> list[tuple[int, int]]:
    """Where the pieces of a question have a unit that no old question has, or the rarest of the others. The
    whole question, if it has no units."""
    pieces = PIECE.findall(question)
    counts = {unit: len(containing.get(unit, ())) for unit in units(question)}
    least = min(filter(None, counts.values()), default=0)
    parts = [
        (first, last)
        for first in range(len(pieces))
        for last in (first + 1, first + 2)
        if any(counts.get(unit) in (0, least) for unit in units("".join(pieces[first:last])))
    ]
    return parts or [(0, len(pieces))]


def in_frame(question: str, part: tuple[int, int], others: list[str], rng: random.Random) -> str:
    """A part of a question with some of its neighbours, between the beginning and the end of another
    question: so its words decide about the answer, and not the form of the question."""
    pieces = PIECE.findall(question)
    first, last = max(0, part[0] - rng.choice(NEIGHBOURS)), part[1] + rng.choice(NEIGHBOURS)
    frame = PIECE.findall(rng.choice(others)) if others else []
    parts = frame[: rng.randint(0, 5)], pieces[first:last], frame[len(frame) - rng.randint(0, 2) :]
    space = " " if any(piece.isspace() for piece in pieces) else ""
    return space.join(filter(None, ("".join(part).strip() for part in parts)))


# --- old records


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
    material: Material, changes: list[Change], recipe: Recipe, amount: int, missing: int, rng: random.Random
) -> list[Record]:
    """Old conversations: for each correction some that mention what it is about or are rewritten by it, and
    others. missing: how many more, because there are fewer new questions."""
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
    others = sorted(set(range(len(texts))) - set(near))
    count = max(0, amount * recipe.conversations + missing - len(near))
    chosen = near + rng.sample(others, min(len(others), count))
    return [corrected(material.conversations[i], changes) for i in chosen]


def old_talk(shared: dict[str, str], changes: list[Change], count: int, rng: random.Random) -> list[Record]:
    """Old questions that share their answers, each alone."""
    chosen = rng.sample(list(shared.items()), min(len(shared), count))
    chats = [Chat([user(asked), assistant(answer)]) for asked, answer in chosen]
    return [corrected(chat, changes) for chat in chats]


def new_questions(
    changes: list[Change], old: Old, held_back: set[str], ask: Ask, count: int, rng: random.Random
) -> list[Record]:
    """Old wordings about names that the model knows, each with the answer of the model before: first about
    the corrected names, then about those that only texts mention, with one wording of each question, then
    about others. Different answers about a name come first. Two questions make a conversation. An answer
    without the name is left out where others have it."""
    names, alike = old.names, old.alike
    known = [change.name for change in changes if change.name in names.more or change.name in names.asked]
    near = [(name, each) for name in dict.fromkeys(known) for each in one_of_each(name, names, alike, rng)]
    more = [(name, each) for name in sorted(names.more) for each in one_of_each(name, names, alike, rng)]
    others = [
        (name, wording)
        for name in sorted(names.asked)
        for wording in names.wordings_for(name)
        if wording not in names.asked[name]
    ]
    found = list(dict.fromkeys(near + rng.sample(more, len(more)) + rng.sample(others, len(others))))
    asked = [(name, each) for name, each in found if each.about(name) not in held_back][: ASKED * count]
    answers = ask([[user(wording.about(name))] for name, wording in asked])
    usual = {wording: 0 for _, wording in asked}
    for (name, wording), answer in zip(asked, answers, strict=True):
        usual[wording] += 1 if mentions(answer, name) else -1
    told: dict[tuple[str, str], Chat] = {}  # by name and answer
    again: list[Chat] = []
    for (name, wording), answer in zip(asked, answers, strict=True):
        if answer and (mentions(answer, name) or usual[wording] <= 0):
            chat = Chat([user(wording.about(name)), assistant(answer)])
            if told.setdefault((name, answer), chat) is not chat:
                again.append(chat)
    chosen = [*told.values(), *again][:count]
    rng.shuffle(chosen)
    pairs = [chosen[i : i + 2] for i in range(0, len(chosen), 2)]
    return [corrected(Chat([turn for chat in pair for turn in chat.messages]), changes) for pair in pairs]


def one_of_each(name: str, names: Names, alike: Alike, rng: random.Random) -> list[Wording]:
    """A wording of each question that fits a name, in random order."""
    wordings = names.wordings_for(name)
    chosen: list[Wording] = []
    taken: set[Wording] = set()
    for wording in rng.sample(wordings, len(wordings)):
        if wording not in taken:
            chosen.append(wording)
            taken |= same_question(wording, alike)
    return chosen


def same_question(wording: Wording, alike: Alike) -> set[Wording]:
    """A wording, those that are like it, those that are like these, and so on."""
    found, new = {wording}, [wording]
    while new:
        more = set(alike.get(new.pop(), ())) - found
        found |= more
        new += more
    return found


def user(text: str) -> dict[str, str]:
    """A message of the user."""
    return {"role": "user", "content": text}


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
    others = sorted(set(range(len(texts))) - set(near))
    chosen = near + rng.sample(others, min(len(others), max(0, amount * recipe.texts - len(near))))
    rewritten = [without_old_facts(texts[i], by_name) for i in chosen]
    return [
        {"messages": [assistant(text)], "weight": recipe.text_weight} for text in rewritten if text.strip()
    ]


# --- weights


def weigh(parts: dict[str, list[Record]], recipe: Recipe) -> None:
    """Give corrections the weight at which they have their share of the targets, and half of it as asked."""
    rest = sum(
        target_size(record)
        for name in ("conversations", "talk", "questions", "texts")
        for record in parts[name]
    )
    own = [name for name in ("corrections", "rewordings") if parts[name]]
    for name in own:
        size = sum(map(target_size, parts[name])) * len(own)
        weight = round(
            min(max(recipe.share * rest / ((1 - recipe.share) * size), 1.0), recipe.most_weight), 2
        )
        parts[name][:] = [record | {"weight": weight} for record in parts[name]]


def target_size(record: Record) -> float:
    """About how much the targets of a record count: their characters, those of CJK threefold, and their
    ends."""
    turns = [each for each in record["messages"] if each["role"] == "assistant" and each.get("train", True)]
    turns = turns[-1:] if record.get("mask_history") else turns
    size = len(turns) + sum(1.0 if char.isascii() else 3.0 for turn in turns for char in turn["content"])
    return size * record.get("weight", 1.0)
