"""Whatever bytes a data file holds: the outcome is a sound cache or one line for the user, and skipping loses
nothing but what it lists."""

import csv
import gzip
import io
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from dataset.records import REFUSED, SWITCHES
from tests.dataset.conftest import build

LENGTH = 24
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # building waits for the disk several times
KINDS = st.sampled_from(["pretrain", "sft", "dpo"])
CALL = {"name": "weather", "arguments": {"city": "北京"}}
USER, BOT = {"role": "user", "content": "the river?"}, {"role": "assistant", "content": "brown 河流 🙂 " * 3}
RECORDS = {
    "pretrain": [{"text": text} for text in ("the river", "", "河流 🙂 " * 12, "<|im_end|>", "a\nb\u0000")],
    "sft": [
        {"conversations": [USER, BOT, USER, BOT]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        {"instruction": "q", "input": "i", "output": "a", "history": [["q0", "a0"]]},
        {"prompt": [USER], "completion": [BOT | {"content": [{"type": "text", "text": "a"}]}], "label": True},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": "[]"},
    ],
    "dpo": [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"chosen": [USER, BOT], "rejected": [USER, USER]},
    ],
}


def json_lines(records: list) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def json_array(records: list) -> bytes:
    return json.dumps(records, ensure_ascii=False, indent=1).encode()


def parquet(records: list) -> bytes:
    texts = [{key: json.dumps(value) for key, value in record.items()} for record in records]
    pq.write_table(pa.Table.from_pylist(texts), memory := io.BytesIO(), row_group_size=2)
    return memory.getvalue()


def arrow(records: list) -> bytes:
    table = pa.table({"text": [json.dumps(record) for record in records]})
    with pa.ipc.new_stream(memory := io.BytesIO(), table.schema) as writer:
        writer.write_table(table)
    return memory.getvalue()


def csv_of(records: list) -> bytes:
    rows = [["text", "messages"], *([json.dumps(record), "[]"] for record in records)]
    csv.writer(memory := io.StringIO(newline="")).writerows(rows)
    return memory.getvalue().encode()


FILES = {
    "x.jsonl": json_lines,
    "x.json": json_array,
    "x.parquet": parquet,
    "x.arrow": arrow,
    "x.csv": csv_of,
    "x.txt": json_lines,
    "x.jsonl.gz": lambda records: gzip.compress(json_lines(records)),
}
ODD = [b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\n\n", b"\x00", b"NaN"]
ODD += [
    b"[" * 99,
    b"[" * 1200,
    b"{",
    b"]",
    b'"',
    b"\\",
    b"-1e999",
    b"9" * 4400,
    b"null",
    b",",
    b'{"text": 1}\n',
]
ODD += ["\u2028".encode(), "\U0010ffff".encode(), "𠮷".encode(), b"<|im_start|>assistant\n"]


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """The content after a few accidents."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        accident = draw(st.sampled_from(["flip", "delete", "insert", "odd", "truncate", "repeat"]))
        if accident == "flip" and at < len(content):
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif accident == "delete":
            del content[at : at + draw(st.integers(1, 40))]
        elif accident == "insert":
            content[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif accident == "odd":
            content[at:at] = draw(st.sampled_from(ODD))
        elif accident == "truncate":
            del content[at:]
        elif accident == "repeat":
            content[at:at] = content[at : at + draw(st.integers(1, 200))]
    return bytes(content)


@pytest.fixture(scope="module")
def check(other_tokenizer):
    """check(kind, name, content) builds with "stop" and with "skip", and checks what comes of it."""

    def sound(kind, path, folder, **options):
        """The cache, checked; or the line that a user reads."""
        try:
            cache = build(kind, path, other_tokenizer, folder, LENGTH, **options)
        except UserError as error:
            line = str(error)
            assert line and "\n" not in line
            return line
        lengths, report = np.diff(cache.offsets), cache.report
        assert lengths.min() >= 2 and lengths.max() <= LENGTH
        assert cache.offsets[-1] == len(cache.tokens) == len(cache.loss_mask) == report["tokens"]
        assert len(cache.tokens) == 0 or cache.tokens.max() < len(other_tokenizer)
        assert not cache.loss_mask[cache.offsets[:-1]].any()
        assert np.add.reduceat(cache.loss_mask, cache.offsets[:-1]).min() > 0
        assert cache.target_bytes.min() >= 0 and len(cache.sources) == len(lengths)
        listed = (cache.path / "bad_records.txt").read_text().splitlines()
        assert len(listed) == report["bad"] <= report["records"]
        return cache

    def run(kind: str, name: str, content: bytes) -> None:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            path = Path(folder, name)
            path.write_bytes(content)
            stopped = sound(kind, path, f"{folder}/stop")
            skipped = sound(kind, path, f"{folder}/skip", on_bad_data="skip", max_bad_share=1)
            assert not list(Path(folder).glob("*/*.tmp"))
            if not isinstance(stopped, str):  # nothing is bad, so nothing is skipped
                assert not isinstance(skipped, str) and skipped.report == stopped.report
            elif not isinstance(skipped, str):
                assert stopped.startswith((skipped.path / "bad_records.txt").read_text().splitlines()[0])

    return run


FEW = settings(max_examples=40, deadline=None)


@FEW
@given(data=st.data(), kind=KINDS, name=st.sampled_from(sorted(FILES)))
def test_damaged_files(check, data, kind, name):
    check(kind, name, data.draw(damaged(FILES[name](RECORDS[kind]))))


ANY_TEXT = st.text(st.characters(), max_size=8)  # lone surrogates among them
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
NAMES = ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation"]
FIELDS = [
    "role",
    "from",
    "content",
    "value",
    "tool_calls",
    "function_call",
    "tools",
    "name",
    "reasoning_content",
]
VALUE = JSON | st.sampled_from([[CALL], json.dumps(CALL), [{"type": "text", "text": "a"}], True, 0])
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(NAMES),
        "content": ANY_TEXT,
        "from": st.sampled_from(NAMES),
        "value": ANY_TEXT,
    },
).flatmap(
    lambda plain: st.dictionaries(st.sampled_from([*FIELDS, *SWITCHES, *REFUSED]), VALUE, max_size=2).map(
        lambda odd: plain | odd
    )
)
MESSAGES = st.lists(MESSAGE | JSON, max_size=4)
KEYS = ["conversations", "messages", "prompt", "completion", "chosen", "rejected", "instruction", "output"]
KEYS += ["history", "input", "system", "tools", "label", "mask_history", "text"]
RECORD = st.dictionaries(st.sampled_from(KEYS), MESSAGES | VALUE, min_size=1, max_size=4) | JSON


@FEW
@given(kind=KINDS, records=st.lists(RECORD, min_size=1, max_size=4), as_array=st.booleans())
def test_arbitrary_values_as_records(check, kind, records, as_array):
    records = [*RECORDS[kind], *records]
    if as_array:
        check(kind, "x.json", json.dumps(records, indent=1).encode())
    else:
        check(kind, "x.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
