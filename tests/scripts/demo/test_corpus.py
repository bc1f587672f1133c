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

FILES = ["pretrain.jsonl", "pretrain_eval.jsonl", "sft.jsonl", "sft_eval.jsonl", "quiz.jsonl"]


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
