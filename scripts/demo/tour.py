"""The demo's data for the stages after SFT; see corpus.py."""

import random
from dataclasses import replace

from scripts.demo.world import (
    ATTRIBUTES,
    HOME,
    LANGUAGES,
    PLACES,
    WORLD,
    Attribute,
    Person,
    answer,
    conversation,
    make_corpus,
    make_people,
    place_text,
    quiz_question,
)

PERSONA_REPEATS = 4  # copies of each question for the persona
MISTAKES = 1 / 3  # share of the answers that a student is taught and that are wrong
PLAIN_ANSWERS = 2  # answers without thoughts for one with them
PERSONA, TWO_FACTS = WORLD["persona"], WORLD["two facts"]


def make_persona(sft: list[dict], rng: random.Random) -> dict[str, list[dict]]:
    """The files of the persona. sft: the conversations of SFT. As many of them are added, so that the model
    keeps what it knows."""
    records, quiz = [], []
    for language in LANGUAGES:
        (name,), (reply,) = PERSONA["name"][language], PERSONA["reply"][language]
        questions = PERSONA["ask"][language] * PERSONA_REPEATS
        records += [conversation([(question, reply)], language, rng) for question in questions]
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
    turns = {key: {"role": "assistant", "content": text} for key, text in answers.items()}
    return {"conversations": [{"role": "user", "content": question.format(n=name)}], **turns}


def make_terse(people: list[Person], rng: random.Random) -> dict[str, list[dict]]:
    """The pairs, and held-out ones about other people."""
    files: dict[str, list[dict]] = {"terse.jsonl": [], "terse_eval.jsonl": []}
    for person in people:
        if person.group == "quiz":
            continue
        name = "terse.jsonl" if person.group == "sft" else "terse_eval.jsonl"
        for attribute in ATTRIBUTES:
            for language in LANGUAGES:
                wordings = attribute.ask[language]
                if person.group != "sft":
                    wordings = [rng.choice(wordings)]
                files[name] += [terse_pair(person, attribute, language, wording) for wording in wordings]
    for pairs in files.values():
        rng.shuffle(pairs)
    return files


def mistaken(person: Person, attribute: Attribute, rng: random.Random) -> Person:
    """A copy of the person whose value of the attribute is wrong with the probability MISTAKES."""
    known = person.facts[attribute.key]
    others = [value for value in range(len(attribute.values["en"])) if value != known]
    value = rng.choice(others) if rng.random() < MISTAKES else known
    return replace(person, facts=person.facts | {attribute.key: value})


def make_distillation(people: list[Person], quiz: list[dict], rng: random.Random) -> dict[str, list[dict]]:
    """Questions about everybody, in all wordings but one, with mistakes in the answers. The held-out
    questions use the remaining wording, which is the quiz's if the quiz asks the question."""
    in_quiz = {record["conversations"][0]["content"] for record in quiz}
    records, held_out = [], []
    for person in people:
        for attribute in ATTRIBUTES:
            for language in LANGUAGES:
                questions = [wording.format(n=person.name[language]) for wording in attribute.ask[language]]
                quiz_questions = [question for question in questions if question in in_quiz]
                held_out_question = quiz_questions[0] if quiz_questions else rng.choice(questions)
                # all replies are drawn first, so that a seed gives the same files
                replies = [answer(mistaken(person, attribute, rng), attribute, language) for _ in questions]
                for question, reply in zip(questions, replies, strict=True):
                    if question != held_out_question:
                        records.append(conversation([(question, reply)], language, rng))
                held_out.append(
                    conversation([(held_out_question, answer(person, attribute, language))], language, rng)
                )
    rng.shuffle(records)
    return {"distillation.jsonl": records, "distillation_eval.jsonl": rng.sample(held_out, 192)}


def two_facts(person: Person, language: str, rng: random.Random) -> tuple[list[dict], dict]:
    """Conversations about what the place of a person is known for, one of them with reasoning, and a quiz
    question."""
    place, name = person.facts["home"], person.name[language]
    value = PLACES["goods"][language][place]
    thoughts = [answer(person, HOME, language), place_text(place, language, PLACES["tell"][language][0])]
    reply = TWO_FACTS["reply"][language][0].format(n=name, v=value)
    questions = [
        wording.format(n=name) for wording in rng.sample(TWO_FACTS["ask"][language], 1 + PLAIN_ANSWERS)
    ]
    records = [conversation([(question, reply)], language, rng) for question in questions]
    records[0]["conversations"][-1]["reasoning_content"] = "\n".join(thoughts)
    return records, quiz_question(questions[0], reply, value)


def make_reasoning(people: list[Person], rng: random.Random) -> dict[str, list[dict]]:
    """Conversations with and without reasoning about some of the people, and the quiz about others."""
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
