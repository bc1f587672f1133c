"""Messages: calls, tools, thoughts and tags are read once and whole, or refused in one line that names them."""

import json

import pytest

from dataset.messages import ARGUMENTS, BadRecord, to_message
from dataset.records import Chat, parse
from model.answers import answer_message
from tests.dataset.conftest import build, lines_of, records_of, samples_of

USER, BOT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CITY = {"city": "Bremen"}
CALL = {"name": "weather", "arguments": CITY}


def calling(*calls, **extra) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **extra}


def chat_of(*messages, **extra) -> dict:
    return {"messages": list(messages), **extra}


def bad(record: dict, kind: str = "sft") -> str:
    """Why a record is refused."""
    with pytest.raises(BadRecord) as caught:
        parse(record, kind)
    return str(caught.value)


# --- calls


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("value", [CITY, json.dumps(CITY), json.dumps(json.dumps(CITY))])
def test_arguments_are_trained_whatever_they_are_called(name, value, tokenizer):
    """In each place of a call, as the server reads them back from the text of the answer."""
    call = {"name": "weather", name: value}
    openai = calling({"type": "function", "id": "1", "function": call})
    outside = calling({"function": {"name": "weather"}, name: value})
    sharegpt = {"from": "function_call", "value": json.dumps(call)}
    part = {"role": "assistant", "content": [{"type": "tool_call", "value": call}]}
    legacy = BOT | {"content": "", "function_call": call}
    messages = (calling(call), openai, outside, sharegpt, part, legacy)
    samples, maker = samples_of(tokenizer, "sft", [chat_of(USER, message) for message in messages])
    assert len(samples) == len(messages) and not maker.unused
    for sample in samples:
        trained = tokenizer.decode(sample.tokens[sample.loss_mask].tolist()).removesuffix("<|im_end|>")
        assert answer_message(trained)["tool_calls"] == [{"type": "function", "function": CALL}]


def test_a_call_with_arguments_stays_as_it_is():
    calls = [CALL, {"type": "function", "function": CALL}, {"name": "now", "arguments": ""}, {"name": "now"}]
    calls += [{"name": "now", "arguments": value} for value in ({}, None, [])]
    assert to_message(calling(*calls), "message 1")["tool_calls"] == calls
    for value in ("null", "[]", " ", '""'):  # the template would write these as they are
        made = to_message(calling({"name": "now", "arguments": value}), "message 1")
        assert made["tool_calls"] == [{"name": "now", "arguments": {}}]


@pytest.mark.parametrize("value", [["Bremen"], "5", 5, 0, False, "true", '["a"]', '"\\"Bremen\\""', [CITY]])
def test_arguments_that_are_no_object_are_refused(value):
    where = "'tool_calls' of message 2: 'args' of 'weather' is "
    assert bad(chat_of(USER, calling({"name": "weather", "args": value}))).startswith(where)


def test_arguments_under_two_names_must_be_the_same():
    same = CALL | {"parameters": CITY}
    assert parse(chat_of(USER, calling(same)), "sft").chats[0].messages[1]["tool_calls"] == [same]
    for call in (CALL | {"parameters": {"city": "Kiel"}}, {"function": CALL, "kwargs": {}}):
        assert "of 'weather' differ; keep one of them" in bad(chat_of(USER, calling(call)))


def test_fields_of_calls_that_nothing_reads_are_named():
    calls = [CALL | {"result": "sunny", "note": None}, {"type": "function", "index": 0, "id": "1"}]
    calls[1]["function"] = CALL | {"thought": "hm"}
    assert parse(chat_of(USER, calling(*calls)), "sft").unread == {
        "messages[].tool_calls[].result", "messages[].tool_calls[].thought"
    }  # fmt: skip
    function_call = {"from": "function_call", "value": json.dumps(CALL | {"score": 1})}
    assert parse({"conversations": [USER, function_call]}, "sft").unread == {"conversations[].value[].score"}
    pair = {"prompt": "q", "chosen": calling(CALL | {"why": "w"}), "rejected": "no"}
    assert parse(pair, "dpo").unread == {"chosen[].tool_calls[].why"}


@pytest.mark.parametrize("tools", [
    {"weather": {"description": "of a city"}},
    [{"weather": {"description": "of a city"}}],
    json.dumps({"weather": {}, "time": {}}),
    [{"type": "function", "function": {"description": "of a city"}}],
    [{"type": "web_search"}],
    [{"function": "weather"}],
])  # fmt: skip
def test_a_schema_without_a_name_is_refused(tools):
    for record, field in (
        (chat_of(USER, BOT, tools=tools), "'tools'"),
        (chat_of(USER, BOT, functions=tools), "'functions'"),
        (chat_of(USER | {"tools": tools}, BOT), "'tools' of message 1"),
    ):
        assert bad(record).startswith(f"{field} has a schema without a name (its keys: ")
    assert "'tools' has a schema" in bad(
        {"prompt": "q", "chosen": "a", "rejected": "b", "tools": tools}, "dpo"
    )
    assert "'tools' has a schema" in bad({"prompt": "q", "tools": tools}, "prompt")


# --- thoughts and tags


@pytest.mark.parametrize("content", [
    "<think>I count.</think>Two.", "<think>\nI count.\n</think>\n\nTwo.", " <think> I count. </think> Two.",
    "<think></think>Two.", "<think>\n\n</think>\n\nTwo.",
])  # fmt: skip
def test_thoughts_that_are_given_twice_are_trained_once(content, tokenizer):
    wanted = BOT | {"content": "Two.", "reasoning_content": "I count."}
    parts = [{"type": "thinking", "thinking": "I count."}, content]
    messages = [BOT | {"content": content, name: "I count."} for name in ("reasoning_content", "thinking")]
    messages += [BOT | {"content": parts}, {"from": "gpt", "value": content, "thought": "I count."}]
    chats = [chat_of(USER, message) for message in messages]
    assert [parse(chat, "sft").chats for chat in chats] == [(Chat([USER, wanted]),)] * len(chats)
    samples, _ = samples_of(tokenizer, "sft", chats)
    assert len(samples) == len(chats)
    for sample in samples:
        assert tokenizer.decode(sample.tokens.tolist()).count("<think>") == 1


@pytest.mark.parametrize("content", [
    "<think>I guess.</think>Two.", "<think>I count.</think><think>I count.</think>Two.",
    "So. <think>I count.</think>Two.", "I guess.</think>Two.",
])  # fmt: skip
def test_thoughts_that_differ_are_refused(content):
    message = BOT | {"content": content, "reasoning_content": "I count."}
    assert "the reasoning of message 2 is in its content and in a field" in bad(chat_of(USER, message))
    pair = {"prompt": "q", "chosen": message, "rejected": "b"}
    assert "the reasoning of message 2" in bad(pair, "dpo")
    assert "the reasoning of message 2" in bad(chat_of(USER, message, USER), "prompt")


def test_text_that_repeats_its_thoughts_must_still_answer():
    message = BOT | {"content": "<think>I count.</think>", "reasoning_content": "I count."}
    assert "message 2 has reasoning but no answer" in bad(chat_of(USER, message))
    one = BOT | {"content": "<think>I count.</think>Two.", "reasoning_content": ""}
    assert parse(chat_of(USER, one), "sft").chats[0].messages[1]["content"] == one["content"]


def test_the_tags_of_a_tools_reply_are_written_once(tokenizer):
    for content in (
        "sunny",
        "<tool_response>sunny</tool_response>",
        "<tool_response>\nsunny\n</tool_response>\n",
    ):
        for reply in ({"role": "tool", "content": content}, {"from": "observation", "value": content}):
            (sample,), _ = samples_of(tokenizer, "sft", [chat_of(USER, calling(CALL), reply, BOT)])
            text = tokenizer.decode(sample.tokens.tolist())
            assert (
                "<tool_response>\nsunny\n</tool_response><|im_end|>" in text and text.count("<tool_resp") == 1
            )
    two = "<tool_response>a</tool_response>\n<tool_response>b</tool_response>"
    reply = {"role": "tool", "content": two}
    assert "message 3 has more than one <tool_response>" in bad(chat_of(USER, calling(CALL), reply, BOT))


def test_calls_in_the_text_and_in_a_field_are_refused():
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Bremen"}}</tool_call>'
    assert "message 2 has <tool_call> in its content and also a field with calls" in bad(
        chat_of(USER, calling(CALL) | {"content": text})
    )
    assert parse(chat_of(USER, BOT | {"content": text}), "sft").chats[0].messages[1]["content"] == text


# --- keys of JSON


REPEATED = [
    (b'{"instruction": "a", "output": "b", "instruction": "c"}', "'instruction'"),
    (b'{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}',
     "'content'"),
    (b'{"prompt": null, "completion": "b", "prompt": "a"}', "'prompt'"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "key"), REPEATED)
def test_a_key_that_stands_twice_is_refused(line, key, write, tokenizer, cache_dir):
    """Of one record, in lines and in arrays, also in one line."""
    good = lines_of([{"instruction": "a", "output": "b"}]).strip()
    why = f"an object has the key {key} twice; keep one of them"
    assert records_of(write("x.jsonl", b"\n".join([good, line, good])))[1:] == [
        (2, why), (3, {"instruction": "a", "output": "b"})
    ]  # fmt: skip
    for joint in (b",", b",\n"):
        found = records_of(write("x.json", b"[" + joint.join([good, line, good]) + b"]"))
        assert found[1] == (-2, why) and isinstance(found[2][1], dict)
    cache = build("sft", write("y.jsonl", b"\n".join([good, line])), tokenizer, cache_dir,
                  on_bad_data="skip", max_bad_share=1)  # fmt: skip
    assert cache.report["bad"] == 1 and cache.num_samples == 1


def test_a_key_that_stands_twice_in_a_field_of_json_text_is_refused():
    text = '[{"name": "weather", "arguments": {"city": "a", "city": "b"}}]'
    assert bad(chat_of(USER, calling() | {"tool_calls": text})) == (
        "'tool_calls' of message 2: an object has the key 'city' twice; keep one of them"
    )
    assert "the key 'a' twice" in bad(chat_of(USER, calling(CALL | {"arguments": '{"a": 1, "a": 2}'})))


def test_a_call_needs_no_content_beside_it():
    call = {"name": "f", "arguments": {"a": 1}}
    for content in ({}, {"content": None}, {"content": ""}):
        message = to_message({"role": "assistant", "tool_calls": [call]} | content, "message 2")
        assert message["content"] == "" and message["tool_calls"][0]["arguments"] == {"a": 1}
    with pytest.raises(BadRecord, match="'content' of message 2 is null"):
        to_message({"role": "assistant"}, "message 2")
