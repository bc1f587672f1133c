"""Which answers count as right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.right_answer import decisive, is_right

ASKED, REFERENCE = "Who commands the Dora?", "Captain Pike commands the Dora."


@pytest.mark.parametrize(
    "question, reference, answer, right",
    [
        (ASKED, REFERENCE, "captain pike commands the Dora", True),  # the same text
        (ASKED, REFERENCE, "Pike does.", True),
        (ASKED, REFERENCE, "Captain Voss commands the Dora.", False),  # the Dora is in the question
        (ASKED, REFERENCE, "Spike does.", False),  # a part of another word
        ("How old is Tom?", "Tom is 41 years old.", "He is 41.", True),
        ("How old is Tom?", "Tom is 41 years old.", "He is 410.", False),
        ("What is 3 + 4?", "3 + 4 is 7.", "3 + 4 is 8.", False),
        ("What is 3 + 4?", "3 + 4 is 7.", "7", True),
        ("What does the Dora carry?", "The Dora carries salt.", "The Dora carries tea.", False),
        ("What does the Dora carry?", "The Dora carries salt.", "Salt.", False),  # neither name nor number
        ("白术长在哪里？", "白术长在北坡。", "白术长在北坡", True),
        ("白术长在哪里？", "白术长在北坡。", "白术长在南湾。", False),
        ("白术几岁？", "白术三十岁，重12克。", "12克", True),
        ("Hello", "Good day. Nice to meet you!", "Nice to see you", False),  # it begins a sentence
        ("Where?", "in Łódź", "Łódź", False),  # no name to this rule: only the same text is right
        ("", "", "", True),
    ],
)
def test_an_answer(question, reference, answer, right):
    assert is_right(question, reference, answer) is right


@given(st.text(), st.text(), st.text())
def test_the_reference_is_right_and_what_decides_is_not_in_the_question(question, reference, answer):
    assert is_right(question, reference, reference)
    key = decisive(question, reference)
    assert key is None or (key in reference and is_right(question, reference, f"it is {key} ."))
    assert isinstance(is_right(question, reference, answer), bool)
