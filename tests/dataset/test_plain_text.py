"""Plain text: what a document is, how a long one is read in parts, and what cannot be read."""

import gzip
import itertools
import json
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.settings import StageArgs
from dataset import files, plain_text
from dataset.files import expand_paths, iter_blocks, parse_block
from dataset.json_values import BadRecord
from dataset.lm_dataset import PretrainDataset
from dataset.tokenizing import DocumentTokenizer, TokenizerSpec
from tests.dataset.conftest import build, records_of
from trainer.data.datasets import open_datasets


def set_part_bytes(monkeypatch, size):
    monkeypatch.setattr(plain_text, "PART_BYTES", size)
    monkeypatch.setattr(files, "BLOCK_BYTES", size)


def test_a_file_is_a_document(write):
    path = write("novel.txt", "\ufeff\r\n\r\n第一章\r\n\r\nIt was night.\r\n\r\n".encode())
    assert records_of(path) == [(3, {"text": "第一章\n\nIt was night."})]
    assert records_of(write("old.TXT", b"one\rtwo\r")) == [(1, {"text": "one\ntwo"})]


@pytest.mark.parametrize("block_bytes", [16, 40, 1 << 20])
def test_lines_equal_to_the_separator_divide_documents(write, monkeypatch, block_bytes):
    set_part_bytes(monkeypatch, block_bytes)
    content = (
        b"***\none\n*** not\n ***\n\n***  \r\n\n***\n\nt\xc3\xa9\xe6\xbc\xa2 wo\n****\n***\n  three\n***"
    )
    path = write("x.txt", content)
    found = list(iter_blocks([path], "***"))
    assert sum(block.size for block in found) == len(content)
    whole, starts = [], []
    for block in found:
        for line, record in parse_block(block):
            if record.begins:
                whole.append("")
                starts.append(line)
            whole[-1] += record["text"]
            assert not record.begins or not record.context
            assert record.begins or record.context
    assert whole == ["one\n*** not\n ***", "té漢 wo\n****", "  three"]
    assert starts == [2, 10, 13]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("好\n中文小说".encode("gb18030"), 1, "not UTF-8 (byte 0xba); save the file as UTF-8: iconv"),
        ("one\ntwo".encode("utf-16"), 1, "not UTF-8 (byte 0xff)"),
        ("one\ntwo".encode("utf-16-le"), 1, "a NUL character, so this is not plain text in UTF-8"),
        (b"one\ntwo\n\xff\n", 3, "not UTF-8 (byte 0xff); save the file as UTF-8"),
    ],
)
def test_text_in_another_encoding(write, content, line, message):
    ((found, record),) = records_of(write("x.txt", content))
    assert isinstance(record, BadRecord) and found == line and message in str(record)


def test_a_folder_of_records_and_text_is_refused(write, tmp_path):
    text, records = write("d/README.txt", b"Read me."), write("d/sub/a.jsonl", [{"text": "x"}])
    with pytest.raises(
        UserError, match=r"both plain text \(.*README.txt\) and records .* --data_path '.*jsonl'"
    ):
        expand_paths(tmp_path / "d")
    assert expand_paths(tmp_path / "d", plain_text=False) == [records]
    assert expand_paths(f"{tmp_path}/d/**/*.jsonl") == [records]
    assert expand_paths(f"{tmp_path}/d/*.txt,{records}") == [text, records]
    write("novels/b.txt", b"b")
    write("novels/a/z.txt.gz", gzip.compress(b"z"))
    assert expand_paths(tmp_path / "novels") == [f"{tmp_path}/novels/a/z.txt.gz", f"{tmp_path}/novels/b.txt"]


# --- a document in parts

PIECES = ["the river ", "北京", "🙂", "𠮷", "\n", "\n\n", "  ", "é", "a" * 9, "\u3000第", "\r\n", "龘"]


def targets(tokenizer, path, max_length):
    """The targets of a file's samples in order, the samples, and the bytes and counts."""
    make = DocumentTokenizer(TokenizerSpec.of(tokenizer), max_length)
    found, spelled, counts = [], 0, Counter()
    samples = []
    for block in iter_blocks([path]):
        made = make(block)
        assert not made.bad
        pieces = np.split(made.tokens, np.cumsum(made.lengths)[:-1]) if len(made.lengths) else []
        samples += [piece.tolist() for piece in pieces]
        found += made.tokens[made.loss_mask].tolist()
        spelled += int(made.target_bytes.sum())
        counts.update(made.counts)
    return found, samples, spelled, counts


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=60).map("".join),
    st.integers(2, 24),
    st.integers(4, 90),
)
def test_the_parts_of_a_document_are_the_document(other_tokenizer, write, text, max_length, block_bytes):
    path = write("x.txt", text.encode())
    text = text.replace("\r\n", "\n").strip("\n")
    if not text.strip():
        return
    with pytest.MonkeyPatch.context() as patch:
        set_part_bytes(patch, block_bytes)
        found, samples, spelled, counts = targets(other_tokenizer, path, max_length)
    assert other_tokenizer.decode(found) == text + other_tokenizer.eos_token
    assert found.count(other_tokenizer.eos_token_id) == 1 and found[-1] == other_tokenizer.eos_token_id
    assert spelled == len(text.encode())
    assert counts["records"] == counts["documents"] == 1
    assert counts["documents_split"] == (len(samples) > 1)
    for before, after in itertools.pairwise(samples):
        assert after[0] == before[-1] and len(after) <= max_length


def test_the_tokens_of_parts_are_those_of_the_whole(tokenizer, write, monkeypatch):
    lines = [f"Chapter {i}. The harbour, 港口在河口 {i * 7919}, was quiet; 很安静。" for i in range(900)]
    path, record = write("x.txt", "\n".join(lines).encode()), write("x.jsonl", [{"text": "\n".join(lines)}])
    whole = targets(tokenizer, record, 100)
    set_part_bytes(monkeypatch, 5000)
    parts = targets(tokenizer, path, 100)
    assert len(list(iter_blocks([path]))) > 10
    assert parts[0] == whole[0] and parts[2] == whole[2]


def test_a_part_that_cannot_be_read_costs_only_itself(other_tokenizer, write, cache_dir, monkeypatch):
    set_part_bytes(monkeypatch, 400)
    text = "".join(f"line {i} of the river\n" for i in range(100)).encode()
    path = write("x.txt", text[:1000] + b"\xff" + text[1000:])
    given = ("pretrain", path, other_tokenizer, 32, cache_dir, 1)
    with pytest.raises(UserError, match=r"x.txt:\d+: not UTF-8 .byte 0xff"):
        build(*given)
    report = build(*given, on_bad_data="skip", max_bad_share=1.0).report
    assert report["documents"] == 1 and report["skipped_bad_records"] == 1 and report["records"] == 2
    assert len(text) - 900 < report["target_bytes"] < len(text)


def test_memory_stays_flat_however_long_a_document_is(write, fake_backend, other_tokenizer, cache_dir):
    peaks = []
    for megabytes in (3, 12):
        path = write(f"{megabytes}.txt", (b"x" * 3999 + b"\n") * (megabytes * 250))
        tracemalloc.start()
        report = build("pretrain", path, other_tokenizer, 512, cache_dir, 1).report
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert report["documents"] == 1 and report["target_bytes"] == megabytes * 1_000_000 - 1
    assert peaks[1] < peaks[0] + 2e6, peaks


def test_a_stage_takes_the_separator(write, tokenizer, cache_dir):
    texts = {"data_path": "one\n---\ntwo", "eval_data_path": "three\n--- \nfour\n---\nfive"}
    paths = {name: write(f"{name}.txt", text.encode()) for name, text in texts.items()}
    args = StageArgs(**paths, cache_dir=str(cache_dir), text_separator="---")
    train, held_out = open_datasets(PretrainDataset, args, tokenizer)
    assert (len(train), len(held_out)) == (2, 3)


def test_the_separator_and_the_kind_of_file_are_part_of_the_cache(other_tokenizer, write, cache_dir):
    record = json.dumps({"text": "one"}) + "\n---\n" + json.dumps({"text": "two"})
    text, other = write("x.txt", record.encode()), write("x.log", record.encode())

    def made(path, **options):
        return build("pretrain", path, other_tokenizer, 32, cache_dir, 1, **options)

    whole, divided = made(text), made(text, text_separator="---")
    assert (whole.report["documents"], divided.report["documents"]) == (1, 2)
    with pytest.raises(UserError, match=r"x.log:2: not valid JSON"):
        made(other)
    skipped = made(other, on_bad_data="skip", max_bad_share=1.0)
    assert (
        len({whole.path, divided.path, skipped.path}) == 3
        and skipped.report["tokens"] < divided.report["tokens"]
    )
