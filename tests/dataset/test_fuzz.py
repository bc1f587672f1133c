"""Whatever bytes a data file holds: the outcome is a sound cache or one line for the user, and skipping loses
nothing but what it lists."""

import gzip
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from dataset.messages import AMBIGUOUS_TRAIN_FLAGS, REASONING_FIELDS, REFUSED, TRAIN_FLAGS
from tests.dataset.conftest import arrow, build, csv_of, lines_of, parquet

LENGTH = 24
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # building waits for the disk several times
FEW = settings(max_examples=40, deadline=None)
KINDS = st.sampled_from(["pretrain", "sft", "dpo"])
CALL = {"name": "weather", "arguments": {"city": "北京"}}
USER, BOT = {"role": "user", "content": "the river?"}, {"role": "assistant", "content": "brown 河流 🙂 " * 3}
RECORDS = {
    "pretrain": [{"text": text} for text in ("the river", "", "河流 🙂 " * 12, "<|im_end|>", "a\nb\u0000")],
    "sft": [
        {"conversations": [USER, BOT, USER, BOT]},
        {"instruction": "q", "input": "i", "output": "a", "history": [["q0", "a0"]]},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": "[]"},
    ],
    "dpo": [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"chosen": [USER, BOT], "rejected": "a"}],
}


def as_text(records: list) -> list[dict]:
    return [{"text": json.dumps(record), "messages": "[]"} for record in records]


FILES = {
    "x.jsonl": lines_of,
    "x.json": lambda records: json.dumps(records, ensure_ascii=False, indent=1).encode(),
    "x.parquet": lambda records: parquet(as_text(records)),
    "x.arrow": lambda records: arrow(as_text(records)),
    "x.csv": lambda records: csv_of(as_text(records)),
    "x.tsv": lambda records: csv_of([{"n": str(n), **row} for n, row in enumerate(as_text(records))], "\t"),
    "spread.jsonl": lambda records: "\n".join(json.dumps(record, indent=1) for record in records).encode(),
    "lists.jsonl": lambda records: lines_of([record.get("messages", [USER, BOT]) for record in records]),
    "x.txt": lambda records: b"A text.\n" + lines_of(records),
    "x.jsonl.gz": lambda records: gzip.compress(lines_of(records)),
}
ODD = [b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\n\n", b"\x00", b"NaN"]
ODD += [b'\t"', b'",', b'""', b"sep=|\n", b"\xe9", "河".encode("gbk"), "\n水".encode("utf-16-le")]
ODD += [b"[" * 1200, b"{", b"]", b'"', b"\\", b"-1e999", b"9" * 4400, b"null", b",", b'{"text": 1}\n']


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """The content after a few accidents."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        end = at + draw(st.integers(0, 40))
        new = draw(st.binary(max_size=8) | st.sampled_from(ODD))
        content[at:end] = draw(st.sampled_from([new, new + content[at:end], content[at:end] * 2]))
        if draw(st.integers(0, 9)) == 0:
            del content[at:]
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
        assert cache.tokens.max() < len(other_tokenizer) and cache.target_bytes.min() >= 0
        assert not cache.loss_mask[cache.offsets[:-1]].any()
        assert np.add.reduceat(cache.loss_mask, cache.offsets[:-1]).min() > 0
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


@FEW
@given(data=st.data(), kind=KINDS, name=st.sampled_from(sorted(FILES)))
def test_damaged_files(check, data, kind, name):
    check(kind, name, data.draw(damaged(FILES[name](RECORDS[kind]))))


TEXT = st.text(st.characters(), max_size=8)  # lone surrogates among them
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
VALUE = JSON | st.sampled_from([[CALL], json.dumps(CALL), [{"type": "text", "text": "a"}], True, 0])
FIELDS = [
    "content",
    "tool_calls",
    "function_call",
    "tools",
    *REASONING_FIELDS,
    *TRAIN_FLAGS,
    *REFUSED,
    *sorted(AMBIGUOUS_TRAIN_FLAGS),
]
SPEAKERS = st.sampled_from(["user", "assistant", "system", "tool", "human", "function_call", "observation"])
MESSAGE = st.builds(
    lambda role, content, odd: {"role": role, "content": content} | odd,
    SPEAKERS, TEXT, st.dictionaries(st.sampled_from(FIELDS), VALUE, max_size=2),
)  # fmt: skip
KEYS = ["conversations", "messages", "prompt", "completion", "chosen", "rejected", "instruction", "output"]
KEYS += ["history", "input", "system", "tools", "label", "mask_history", "text", "weight", "conversation"]
KEYS += ["question", "response_j", "response_k"]
HOLDS = st.lists(MESSAGE | JSON, max_size=4) | VALUE
RECORD = st.dictionaries(st.sampled_from(KEYS), HOLDS, min_size=1, max_size=4) | JSON


@FEW
@given(kind=KINDS, records=st.lists(RECORD, min_size=1, max_size=4), as_array=st.booleans())
def test_arbitrary_values_as_records(check, kind, records, as_array):
    lines = [json.dumps(record).encode() for record in [*RECORDS[kind], *records]]
    if as_array:
        check(kind, "x.json", b"[\n" + b",\n".join(lines) + b"\n]")
    else:
        check(kind, "x.jsonl", b"\n".join(lines))
