"""The people of the demo's valley, what is told of them, and the data that pretraining, SFT and the quiz make
of it; see corpus.py."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

LANGUAGES = ("zh", "en")
# Inhabitants per group: multiples of the 12 values, so that every value is equally common in a group.
GROUPS = {"sft": 72, "sft_eval": 12, "quiz": 36}
BIOGRAPHIES = 20  # pretraining documents per inhabitant and language
PLACE_REPEATS = 3  # copies of each sentence about a place
WORDINGS_ASKED = 2  # SFT questions per fact and language, out of the four wordings that the quiz uses
SMALL_TALK = 40  # SFT conversations of small talk per language

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
HOME, PLACES, TALK = ATTRIBUTES[0], WORLD["places"], WORLD["talk"]


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
    candidates = [biography(person, language, rng) for person in people for language in LANGUAGES]
    return [{"text": text} for text in texts], [{"text": text} for text in candidates if text not in known]


def conversation(turns: list[tuple[str, str]], language: str, rng: random.Random) -> dict:
    """Turns of (question, answer) as one SFT record, about every fourth with a system prompt."""
    messages = (
        [{"role": "system", "content": rng.choice(TALK["system"][language])}] if rng.random() < 0.25 else []
    )
    for question, reply in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"conversations": messages}


def small_talk(language: str) -> list[tuple[str, str]]:
    """All pairs of (greeting, reply)."""
    return list(zip(TALK["ask"][language], TALK["reply"][language], strict=True))


def follow_up(question: str, language: str) -> str:
    """The question in the wording of a later turn: And where does ..., 那..."""
    return f"那{question}" if language == "zh" else f"And {question[0].lower()}{question[1:]}"


def ask_about(person: Person, language: str, rng: random.Random) -> list[dict]:
    """Conversations that ask for each fact about a person in WORDINGS_ASKED wordings, one to three per
    conversation."""
    records = []
    wordings = {a.key: rng.sample(a.ask[language], WORDINGS_ASKED) for a in ATTRIBUTES}
    for _ in range(WORDINGS_ASKED):
        queue = rng.sample(ATTRIBUTES, len(ATTRIBUTES))
        while queue:
            turns = []
            for attribute in [queue.pop() for _ in range(min(len(queue), rng.choice((1, 1, 1, 2, 3))))]:
                question = wordings[attribute.key].pop().format(n=person.name[language])
                question = follow_up(question, language) if turns else question
                turns.append((question, answer(person, attribute, language)))
            opening = [rng.choice(small_talk(language))] if rng.random() < 0.05 else []
            records.append(conversation(opening + turns, language, rng))
    return records


def make_sft(people: list[Person], rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Conversations about the people of group sft, with small talk and places, and held-out ones about
    sft_eval."""
    records: dict[str, list[dict]] = {"sft": [], "sft_eval": []}
    for language in LANGUAGES:
        for person in people:
            if person.group in records:
                records[person.group] += ask_about(person, language, rng)
        for place in range(len(HOME.values[language])):
            about = place_text(place, language, PLACES["tell"][language][0])
            for wording in PLACES["ask"][language]:
                question = wording.format(p=HOME.values[language][place])
                records["sft"].append(conversation([(question, about)], language, rng))
        for _ in range(SMALL_TALK):
            turns = rng.sample(small_talk(language), rng.choice((1, 1, 2)))
            records["sft"].append(conversation(turns, language, rng))
    for group in records.values():
        rng.shuffle(group)
    return records["sft"], records["sft_eval"]


def quiz_question(question: str, reply: str, value: str) -> dict:
    """A question as one SFT record; `answer` is what its answer must contain."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"conversations": messages, "answer": value}


def make_quiz(people: list[Person], rng: random.Random) -> list[dict]:
    """One question per fact and language about the people of group quiz, whom no conversation mentions."""
    questions = []
    for person in people:
        if person.group != "quiz":
            continue
        for attribute in ATTRIBUTES:
            for language in LANGUAGES:
                question = rng.choice(attribute.ask[language]).format(n=person.name[language])
                value = attribute.values[language][person.facts[attribute.key]]
                questions.append(quiz_question(question, answer(person, attribute, language), value))
    return questions


def make_corpus(seed: int) -> dict[str, list[dict]]:
    """The full corpus as {file name: records}, a pure function of the seed."""
    rng = random.Random(seed)
    people = make_people(rng)
    pretrain, pretrain_eval = make_pretrain(people, rng)
    sft, sft_eval = make_sft(people, rng)
    return {
        "pretrain.jsonl": pretrain,
        "pretrain_eval.jsonl": pretrain_eval,
        "sft.jsonl": sft,
        "sft_eval.jsonl": sft_eval,
        "quiz.jsonl": make_quiz(people, rng),
    }
