"""Records: the formats that are understood, and one clear line for each thing that can be wrong with one."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from dataset import records as record_formats
from dataset.files import iter_blocks, parse_block
from dataset.records import MESSAGE_FIELDS, BadRecord, Chat, known_fields, to_chat, to_text, unread_fields
from tests.conftest import ROOT
from tests.dataset.conftest import block_of, build

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


@pytest.mark.parametrize("none", [None, "", " ", "[]", "{}", "null", [], {}])
def test_no_tools_in_any_way(none):
    assert to_chat(chat_of(USER, BOT, tools=none, functions=none)) == Chat([USER, BOT], None)
    assert to_chat({"instruction": "q", "output": "a", "tools": none}) == Chat([USER, BOT], None)


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
    with pytest.raises(BadRecord, match="'kto_tag' is 3; write true"):
        to_chat({**record, "kto_tag": 3})


def test_fields_that_nothing_reads():
    def unread(record):
        return sorted(unread_fields(record))

    record = chat_of({**USER, "date": "today", "loss": False, "x": None}, BOT, id=7, meta=None)
    assert unread(record) == ["conversations.date", "id"]
    others = {
        "context": "c",
        "history": [["q", "a"]],
        "input": "i",
        "output": "o",
        "prompt": "p",
        "text": "t",
    }
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
    ("pretrain", b'{"text": "abc"', "not valid JSON (Expecting ',' delimiter at column 15)"),
    ("pretrain", b"hello", "not valid JSON (Expecting value at column 1)"),
    ("pretrain", b'{"text": "a"} {"text": "b"}', "not valid JSON (Extra data at column 15)"),
    ("pretrain", b"{'text': 'a'}", "not valid JSON (Expecting property name enclosed in double quotes"),
    ("pretrain", b'{"text": "a\x00b"}', "not valid JSON (Invalid control character at at column 12)"),
    ("pretrain", b"\x00" * 64, "not valid JSON"),
    ("pretrain", b'["text"]', "a list instead of a JSON object; write {...}"),
    ("pretrain", b'"text"', "text instead of a JSON object"),
    ("pretrain", b"null", "null instead of a JSON object"),
    ("pretrain", b"17", "a number instead of a JSON object"),
    ("pretrain", b"NaN", "a number instead of a JSON object"),
    ("pretrain", b"9" * 5000, "JSON that cannot be read"),
    ("pretrain", b"[" * 100_000, "nested too deep"),
    ("pretrain", b"{}", "no 'text' in this record (its keys: none)"),
    ("pretrain", b'{"content": "a"}', "no 'text' in this record (its keys: 'content')"),
    ("pretrain", b'{"conversations": []}', "'conversations' is an empty list"),
    ("pretrain", b'{"text": null}', "'text' is null instead of text"),
    ("pretrain", b'{"text": 5}', "'text' is a number instead of text"),
    ("pretrain", b'{"text": true}', "'text' is true/false instead of text"),
    ("pretrain", b'{"text": ["a"]}', "'text' is a list instead of text"),
    ("pretrain", b'{"text": {"a": "b"}}', "'text' is an object instead of text"),
    ("pretrain", b'{"text": "\\ud83d"}', "lone surrogate \\ud83d (half a character)"),
    ("pretrain", b'{"text": "\\uDE00\\ud83d\\ude00"}', "lone surrogate \\ude00 (half a character)"),
    ("pretrain", b'{"text": "\xe4\xb8"}', "not UTF-8 (byte 0xe4); save the file as UTF-8"),
    ("pretrain", '{"text": "中文"}'.encode("gb18030"), "not UTF-8 (byte 0xd6); save the file as UTF-8:"),
    ("pretrain", b'{"text": "\xed\xa0\xbd"}', "not UTF-8 (byte 0xed)"),
    ("pretrain", {"prompt": "q", "chosen": "a", "rejected": "b"}, "'chosen' and 'rejected': a"),
    ("pretrain", {"prompt": "q"}, "no 'completion' (its keys: 'prompt'); add it"),
    ("sft", {"chosen": "qa", "rejected": "qb"}, "a preference file (DPO), which is another stage; for"),
    ("sft", {"prompt": "q", "chosen": "a", "rejected": "b"}, "'chosen' and 'rejected': a preference"),
    ("sft", {"prompt": [USER], "chosen": [BOT], "rejected": [BOT]}, "a preference file (DPO), which is"),
    ("sft", {"chosen": [USER, BOT], "rejected": [USER, BOT], "messages": [USER, BOT]}, "a preference"),
    ("sft", chat_of(USER, chosen=BOT, rejected=BOT), "'chosen' and 'rejected': a preference file (DPO)"),
    ("sft", {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"}, "a preference file (DPO)"),
    ("sft", {"chosen_messages": [USER, BOT], "rejected_messages": [USER, BOT]}, "'chosen_messages' and"),
    ("sft", {"input": {}, "preferred_output": [BOT], "non_preferred_output": [BOT]}, "a preference file"),
    ("sft", chat_of(USER, BOT, rejected_response="b"), "'rejected_response': a preference file (DPO)"),
    ("sft", chat_of(USER, BOT, images=["1.jpg"]), "'images' beside the conversation: the model reads"),
    ("sft", chat_of(USER, BOT, image="1.jpg"), "'image' beside the conversation: the model reads text"),
    ("sft", chat_of(USER, BOT, videos=["1"], audios=["1"]), "'audios' beside the conversation: the"),
    ("sft", chat_of(USER, BOT, kto_tag=False), "'kto_tag' is false: a bad answer (KTO), which SFT must"),
    ("sft", chat_of(USER, BOT, mask_history="some"), "'mask_history' is 'some'; it is a switch: write"),
    ("sft", chat_of(USER, {**BOT, "loss_weight": 0.3}), "'loss_weight' of message 2 is 0.3; it is a"),
    ("sft", {"prompt": "q"}, "no 'completion' (its keys: 'prompt'); add it"),
    ("sft", {"question": "q", "answers": ["a"]}, "no 'answer' (its keys: 'question', 'answers'); add it"),
    ("sft", {"prompt": "q", "completion": ["a"]}, "completion's message 1 is text instead of an object"),
    ("sft", {"prompt": [USER], "completion": [BOT], "context": "c"}, "'prompt' is a list of messages,"),
    ("sft", {"prompt": [], "completion": "a"}, "'prompt' is an empty list"),
    ("sft", {"prompt": "q", "completion": "a", "question": "q", "answer": "a"}, "both 'prompt' and"),
    ("sft", {"messages": [USER, BOT], "prompt": "q", "completion": "a"}, "both 'messages' and 'prompt'"),
    ("sft", chat_of(USER, BOT, tools=[TOOL], functions=[TOOL]), "'tools' are given more than once"),
    ("sft", b'{"text": "a"}', "is this pretraining data?"),
    ("sft", b'{"conversations": null}', "no 'conversations', 'messages' or 'instruction' in this record"),
    ("sft", b'{"conversations": "hi"}', "'conversations' is text instead of a list of messages"),
    ("sft", b'{"conversations": {"role": "user"}}', "'conversations' is an object instead of a list of"),
    ("sft", b'{"conversations": []}', "'conversations' is an empty list"),
    ("sft", b'{"messages": []}', "'messages' is an empty list"),
    ("sft", chat_of("hi", BOT), "message 1 is text instead of an object with 'role' and 'content'"),
    ("sft", chat_of(USER, None), "message 2 is null instead of an object"),
    ("sft", chat_of(USER, {"content": "a"}), "message 2 has no 'role' (its keys: 'content'); write one"),
    ("sft", chat_of({"role": "robot", "content": "a"}), "message 1 has the unknown role 'robot'; known"),
    ("sft", chat_of({"from": "bot3", "value": "a"}), "message 1 has the unknown role 'bot3'"),
    ("sft", chat_of({"role": 5, "content": "a"}), "message 1 has the unknown role 5"),
    ("sft", chat_of({"role": ["user"], "content": "a"}), "message 1 has the unknown role ['user']"),
    ("sft", chat_of(USER, {"role": "assistant"}), "no 'content' of message 2 (its keys: 'role'); add it"),
    ("sft", chat_of(USER, {"role": "assistant", "content": None}), "'content' of message 2 is null"),
    ("sft", chat_of(USER, {"role": "assistant", "content": 3.5}), "'content' of message 2 is a number"),
    ("sft", chat_of({"role": "user", "content": [{"type": "text"}]}, BOT), "no 'text' of part 1 of"),
    ("sft", chat_of({"from": "human", "content": "q"}, BOT), "no 'value' of message 1 (its keys:"),
    ("sft", chat_of(USER, {**BOT, "reasoning_content": 1}), "'reasoning_content' of message 2 is a"),
    ("sft", chat_of(USER), "no assistant turn, so nothing to learn"),
    ("sft", chat_of({"role": "system", "content": "s"}), "no assistant turn"),
    ("sft", chat_of(*[{"role": "system", "content": "s"}] * 2, USER, BOT), "two system messages in one"),
    ("sft", chat_of({"role": "system", "content": "s"}, USER, BOT, system="t"), "two system messages"),
    ("sft", chat_of(USER, {"role": "system", "content": "s"}, BOT), "the system message is not the"),
    ("sft", chat_of(USER, {**BOT, "tool_calls": "{oops"}), "'tool_calls' of message 2 does not parse as"),
    ("sft", chat_of(USER, {**BOT, "tool_calls": "[1]"}), "entry 1 of 'tool_calls' of message 2 is a"),
    ("sft", chat_of(USER, {**BOT, "tool_calls": [{"x": 1}]}), "'tool_calls' of message 2 holds a call"),
    ("sft", chat_of(USER, {**BOT, "tool_calls": [{"function": 1}]}), "holds a call without a 'name'"),
    ("sft", chat_of({**USER, "tool_calls": [CALL]}, BOT), "message 1 has 'tool_calls' but the role user"),
    ("sft", chat_of(USER, BOT, tools="nope"), "'tools' does not parse as JSON"),
    ("sft", chat_of(USER, BOT, tools=5), "'tools' is a number instead of a list of JSON objects"),
    ("sft", chat_of({**USER, "tools": [TOOL]}, BOT, tools=[TOOL]), "'tools' are given more than once"),
    ("sft", chat_of(USER, BOT, messages=[USER, BOT]), "both 'conversations' and 'messages' in one"),
    ("sft", chat_of(USER, BOT, instruction="q", output="a"), "both 'conversations' and 'instruction' in"),
    ("sft", {"instruction": "q"}, "no 'output' (its keys: 'instruction'); add it"),
    ("sft", {"instruction": "q", "output": None}, "'output' is null instead of text"),
    ("sft", {"instruction": 1, "output": "a"}, "'instruction' is a number instead of text"),
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


def test_many_unused_fields_are_cut_short(write, cache_dir, other_tokenizer, capsys):
    path = write("data.jsonl", [{"text": "a", **{f"x{number:03}": 1 for number in range(250)}}])
    cache = build("pretrain", path, other_tokenizer, 64, cache_dir)
    assert list(cache.report["unused_fields"]) == [f"x{number:03}" for number in range(12)]
    out = capsys.readouterr().out
    assert "unused fields: x000 1, x001 1," in out and "x011 1\n" in out and "warning" not in out


def test_a_report_without_unused_fields_says_nothing_of_them(write, cache_dir, other_tokenizer, capsys):
    build("sft", write("data.jsonl", [chat_of(USER, BOT, tools=None)]), other_tokenizer, 64, cache_dir)
    out = capsys.readouterr().out
    assert ": conversations 1\n" in out
    assert not [told for told in ("unused fields", "not to be trained", "warning") if told in out]


def test_bad_answers_of_kto_are_skipped(write, cache_dir, other_tokenizer):
    records = [chat_of(USER, {**BOT, "content": f"a{n}"}, label=n % 3 == 0) for n in range(9)]
    path = write("data.jsonl", records)
    with pytest.raises(UserError, match=r"data.jsonl:2: 'label' is false: a bad answer"):
        build("sft", path, other_tokenizer, 64, cache_dir)
    cache = build("sft", path, other_tokenizer, 64, cache_dir, on_bad_data="skip", max_bad_share=1)
    assert cache.sources[:, 1].tolist() == [1, 4, 7]


def test_a_file_without_a_turn_to_train(write, cache_dir, other_tokenizer):
    path = write("data.jsonl", [chat_of(USER, {**BOT, "train": False})] * 2)
    with pytest.raises(UserError, match=r"turns not to be trained 2, dropped for lack of a label 2\)"):
        build("sft", path, other_tokenizer, 64, cache_dir)


def test_null_means_absent_in_parquet(tmp_path, cache_dir, other_tokenizer, write):
    """Arrow gives every struct of a column the keys of all of them."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"city": "x"}}]}
    other = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "g", "arguments": {"day": 1}}],
        "train": False,
    }
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


def test_labels_in_parquet_are_read(tmp_path, cache_dir, other_tokenizer):
    table = pa.table(
        {"prompt": ["q", "q"], "completion": ["good", "bad"], "label": [True, False], "other": [1, None]}
    )
    pq.write_table(table, tmp_path / "x.parquet")
    options = {"on_bad_data": "skip", "max_bad_share": 1}
    cache = build("sft", str(tmp_path / "x.parquet"), other_tokenizer, 64, cache_dir, **options)
    assert cache.sources[:, 1].tolist() == [1] and cache.report["unused_fields"] == {"other": 1}


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


def test_two_forms_of_one_conversation_are_refused_whoever_adds_them(monkeypatch):
    monkeypatch.setitem(
        record_formats.FORMATS, "dialogue", record_formats.RecordFormat(lambda record, key: [])
    )
    with pytest.raises(BadRecord, match="both 'messages' and 'dialogue' in one record; keep one of them"):
        to_chat({"messages": [USER, BOT], "dialogue": ["q"]})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(known_fields())
MESSAGE_KEYS = sorted(MESSAGE_FIELDS)
NAMES = st.sampled_from(
    ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation"]
)
PART = st.dictionaries(st.sampled_from(["type", "value", "text"]), st.just("text") | JSON, max_size=3)
MESSAGE = (
    st.dictionaries(st.sampled_from(MESSAGE_KEYS), NAMES | st.lists(PART, max_size=2) | JSON, max_size=5)
    | JSON
)
RECORD = st.dictionaries(st.sampled_from(KEYS), JSON | st.lists(MESSAGE, max_size=4), max_size=4) | JSON


@settings(max_examples=250, deadline=None)
@given(RECORD)
def test_any_json_is_a_record_or_a_bad_record(record):
    line = json.dumps(record).encode()
    for _, found in parse_block(block_of(line)):
        for normalise in (to_text, to_chat):
            try:
                result = normalise(found) if isinstance(found, dict) else None
            except BadRecord as error:
                assert str(error) and "\n" not in str(error)
            else:
                json.dumps(result, ensure_ascii=False).encode("utf-8")


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=80)
    | st.tuples(st.just(b'{"text": "'), st.binary(max_size=30), st.just(b'"}')).map(b"".join)
)
def test_any_bytes_are_records_or_bad_records(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "bytes.jsonl"
    path.write_bytes(content)
    try:
        for block in iter_blocks([str(path)]):
            for line, record in parse_block(block):
                assert 1 <= line <= content.count(b"\n") + 1
                assert isinstance(record, dict | BadRecord)
    except UserError as error:
        assert "holds no record" in str(error)
