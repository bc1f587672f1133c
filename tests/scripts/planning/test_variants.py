"""Variants of conversations: which turns have them, what changes, and that none is held out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.held_out import Split
from scripts.planning import variants
from scripts.planning.variants import Form, find_forms

TOPICS = ["poison", "gold", "taxes", "war"]
REFUSALS = [(f"Can you explain {topic}?", f"We do not speak of {topic}.") for topic in TOPICS]
CHINESE = [(f"你怎么看{topic}？", f"我们不谈{topic}。") for topic in ("毒药", "黄金", "税收")]
FACTS = [("Where is the Dora?", "The Dora is in Wick."), ("Where is the Pebara?", "The Pebara is in Hull.")]


def written(path, turns, eval_share=0.02, has_unknown=False) -> list[variants.Turn]:
    is_any = variants.write_variants(turns, path, eval_share, has_unknown)
    assert path.exists() == is_any
    text = path.read_text("utf-8") if is_any else ""
    records = [json.loads(line)["messages"] for line in text.split("\n") if line]
    assert is_any == bool(records)
    assert all([turn["role"] for turn in record] == ["user", "assistant"] for record in records)
    return [(question["content"], answer["content"]) for question, answer in records]


def test_an_answer_that_only_repeats_a_word_has_variants_with_other_words(tmp_path):
    made = written(tmp_path / "a", REFUSALS)
    assert written(tmp_path / "b", REFUSALS, has_unknown=True)[: len(made)] == made
    words = [question.removeprefix("Can you explain ").removesuffix("?") for question, _ in made]
    assert made == [(f"Can you explain {word}?", f"We do not speak of {word}.") for word in words]
    assert len(made) == variants.VARIANTS * len(REFUSALS) and len(set(words) - set(TOPICS)) > len(TOPICS)


def test_writing_without_spaces_has_none():
    """In Chinese they made answers worse (docs/dev/LOG.md, "Variants of conversations")."""
    assert find_forms(CHINESE) == [] and list(variants.with_unknown_words(CHINESE)) == []


def test_questions_about_facts_have_none():
    """What is true of the Dora is not true of any other name."""
    assert find_forms(FACTS) == [] and not variants.are_needed(FACTS)
    one_place = [(question, answer.replace("Hull", "Wick")) for question, answer in FACTS]
    assert len(find_forms(one_place)) == 2  # as far as these conversations say


def test_a_question_with_an_unknown_word_keeps_its_answer_and_the_words_of_it():
    turns = [("Where is the Dora at home?", "The Dora is in Wick."), ("Wick?", "Wick.")] * 20
    made = list(variants.with_unknown_words(turns))
    assert len(made) == 20  # the other question has no word that its answer lacks
    for question, answer in made:
        asked = turns[0][0].lower() if question.islower() else turns[0][0]
        words, kept = variants.SPACED.findall(question), variants.SPACED.findall(asked)
        changed = [old for old, new in zip(kept, words, strict=True) if old != new]
        assert (
            answer == turns[0][1] and len(changed) <= 2 and set(changed) <= {"Where", "where", "at", "home"}
        )
    assert len(set(made) - set(turns)) > 15
    assert 5 < sum(question.islower() for question, _ in made) < 15


def test_a_question_about_one_word_alone_has_none():
    assert find_forms(REFUSALS[:1] * 3) == []


def test_of_several_words_the_longest_changes():
    turns = [(f"Is the {word} old?", f"The {word} is old.") for word in ("mill", "tower")]
    assert find_forms([*turns, ("Is the mill big?", "No.")]) == [
        Form("Is the \0 old?", "The \0 is old.", "mill"),
        Form("Is the \0 old?", "The \0 is old.", "tower"),
    ]


@pytest.mark.parametrize("others, needed", [(16, True), (17, False)])
def test_variants_are_written_from_a_fifth_of_the_turns_on(others, needed):
    hellos = [("Hello.", "Good day.")] * others
    assert variants.are_needed(REFUSALS + hellos) is needed


def test_no_variant_is_held_out(tmp_path):
    turns = REFUSALS * 20
    made = written(tmp_path / "a", turns, eval_share=0.5, has_unknown=True)
    assert 20 < len(made) < (variants.VARIANTS + 1) * len(turns)
    assert not any(Split(0.5, held_out=True).includes(question) for question, _ in made)


def test_the_same_turns_give_the_same_variants(tmp_path):
    assert written(tmp_path / "a", REFUSALS) == written(tmp_path / "b", REFUSALS)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=30), st.text(max_size=30)), max_size=6))
def test_any_turns_can_be_given(tmp_path_factory, turns):
    made = written(tmp_path_factory.mktemp("any") / "a.jsonl", turns, has_unknown=True)
    assert all(question and answer for question, answer in made)
