"""Text shown while it is written is the beginning of the whole text; reasoning and calls wherever it is
cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from model.answer_stream import AnswerParser, IncrementalDecoder, TextStream, merge
from tests.conftest import ROOT

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "model")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "中"}}\n</tool_call>'
CASES = {  # text: reasoning, content, names of the calls
    "Hello.\n": (None, "Hello.\n", []),
    "\nHello": (None, "\nHello", []),
    "<think>\nHm.\nSo.\n</think>\n\nYes.": ("Hm.\nSo.", "Yes.", []),
    "<think>\n</think>\n\nYes.": (None, "Yes.", []),
    "<think>\nIt never end": ("It never end", None, []),
    "<thin air": (None, "<thin air", []),
    "It is 1 < 2 and <think> is a word": (None, "It is 1 < 2 and <think> is a word", []),
    CALL: (None, None, ["add"]),
    f"Let me see.\n{CALL}": (None, "Let me see.", ["add"]),
    f"<think>\nadd!\n</think>\n\n{CALL}\n{CALL}": ("add!", None, ["add", "add"]),
    "<tool_call>\n{broken\n</tool_call>": (None, "<tool_call>\n{broken\n</tool_call>", []),
    f"so:\n<tool_call>[1]</tool_call>\n{CALL}": (None, "so:\n<tool_call>[1]</tool_call>", ["add"]),
    "<tool_call>\n{}": (None, "<tool_call>\n{}", []),
    CALL.replace("add", "drop"): (None, CALL.replace("add", "drop"), []),
    CALL.replace("1,", "NaN,"): (None, CALL.replace("1,", "NaN,"), []),
    CALL.replace('{"a": 1, "b": "中"}', "[1]"): (None, CALL.replace('{"a": 1, "b": "中"}', "[1]"), []),
}


def parsed(pieces: list[str], **how: Any) -> dict[str, Any]:
    parser, message = AnswerParser(**how), {}
    for delta in [delta for piece in pieces for delta in parser.push(piece)] + parser.end():
        assert len(delta) == 1 and all(delta.values())
        merge(message, delta)
    return message


@pytest.mark.parametrize("text", CASES)
def test_every_case_whole_and_character_by_character(text):
    reasoning, content, names = CASES[text]
    for pieces in ([text], list(text)):
        message = parsed(pieces, tools=["add"])
        assert message.get("reasoning_content") == reasoning and message.get("content") == content
        calls = message.get("tool_calls", [])
        assert [call["function"]["name"] for call in calls] == names
        assert len({call["id"] for call in calls}) == len(calls)
        for call in calls:
            assert call["type"] == "function" and json.loads(call["function"]["arguments"]) == {
                "a": 1,
                "b": "中",
            }


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", CALL, "<tool_call>", "</tool_call>", "\n", "x", "{"]),
        max_size=8,
    ),
    st.data(),
)
def test_pieces_do_not_matter(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for thinks in (False, True):
        found = [parsed(some, thinks=thinks, tools=["add"]) for some in ([text], pieces)]
        for message in found:
            for call in message.get("tool_calls", []):
                call.pop("id")
        assert found[0] == found[1]


def test_without_tools_a_call_is_text():
    assert parsed([CALL]) == {"content": CALL}


def test_an_answer_that_begins_inside_its_reasoning():
    message = parsed(list("\nHm.\n</think>\n\nYes."), thinks=True)
    assert message == {"reasoning_content": "Hm.", "content": "Yes."}


def test_a_message_renders_to_the_text_that_it_was_found_in():
    """What a client sends back is what the model wrote, token for token."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "model")
    for text in (f"<think>\nadd!\n</think>\n\nWait.\n{CALL}\n{CALL}", CALL, "<think>\nHm.\n</think>\n\nYes."):
        message = {"role": "assistant", "content": "", **parsed([text], tools=["add"])}
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "?"}, message], tokenize=False)
        assert rendered.endswith(f"<|im_start|>assistant\n{text}<|im_end|>\n")


# --- from tokens to text

TEXTS = st.text(alphabet="ab \n🙂中文é<|>", max_size=40)


def shown(stream: TextStream, tokens: list[int]) -> list[str]:
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.end()]


@given(TEXTS)
def test_characters_come_whole_and_as_soon_as_they_can(text):
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    pieces = shown(TextStream(TOKENIZER), tokens)
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
    pieces = shown(stream, TOKENIZER.encode(text, add_special_tokens=False))
    first = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    assert stream.stopped == (first is not None)
    # a stop string that is complete may hide one that begins earlier and is not
    assert text.startswith("".join(pieces)) and not any(stop in "".join(pieces) for stop in stops)
    if first is None or len({len(stop) for stop in stops}) == 1:
        assert "".join(pieces) == text[:first]
