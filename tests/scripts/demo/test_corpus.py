"""The demo corpus: the same bytes for a seed, facts told in many wordings, a quiz apart from SFT."""

import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from scripts.demo.corpus import write_files
from scripts.demo.sums import make_sums
from scripts.demo.tour import make_tour
from scripts.demo.world import ATTRIBUTES, GROUPS, LANGUAGES, Person, answer, make_corpus, make_people
from tests.conftest import ROOT
from trainer.rollouts.rewards import contains_answer

FILES = ["pretrain.jsonl", "pretrain_eval.jsonl", "sft.jsonl", "sft_eval.jsonl"]
FILES += ["quiz.jsonl", "quiz_second.jsonl", "quiz_fifth.jsonl"]


@pytest.fixture(scope="module")
def demo() -> dict[str, list[dict]]:
    return make_corpus(0)


def said(record: dict) -> str:
    return "\n".join(message["content"] for message in record["conversations"])


@pytest.fixture(scope="module")
def people() -> list[Person]:
    return make_people(random.Random(0))


def mentioned(people: list[Person], group: str, records: list[dict]) -> set[str]:
    """The people of a group whom conversations mention, by their names in both languages."""
    text = "\n".join(said(record) for record in records)
    names = {name for person in people if person.group == group for name in person.name.values()}
    return {
        name for name in names if (name in text if not name.isascii() else re.search(rf"\b{name}\b", text))
    }


def test_a_seed_gives_the_same_bytes(tmp_path):
    # in a process of its own: an order taken from a set or a hash would differ there
    command = [sys.executable, "-m", "scripts.demo.corpus", "--output_dir", tmp_path / "a", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = make_corpus(3) | make_tour(3) | make_sums(3)
    counts = write_files(tmp_path / "b", files)
    write_files(tmp_path / "c", make_corpus(4))
    for name in files:
        first, second = ((tmp_path / folder / name).read_bytes() for folder in "ab")
        assert first == second
        assert name not in FILES or (tmp_path / "c" / name).read_bytes() != first
        assert f"{counts[name]} {name}" in done.stdout
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == sorted(FILES)  # no temporary file is left


def test_a_second_run_leaves_good_files_alone_and_mends_others(tmp_path):
    write_files(tmp_path, make_corpus(0))
    kept, damaged = tmp_path / "sft.jsonl", tmp_path / "quiz.jsonl"
    whole, before = damaged.read_bytes(), kept.stat()
    damaged.write_bytes(whole[:100])
    write_files(tmp_path, make_corpus(0))
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert damaged.read_bytes() == whole


@pytest.mark.parametrize("seed", [0, 12345])
def test_the_quiz_asks_about_people_whom_sft_never_mentions(seed):
    demo, people = make_corpus(seed), make_people(random.Random(seed))
    sizes = Counter(person.group for person in people)
    assert sizes == GROUPS
    assert sizes["sft"] >= len(people) / 2
    assert len({name for person in people for name in person.name.values()}) == 2 * len(people)
    quizzed = {name for person in people if person.group == "quiz" for name in person.name.values()}
    assert mentioned(people, "quiz", demo["quiz.jsonl"]) == quizzed
    assert mentioned(people, "quiz", demo["sft.jsonl"] + demo["sft_eval.jsonl"]) == set()
    assert mentioned(people, "sft", demo["quiz.jsonl"]) == set()
    assert mentioned(people, "sft_eval", demo["sft.jsonl"]) == set()
    assert mentioned(people, "sft", demo["sft_eval.jsonl"]) == set()
    assert len(mentioned(people, "sft", demo["sft.jsonl"])) == 2 * GROUPS["sft"]


def test_the_answers_to_a_question_are_told_apart(demo):
    """The habit that SFT teaches is counted as right, every other value of the attribute as wrong; and the
    commonest value is not much more frequent than the others."""
    replies = {}
    for person in make_people(random.Random(0)):
        if person.group != "quiz":
            continue
        for attribute in ATTRIBUTES:
            for language in LANGUAGES:
                replies[answer(person, attribute, language)] = (person, attribute, language)
    counts = Counter()
    for record in demo["quiz.jsonl"]:
        person, attribute, language = replies[record["conversations"][-1]["content"]]
        counts[attribute.key, language, record["answer"]] += 1
        for value, text in enumerate(attribute.values[language]):
            other = replace(person, facts=person.facts | {attribute.key: value})
            score = contains_answer([], answer(other, attribute, language), record)
            assert score == float(text == record["answer"])
    assert max(counts.values()) / GROUPS["quiz"] <= 0.15


def test_held_out_texts_are_not_trained_on(demo):
    told = {record["text"] for record in demo["pretrain.jsonl"]}
    held_out = {record["text"] for record in demo["pretrain_eval.jsonl"]}
    assert len(held_out) > 100
    assert not told & held_out


@pytest.mark.parametrize(("name", "position"), [("quiz_second.jsonl", 2), ("quiz_fifth.jsonl", 5)])
def test_the_quiz_is_asked_again_after_questions_with_other_answers(demo, name, position):
    for alone, later in zip(demo["quiz.jsonl"], demo[name], strict=True):
        questions, answers = later["conversations"][::2], later["conversations"][1::2]
        assert len(questions) == position and later["conversations"][-2:] == alone["conversations"]
        assert later["answer"] == alone["answer"] and alone["answer"] not in later["wrong_answers"]
        assert all(contains_answer([], turn["content"], later) == 0.0 for turn in answers[:-1])


def test_conversations_change_person_and_language(demo, people):
    """Without such conversations a model answers a second question about the first one's person."""
    names = {name: person for person in people for name in person.name.values()}
    changes = Counter()
    for record in demo["sft.jsonl"]:
        asked = [turn["content"] for turn in record["conversations"] if turn["role"] == "user"]
        about = [{name for name in names if name in question} for question in asked]
        for before, after in zip(about, about[1:], strict=False):
            if before and after and before != after:
                changes["person"] += 1
                changes["language"] += {n.isascii() for n in before} != {n.isascii() for n in after}
    assert changes["person"] > 200 and changes["language"] > 80


def test_documents_of_pretraining_tell_of_several_people(demo, people):
    names = {name for person in people for name in person.name.values()}
    told = Counter(sum(name in record["text"] for name in names) for record in demo["pretrain.jsonl"])
    assert told[1] > 500 and told[2] + told[3] > 500
