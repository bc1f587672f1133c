"""Which files a path means, and the blocks they are read in."""

import gzip
import json
import os

import pytest

from common.errors import UserError
from dataset import blocks, data_files
from dataset.files import describe_files, expand_paths, iter_blocks, parse_block, place
from dataset.records import BadRecord


def records_of(*paths):
    return [(b.path, line, r) for b in iter_blocks(paths) for line, r in parse_block(b)]


def test_files_globs_and_folders_in_a_fixed_order(tmp_path, write):
    one, two, deep = (
        write("b.jsonl", [{"text": "b"}]),
        write("a.jsonl", [{"text": "a"}]),
        write("sub/z.jsonl", [{}]),
    )
    packed = tmp_path / "sub" / "y.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "y"}\n'))
    write("sub/notes.md", b"not data")
    write("sub/dataset_info.json", b"{}")
    write(".hidden/x.jsonl", [{}])
    assert expand_paths(one) == [one]
    assert expand_paths(f"{one}, {two}") == [one, two]  # as typed
    assert expand_paths(str(tmp_path / "*.jsonl")) == [two, one]  # sorted
    assert expand_paths(tmp_path) == [two, one, str(packed), deep]
    assert expand_paths(f"{two},{tmp_path}/*.jsonl") == [two, one]  # named twice, read once


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
@pytest.mark.parametrize("kind", ["dangling link", "link to itself", "pipe", "no rights"])
def test_what_is_no_file_is_not_left_out_in_silence(asked, kind, tmp_path, write, monkeypatch):
    write("data/a.jsonl", [{}])
    path = tmp_path / "data/b.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "no rights":
        (tmp_path / "data/b.jsonl").mkdir()
        scandir = os.scandir

        def refused(folder):
            if os.fspath(folder).endswith("b.jsonl"):
                raise PermissionError(13, "Permission denied", str(folder))
            return scandir(folder)

        monkeypatch.setattr(os, "scandir", refused)  # root may read anything
        if asked in ("data/*", "data/**/*.jsonl"):
            return  # what a pattern finds is not searched
    else:
        path.symlink_to("gone" if "dangling" in kind else "b.jsonl")
    said = (
        r"cannot be read \(Permission denied\)"
        if kind == "no rights"
        else "is a pipe, a device or a link to nothing"
    )
    with pytest.raises(UserError, match=f"data/b.jsonl {said}"):
        expand_paths(f"{tmp_path}/{asked}")


def test_the_files_read_are_told():
    assert describe_files(list("abcdefg")) == "data: a, b, c, d, e and 2 more"


def test_a_path_with_a_comma_or_brackets_that_exists_is_taken_as_it_is(write):
    path = write("a,b[1].jsonl", [{"text": "x"}])
    assert expand_paths(path) == [path]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing.jsonl", "missing.jsonl: no such file; check --data_path"),
        ("nothing*.jsonl", "nothing*.jsonl: no such file; check --data_path"),
        ("folder", "folder is a folder without data"),
        ("empty.jsonl", "empty.jsonl is an empty file"),
        (" , ", "--data_path is empty"),
    ],
)
def test_paths_without_data(tmp_path, write, what, message, monkeypatch):
    (tmp_path / "folder").mkdir()
    write("empty.jsonl", b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        expand_paths(what)


def test_blank_lines_alone_are_no_data(write):
    path = write("blank.jsonl", b"\n \r\n\n")
    with pytest.raises(UserError, match=r"blank\.jsonl holds no record"):
        list(iter_blocks([path]))


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
def test_lines_keep_their_numbers_whatever_the_blocks(write, monkeypatch, block_bytes):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    path = write(
        "x.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "four"}\n\xef\xbb\xbf{"text": "five"}'
    )
    assert records_of(path) == [
        (path, 1, {"text": "one"}),
        (path, 4, {"text": "four"}),
        (path, 5, {"text": "five"}),
    ]
    assert sum(block.size for block in iter_blocks([path])) == 60


def test_gzip_reads_like_the_plain_file_and_reports_damage(tmp_path, write, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)
    plain = write("x.jsonl", [{"text": f"record {i} {i * 7919}"} for i in range(2000)])
    packed = tmp_path / "x.jsonl.gz"
    content = gzip.compress((tmp_path / "x.jsonl").read_bytes())
    packed.write_bytes(content)
    assert [r[1:] for r in records_of(str(packed))] == [r[1:] for r in records_of(plain)]
    assert sum(block.size for block in iter_blocks([str(packed)])) == len(content)
    packed.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        UserError, match=r"x.jsonl.gz:\d+: after this line the compressed file is damaged or cut off"
    ):
        records_of(str(packed))
    packed.write_bytes(content[:500] + b"garbage" + content[507:])
    with pytest.raises(UserError, match=r"x.jsonl.gz:\d+: after this line"):
        records_of(str(packed))
    packed.write_bytes(b"not gzip at all")
    with pytest.raises(UserError, match=r"x.jsonl.gz:1: after this line .* damaged"):
        records_of(str(packed))


def test_parquet_reads_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = str(tmp_path / "x.parquet")
    pq.write_table(
        pa.table({"text": [f"row {i}" for i in range(3000)], "url": ["u"] * 3000}), path, row_group_size=700
    )
    rows = records_of(path)
    assert [line for _, line, _ in rows] == list(range(1, 3001))
    assert [r for _, _, r in rows] == [{"text": f"row {i}", "url": "u"} for i in range(3000)]
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"x.parquet"):
        records_of(path)


def test_parquet_without_a_known_column_shows_its_columns(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"content": ["x"]}), path)
    assert records_of(path)[0][2] == {"content": "x"}


def test_parquet_with_a_time_that_python_has_not(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"when": pa.array([2**62], pa.timestamp("us"))}), path)
    with pytest.raises(UserError, match=r"x.parquet:1: unreadable Parquet from this row on"):
        records_of(path)


@pytest.mark.parametrize("content", [b"\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n\n"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_file_without_a_record(name, content, write):
    with pytest.raises(UserError, match=f"{name} holds no record; leave it out or write it again"):
        records_of(write(name, content))


def test_a_json_file_may_hold_one_array(write):
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "c\nd", "output": ""}, 5]
    path = write("x.json", json.dumps(rows, indent=2).encode())
    found = records_of(path)
    assert [line for _, line, _ in found] == [2, 6, 10]
    assert [r for _, _, r in found[:2]] == rows[:2]
    assert "a number instead of a JSON object" in str(found[2][2])
    lines = write("y.json", b'{"text": "a"}\n{"text": "b"}\n')
    assert [line for _, line, _ in records_of(lines)] == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'[\n{"a": 1},\n{"a": "b"c"}\n]',
            "x.json:3: in this record or after it a quote is not closed on its line; nothing",
        ),
        (
            b'[\n{"a": 1},\n{"a": [}\n]',
            "x.json:3: in this record or after it the array is cut off, a ']' is missing",
        ),
        (b'[\n{"a": 1},\n}\n]', "x.json:4: the array has ended before this"),
        (b'[\n{"a": 1},\n{"a": 2}\n', "x.json:3: in this record or after it the array is cut off"),
        (b"[]", "x.json holds no record"),
        (b'[{"a": 1}]\n[{"a": 2}]', "x.json:2: the array has ended before this"),
        (b'[{"a": 1}, {"a": 2', r"x.json\[1\]: in this record or after it the array is cut off"),
        (b'[{"a": 1}], {"a": 2}', "x.json:1: the array has ended before this"),
        (b"[" * 100_000, r"x.json\[0\]: in this record or after it the array is cut off"),
    ],
)
def test_damaged_arrays(write, content, message):
    with pytest.raises(UserError, match=message):
        records_of(write("x.json", content))


BAD_ELEMENTS = {
    b'{"a": "\\ud800"}': "lone surrogate",
    b'"a"': "text instead of a JSON object",
    b'{"a": "\xff"}': "not UTF-8 (byte 0xff)",
    b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}": "nested too deep",
    b'{"a": }': "not valid JSON (Expecting value",
    b'{"a": 1,}': "not valid JSON",
    b"{'a': [1, {'b': 2}]}": "not valid JSON (Expecting property name enclosed in double quotes",
    b'{"a": "[},", "b": oops, "c": "]"}': "not valid JSON (Expecting value",
    b'{"a": "\xc4\xe3", }': "not UTF-8 (",
    b"oops": "not valid JSON (Expecting value",
    b"": "not valid JSON (Expecting value",
    b"9" * 5000: "Exceeds the limit",
    b"17": "a number instead of a JSON object",
}


@pytest.mark.parametrize("block_bytes", [1, 13, 1 << 20])
@pytest.mark.parametrize("bad", BAD_ELEMENTS, ids=range(len(BAD_ELEMENTS)))
def test_a_bad_element_of_an_array_costs_only_itself(write, bad, block_bytes, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    path = write("x.json", b'[\n{"a": "\xe4\xbd\xa0"},\n' + bad + b'\n,\n{"b": [2]}, 5\n]\n')
    (_, one, first), (_, two, problem), (_, three, last), (_, four, number) = records_of(path)
    assert (first, last, one, three) == ({"a": "你"}, {"b": [2]}, 2, two + 2 - (not bad))
    assert isinstance(problem, BadRecord) and BAD_ELEMENTS[bad] in str(problem) and two == 3 + (not bad)
    assert isinstance(number, BadRecord) and place(path, four) == f"{path}[3]"


def test_records_in_one_line_are_named_by_their_index(write):
    rows = [{"text": "a"}, {"text": "[}"}, 5]
    one_line = write("x.json", json.dumps(rows).encode())
    assert [place(path, line) for path, line, _ in records_of(one_line)] == [
        f"{one_line}[{i}]" for i in range(3)
    ]
    pairs = write("y.json", b'[\n{"text": "a"}, {"text": "b"},\n{"text": "c"}]')
    assert [place("y", line) for _, line, _ in records_of(pairs)] == ["y:2", "y[1]", "y:3"]


def test_an_array_is_read_piece_by_piece(write, monkeypatch):
    rows = [{"text": f"record {i} " * (i % 50), "n": i} for i in range(3000)]
    for content in (
        json.dumps(rows),
        json.dumps(rows, indent=1, ensure_ascii=False),
        "[" + json.dumps(rows)[1:],
    ):
        path = write("x.json", content.encode())
        whole = [record for _, _, record in records_of(path)]
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 700)
        found = list(iter_blocks([path]))
        assert len(found) > 100 and sum(block.size for block in found) == len(content)
        assert [record for block in found for _, record in parse_block(block)] == whole == rows
        monkeypatch.undo()


def test_another_kind_of_file_is_one_entry(write, monkeypatch, tmp_path):
    def read_pairs(file):
        for number, raw in enumerate(file.content, 1):
            text = raw.decode().strip()
            yield number, {"text": text} if text else BadRecord("an empty line")

    path = write("d/a.lines", b"one\n\ntwo\n")
    with pytest.raises(UserError, match="is a folder without data"):
        expand_paths(tmp_path / "d")
    monkeypatch.setitem(data_files.READERS, ".lines", read_pairs)
    assert expand_paths(tmp_path / "d") == [path]
    (_, _, one), (_, _, bad), (_, three, two) = records_of(path)
    assert (one, two, three) == ({"text": "one"}, {"text": "two"}, 3) and isinstance(bad, BadRecord)
    packed = write("a.lines.gz", gzip.compress(b"one\n"))
    assert records_of(packed) == [(packed, 1, {"text": "one"})]
