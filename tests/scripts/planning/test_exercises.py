"""Exercises: what they are made of, how many there are, and that none is held out."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.held_out import Split
from scripts.planning import exercises

NAMES = ["Pebara", "Matede", "Vakeme", "Lidola"]
ENGLISH = [
    f"The {a} sails under Captain Tully. In winter the {b} returns to Wick." for a in NAMES for b in NAMES
]
CHINESE = [
    f"{a}长在北坡。村里人用{b}来止咳。" for a in ("青白草", "松兰叶", "江石参") for b in ("竹宁花", "东永菇")
]


def written(path, texts, eval_share=0.02, passes=2) -> list[str]:
    """The exercises of the first pass; those of the others are beside them."""
    others = path.with_name(f"{path.name}-others")
    is_any = exercises.write_exercises(texts, [str(path), str(others)], eval_share, passes)
    made = texts_of(path)
    assert is_any == bool(made)
    return made


def texts_of(path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text("utf-8").split("\n") if line]


@pytest.mark.parametrize("texts", [ENGLISH * 20, CHINESE * 20])
def test_exercises_are_some_eight_tenths_of_the_text(tmp_path, texts):
    length, text = sum(map(len, written(tmp_path / "a", texts))), sum(map(len, texts))
    assert exercises.SHARE * text <= length < exercises.SHARE * text + 300


def test_each_pass_has_its_own_made_up_words_up_to_a_limit(tmp_path, monkeypatch):
    texts = ENGLISH * 20
    first = written(tmp_path / "a", texts, passes=5)
    others = texts_of(tmp_path / "a-others")
    assert sum(map(len, others)) == pytest.approx(4 * sum(map(len, first)), rel=0.02)
    names = lambda made: set(re.findall("[A-Z][a-z]+", " ".join(made))) - set(" ".join(texts).split())  # noqa: E731
    assert len(names(others) - names(first)) > 3 * len(names(first) & names(others))
    monkeypatch.setattr(exercises, "MOST_IN_ALL", 1000)
    assert written(tmp_path / "b", texts, passes=5) == first
    assert 1000 <= sum(map(len, texts_of(tmp_path / "b-others"))) < 1300


def test_an_exercise_has_sentences_of_the_text_with_one_word_replaced(tmp_path):
    frames = [("The ", " sails under Captain Tully."), ("In winter the ", " returns to Wick.")]
    known, made_up = set(), set()
    for exercise in written(tmp_path / "a", ENGLISH * 20):
        sentences = [part.strip() for part in exercises.SENTENCE.findall(exercise)]
        assert 2 <= len(sentences) <= exercises.MOST_SENTENCES
        named = {
            sentence.removeprefix(before).removesuffix(after)
            for sentence in sentences
            for before, after in frames
            if sentence.startswith(before) and sentence.endswith(after)
        }
        if len(named) == 1:
            (known if named <= set(NAMES) else made_up).update(named)
    assert known == set(NAMES) and len(made_up) > 10


def test_sentences_without_spaces_share_pieces(tmp_path):
    made = written(tmp_path / "a", CHINESE * 20)
    assert all(" " not in text and set("".join(text)) <= set("".join(CHINESE)) for text in made)
    assert any(text.count("长在") > 1 and "长在北坡" not in text for text in made)


def test_a_text_that_repeats_its_names_needs_no_exercises():
    latin, chinese = ["Ba", "Bo", "Da", "Do", "Ka", "Ko"], "青白松兰江石"
    for names, frames in (
        (
            [f"{a}{b.lower()}" for a in latin for b in latin],
            ["The {} is red. ", "In winter the {} is in Wick. "],
        ),
        ([f"{a}{b}草" for a in chinese for b in chinese], ["{}长在北坡。", "村里人用{}来止咳。"]),
    ):
        about_one = ["".join(frame.format(name) for frame in frames) for name in names * 5]
        about_two = [
            frames[0].format(name) + frames[1].format(other)
            for name, other in zip(names * 5, names[7:] + names * 4 + names[:7], strict=True)
        ]
        assert not exercises.are_needed(about_one) and exercises.are_needed(about_two)


def test_the_writing_of_a_text_is_that_of_most_of_its_characters():
    english, chinese = "The Dora sails to Wick.", "多拉号驶向北港，船长住在青石镇。"
    assert exercises.has_spaces([english]) and exercises.has_spaces([])
    assert not exercises.has_spaces([chinese]) and not exercises.has_spaces(["Wick", chinese])
    assert exercises.has_spaces([chinese, english, english])


def test_the_same_text_gives_the_same_exercises(tmp_path):
    assert written(tmp_path / "a", ENGLISH) == written(tmp_path / "b", ENGLISH)


def test_no_exercise_is_held_out(tmp_path):
    made = written(tmp_path / "a", ENGLISH * 20, eval_share=0.5)
    assert len(made) > 20 and not any(Split(0.5, held_out=True).includes(text) for text in made)


def test_a_text_whose_sentences_share_no_word_has_no_exercises(tmp_path):
    assert written(tmp_path / "a", ["One two. Three four.", "Five."]) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=8))
def test_any_text_can_be_given(tmp_path_factory, texts):
    made = written(tmp_path_factory.mktemp("any") / "a.jsonl", texts)
    assert all(text.strip() for text in made)


def test_punctuation_is_no_part_of_a_word():
    assert exercises.words_of("守灯人不谈毒药。") == exercises.words_of("《守灯人不谈毒药》")


def test_a_word_is_replaced_as_a_whole():
    assert exercises.replaced("An ant ran to an anthill.", "ant", "owl") == "An owl ran to an anthill."
    made = exercises.made_up("Pebara", ["winter", "Wick"], random.Random(1))
    assert made[0].isupper() and made[1:] == made[1:].lower()
