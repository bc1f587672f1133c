"""The data of the tour: held-out parts are held out, what is said is true, and thoughts are trained."""

import json
import random

import pytest

from scripts.demo.tour import MISTAKES, PERSONA, make_tour
from scripts.demo.world import ATTRIBUTES, GROUPS, LANGUAGES, answer, make_corpus, make_people
from trainer.rollouts.rewards import contains_answer


@pytest.fixture(scope="module")
def tour() -> dict[str, list[dict]]:
    return make_tour(0)


@pytest.fixture(scope="module")
def corpus_files() -> dict[str, list[dict]]:
    return make_corpus(0)


def questions(records: list[dict]) -> set[str]:
    """What users ask in conversations."""
    turns = [turn for record in records for turn in record["conversations"]]
    return {turn["content"] for turn in turns if turn["role"] == "user"}


def mentioned(names: set[str], records: list[dict]) -> set[str]:
    text = json.dumps(records, ensure_ascii=False)
    return {name for name in names if name in text}


def test_the_persona_is_asked_in_wordings_that_are_not_trained(tour):
    trained, asked = questions(tour["persona.jsonl"]), questions(tour["persona_quiz.jsonl"])
    assert len(asked) == 32 and not trained & asked
    replies = {reply for language in LANGUAGES for reply in PERSONA["reply"][language]}
    taught = [record for record in tour["persona.jsonl"] if record["conversations"][-1]["content"] in replies]
    assert len(taught) * 2 == len(tour["persona.jsonl"])  # as much of what it knew
    for record in tour["persona_quiz.jsonl"]:
        assert contains_answer([], record["conversations"][-1]["content"], record) == 1.0


def test_the_student_is_never_asked_a_question_of_the_quiz(tour, corpus_files):
    quiz, trained = questions(corpus_files["quiz.jsonl"]), questions(tour["distillation.jsonl"])
    held_out = questions(tour["distillation_eval.jsonl"])
    assert not trained & quiz and not trained & held_out
    assert len(held_out & quiz) > 20  # and the held-out data are like the quiz
    assert len(trained) == sum(GROUPS.values()) * 8 * 3
    people = make_people(random.Random(0))
    true = {
        answer(person, kind, language) for person in people for kind in ATTRIBUTES for language in LANGUAGES
    }
    replies = {
        name: [each["conversations"][-1]["content"] for each in tour[name]] for name in tour if "dist" in name
    }
    assert set(replies["distillation_eval.jsonl"]) <= true
    right = sum(reply in true for reply in replies["distillation.jsonl"]) / len(trained)
    assert right == pytest.approx(1 - MISTAKES, abs=0.03)
