"""Which files a path means, and the blocks they are read in."""

import gzip
import json
import os

import pytest

from common.errors import UserError
from dataset import files
from dataset.files import expand_paths, iter_blocks, parse_block, place
from dataset.json_values import BadRecord
from tests.dataset.conftest import records_of


def test_files_globs_and_folders_in_a_fixed_order(tmp_path, write):
    one, two = write("b.jsonl", [{"text": "b"}]), write("a.jsonl", [{"text": "a"}])
    packed, deep = write("sub/y.jsonl.gz", gzip.compress(b'{"text": "y"}\n')), write("sub/z.jsonl", [{}])
    write("sub/notes.md", b"not data")
    write("sub/dataset_info.json", b"{}")
    write(".hidden/x.jsonl", [{}])
    assert expand_paths(one) == [one]
    assert expand_paths(f"{one}, {two}") == [one, two]  # as typed
    assert expand_paths(str(tmp_path / "*.jsonl")) == [two, one]  # sorted
    assert expand_paths(tmp_path) == [two, one, packed, deep]
    assert expand_paths(f"{two},{tmp_path}/*.jsonl") == [two, one]  # named twice, read once
    existing = write("a,b[1].jsonl", [{"text": "x"}])
    assert expand_paths(existing) == [existing]  # no list, no pattern


def test_links_are_followed_once(tmp_path, write):
    one, two = write("data/a/x.jsonl", [{}]), write("else/where/y.jsonl", [{}])
    for name, target in (("a/up", ".."), ("self", "."), ("a/loop", "../a"), ("linked", "../else")):
        (tmp_path / "data" / name).symlink_to(target)
    linked = str(tmp_path / "data/linked/where/y.jsonl")
    assert expand_paths(tmp_path / "data") == [one, linked]
    for name in ("a/up", "self"):
        (tmp_path / "data" / name).unlink()
    found = expand_paths(f"{tmp_path}/data/**/*.jsonl")
    assert len(found) == 2 and {os.path.realpath(path) for path in found} == {one, two}


@pytest.mark.parametrize("asked", ["data", "data/*", "data/**/*.jsonl", "data/b.jsonl"])
@pytest.mark.parametrize("kind", ["dangling link", "link to itself", "pipe"])
def test_what_is_no_file_is_not_left_out_in_silence(asked, kind, tmp_path, write):
    write("data/a.jsonl", [{}])
    path = tmp_path / "data/b.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("gone" if kind == "dangling link" else "b.jsonl")
    with pytest.raises(UserError, match=r"data/b\.jsonl is a pipe, a device or a link to nothing"):
        expand_paths(f"{tmp_path}/{asked}")


def test_a_folder_that_cannot_be_searched(tmp_path, write, monkeypatch):
    write("data/b/a.jsonl", [{}])
    scandir = os.scandir

    def refused(folder):
        if os.fspath(folder).endswith("data/b"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refused)  # root may read anything
    with pytest.raises(UserError, match=r"data/b cannot be read \(Permission denied\)"):
        expand_paths(f"{tmp_path}/data")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.jsonl", "missing.jsonl: no such file; check --data_path"),
        ("nothing*.jsonl", r"nothing\*.jsonl: no such file; check --data_path"),
        ("folder", "folder is a folder without data"),
        ("empty.jsonl", "empty.jsonl is an empty file"),
        (" , ", "--data_path is empty"),
    ],
)
def test_paths_without_data(tmp_path, write, path, message, monkeypatch):
    (tmp_path / "folder").mkdir()
    write("empty.jsonl", b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        expand_paths(path)


@pytest.mark.parametrize("content", [b"\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n\n", b"[]", b" [ ]\n"])
def test_a_file_without_a_record(content, write):
    for name in ("x.json", "x.jsonl") if b"[" not in content else ("x.json",):
        with pytest.raises(UserError, match=f"{name} holds no record; leave it out or write it again"):
            records_of(write(name, content))


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
def test_lines_keep_their_numbers_whatever_the_blocks(write, monkeypatch, block_bytes):
    monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes)
    lines = b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "four"}\n\xef\xbb\xbf{"text": "five"}'
    path = write("x.jsonl", lines)
    assert records_of(path) == [(1, {"text": "one"}), (4, {"text": "four"}), (5, {"text": "five"})]
    assert sum(block.size for block in iter_blocks([path])) == 60


def test_gzip_reads_like_the_plain_file_and_reports_damage(tmp_path, write, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 1000)
    plain = write("x.jsonl", [{"text": f"record {i} {i * 7919}"} for i in range(2000)])
    content = gzip.compress((tmp_path / "x.jsonl").read_bytes())
    packed = write("x.jsonl.gz", content)
    assert records_of(packed) == records_of(plain)
    assert sum(block.size for block in iter_blocks([packed])) == len(content)
    cut, garbled = content[: len(content) // 2], content[:500] + b"garbage" + content[507:]
    for damaged in (cut, garbled, b"not gzip at all"):
        write("x.jsonl.gz", damaged)
        with pytest.raises(
            UserError, match=r"x.jsonl.gz:\d+: after this line the compressed file is damaged"
        ):
            records_of(packed)


def test_a_json_file_may_hold_one_array(write, monkeypatch):
    rows = [{"text": f"record {i} " * (i % 50), "n": i, "half": 0.5} for i in range(3000)]
    for content in (json.dumps(rows), "\ufeff" + json.dumps(rows, indent=1, ensure_ascii=False)):
        path = write("x.json", content.encode())
        assert [record for _, record in records_of(path)] == rows
        monkeypatch.setattr(files, "BLOCK_BYTES", 70_000)
        blocks = list(iter_blocks([path]))
        assert len(blocks) > 5 and sum(block.size for block in blocks) == len(content.encode())
        monkeypatch.undo()
    assert [place(path, line) for line, _ in records_of(path)[:2]] == [f"{path}[0]", f"{path}[1]"]
    lines = write("y.json", b'{"text": "a"}\n{"text": "b"}\n')
    assert records_of(lines) == [(1, {"text": "a"}), (2, {"text": "b"})]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'"a"', "text instead of a JSON object"),
        (b"17", "a number instead of a JSON object"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deep"),
        (b'{"a": ' + b"[" * 700 + b"]" * 700 + b"}", "nested too deep"),  # to be handed to a process
    ],
)
def test_a_bad_element_of_an_array_costs_only_itself(write, bad, message):
    path = write("x.json", '[\n{"a": "你"},\n'.encode() + bad + b'\n,\n{"b": [2]}\n]\n')
    (_, first), (line, problem), (_, last) = records_of(path)
    assert (first, last) == ({"a": "你"}, {"b": [2]})
    assert isinstance(problem, BadRecord) and message in str(problem)
    assert place(path, line) == f"{path}[1]"


@pytest.mark.parametrize(
    "rest", [b'{"a": "b"c"}\n]', b'{"a": "\xff"}]', b'{"a": 1e999}]', b'{"a": 2', b"[" * 2000, b""]
)
def test_an_array_that_is_no_json_ends_at_its_element(write, rest):
    path = write("x.json", b'[\n{"a": 1},\n' + rest)
    with pytest.raises(UserError, match=r"x.json\[[12]\]: from this element on the array cannot be read \("):
        records_of(path)
    with pytest.raises(UserError, match=r"x.json\[1\]: from this element on"):
        records_of(write("x.json", b'[{"a": 1}]\n[{"a": 2}]'))


def test_another_kind_of_file_is_one_entry(write, monkeypatch, tmp_path):
    def read_pairs(content, path):
        for number, raw in enumerate(content, 1):
            text = raw.decode().strip()
            yield number, {"text": text} if text else BadRecord("an empty line")

    path = write("d/a.lines", b"one\n\ntwo\n")
    with pytest.raises(UserError, match="is a folder without data"):
        expand_paths(tmp_path / "d")
    monkeypatch.setitem(files.READERS, ".lines", read_pairs)
    assert expand_paths(tmp_path / "d") == [path]
    (_, one), (_, bad), (_, two) = records_of(path)
    assert (one, two) == ({"text": "one"}, {"text": "two"}) and isinstance(bad, BadRecord)
    packed = write("a.lines.gz", gzip.compress(b"one\n"))
    assert [record for block in iter_blocks([packed]) for _, record in parse_block(block)] == [
        {"text": "one"}
    ]
