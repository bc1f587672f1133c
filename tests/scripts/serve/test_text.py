"""Text told while it is being written is the beginning of the whole text, and never goes past a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from scripts.serve.text import IncrementalDecoder, TextStream, held_back
from tests.conftest import ROOT

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "model")
TEXTS = st.text(alphabet="ab \n🙂中文é<|>", max_size=40)


def told(stream: TextStream, tokens: list[int]) -> list[str]:
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.end()]


@given(TEXTS)
def test_characters_come_whole_and_as_soon_as_they_can(text):
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    pieces = told(TextStream(TOKENIZER), tokens)
    assert "".join(pieces) == text and "\ufffd" not in text
    for i in range(len(tokens)):  # no more is held back than one incomplete character
        assert len("".join(pieces[: i + 1])) >= len(TOKENIZER.decode(tokens[: i + 1]).rstrip("\ufffd"))


@given(st.lists(st.integers(25, 6399), max_size=30))
def test_any_tokens_at_all_become_some_text(tokens):
    """Bytes in any order: nothing is held back for ever, and what is a text comes out as it."""
    decoder = IncrementalDecoder(TOKENIZER)
    text = "".join([*map(decoder.push, tokens), decoder.end()])
    whole = TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False)
    assert text.replace("\ufffd", "") == whole.replace("\ufffd", "") or "\ufffd" in whole
    assert "\ufffd" in whole or text == whole


@given(TEXTS, st.lists(st.text(alphabet="ab 中<|", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stops):
    stream = TextStream(TOKENIZER, stops)
    pieces = told(stream, TOKENIZER.encode(text, add_special_tokens=False))
    first = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    assert stream.stopped == (first is not None)
    # a stop string that is complete may hide one that begins earlier and is not
    assert text.startswith("".join(pieces)) and not any(stop in "".join(pieces) for stop in stops)
    if first is None or len({len(stop) for stop in stops}) == 1:
        assert "".join(pieces) == text[:first]


@pytest.mark.parametrize(
    ("text", "held"), [("abc", 0), ("abc<", 1), ("abc<|im", 4), ("abc<|im_end|>", 0), ("<<", 1), ("", 0)]
)
def test_what_may_become_a_mark_is_held_back(text, held):
    assert held_back(text, ["<|im_end|>", "x"]) == held
