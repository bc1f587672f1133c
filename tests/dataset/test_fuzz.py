"""Whatever bytes a data file holds: the outcome is a sound cache or one line for the user, with nothing
half-built."""

import contextlib
import csv
import gzip
import io
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from dataset import files
from dataset import plain_text as plain_text_files
from dataset.files import FIRST_ELEMENT
from dataset.records import MESSAGE_FIELDS, known_fields
from tests.dataset.conftest import build

LENGTH = 24
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # building waits for the disk several times
KINDS = st.sampled_from(["pretrain", "sft"])
ARRAYS = ("tokens", "offsets", "target_bytes", "loss_mask")

CALL = {"name": "weather", "arguments": {"city": "北京"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
USER, BOT = {"role": "user", "content": "the river?"}, {"role": "assistant", "content": "brown 河流 🙂 " * 3}
RECORDS = {
    "pretrain": [
        {"text": text} for text in ("the river", "", "河流 🙂 " * 12, "<|im_end|> literally", "a\nb\u0000")
    ],
    "sft": [
        {"conversations": [USER, BOT, USER, BOT]},
        {"messages": [{"role": "system", "content": "brief", "tools": json.dumps([TOOL])}, USER, BOT]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        {"instruction": "q", "input": "i", "output": "a", "history": [["q0", "a0"]]},
        {
            "prompt": [USER],
            "completion": [{**BOT, "content": [{"type": "text", "text": "a"}]}],
            "label": True,
            "id": 1,
        },
        {"messages": [USER, {**BOT, "loss_weight": 0.0}, USER, {**BOT, "loss_weight": 1.0}], "tools": "[]"},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {**USER, "role": "tool"},
            ]
        },
    ],
}
BOM = b"\xef\xbb\xbf"
ODD = [BOM, b"\\ud800", b"\\u0000", b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\n", b"\n\n", b"\x00", b"\x0c"]
ODD += [b"[" * 99, b"[" * 1200, b"{", b"]", b'"', b"\\", b"NaN", b"-1e999", b"9" * 4400, b"null", b","]
ODD += [b'{"text": 1}\n']
ODD += [
    c.encode()
    for c in (
        "\u2028",
        "\u0085",
        "\ufeff",
        "\u202e",
        "\U0010ffff",
        "e\u0301",
        "𠮷",
        "<|im_start|>assistant\n",
    )
]


def json_lines(records) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def json_array(records) -> bytes:
    return json.dumps(records, ensure_ascii=False, indent=1).encode()


def parquet(records) -> bytes:
    texts = [{key: json.dumps(value) for key, value in record.items()} for record in records]
    rows = records if all("text" in record for record in records) else texts
    pq.write_table(pa.Table.from_pylist(rows), memory := io.BytesIO(), row_group_size=2)
    return memory.getvalue()


def parquet_chats(records) -> bytes:
    """Conversations as nested columns, as data sets on the Hub have them."""
    chats = [record["conversations"] for record in records if "conversations" in record]
    pq.write_table(pa.table({"conversations": chats}), memory := io.BytesIO())
    return memory.getvalue()


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """The content after a few accidents."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        accident = draw(st.sampled_from(["flip", "delete", "insert", "odd", "truncate", "repeat", "swap"]))
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
        elif accident == "swap":
            content = bytearray(b"\n".join(draw(st.permutations(content.split(b"\n")))))
    return bytes(content)


ANY_TEXT = st.text(st.characters(), max_size=8)  # lone surrogates among them
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
NAMES = ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation"]
MESSAGE_KEYS = sorted(MESSAGE_FIELDS)
SWITCH = st.sampled_from([True, False, 0, 1, 0.0, 1.0, None]) | JSON
CALLS = st.sampled_from([[CALL], json.dumps(CALL), [{"function": CALL}], "[", [TOOL], json.dumps([TOOL])])
PART = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "reasoning"]), "value": st.text(max_size=9)}),
    st.fixed_dictionaries({"type": st.just("tool_call"), "value": CALLS}),
    st.dictionaries(
        st.sampled_from(["type", "text", "value"]), st.sampled_from(["text", "image"]) | JSON, max_size=3
    ),
)
ANSWER = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.text(max_size=9) | st.lists(PART, max_size=3)},
    optional={"loss_weight": SWITCH, "train": SWITCH, "tool_calls": CALLS, "images": JSON},
)
MESSAGE = st.one_of(
    ANSWER,
    st.fixed_dictionaries(
        {"role": st.sampled_from(NAMES), "content": st.text(max_size=30)}, optional={"tools": CALLS}
    ),
    st.fixed_dictionaries({"from": st.sampled_from(NAMES), "value": st.text(max_size=30) | CALLS}),
    st.dictionaries(st.sampled_from(MESSAGE_KEYS), st.sampled_from(NAMES) | CALLS | JSON, max_size=5),
    JSON,
)
RECORD_KEYS = sorted(known_fields())
RECORD = st.one_of(
    st.fixed_dictionaries({"text": st.text(max_size=80)}),
    st.fixed_dictionaries(
        {"messages": st.lists(MESSAGE, max_size=5)}, optional={"tools": CALLS, "system": JSON}
    ),
    st.fixed_dictionaries({"messages": st.lists(ANSWER, min_size=1, max_size=3)}, optional={"label": SWITCH}),
    st.fixed_dictionaries(
        {"prompt": st.text(max_size=9) | st.lists(MESSAGE, max_size=2), "completion": st.text(max_size=9)},
        optional={"kto_tag": SWITCH, "rejected": JSON, "mask_history": SWITCH},
    ),
    st.fixed_dictionaries(
        {"instruction": st.text(max_size=9), "output": st.text(max_size=9)}, optional={"history": JSON}
    ),
    st.dictionaries(st.sampled_from(RECORD_KEYS), st.lists(MESSAGE, max_size=3) | JSON, max_size=4),
    JSON,
)


@pytest.fixture(scope="module")
def outcome(small_tokenizer):
    """outcome(kind, name, content, on_bad_data) builds a cache in a fresh folder and checks whatever comes of
    it.

    Gives the arrays and the count of records (None after a UserError), and the numbers of the lines that were
    left out.
    """
    tokenizer = small_tokenizer(bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>")

    def build_one(kind: str, name: str, content: bytes, on_bad_data: str) -> tuple[dict | None, set[int]]:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder, contextlib.redirect_stdout(io.StringIO()):
            path, caches = Path(folder, name), Path(folder, "cache")
            path.write_bytes(content)
            cache, arrays, bad = None, None, set()
            try:
                cache = build(
                    kind,
                    str(path),
                    tokenizer,
                    LENGTH,
                    caches,
                    num_proc=1,
                    on_bad_data=on_bad_data,
                    max_bad_share=1.0,
                )
            except UserError as error:
                assert str(path) in str(error) and "\n" not in str(error)
                assert not list(caches.glob("*/meta.json"))
            else:
                bad = check(cache, kind, on_bad_data)
                arrays = {
                    key: np.array(getattr(cache, key)) for key in ARRAYS if getattr(cache, key) is not None
                }
                arrays["records"] = np.array(cache.report["records"])
            assert not list(caches.rglob("*.tmp*"))
            return arrays, bad

    def check(cache, kind, on_bad_data) -> set[int]:
        report, lengths = cache.report, np.diff(cache.offsets)
        assert cache.offsets[0] == 0 and cache.offsets[-1] == len(cache.tokens) == report["tokens"]
        assert cache.num_samples == len(lengths) == report["samples"] > 0
        # a token to predict, and one to predict it from
        assert lengths.min() >= 2 and lengths.max() <= LENGTH
        assert cache.tokens.max() < len(tokenizer)
        trained = np.ones(len(cache.tokens), bool) if cache.loss_mask is None else np.array(cache.loss_mask)
        if kind == "pretrain":
            trained[cache.offsets[:-1]] = False
        assert not trained[cache.offsets[:-1]].any()
        targets = np.add.reduceat(trained, cache.offsets[:-1], dtype=int)
        assert targets.min() > 0 and targets.sum() == report["targets"]
        assert cache.target_bytes.min() >= 0 and cache.target_bytes.sum() == report["target_bytes"]
        listed = cache.path / "bad_records.txt"
        places = [line.split(": ")[0] for line in listed.read_text().splitlines()] if listed.exists() else []
        named = [re.search(r"([:\[])(\d+)\]?$", place) for place in places]
        bad = [
            int(number) + FIRST_ELEMENT * (mark == "[") for mark, number in (each.groups() for each in named)
        ]
        good = report["conversations"]
        if kind == "pretrain":
            good += report["documents"]
        assert len(bad) == report["skipped_bad_records"] == report["records"] - good
        assert on_bad_data == "skip" or not bad
        for lines in (np.array(bad), cache.sources[:, 1]):  # of records with an index, and of those without
            assert all(
                (np.diff(lines[of]) >= 0).all() for of in (lines < FIRST_ELEMENT, lines >= FIRST_ELEMENT)
            )
        return set(bad)

    return build_one


def check_lines(outcome, kind: str, content: bytes, suffix: str = ".jsonl") -> None:
    """`stop` and `skip` agree, and `skip` gives the samples of the same file without its bad lines."""
    pack = gzip.compress if suffix.endswith(".gz") else bytes
    stopped, _ = outcome(kind, "x" + suffix, pack(content), "stop")
    skipped, bad = outcome(kind, "x" + suffix, pack(content), "skip")
    lines = content.split(b"\n")
    if skipped is not None:
        assert skipped.pop("records") == sum(bool(line.removeprefix(BOM).strip(b" \t\r")) for line in lines)
    if skipped is None or not bad:
        assert same(stopped, skipped)
        return
    assert stopped is None and max(bad) <= len(lines)
    rest = b"\n".join(line for number, line in enumerate(lines, 1) if number not in bad)
    assert same(outcome(kind, "x" + suffix, pack(rest), "stop")[0], skipped)


def check_array(outcome, kind: str, content: bytes) -> None:
    """A `.json` file: no record is lost, as Python's own parser reads it; anything it refuses holds a bad
    record."""
    stopped, _ = outcome(kind, "x.json", content, "stop")
    skipped, bad = outcome(kind, "x.json", content, "skip")
    assert stopped is None if bad else same(stopped, skipped)
    if skipped is not None and content.removeprefix(BOM).lstrip().startswith(b"["):
        try:
            text = content.decode("utf-8-sig")
            # ijson takes them as blanks
            records = json.loads(text.replace("\x0b", " ").replace("\x0c", " "))
        except (ValueError, RecursionError):
            # one in front of a record, as where files were joined, is passed over
            assert bad or BOM in content[1:]
        else:
            assert skipped["records"] == len(records)


def same(one: dict | None, other: dict | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(np.array_equal(one[key], other[key]) for key in ARRAYS if key in one)


OTHERS = [".txt", ".csv", ".arrow", ".csv.gz"]
few = settings(max_examples=12, deadline=None)
more = settings(max_examples=30, deadline=None)


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_the_undamaged_records_give_samples(kind, outcome):
    arrays, bad = outcome(kind, "x.jsonl", json_lines(RECORDS[kind]), "skip")
    assert arrays is not None and not bad


@few
@given(KINDS, st.binary(max_size=200), st.sampled_from([".jsonl", ".json", ".jsonl.gz", ".parquet", *OTHERS]))
def test_arbitrary_bytes(outcome, kind, content, suffix):
    for on_bad_data in ("stop", "skip"):
        outcome(kind, "x" + suffix, content, on_bad_data)


@more
@given(KINDS.flatmap(lambda kind: st.tuples(st.just(kind), damaged(json_lines(RECORDS[kind])))))
def test_damaged_json_lines(outcome, given):
    check_lines(outcome, *given)


@few
@given(
    KINDS.flatmap(lambda kind: st.tuples(st.just(kind), damaged(gzip.compress(json_lines(RECORDS[kind])))))
)
def test_damaged_gzip(outcome, given):
    kind, content = given
    assert same(
        outcome(kind, "x.jsonl.gz", content, "skip")[0], outcome(kind, "x.jsonl.gz", content, "skip")[0]
    )
    outcome(kind, "x.jsonl.gz", content, "stop")


@few
@given(KINDS.flatmap(lambda kind: st.tuples(st.just(kind), damaged(json_array(RECORDS[kind])))))
def test_damaged_json_arrays(outcome, given):
    check_array(outcome, *given)


@few
@given(
    st.sampled_from([("pretrain", parquet), ("sft", parquet), ("sft", parquet_chats)]).flatmap(
        lambda pair: st.tuples(st.just(pair[0]), damaged(pair[1](RECORDS[pair[0]])))
    )
)
def test_damaged_parquet(outcome, given):
    kind, content = given
    stopped, _ = outcome(kind, "x.parquet", content, "stop")
    skipped, bad = outcome(kind, "x.parquet", content, "skip")
    assert stopped is None if bad else same(stopped, skipped)


def arrow(records) -> bytes:
    with pa.ipc.new_stream(memory := io.BytesIO(), pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.Table.from_pylist(records))
    return memory.getvalue()


def csv_table(records) -> bytes:
    csv.DictWriter(memory := io.StringIO(newline=""), records[0]).writerows([{"text": "text"}, *records])
    return memory.getvalue().encode()


def plain_text(records) -> bytes:
    return "\n***\n".join(record["text"] for record in records).encode()


@few
@given(
    st.sampled_from([(arrow, ".arrow"), (csv_table, ".csv"), (plain_text, ".txt")]).flatmap(
        lambda pair: st.tuples(st.just(pair[1]), damaged(pair[0](RECORDS["pretrain"])))
    ),
    st.integers(20, 400),
)
def test_other_damaged_files(outcome, given, block_bytes):
    suffix, content = given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", block_bytes)
        patch.setattr(plain_text_files, "PART_BYTES", block_bytes)
        stopped, _ = outcome("pretrain", "x" + suffix, content, "stop")
        skipped, bad = outcome("pretrain", "x" + suffix, content, "skip")
    assert stopped is None if bad else same(stopped, skipped)


@more
@given(KINDS, st.lists(RECORD, min_size=1, max_size=4), st.booleans())
def test_arbitrary_json_values_as_records(outcome, kind, records, escaped):
    lines = [json.dumps(record, ensure_ascii=escaped).encode("utf-8", "surrogatepass") for record in records]
    check_lines(outcome, kind, b"\n".join(lines))


@few
@given(st.lists(st.fixed_dictionaries({"text": JSON}) | JSON, min_size=1, max_size=5))
def test_arbitrary_json_values_as_an_array(outcome, records):
    content = json.dumps(records, indent=1).encode()
    check_array(outcome, "pretrain", content)
    check_array(outcome, "sft", content)
