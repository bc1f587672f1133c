"""What is counted in a text, and the prompts."""

import json
from collections import Counter

import pytest

from common.errors import UserError
from scripts.evaluation.probe import PROMPTS, counts, is_looping, read_prompts

WORDS = list(range(100, 200))


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        ([], False),
        (WORDS, False),
        ([7] * 12, True),
        ([7] * 11, False),  # short runs, such as a row of dashes, are no loop
        ([*WORDS, *[1, 2, 3] * 4], True),
        ([*WORDS, *[1, 2, 3] * 3, 1, 2], False),  # not four times
        ([*WORDS[:40] * 4], True),
        ([*WORDS[:40] * 3, *WORDS[:39]], False),
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 3], False),  # again and again, but not in a row
        ([*[5, 6] * 6, *WORDS], True),  # it found its way out; still a loop
    ],
)
def test_a_loop_is_something_said_four_times_in_a_row(tokens, looping):
    assert is_looping(tokens) is looping


def test_counts():
    found = counts([1, 2, 1, 2, 3], stopped=True)
    assert found["stopped"] == (1.0, 1.0) and found["looping"] == (0.0, 1.0) and found["tokens"] == (5.0, 1.0)
    assert found["distinct 1-grams"] == (3.0, 5.0) and found["distinct 2-grams"] == (3.0, 4.0)
    assert found["distinct 4-grams"] == (2.0, 2.0)
    assert counts([], stopped=False)["distinct 2-grams"] == (0.0, 0.0)


def test_the_prompts_of_the_project():
    prompts = read_prompts(PROMPTS)
    assert Counter(each["language"] for each in prompts) == {"zh": 40, "en": 40}
    assert len({each["prompt"] for each in prompts}) == 80


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "x"}', '{"prompt": " "}', '{"prompt": "x", "language": 1}'])
def test_a_line_that_is_no_prompt_is_named(line, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "x"}) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"p\.jsonl:2 is not a prompt"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        read_prompts(path)
    with pytest.raises(UserError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl")
