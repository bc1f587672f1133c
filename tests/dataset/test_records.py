"""Records: the formats that are understood, and one clear line for each thing that can be wrong with one."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import UserError
from dataset import records as record_formats
from dataset.json_values import BadRecord
from dataset.records import Chat, Turn, parse_message, to_chat, to_text, unread_fields
from tests.conftest import ROOT
from tests.dataset.conftest import build

USER, BOT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
CALL = {"name": "weather", "arguments": {"city": "北京"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def chat_of(*messages, **extra):
    return {"conversations": list(messages), **extra}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        (chat_of(USER, BOT), [USER, BOT]),
        ({"messages": [USER, BOT], "id": 7}, [USER, BOT]),
        ({"conversations": None, "messages": [USER, BOT]}, [USER, BOT]),  # as Parquet fills absent columns
        (chat_of({"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}), [USER, BOT]),
        (
            chat_of({"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, system="s"),
            [{"role": "system", "content": "s"}, USER, BOT],
        ),
        (
            chat_of(
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "r"},
                {"from": "gpt", "value": "a"},
            ),
            [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "r"},
                BOT,
            ],
        ),
        ({"instruction": "q", "output": "a"}, [USER, BOT]),
        ({"instruction": "q", "input": "", "output": "a", "history": [], "system": ""}, [USER, BOT]),
        ({"instruction": "q", "input": "i", "output": "a"}, [{"role": "user", "content": "q\ni"}, BOT]),
        (
            {"instruction": "q", "output": "a", "history": [["q0", "a0"]], "system": "s"},
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "q0"},
                {"role": "assistant", "content": "a0"},
                USER,
                BOT,
            ],
        ),
        (
            chat_of(USER, {**BOT, "reasoning_content": "hm", "tool_calls": None, "tools": ""}),
            [USER, {**BOT, "reasoning_content": "hm"}],
        ),
        (
            chat_of(USER, {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])}),
            [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
        (chat_of(BOT), [BOT]),
        ({"instruction": "q", "context": "c", "response": "a"}, [{"role": "user", "content": "q\nc"}, BOT]),
        ({"prompt": "q", "completion": "a"}, [USER, BOT]),
        ({"prompt": "q", "completion": [BOT]}, [USER, BOT]),
        ({"prompt": "q", "response": "a"}, [USER, BOT]),
        ({"question": "q", "answer": "a", "prompt": "unused"}, [USER, BOT]),
        ({"query": "q", "response": "a"}, [USER, BOT]),
        ({"system_prompt": "s", "question": "q", "response": "a"}, [SYSTEM, USER, BOT]),
        ({"messages": [USER, BOT], "prompt": "q"}, [USER, BOT]),
        (chat_of(SYSTEM, USER, BOT, system="s"), [SYSTEM, USER, BOT]),  # said twice
        (chat_of(USER, BOT, images=[], label=3, mask_history=False), [USER, BOT]),
        (chat_of(USER, BOT, chosen=None, rejected=""), [USER, BOT]),
        (chat_of(USER, {"role": "assistant", "content": ""}), [USER, {"role": "assistant", "content": ""}]),
    ],
)
def test_forms_of_conversations(record, messages):
    assert to_chat(record) == Chat(messages, None)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), TOOL, json.dumps(TOOL), [json.dumps(TOOL)]])
def test_tools_stand_on_the_system_message_or_beside_the_conversation(tools):
    system = {"role": "system", "content": "s"}
    assert to_chat(chat_of({**system, "tools": tools}, USER, BOT)) == Chat([system, USER, BOT], [TOOL])
    assert to_chat(chat_of(system, USER, BOT, tools=tools)) == Chat([system, USER, BOT], [TOOL])


def test_tools_beside_a_question_and_under_their_older_name():
    assert to_chat({"prompt": "q", "completion": "a", "tools": [TOOL]}) == Chat([USER, BOT], [TOOL])
    assert to_chat(chat_of(USER, BOT, functions=[TOOL])) == Chat([USER, BOT], [TOOL])


def test_turns_that_are_not_trained():
    first, last = {**BOT, "loss_weight": 0.0}, {**BOT, "loss_weight": 1.0}
    assert to_chat(chat_of({**USER, "loss_weight": 0.0}, first, USER, last)).masked == (1,)
    assert to_chat(chat_of(USER, first, USER, BOT, system="s")).masked == (2,)
    assert to_chat(chat_of(USER, BOT, USER, BOT, USER, BOT, mask_history=True)).masked == (1, 3)
    pair = to_chat({"prompt": [USER, BOT, USER], "completion": [BOT, USER, BOT]})
    assert pair == Chat([USER, BOT, USER, BOT, USER, BOT], None, masked=(1,))


@pytest.mark.parametrize("record", [chat_of(USER, BOT), {"prompt": "q", "completion": "a"}])
@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_the_labels_of_kto(record, key):
    for good in (True, "True", None, ""):
        assert to_chat({**record, key: good}) == Chat([USER, BOT], None)
    for bad in (False, "false"):
        with pytest.raises(BadRecord, match=f"'{key}' is false: a bad answer"):
            to_chat({**record, key: bad})
    with pytest.raises(BadRecord, match="'kto_tag' is false"):
        to_chat({**record, "kto_tag": 0})
    assert "kto_tag" in unread_fields({**record, "kto_tag": 3})


def test_fields_that_nothing_reads():
    def unread(record):
        return sorted(unread_fields(record))

    record = chat_of({**USER, "date": "today", "loss": False, "x": None}, BOT, id=7, meta=None)
    assert unread(record) == ["conversations.date", "id"]
    others = {"context": "c", "history": [["q", "a"]], "input": "i", "output": "o", "prompt": "p"}
    others |= {"text": "t"}
    assert unread(chat_of(USER, BOT, **others)) == list(others)  # read in records of other forms only
    assert unread({"prompt": "q", "completion": "a", "response": "b"}) == ["response"]
    for label, is_unread in ((True, False), ("false", False), (3, True), ("angry", True)):
        assert unread(chat_of(USER, BOT, label=label)) == ["label"] * is_unread
    assert unread(chat_of(USER, {**BOT, "loss": True, "tool_calls": [CALL]}, label=False, tools=[TOOL])) == []
    pair = {"prompt": [{**USER, "x": 1}], "completion": [{**BOT, "x": 1}], "score": 1}
    assert unread(pair) == ["completion.x", "prompt.x", "score"]
    assert unread({"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]]}) == []


def test_nothing_is_changed_in_a_text():
    text = " \t leading, NUL \x00, trailing \r\n\n"
    assert to_text({"text": text}) == text
    assert to_chat(chat_of({"role": "user", "content": text}, BOT)).messages[0]["content"] == text


# (kind, line of the file, expected message)
BAD_LINES = [
    ("pretrain", b'{"text": "abc', "not valid JSON (Unterminated string starting at at column 10); each"),
    ("pretrain", b'{"text": "a"} {"text": "b"}', "not valid JSON (Extra data at column 15)"),
    ("pretrain", b"{'text': 'a'}", "not valid JSON (Expecting property name enclosed in double quotes"),
    ("pretrain", b'{"text": "a\x00b"}', "not valid JSON (Invalid control character at at column 12)"),
    ("pretrain", b'["text"]', "a list instead of a JSON object; write {...}"),
    ("pretrain", b'"text"', "text instead of a JSON object"),
    ("pretrain", b"null", "null instead of a JSON object"),
    ("pretrain", b"NaN", "a number instead of a JSON object"),
    ("pretrain", b"9" * 5000, "JSON that cannot be read"),
    ("pretrain", b"[" * 100_000, "nested too deep"),
    ("pretrain", b"{}", "no 'text' in this record (its keys: none)"),
    ("pretrain", b'{"content": "a"}', "no 'text' in this record (its keys: 'content')"),
    ("pretrain", b'{"conversations": []}', "'conversations' is an empty list"),
    ("pretrain", b'{"text": null}', "'text' is null instead of text"),
    ("pretrain", b'{"text": 5}', "'text' is a number instead of text"),
    ("pretrain", b'{"text": true}', "'text' is true/false instead of text"),
    ("pretrain", b'{"text": "\\ud83d"}', "lone surrogate \\ud83d (half a character)"),
    ("pretrain", b'{"text": "\\uDE00\\ud83d\\ude00"}', "lone surrogate \\ude00 (half a character)"),
    ("pretrain", b'{"text": "\xe4\xb8"}', "not UTF-8 (byte 0xe4); save the file as UTF-8"),
    ("pretrain", '{"text": "中文"}'.encode("gb18030"), "not UTF-8 (byte 0xd6); save the file as UTF-8:"),
    ("pretrain", {"prompt": "q", "chosen": "a", "rejected": "b"}, "'chosen': a preference file"),
    ("pretrain", {"prompt": "q"}, "no 'completion' (its keys: 'prompt'); add it"),
    ("sft", {"chosen": "qa", "rejected": "qb"}, "a preference file (DPO), which is another stage; for"),
    ("sft", {"chosen": [USER, BOT], "rejected": [USER, BOT], "messages": [USER, BOT]}, "a preference"),
    ("sft", chat_of(USER, chosen=BOT, rejected=BOT), "'chosen': a preference file (DPO)"),
    (
        "sft",
        {"chosen_messages": [USER, BOT], "rejected_messages": [USER, BOT]},
        "'chosen_messages': a preference",
    ),
    ("sft", {"input": {}, "preferred_output": [BOT], "non_preferred_output": [BOT]}, "a preference file"),
    ("sft", chat_of(USER, BOT, rejected_response="b"), "'rejected_response': a preference file (DPO)"),
    ("sft", chat_of(USER, BOT, images=["1.jpg"]), "'images': the model reads text only;"),
    ("sft", chat_of(USER, BOT, kto_tag=False), "'kto_tag' is false: a bad answer (KTO), which SFT must"),
    ("sft", chat_of(USER, BOT, mask_history="some"), "'mask_history' is 'some'; it is a switch: write"),
    ("sft", {"prompt": "q"}, "no 'completion' (its keys: 'prompt'); add it"),
    ("sft", {"prompt": "q", "completion": ["a"]}, "message 2 is text instead of an object"),
    ("sft", {"prompt": [USER], "completion": [BOT], "context": "c"}, "'prompt' is a list of messages,"),
    ("sft", {"prompt": [], "completion": "a"}, "'prompt' is an empty list"),
    ("sft", {"prompt": "q", "completion": "a", "question": "q", "answer": "a"}, "both 'prompt' and"),
    ("sft", chat_of(USER, BOT, tools=[TOOL], functions=[TOOL]), "'tools' are given more than once"),
    ("sft", b'{"text": "a"}', "is this pretraining data?"),
    ("sft", b'{"conversations": null}', "no 'conversations', 'messages' or 'instruction' in this record"),
    ("sft", b'{"conversations": "hi"}', "'conversations' is text instead of a list of messages"),
    ("sft", b'{"conversations": []}', "'conversations' is an empty list"),
    ("sft", chat_of("hi", BOT), "message 1 is text instead of an object with 'role' and 'content'"),
    ("sft", chat_of(USER, None), "message 2 is null instead of an object"),
    ("sft", chat_of(USER, {"content": "a"}), "message 2 has no 'role' (its keys: 'content'); write one"),
    ("sft", chat_of({"role": "robot", "content": "a"}), "message 1 has the unknown role 'robot'; known"),
    ("sft", chat_of({"role": ["user"], "content": "a"}), "message 1 has the unknown role ['user']"),
    ("sft", chat_of(USER, {"role": "assistant"}), "no 'content' of message 2 (its keys: 'role'); add it"),
    ("sft", chat_of(USER, {"role": "assistant", "content": None}), "'content' of message 2 is null"),
    ("sft", chat_of(USER, {"role": "assistant", "content": 3.5}), "'content' of message 2 is a number"),
    ("sft", chat_of({"from": "human", "content": "q"}, BOT), "no 'value' of message 1 (its keys:"),
    ("sft", chat_of(USER, {**BOT, "reasoning_content": 1}), "'reasoning_content' of message 2 is a"),
    ("sft", chat_of(USER), "no assistant turn, so nothing to learn"),
    ("sft", chat_of(*[{"role": "system", "content": "s"}] * 2, USER, BOT), "two system messages in one"),
    ("sft", chat_of({"role": "system", "content": "s"}, USER, BOT, system="t"), "two system messages"),
    ("sft", chat_of(USER, {"role": "system", "content": "s"}, BOT), "the system message is not the"),
    ("sft", chat_of(USER, {**BOT, "tool_calls": "{oops"}), "'tool_calls' of message 2 does not parse as"),
    ("sft", chat_of(USER, {**BOT, "tool_calls": [{"x": 1}]}), "'tool_calls' of message 2 holds a call"),
    ("sft", chat_of(USER, {**BOT, "tool_calls": [{"function": 1}]}), "holds a call without a 'name'"),
    ("sft", chat_of(USER, BOT, tools="nope"), "'tools' does not parse as JSON"),
    ("sft", chat_of(USER, BOT, tools=5), "'tools' is a number instead of a list of JSON objects"),
    ("sft", chat_of({**USER, "tools": [TOOL]}, BOT, tools=[TOOL]), "'tools' are given more than once"),
    ("sft", chat_of(USER, BOT, messages=[USER, BOT]), "both 'conversations' and 'messages' in one"),
    ("sft", {"instruction": "q", "output": None}, "'output' is null instead of text"),
    ("sft", {"instruction": "q", "input": 4, "output": "a"}, "'input' is a number instead of text"),
    ("sft", {"instruction": "q", "output": "a", "history": "h"}, "'history' is text instead of a list"),
    ("sft", {"instruction": "q", "output": "a", "history": [["q"]]}, "turn 1 of 'history' is not"),
    ("sft", b'{"conversations": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate \\ud800"),
]


@pytest.mark.parametrize(("kind", "line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_records_end_in_one_line_that_names_file_and_line(
    kind, line, message, write, cache_dir, other_tokenizer
):
    good = json.dumps({"text": "x"} if kind == "pretrain" else chat_of(USER, BOT)).encode()
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    path = write("data.jsonl", good + b"\n\n" + line + b"\n" + good + b"\n" + line + b"\n")
    with pytest.raises(UserError) as caught:
        build(kind, path, other_tokenizer, 64, cache_dir)
    text = str(caught.value)
    assert text.startswith(f"{path}:3: ") and message in text and "\n" not in text
    assert "--on_bad_data skip" in text


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_all_bad_records_at_once_can_be_skipped(kind, write, cache_dir, other_tokenizer):
    lines = [
        line if isinstance(line, bytes) else json.dumps(line).encode()
        for k, line, _ in BAD_LINES
        if k == kind
    ]
    good = json.dumps({"text": "x"} if kind == "pretrain" else chat_of(USER, BOT)).encode()
    path = write("data.jsonl", b"\n".join([good, *lines, good, b""]))
    cache = build(kind, path, other_tokenizer, 64, cache_dir, on_bad_data="skip", max_bad_share=1)
    report, bad = cache.report, len(lines)
    assert (report["records"], report["samples"], report["skipped_bad_records"]) == (bad + 2, 2, bad)
    listed = (cache.path / "bad_records.txt").read_text().splitlines()
    assert [entry.split(": ")[0] for entry in listed] == [f"{path}:{number}" for number in range(2, bad + 2)]
    with pytest.raises(UserError) as caught:  # a cache built with skip is no way around stop
        build(kind, path, other_tokenizer, 64, cache_dir)
    assert str(caught.value).startswith(listed[0])


def test_a_file_where_every_record_is_bad_is_refused_with_skip_too(write, cache_dir, other_tokenizer):
    path = write("data.jsonl", [{"content": "a"}] * 3)
    with pytest.raises(
        UserError, match=r"none of the 3 .*\(bad 3; the first bad one: .*data.jsonl:1: no 'text'"
    ):
        build("pretrain", path, other_tokenizer, 64, cache_dir, on_bad_data="skip")


def test_the_report_tells_of_fields_that_nothing_reads(write, cache_dir, other_tokenizer, capsys):
    records = [chat_of({**USER, "id": 1}, {**BOT, "id": 2, "reasoning": "hm"}, source="x")] * 3
    records += [{"messages": [USER, BOT], "source": None, "a\nb": 1}]
    cache = build("sft", write("data.jsonl", records), other_tokenizer, 64, cache_dir)
    told = {"conversations.id": 6, "conversations.reasoning": 3, "source": 3, "a\nb": 1}
    assert list(cache.report["unused_fields"].items()) == list(told.items())
    out = capsys.readouterr().out
    names = "conversations.id 6, conversations.reasoning 3, source 3, a\\nb 1"
    assert f"\n  unused fields: {names}\n" in out


def test_null_means_absent_in_parquet(tmp_path, cache_dir, other_tokenizer, write):
    """Arrow gives every struct of a column the keys of all of them."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"city": "x"}}]}
    other = {"role": "assistant", "content": "", "tool_calls": [{"name": "g", "arguments": {"day": 1}}]}
    other |= {"train": False}
    tools = [
        {"name": "f", "parameters": {"city": {"type": "string"}}},
        {"name": "g", "parameters": {"day": {"x": 1}}},
    ]
    records = [
        {"messages": [USER, {**BOT, "reasoning_content": "hm"}], "id": 1},
        {"messages": [USER, call, USER, other], "tools": tools, "label": True},
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")
    caches = [
        build("sft", path, other_tokenizer, 512, cache_dir)
        for path in (str(tmp_path / "x.parquet"), write("x.jsonl", records))
    ]
    assert pq.read_table(tmp_path / "x.parquet")["messages"].to_pylist()[0][0]["tool_calls"] is None
    assert caches[0].tokens.tolist() == caches[1].tokens.tolist()
    assert caches[0].loss_mask.tolist() == caches[1].loss_mask.tolist()
    assert [cache.report["unused_fields"] for cache in caches] == [{"id": 1}] * 2


def recipe(word):
    """The block of code in the manual that holds a word."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    (code,) = (block for block in blocks if word in block)
    return code


def test_another_form_is_one_entry(write, tmp_path, cache_dir, other_tokenizer, monkeypatch):
    """As the manual shows it; in JSON Lines, Parquet and CSV, with the fields that nothing reads."""
    monkeypatch.setattr(record_formats, "FORMATS", dict(record_formats.FORMATS))
    exec(recipe("FORMATS["), vars(record_formats))
    records = [{"dialogue": ["q", "a", "q", "b"], "id": 1}, {"dialogue": ["q"], "id": 2}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")
    table = write("x.csv", b'dialogue,id\n"[""q"", ""a"", ""q"", ""b""]",1\n"[""q""]",2\n')
    for path in (write("x.jsonl", records), str(tmp_path / "x.parquet"), table):
        with pytest.raises(UserError, match=rf"{path}:\d: no assistant turn"):
            build("sft", path, other_tokenizer, 64, cache_dir)
        cache = build("sft", path, other_tokenizer, 64, cache_dir, on_bad_data="skip", max_bad_share=0.5)
        text = other_tokenizer.decode(cache.tokens)
        assert "user\nq<|im_end|>" in text and "assistant\nb<|im_end|>" in text
        assert cache.report["unused_fields"] == {"id": 1}


def test_a_question_is_an_entry_with_the_fields_of_its_answer(monkeypatch):
    monkeypatch.setitem(record_formats.FORMATS, "ask", record_formats.read_question)
    monkeypatch.setitem(record_formats.ANSWERS, "ask", ("reply",))
    assert to_chat({"ask": "q", "reply": "a"}) == Chat([USER, BOT], None)
    assert list(unread_fields({"ask": "q", "reply": "a", "input": "", "answer": "b"})) == ["answer"]


def test_two_forms_of_one_conversation_are_refused_whoever_adds_them(monkeypatch):
    monkeypatch.setitem(record_formats.FORMATS, "dialogue", lambda record, key: [])
    with pytest.raises(BadRecord, match="both 'messages' and 'dialogue' in one record; keep one of them"):
        to_chat({"messages": [USER, BOT], "dialogue": ["q"]})


# --- messages

CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def answer(*parts, **extra):
    return {"role": "assistant", "content": list(parts), **extra}


def part(kind, **values):
    return {"type": kind, **values}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (answer(part("text", text="a")), BOT),
        (answer(part("text", value="a")), BOT),
        (answer(part("text", text="a", value=None, image_url=None)), BOT),  # as Parquet fills in
        (answer({"text": "a"}), BOT),
        (answer("a"), BOT),
        (answer(part("text", text="a "), part("text", value="\nb")), {**BOT, "content": "a \nb"}),
        ({"from": "gpt", "value": [part("text", text="a")]}, BOT),
        ({"role": "user", "content": [part("text", value="q")]}, {"role": "user", "content": "q"}),
        (answer(part("text", text="a"), tool_calls=[CALL]), {**CALLING, "content": "a"}),
        (
            answer(
                part("reasoning", value="r"),
                part("text", value="a"),
                part("tool_call", value=json.dumps(CALL)),
            ),
            {**CALLING, "content": "a", "reasoning_content": "r"},
        ),
        (answer(part("thinking", thinking="r"), "a"), {**BOT, "reasoning_content": "r"}),
        (
            answer(part("tool_call", value=json.dumps(CALL)), part("tool_call", value=[CALL, CALL])),
            {**CALLING, "tool_calls": [CALL] * 3},
        ),
        (answer(part("text", value="a"), reasoning_content="r"), {**BOT, "reasoning_content": "r"}),
        ({"role": "assistant", "content": None, "function_call": CALL}, CALLING),
        ({"role": "function", "name": "f", "content": "r"}, {"role": "tool", "name": "f", "content": "r"}),
        ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
        ({"from": "function_call", "value": json.dumps(CALL)}, CALLING),
    ],
)
def test_spellings_of_a_message(item, message):
    assert parse_message(item, "message 1") == Turn(message, [])


@pytest.mark.parametrize("none", [None, "", " ", "[]", "{}", "null", " [ ] ", [], {}])
def test_no_calls_and_no_tools_in_any_way(none):
    assert parse_message({**BOT, "tool_calls": none, "tools": none}, "message 1") == Turn(BOT, [])


BAD_MESSAGES = [
    (answer(), "'content' of message 1 is an empty list; write the text"),
    (answer(5), "part 1 of 'content' of message 1 is a number instead of an object with 'type' and"),
    (answer({}), "no 'text' of part 1 of 'content' of message 1 (its keys: none); add it"),
    (answer(part("table", text="a")), "part 1 of 'content' of message 1 is of type 'table': the model"),
    (answer(part(["text"], text="a")), "part 1 of 'content' of message 1 is of type ['text']: the model"),
    (answer(part("text")), "no 'text' of part 1 of 'content' of message 1 (its keys: 'type'); add it"),
    (answer(part("text", text=3)), "'text' of part 1 of 'content' of message 1 is a number instead of"),
    (answer(part("image_url", value="1.jpg")), "is of type 'image_url': the model reads text only;"),
    (answer("a", part("input_audio", input_audio={})), "part 2 of 'content' of message 1 is of type"),
    (answer("a", part("reasoning", value="r")), "part 2 of 'content' of message 1 comes too late; write"),
    (answer(part("tool_call", value="[]")), "'value' of part 1 of 'content' of message 1 holds no call;"),
    (answer(part("tool_call", value=[CALL]), tool_calls=[CALL]), "message 1 gives its 'tool_calls' in"),
    ({"role": "user", "content": "", "reasoning_content": "r"}, "message 1 has 'reasoning_content' but"),
    ({"role": "user", "content": "", "tool_calls": [CALL]}, "message 1 has 'tool_calls' but the role"),
    ({"from": "function_call", "value": "[]"}, "'value' of message 1 holds no call; write {"),
    ({**BOT, "tool_calls": [CALL, 5]}, "entry 2 of 'tool_calls' of message 1 is a number instead of"),
    ({**BOT, "tool_calls": "[[]]"}, "entry 1 of 'tool_calls' of message 1 is a list instead of a"),
    ({**BOT, "tool_calls": ["{"]}, "entry 1 of 'tool_calls' of message 1 does not parse as JSON"),
    ({**BOT, "images": ["1.jpg"]}, "'images' of message 1: the model reads text only; leave the"),
    ({**BOT, "loss_weight": 0.5}, "'loss_weight' of message 1 is 0.5; it is a switch: write true or"),
    ({**BOT, "train": "no"}, "'train' of message 1 is 'no'; it is a switch: write true or 1, false"),
    ({**BOT, "train": True, "weight": 0}, "message 1 is to be trained and not to be trained (weight,"),
    ({**BOT, "train_detail": [{"begin_offset": 0, "end_offset": 3}]}, "'train_detail' of message 1:"),
    ({**BOT, "train_on_inputs": True}, "'train_on_inputs' of message 1: only the assistant's turns"),
    ({"role": "user", "content": "q", "loss": True}, "'loss' of message 1 asks to train the role user;"),
]


@pytest.mark.parametrize(("item", "message"), BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_what_cannot_be_used_says_so(item, message):
    with pytest.raises(BadRecord) as caught:
        parse_message(item, "message 1")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["loss_weight", "weight", "loss", "train", "training", "train_on_turn"])
@pytest.mark.parametrize(
    ("value", "is_masked"), [(0, True), (0.0, True), (False, True), (1, False), (1.0, False), (True, False)]
)
def test_switches_of_a_turn(key, value, is_masked):
    assert parse_message({**BOT, key: value}, "message 1") == Turn(BOT, [], is_masked)
    if is_masked:  # the user's turn is no target anyway
        assert parse_message({"role": "user", "content": "q", key: value}, "message 1").is_masked is False
    assert parse_message({**BOT, key: None}, "message 1").is_masked is False
