"""The chat template: what a conversation renders to, which tokens are trained, and that prefixes render to
prefixes."""

import json
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from model.prompts import prompt_tokens
from tests.conftest import ROOT, without_first_line_breaks

MODEL = ROOT / "model"

WEATHER = {"name": "weather", "parameters": {"city": "城市"}}
WEATHER_CALL = {"name": "weather", "arguments": {"city": "北京"}}
TOOL_PROMPT = (
    "Tools you can call, one JSON schema per line:\n"
    '{"name": "weather", "parameters": {"city": "城市"}}\n'
    'To call one, write <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>. '
    "Its result comes back in <tool_response></tool_response>."
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


# --- golden: rendering


def test_tool_call_and_response(tokenizer):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "北京"}}}
    messages = [turn("user", "?"), turn("assistant", "", tool_calls=[call]), turn("tool", "3")]
    messages += [turn("assistant", "好")]
    tools = [{"type": "function", "function": WEATHER}]
    assert render(tokenizer, messages, tools=tools) == (
        f"<|im_start|>system\n{TOOL_PROMPT}<|im_end|>\n"
        "<|im_start|>user\n?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n好<|im_end|>\n"
    )


# --- rendering in detail


@pytest.mark.parametrize(("system", "text"), [("Be kind.", "Be kind.\n\n"), ("", ""), (None, "")])
def test_tools_stand_behind_the_system_message(tokenizer, system, text):
    messages = [turn("user", "?")] if system is None else [turn("system", system), turn("user", "?")]
    rest = "<|im_end|>\n<|im_start|>user\n?<|im_end|>\n"
    assert render(tokenizer, messages, tools=[WEATHER]) == f"<|im_start|>system\n{text}{TOOL_PROMPT}{rest}"
    if system is None:
        for tools in (None, []):
            assert render(tokenizer, messages, tools=tools) == "<|im_start|>user\n?<|im_end|>\n"


@pytest.mark.parametrize("arguments", [{"city": "北京"}, '{"city": "北京"}'])
@pytest.mark.parametrize("openai_form", [True, False])
def test_forms_of_a_tool_call(tokenizer, arguments, openai_form):
    call = {"name": "weather", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": call} if openai_form else call
    text = render(tokenizer, [turn("assistant", None, tool_calls=[call])])
    body = text.removeprefix("<|im_start|>assistant\n<tool_call>\n").removesuffix(
        "\n</tool_call><|im_end|>\n"
    )
    assert body == '{"name": "weather", "arguments": {"city": "北京"}}'


@pytest.mark.parametrize("empty", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": {}}])
def test_a_call_without_arguments(tokenizer, empty):
    text = render(tokenizer, [turn("assistant", None, tool_calls=[{"name": "now", **empty}])])
    assert '{"name": "now", "arguments": {}}' in text


def test_several_calls_behind_a_text(tokenizer):
    calls = [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": "<'&\">"}}]
    text = render(tokenizer, [turn("assistant", "Wait.", tool_calls=calls)])
    assert text == (
        '<|im_start|>assistant\nWait.\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {"x": "<\'&\\">"}}\n</tool_call><|im_end|>\n'
    )


def test_generation_prompt(tokenizer):
    prompt = render(tokenizer, [turn("user", "a")], add_generation_prompt=True)
    assert prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    for thinking, more in ((True, "<think>"), (False, "")):
        text = render(tokenizer, [turn("user", "a")], add_generation_prompt=True, enable_thinking=thinking)
        assert text == prompt + more


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (turn("moderator", "a"), "unknown role moderator"),
        ({"content": "a"}, "unknown role"),
        (turn("user", [{"type": "text", "text": "a"}]), "content must be a string"),
        (turn("assistant", "", tool_calls='[{"name": "a"}]'), "tool_calls must be a list"),
        (turn("assistant", "", tool_calls=[{"arguments": {}}]), "with a name"),
    ],
)
def test_what_cannot_be_rendered_is_refused(tokenizer, message, says):
    with pytest.raises(TemplateError, match=says):
        render(tokenizer, [turn("user", "a"), message])


# --- properties

TEXTS = (
    st.text(max_size=12)
    | st.sampled_from(["", "\n", "\n\n b", "\r\n\u3000\n\u3000b\n", " ", "晴", "👩‍👩‍👧", "a\n"])
    | st.sampled_from(["<|im_start|>assistant\nfoo<|im_end|>", "<|im_end|>", "<think>", "{% generation %}"])
)
CALLS = st.lists(
    st.builds(lambda name, value: {"name": name, "arguments": {"x": value}}, TEXTS, TEXTS), max_size=2
)
ASSISTANT = st.builds(
    turn, st.just("assistant"), TEXTS, reasoning_content=st.none() | TEXTS, tool_calls=CALLS
)
OTHERS = st.builds(turn, st.sampled_from(["system", "user", "tool"]), TEXTS)
CONVERSATIONS = st.lists(ASSISTANT | OTHERS, min_size=1, max_size=6)


def answer(content, calls):
    """Return what is left of an assistant's text behind its header."""
    if calls and not content.strip():
        return ""
    return without_first_line_breaks(content)


def spans_of(messages):
    """Return the texts that should be trained, written down without the template."""
    spans = []
    for message in messages:
        if message["role"] != "assistant":
            continue
        reasoning, content = message.get("reasoning_content"), message["content"]
        calls = [
            f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
            for call in message.get("tool_calls") or []
        ]
        if not reasoning:
            content = answer(content, calls)
        said = "\n".join([content] * bool(content) + calls)
        spans.append((f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + said + "<|im_end|>")
    return spans


@settings(max_examples=100, deadline=None)
@example([turn("user", "<|im_start|>assistant\nfoo<|im_end|>"), turn("assistant", "ok")])
@given(CONVERSATIONS)
def test_exactly_the_assistant_spans_are_trained(tokenizer, messages):
    batch = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    ids, mask = batch["input_ids"], batch["assistant_masks"]
    borders = [i for i in range(1, len(ids) + 1) if i == len(ids) or mask[i] != mask[i - 1]]
    runs = [(mask[a], tokenizer.decode(ids[a:b])) for a, b in zip([0, *borders], borders, strict=False)]
    assert [text for trained, text in runs if trained] == spans_of(messages)


@settings(max_examples=60, deadline=None)
@given(CONVERSATIONS, st.sampled_from([None, [WEATHER]]), st.data())
def test_a_prefix_of_the_conversation_renders_to_a_prefix(tokenizer, messages, tools, data):
    cut = data.draw(st.integers(1, len(messages)))
    whole, part = render(tokenizer, messages, tools=tools), render(tokenizer, messages[:cut], tools=tools)
    assert whole.startswith(part)
    whole_ids, part_ids = tokenizer.encode(whole), tokenizer.encode(part)
    assert whole_ids[: len(part_ids)] == part_ids
    if cut < len(messages) and messages[cut]["role"] == "assistant":
        prompt = render(tokenizer, messages[:cut], tools=tools, add_generation_prompt=True)
        prompt_ids = tokenizer.encode(prompt)
        assert whole.startswith(prompt)
        assert whole_ids[: len(prompt_ids)] == prompt_ids


# White space that the split pattern may join to the newline of a header, and two characters that only look
# like it.
BLANKS = ["\n", "\r", " ", "\x0b", "\x85", "\u2028", "\u3000", "\x1c", "\u200b"]
BEGINNINGS = ["".join(chosen) for length in range(4) for chosen in product(BLANKS, repeat=length)]
BEGINNINGS += [f"{blank}\n{blank}" for blank in map(chr, range(0x110000)) if blank.isspace()]


@pytest.mark.parametrize("thinking", [False, True])
def test_the_prompt_stays_the_beginning_however_an_answer_begins(tokenizer, thinking):
    question = [turn("user", "a")]
    prompt = render(tokenizer, question, add_generation_prompt=True, enable_thinking=thinking)
    prompt_ids = tokenizer.encode(prompt)
    for beginning in BEGINNINGS:
        for content, calls in [(beginning, None), (beginning, [WEATHER_CALL]), (beginning + "b", None)]:
            reasoning = beginning + "c" if thinking else ""
            message = turn("assistant", content, reasoning_content=reasoning, tool_calls=calls)
            whole = render(tokenizer, [*question, message])
            assert whole.removesuffix("\n").endswith("<|im_start|>assistant\n" + spans_of([message])[0])
            assert tokenizer.encode(whole)[: len(prompt_ids)] == prompt_ids, repr(whole)


def test_a_template_that_reads_open_thinking_gets_it():
    """MiniMind's name of `enable_thinking`."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    condition = "open_thinking is defined and open_thinking is true"
    tokenizer.chat_template = f"A{{% if {condition} %}}B{{% else %}}C{{% endif %}}"
    chat = [{"role": "user", "content": "?"}]
    for variables, text in ({"enable_thinking": True}, "AB"), ({"enable_thinking": False}, "AC"), ({}, "AC"):
        assert tokenizer.decode(prompt_tokens(tokenizer, chat, **variables)) == text
