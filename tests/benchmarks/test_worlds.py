"""The invented worlds: the same bytes for a seed, and questions that only the text, or no wording, answers."""

import random
import re

import pytest

from benchmarks.worlds import MENTIONS, WORLDS, latin_names, make_worlds


@pytest.fixture(scope="module")
def worlds():
    return make_worlds(3)


def said(records) -> str:
    return "\n".join(turn["content"] for record in records for turn in record["messages"])


def test_a_seed_gives_the_same_worlds_and_another_one_others(worlds):
    again, other = make_worlds(3), make_worlds(4)
    assert again == worlds
    assert all(other[name]["text.jsonl"] != worlds[name]["text.jsonl"] for name in worlds)


@pytest.mark.parametrize("name", ["ships", "herbs", "scattered"])
def test_each_fact_stands_a_dozen_times_and_no_conversation_answers_the_quiz(worlds, name):
    files = worlds[name]
    text = "".join(record["text"] for record in files["text.jsonl"])
    for record in files["quiz.jsonl"][:20]:
        question, answer = (turn["content"] for turn in record["messages"])
        assert record["answer"] in answer and not set(record["wrong_answers"]) & set(answer.split())
        assert question not in said(files["sft_1000.jsonl"])
    values = {len(kind) for kind in WORLDS["herbs" if name == "herbs" else "ships"]["values"].values()}
    assert values == {10}
    sentences = 120 * 4 * MENTIONS
    assert sum(text.count(mark) for mark in (".", "。")) == sentences


def test_reworded_questions_are_answered_in_the_fewest_conversations_in_other_words(worlds):
    for name in ("ships", "herbs", "scattered"):
        files = worlds[name]
        shown = said(files["sft_50.jsonl"])
        for record in files["reworded.jsonl"]:
            question, answer = (turn["content"] for turn in record["messages"])
            assert answer in shown and question not in shown


def test_the_text_of_manners_says_nothing_of_them(worlds):
    files = worlds["manners"]
    text = "".join(record["text"] for record in files["text.jsonl"])
    assert "lamp" not in text and "Alder" not in text
    asked = {record["messages"][0]["content"] for record in files["quiz.jsonl"]}
    assert not asked & set(said(files["sft_1000.jsonl"]).split("\n"))


def test_no_conversation_of_the_handbook_mentions_a_fact_of_the_quiz(worlds):
    files = worlds["handbook"]
    text = [record["text"] for record in files["text.jsonl"]]
    groups = [WORLDS["handbook"][group] for group in ("goods", "staff")]
    kinds = [kind for group in groups for kind in group["facts"].values()]

    def mentions(texts, question: str, answer: str, forms: tuple[str, ...]) -> int:
        """How often the texts state the fact that this question asks for."""
        kind = next(kind for kind in kinds if stated(question, kind["questions"], ""))
        return sum(stated(line, [w for form in forms for w in kind[form]], answer) for line in texts)

    def stated(line: str, wordings: list[str], value: str) -> int:
        return sum(len(re.findall(pattern(wording, value), line)) for wording in wordings)

    def pattern(wording: str, value: str) -> str:
        return re.escape(wording).replace(r"\{n\}", name).replace(r"\{v\}", re.escape(value))

    shown = said(files["sft_1000.jsonl"]).split("\n")
    for record in files["quiz.jsonl"]:
        question, value = record["messages"][0]["content"], record["answer"]
        name = next(n for n in names(groups) if n in question)
        assert 3 <= mentions(text, question, value, ("sentences",)) <= 30
        assert not mentions(shown, question, value, ("answers",))


def names(groups) -> list[str]:
    return [f"{a} {b}" for group in groups for a in group["names"][0] for b in group["names"][1]]


def test_names_differ():
    assert len(set(latin_names(random.Random(0), 300, 2))) == 300
