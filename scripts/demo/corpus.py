"""The built-in demo data: a small invented world in Chinese and English, generated from a seed without
downloads.

    python -m scripts.demo.corpus --output_dir dataset/demo --seed 0

It shows what each training stage is for. The pretraining data state four facts about every inhabitant of a
valley, each in many wordings and in both languages. The SFT data show how to answer questions, about some of
the inhabitants. The quiz asks about inhabitants whom SFT never mentions, so it needs both: facts from
pretraining and answering from SFT.

Files: pretrain.jsonl, pretrain_eval.jsonl {"text"}; sft.jsonl, sft_eval.jsonl {"conversations"}; quiz.jsonl
{"conversations", "answer"}: one question each, whose answer must contain the value in "answer". For the
stages after SFT:

persona       another identity than in SFT, asked for in many wordings, beside conversations of SFT. The quiz
              has other wordings.
terse         pairs of answers for DPO: the rejected one is SFT's sentence, the chosen one the same without
              the name. Held-out pairs are about other people.
distillation  questions about everybody; one answer in three is wrong. Held-out ones, also the quiz's, come in
              other wordings; their answers are right.
reasoning     questions that take two facts, where somebody lives and what that place is known for. One answer
              in three states both in `reasoning_content`. The quiz asks about people whom the conversations
              never mention.
sums/         sums for reinforcement learning, see sums.py.

A seed gives the same bytes everywhere; files that are up to date are not rewritten. Of the words in
world.json {n} is the name of a person, {v} the value, {p} a place.
A model can answer questions about a fact only if it was stated in several wordings: Allen-Zhu & Li,
arXiv:2309.14316.
"""

import json
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from common.files import atomic_write
from scripts.demo.sums import make_sums

LANGUAGES = ("zh", "en")
# Inhabitants per group: multiples of the 12 values, so that every value is equally common in a group.
GROUPS = {"sft": 72, "sft_eval": 12, "quiz": 36}
BIOGRAPHIES = 20  # pretraining documents per inhabitant and language
PLACE_REPEATS = 3  # copies of each sentence about a place
WORDINGS_ASKED = 2  # SFT questions per fact and language, out of the four wordings that the quiz uses
SMALL_TALK = 40  # SFT conversations of small talk per language
PERSONA_REPEATS = 4  # copies of each question for the persona
MISTAKES = 1 / 3  # share of the answers that a student is taught and that are wrong
PLAIN_ANSWERS = 2  # answers without thoughts for one with them

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
PERSONA, TWO_FACTS = WORLD["persona"], WORLD["two facts"]


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


def make_persona(sft: list[dict], rng: random.Random) -> dict[str, list[dict]]:
    """The files of the persona. sft: the conversations of SFT, of which as many are added, so that the model
    keeps what it knows."""
    records, quiz = [], []
    for language in LANGUAGES:
        (name,), (reply,) = PERSONA["name"][language], PERSONA["reply"][language]
        asked = PERSONA["ask"][language] * PERSONA_REPEATS
        records += [conversation([(question, reply)], language, rng) for question in asked]
        quiz += [quiz_question(question, reply, name) for question in PERSONA["quiz"][language]]
    records += rng.sample(sft, len(records))
    rng.shuffle(records)
    return {"persona.jsonl": records, "persona_quiz.jsonl": quiz}


def terse_pair(person: Person, attribute: Attribute, language: str, question: str) -> dict:
    """A question with a chosen answer, which does not repeat the name, and a rejected one, the sentence."""
    name, sentence = person.name[language], answer(person, attribute, language)
    # as in the sentence, the blank before "lives" with it
    short = sentence.removeprefix(name).removeprefix("的")
    answers = {"chosen": short, "rejected": sentence}
    said = {key: {"role": "assistant", "content": text} for key, text in answers.items()}
    return {"conversations": [{"role": "user", "content": question.format(n=name)}], **said}


def make_terse(people: list[Person], rng: random.Random) -> dict[str, list[dict]]:
    """The pairs, and held-out ones about other people."""
    files: dict[str, list[dict]] = {"terse.jsonl": [], "terse_eval.jsonl": []}
    for person in people:
        if person.group == "quiz":
            continue
        name = "terse.jsonl" if person.group == "sft" else "terse_eval.jsonl"
        for attribute in ATTRIBUTES:
            for language in LANGUAGES:
                wordings = (
                    attribute.ask[language]
                    if person.group == "sft"
                    else [rng.choice(attribute.ask[language])]
                )
                files[name] += [terse_pair(person, attribute, language, wording) for wording in wordings]
    for pairs in files.values():
        rng.shuffle(pairs)
    return files


def mistaken(person: Person, attribute: Attribute, rng: random.Random) -> Person:
    """The person as somebody knows it who is wrong about the attribute with the probability MISTAKES."""
    known = person.facts[attribute.key]
    others = [value for value in range(len(attribute.values["en"])) if value != known]
    value = rng.choice(others) if rng.random() < MISTAKES else known
    return replace(person, facts=person.facts | {attribute.key: value})


def make_distillation(people: list[Person], quiz: list[dict], rng: random.Random) -> dict[str, list[dict]]:
    """Questions about everybody in all wordings but one, with mistakes in the answers, and held-out ones in
    that one, the quiz's where it asks."""
    in_quiz = {record["conversations"][0]["content"] for record in quiz}
    records, held_out = [], []
    for person in people:
        for attribute in ATTRIBUTES:
            for language in LANGUAGES:
                asked = [wording.format(n=person.name[language]) for wording in attribute.ask[language]]
                quizzed = [question for question in asked if question in in_quiz]
                kept = quizzed[0] if quizzed else rng.choice(asked)
                # all replies are drawn first, so that a seed gives the same files
                replies = [answer(mistaken(person, attribute, rng), attribute, language) for _ in asked]
                for question, reply in zip(asked, replies, strict=True):
                    if question != kept:
                        records.append(conversation([(question, reply)], language, rng))
                held_out.append(conversation([(kept, answer(person, attribute, language))], language, rng))
    rng.shuffle(records)
    return {"distillation.jsonl": records, "distillation_eval.jsonl": rng.sample(held_out, 192)}


def two_facts(person: Person, language: str, rng: random.Random) -> tuple[list[dict], dict]:
    """Conversations about what the place of a person is known for, one of them with thoughts, and a quiz
    question."""
    place, name = person.facts["home"], person.name[language]
    value = PLACES["goods"][language][place]
    thoughts = [answer(person, HOME, language), place_text(place, language, PLACES["tell"][language][0])]
    reply = TWO_FACTS["reply"][language][0].format(n=name, v=value)
    asked = [wording.format(n=name) for wording in rng.sample(TWO_FACTS["ask"][language], 1 + PLAIN_ANSWERS)]
    records = [conversation([(question, reply)], language, rng) for question in asked]
    records[0]["conversations"][-1]["reasoning_content"] = "\n".join(thoughts)
    return records, quiz_question(asked[0], reply, value)


def make_reasoning(people: list[Person], rng: random.Random) -> dict[str, list[dict]]:
    """Conversations with and without thoughts about some of the people, and the quiz about others."""
    records, quiz = [], []
    for person in people:
        if person.group not in ("sft", "quiz"):
            continue
        for language in LANGUAGES:
            conversations, question = two_facts(person, language, rng)
            if person.group == "sft":
                records += conversations
            else:
                quiz.append(question)
    rng.shuffle(records)
    return {"reasoning.jsonl": records, "reasoning_quiz.jsonl": quiz}


def make_tour(seed: int) -> dict[str, list[dict]]:
    """All files as {file name: records}, a pure function of the seed."""
    corpus, people, rng = make_corpus(seed), make_people(random.Random(seed)), random.Random(seed)
    files = make_persona(corpus["sft.jsonl"], rng) | make_terse(people, rng)
    files |= make_distillation(people, corpus["quiz.jsonl"], rng)
    return files | make_reasoning(people, rng)


def write_files(output_dir: str | Path, files: dict[str, list[dict]]) -> dict[str, int]:
    """Write {file name: records} into a folder; returns the number of records per file.

    Files are replaced atomically; one with the right content is not touched.
    Raises UserError if the folder cannot be created or written.
    """
    folder = Path(output_dir)
    try:
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output_dir {folder} cannot be created ({error.strerror}); give another folder"
        ) from error
    for name, records in files.items():
        data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            atomic_write(path, lambda file, data=data: file.write(data))
    return {name: len(records) for name, records in files.items()}


def main() -> None:
    """Write the files of a seed, and print their sizes."""
    parser = Parser(description="Generate the built-in demo data; nothing is downloaded.")
    default = str(Path(__file__).resolve().parent / "demo")
    parser.add_argument("--output_dir", default=default, help="folder for the files")
    parser.add_argument("--seed", type=int, default=0, help="number that selects the world")
    args = parser.parse_args()
    files = make_corpus(args.seed) | make_tour(args.seed)
    files |= {f"sums/{name}": records for name, records in make_sums(args.seed).items()}
    counts = write_files(args.output_dir, files)
    print(
        f"seed {args.seed} in {args.output_dir}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items())
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
