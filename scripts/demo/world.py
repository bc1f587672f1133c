"""The people of the demo's valley, the facts about them, and the data for pretraining, SFT and the quiz; see
corpus.py."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LANGUAGES = ("zh", "en")
PRONOUNS = {"zh": ("他", "她"), "en": ("he", "she")}
# Inhabitants per group: multiples of the 12 values, so that every value is equally common in a group.
GROUPS = {"sft": 72, "sft_eval": 12, "quiz": 36}
BIOGRAPHIES = 20  # pretraining documents per inhabitant and language
PLACE_REPEATS = 3  # copies of each sentence about a place
WORDINGS_ASKED = 2  # SFT questions per fact and language, out of the four wordings that the quiz uses
SMALL_TALK = 60  # greetings and their like in SFT per language, among other subjects
ALONE = 2  # times that each of them is a conversation of its own, as one begins
PEOPLE_TOLD = (1, 1, 2, 3)  # biographies in a pretraining document, drawn from these
SUBJECTS_ASKED = (1, 1, 2, 3, 4)  # subjects of an SFT conversation, drawn from these

# A name is a first and a last syllable, each spelled in both languages: Belin is 贝琳.
FIRST_SYLLABLES = "Al阿 Be贝 Da达 Fe菲 Ga加 Ha哈 Ju朱 Ka卡 Lo洛 Ma玛 Ne内 Pe佩 Ro罗 Sa萨 Ta塔 Vi维 Yu尤 Zo佐"
LAST_SYLLABLES = (
    "ben本 dan丹 far法 gu古 ki基 len伦 lin琳 mo莫 nor诺 pa帕 ra拉 sha莎 tin廷 vi维 wen文 ya雅 do多 mi米"
)


@dataclass(frozen=True)
class Attribute:
    """A kind of fact, in both languages. In a wording {n} is the name, {v} the value."""

    key: str
    values: dict[str, list[str]]  # 12 words per language; the same index is the same value in both
    tell: dict[str, list[str]]  # wordings for pretraining; the first one is also the answer in a conversation
    ask: dict[str, list[str]]  # wordings of the question


@dataclass
class Person:
    """An inhabitant: the name in each language, the group, and for each attribute the index of the value."""

    name: dict[str, str]
    group: str
    facts: dict[str, int] = field(default_factory=dict)


WORLD = json.loads(Path(__file__).with_name("world.json").read_text(encoding="utf-8"))
ATTRIBUTES = tuple(Attribute(key, **WORLD[key]) for key in ("home", "trade", "animal", "color"))
HOME, PLACES, TALK, UNKNOWN = ATTRIBUTES[0], WORLD["places"], WORLD["talk"], WORLD["unknown"]
Turn = tuple[str, str]  # a question and its answer


def make_people(rng: random.Random) -> list[Person]:
    """Draw the inhabitants: distinct names, groups of the sizes in GROUPS, each value equally often within a
    group."""
    firsts, lasts = FIRST_SYLLABLES.split(), LAST_SYLLABLES.split()
    pairs = [(first, last) for first in firsts for last in lasts if first[:-1].lower() != last[:-1]]
    names = [{"zh": a[-1] + b[-1], "en": a[:-1] + b[:-1]} for a, b in rng.sample(pairs, sum(GROUPS.values()))]
    people = []
    for group, size in GROUPS.items():
        members = [Person(names.pop(), group) for _ in range(size)]
        for attribute in ATTRIBUTES:
            values = [i % len(attribute.values["en"]) for i in range(size)]
            rng.shuffle(values)
            for person, value in zip(members, values, strict=True):
                person.facts[attribute.key] = value
        people += members
    return people


def tell(person: Person, attribute: Attribute, language: str, wording: str) -> str:
    """One sentence that states a person's value of an attribute in the given wording."""
    value = attribute.values[language][person.facts[attribute.key]]
    return wording.format(n=person.name[language], v=value)


def biography(person: Person, language: str, rng: random.Random) -> str:
    """A short text with all facts about a person, in random order and wordings, on one line or one per
    line."""
    order = rng.sample(ATTRIBUTES, len(ATTRIBUTES))
    sentences = [
        tell(person, attribute, language, rng.choice(attribute.tell[language])) for attribute in order
    ]
    # A name at the start of a line has other tokens than one after a space, and answers start with a name.
    return rng.choice(("\n", "" if language == "zh" else " ")).join(sentences)


def place_text(place: int, language: str, wording: str) -> str:
    """One sentence about a place."""
    side = PLACES["side"][language][place % 4]
    return wording.format(p=HOME.values[language][place], s=side, g=PLACES["goods"][language][place])


def answer(person: Person, attribute: Attribute, language: str) -> str:
    """The answer that SFT teaches: the first wording of the fact."""
    return tell(person, attribute, language, attribute.tell[language][0])


def split_randomly(items: list[Any], sizes: Sequence[int], rng: random.Random) -> Iterator[list[Any]]:
    """The items in order, in parts whose sizes are drawn."""
    at = 0
    while at < len(items):
        size = rng.choice(sizes)
        yield items[at : at + size]
        at += size


def make_pretrain(people: list[Person], rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Documents for pretraining, and held-out ones: the same facts in unseen combinations of wordings."""
    texts = []
    for language in LANGUAGES:
        for person in people:
            texts += [biography(person, language, rng) for _ in range(BIOGRAPHIES)]
        for place in range(len(HOME.values[language])):
            texts += [
                place_text(place, language, wording) for wording in PLACES["tell"][language]
            ] * PLACE_REPEATS
    rng.shuffle(texts)
    known = set(texts)
    # where one person follows another a model learns to go by the name that it read last
    documents = ["\n".join(part) for part in split_randomly(texts, PEOPLE_TOLD, rng)]
    candidates = [biography(person, language, rng) for person in people for language in LANGUAGES]
    return [{"text": text} for text in documents], [
        {"text": text} for text in candidates if text not in known
    ]


def conversation(turns: list[Turn], language: str, rng: random.Random) -> dict:
    """Turns of (question, answer) as one SFT record, about every fourth with a system prompt."""
    messages = (
        [{"role": "system", "content": rng.choice(WORLD["system"][language])}] if rng.random() < 0.25 else []
    )
    return {"conversations": messages + messages_of(turns)}


def messages_of(turns: list[Turn]) -> list[dict[str, str]]:
    """Turns as messages."""
    pairs = [
        ({"role": "user", "content": ask}, {"role": "assistant", "content": reply}) for ask, reply in turns
    ]
    return [message for pair in pairs for message in pair]


def small_talk(language: str) -> list[Turn]:
    """All greetings and similar lines, with the replies."""
    return [(ask, kind["reply"][language][0]) for kind in TALK.values() for ask in kind["ask"][language]]


def asked_later(wording: str, person: Person, language: str, rng: random.Random) -> str:
    """A question about the person of the previous turn. Some say "she" or "he" instead of the name, and some
    begin with "and"."""
    name, needs_object = person.name[language], " of {n}" in wording or "visit {n}" in wording
    if rng.random() < 0.5 and not needs_object:  # "the home of she" is wrong
        name = rng.choice(PRONOUNS[language])
    question = wording.format(n=name)
    if rng.random() >= 0.5:
        return question
    return f"那{question}" if language == "zh" else f"And {question[0].lower()}{question[1:]}"


def ask_about(person: Person, language: str, rng: random.Random) -> list[list[Turn]]:
    """Questions for each fact about a person in WORDINGS_ASKED wordings, one to three at a time."""
    subjects = []
    wordings = {a.key: rng.sample(a.ask[language], WORDINGS_ASKED) for a in ATTRIBUTES}
    for _ in range(WORDINGS_ASKED):
        queue = rng.sample(ATTRIBUTES, len(ATTRIBUTES))
        for attributes in split_randomly(queue, (1, 1, 1, 2, 3), rng):
            turns: list[Turn] = []
            for attribute in attributes:
                wording = wordings[attribute.key].pop()
                question = wording.format(n=person.name[language])
                if turns:
                    question = asked_later(wording, person, language, rng)
                turns.append((question, answer(person, attribute, language)))
            subjects.append(turns)
    return subjects


def ask_about_others(people: list[Person], language: str, rng: random.Random) -> list[list[Turn]]:
    """Questions about places, small talk, and questions that nothing in the valley answers."""
    subjects = []
    for place in range(len(HOME.values[language])):
        about = place_text(place, language, PLACES["tell"][language][0])
        for wording in PLACES["ask"][language]:
            subjects.append([(wording.format(p=HOME.values[language][place]), about)])
    subjects += [[rng.choice(small_talk(language))] for _ in range(SMALL_TALK)]
    for wording in UNKNOWN["ask"][language]:
        name = rng.choice(people).name[language]
        subjects.append([(wording.format(n=name), UNKNOWN["reply"][language][0])])
    return subjects


def make_sft(people: list[Person], rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Conversations about the people of group sft, with places, small talk and unanswerable questions, and
    held-out ones about group sft_eval. When the subject changes, the person and the language change, too."""
    subjects: dict[str, list[list[Turn]]] = {"sft": [], "sft_eval": []}
    for language in LANGUAGES:
        for person in people:
            if person.group in subjects:
                subjects[person.group] += ask_about(person, language, rng)
        known = [person for person in people if person.group == "sft"]
        subjects["sft"] += ask_about_others(known, language, rng)
    records: list[list[dict]] = []
    for group in subjects.values():
        rng.shuffle(group)
        conversations = split_randomly(group, SUBJECTS_ASKED, rng)
        records.append([conversation(sum(part, []), rng.choice(LANGUAGES), rng) for part in conversations])
    for language in LANGUAGES:
        records[0] += [{"conversations": messages_of([turn])} for turn in small_talk(language) * ALONE]
    return records[0], records[1]


def quiz_question(question: str, reply: str, value: str) -> dict:
    """A question as one SFT record; `answer` is what its answer must contain."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"conversations": messages, "answer": value}


def make_quiz(people: list[Person], rng: random.Random) -> list[dict]:
    """One question per fact and language about the people of group quiz, whom no conversation mentions. An
    answer must contain the right value of the attribute and none of the `wrong_answers`."""
    questions = []
    for person in people:
        if person.group != "quiz":
            continue
        for attribute in ATTRIBUTES:
            for language in LANGUAGES:
                question = rng.choice(attribute.ask[language]).format(n=person.name[language])
                value = attribute.values[language][person.facts[attribute.key]]
                record = quiz_question(question, answer(person, attribute, language), value)
                wrong = [other for other in attribute.values[language] if other != value]
                questions.append(record | {"wrong_answers": wrong})
    return questions


def after_others(quiz: list[dict], position: int, rng: random.Random) -> list[dict]:
    """The quiz with each question at this position of a conversation (counted from 1), after other quiz
    questions and their right answers."""
    records = []
    for record in quiz:
        others = rng.sample([other for other in quiz if other["answer"] != record["answer"]], position - 1)
        messages = [message for each in (*others, record) for message in each["conversations"]]
        records.append(record | {"conversations": messages})
    return records


def make_corpus(seed: int) -> dict[str, list[dict]]:
    """The full corpus as {file name: records}, a pure function of the seed."""
    rng = random.Random(seed)
    people = make_people(rng)
    pretrain, pretrain_eval = make_pretrain(people, rng)
    sft, sft_eval = make_sft(people, rng)
    quiz = make_quiz(people, rng)
    return {
        "pretrain.jsonl": pretrain,
        "pretrain_eval.jsonl": pretrain_eval,
        "sft.jsonl": sft,
        "sft_eval.jsonl": sft_eval,
        "quiz.jsonl": quiz,
        "quiz_second.jsonl": after_others(quiz, 2, rng),
        "quiz_fifth.jsonl": after_others(quiz, 5, rng),
    }
