"""Text shown while it is written is the beginning of the whole text; an answer's parts, wherever it is cut."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from model.answers import AnswerParser, TextStream, answer_message, held_back, merge, parse_call
from tests.conftest import ROOT

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "model")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "中"}}\n</tool_call>'
UNNAMED = '<tool_call>{"name": 1}</tool_call>'
DROP = CALL.replace("add", "drop")
CASES = {  # text: reasoning, content, names of the calls
    "\n Hello.\n": (None, "\n Hello.\n", []),
    "<think>\nHm.\nSo.\n</think>\n\nYes.": ("Hm.\nSo.", "Yes.", []),
    "<think>\n</think>\n\nYes.": (None, "Yes.", []),
    "\n<think>\nIt never ends\n": ("It never ends", "", []),
    "<thin air": (None, "<thin air", []),
    "1 < 2 and <think> is a word": (None, "1 < 2 and <think> is a word", []),
    f"<think>\nadd!\n</think>\n\n{CALL}\n{CALL}": ("add!", "", ["add", "add"]),
    f"{CALL}{DROP}": (None, "", ["add", "drop"]),
    f"so:\n{UNNAMED}\n{CALL}": (None, f"so:\n{UNNAMED}", ["add"]),
    '<tool_call>{"name": "f"}': (None, '<tool_call>{"name": "f"}', []),
}


def parsed(pieces: list[str], **how: Any) -> dict[str, Any]:
    parser, message = AnswerParser(**how), {"role": "assistant", "content": ""}
    parts = [part for piece in pieces for part in parser.push(piece)]
    for part in [*parts, *parser.push("", is_last=True)]:
        assert len(part) == 1 and all(part.values())
        merge(message, part)
    return message


@pytest.mark.parametrize("text", CASES)
def test_every_case_whole_and_character_by_character(text):
    reasoning, content, names = CASES[text]
    message = answer_message(text)
    assert message == parsed(list(text))
    assert message.get("reasoning_content") == reasoning and message["content"] == content
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert functions == [{"name": name, "arguments": {"a": 1, "b": "中"}} for name in names]


PARTS = ["<think>", "</think>", CALL, DROP, "<tool_call>", "</tool_call>", "<to", "\n", " ", "x"]


@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), st.data())
def test_any_cut_gives_the_message_of_the_whole_text(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces) == answer_message(text)
    assert parsed(pieces, thinks=True) == answer_message("<think>" + text)
    for tools in ([], ["add"]):
        assert parsed(pieces, tools=tools) == parsed([text], tools=tools)


def test_a_call_of_a_tool_that_was_not_offered_stays_text():
    text = f"{CALL}\n{DROP}"
    message = parsed([text], tools=["add"])
    assert message["content"] == DROP and len(message["tool_calls"]) == 1
    assert parsed([text], tools=[]) == {"role": "assistant", "content": text}


def test_words_are_emitted_as_soon_as_they_can_be_no_tag():
    parser = AnswerParser()
    assert parser.push("Is 1 <") == [{"content": "Is 1 "}]
    assert parser.push(" 2?\n") == [{"content": "< 2?"}]
    assert parser.push("<tool_") == []
    assert parser.push("box>") == [{"content": "\n<tool_box>"}]
    assert AnswerParser(tools=[]).push("a\n<tool_") == [{"content": "a\n<tool_"}]


@pytest.mark.parametrize("text", [CALL, f"<think>\nadd!\n</think>\n\nWait.\n{CALL}\n{CALL}"])
def test_a_message_renders_to_the_text_that_it_was_found_in(text):
    turns = [{"role": "user", "content": "?"}, answer_message(text)]
    rendered = TOKENIZER.apply_chat_template(turns, tokenize=False)
    assert rendered.endswith(f"<|im_start|>assistant\n{text}<|im_end|>\n")


def test_arguments_may_be_json_text_or_missing():
    assert parse_call('{"name": "f", "arguments": "{\\"a\\": 1}"}') == {"name": "f", "arguments": {"a": 1}}
    assert parse_call('{"name": "f"}') == {"name": "f", "arguments": {}}


def test_malformed_calls_are_refused():
    for value in ("[1]", '"1"', "3", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud83d"}', "[" * 100_000):
        assert parse_call(f'{{"name": "f", "arguments": {value}}}') is None, value
        assert parse_call(value) is None, value


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
    assert "".join(pieces) == text
    for i in range(len(tokens)):
        assert "".join(pieces[: i + 1]) == TOKENIZER.decode(tokens[: i + 1]).rstrip("\ufffd")


@given(st.lists(st.integers(25, 6399) | st.integers(25, 280), max_size=30))
def test_any_tokens_become_the_text_that_they_decode_to(tokens):
    text = "".join(shown(TextStream(TOKENIZER), tokens))
    assert text == TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False)


@example("the", ["e", "h"])
@given(TEXTS, st.lists(st.text(alphabet="ab 中<|", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stops):
    stream = TextStream(TOKENIZER, stops)
    joined = "".join(shown(stream, TOKENIZER.encode(text, add_special_tokens=False)))
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    assert stream.stopped == (first is not None)
    assert joined == text[:first]


@pytest.mark.parametrize("size", [1, 3])
def test_an_earlier_stop_string_wins_over_one_that_is_complete_before_it(size):
    """Whatever the pieces: "bc" is complete when "abcd" may still come."""
    for text, shown_text in (("xabcd.", "x"), ("xabc.", "xa"), ("xabc", "xa"), ("xab.", "xab.")):
        stream = TextStream(TOKENIZER, ("abcd", "bc"))
        pieces = [stream._emit(text[i : i + size]) for i in range(0, len(text), size)]
        assert "".join([*pieces, stream._emit("", is_last=True)]) == shown_text, text


def test_a_long_stop_string_costs_no_memory_and_is_held_back_as_far_as_it_came():
    assert held_back("x" + "a" * 50_000, ["a" * 60_000]) == 50_000
    assert held_back("xab", ["abc", "b"]) == 2 and held_back("xab", ["xabc", "b"]) == 3
    assert held_back("abc", []) == held_back("", ["abc"]) == 0
