"""Which files are found, and the records of each kind of file; what cannot be read is one line."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import zipfile
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from dataset import files
from dataset.files import expand_paths, find_files, format_source
from dataset.records import parse
from tests.dataset.conftest import arrow, csv_of, lines_of, parquet, records_of

CHAT = [{"role": "user", "content": "河?"}, {"role": "assistant", "content": 'the "river",\nbrown'}]
ICONV = "iconv -f GB18030 -t UTF-8"

# --- which files


def test_files_globs_and_folders(write, tmp_path, monkeypatch):
    names = ("d/b.jsonl", "d/a.json", "d/sub/c.csv", "d/.hidden/x.jsonl", "d/.x.jsonl")
    b, a, c, _, _ = (write(name, [{"text": "x"}]) for name in names)
    assert expand_paths(f"{tmp_path}/d") == [a, b, c]
    assert expand_paths(f"{b}, {tmp_path}/d/**/*.csv,{tmp_path}/d,") == [b, c, a]
    odd = write("x,y*.jsonl", [{"text": "x"}])
    assert expand_paths(odd) == [odd]  # exists as typed
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_paths("~/d/b.jsonl") == [b]


def test_the_first_files_of_a_glob(write, tmp_path):
    """By name, whatever else lies there; exactly as many as asked for."""
    c, a, b = (write(f"d/{name}.jsonl", [{"text": "x"}]) for name in "cab")
    assert expand_paths(f"{tmp_path}/d/*.jsonl[:2]") == [a, b]
    assert expand_paths(f"{tmp_path}/d/[bc].jsonl[:1],{a}") == [b, a]
    assert expand_paths(f"{tmp_path}/**/*.jsonl[:3]") == [a, b, c]
    odd = write("d/*[:1]", [{"text": "x"}])
    assert expand_paths(odd) == [odd]  # exists as typed
    for wrong, message in (
        ("*.jsonl[:4]", "*.jsonl[:4]: the pattern fits 3; "),
        ("*.jsonl[:0]", "*.jsonl[:0]: [:N] must follow a pattern"),
        ("a.jsonl[:1]", "a.jsonl[:1]: [:N] must follow a pattern"),
    ):
        with pytest.raises(UserError) as caught:
            expand_paths(f"{tmp_path}/d/{wrong}")
        assert str(caught.value).startswith(f"{tmp_path}/d/{message}")


def test_links_are_followed_and_no_file_is_read_twice(write, tmp_path):
    one, two = write("data/a/x.jsonl", [{}]), write("else/where/y.jsonl", [{}])
    for name, target in (("a/up", ".."), ("self", "."), ("linked", "../else"), ("x.jsonl", "a/x.jsonl")):
        (tmp_path / "data" / name).symlink_to(target)
    assert expand_paths(f"{tmp_path}/data") == [one, str(tmp_path / "data/linked/where/y.jsonl")]
    assert expand_paths(f"{two},{tmp_path}/else") == [two]
    (tmp_path / "data/a/second").symlink_to("../..")
    for pattern in ("data/**/*.jsonl", "**/[xy].jsonl", "**"):
        assert sorted(map(os.path.realpath, expand_paths(f"{tmp_path}/{pattern}"))) == [one, two]


def test_what_a_folder_holds_beside_the_data_is_named(write, tmp_path):
    """Files of other kinds, text beside records, links to nothing; not what is hidden or described."""
    names = ("d/a.png", "d/b.bin", "d/README.txt", "d/.git", "d/dataset_info.json", "d/cache-1.arrow")
    pdf, binary, text, *_ = (write(name, b"x") for name in names)
    data = write("d/c.jsonl", [{}])
    (tmp_path / "d/gone.jsonl").symlink_to("nowhere")
    others = [text, pdf, binary, str(tmp_path / "d/gone.jsonl")]
    assert find_files(f"{tmp_path}/d") == ([data], others)
    novels = [write("novels/a.txt", b"a"), write("novels/sub/b.txt.gz", gzip.compress(b"b"))]
    readme = write("novels/README.md", b"# Novels")
    assert find_files(f"{tmp_path}/novels") == (novels, [readme])
    notes = [write("notes/a.md", b"# A"), write("notes/b.MD", b"# B")]
    assert find_files(f"{tmp_path}/notes") == (notes, [])


def test_a_folder_without_data_says_what_it_holds(write, tmp_path):
    for name in ("d/a.png", "d/b.png", "d/sub/c.pptx", "d/LICENSE"):
        write(name, b"x")
    with pytest.raises(
        UserError, match=r"d: a folder without data; it contains 2 \.png, 1 without a suffix, 1 \.pptx; "
    ):
        expand_paths(f"{tmp_path}/d")


def test_a_saved_dataset_without_a_training_part_names_its_parts(write, tmp_path):
    for part in ("validation", "test"):
        write(f"d/set/{part}/data-00000-of-00001.arrow", b"x")
    write("d/set/dataset_dict.json", b"{}")
    write("d/other.jsonl", [{"text": "a"}])
    for path in (f"{tmp_path}/d/set", f"{tmp_path}/d"):  # beside other data, too
        with pytest.raises(UserError) as caught:
            expand_paths(path)
        said = "d/set: a dataset without the split train (its splits: test, validation); name one: "
        assert str(caught.value).startswith(f"{tmp_path}/{said}{tmp_path}/d/set/test")
    assert len(expand_paths(f"{tmp_path}/d/set/validation,{tmp_path}/d/set/test,{tmp_path}/d/*.jsonl")) == 3
    write("e/dataset_dict.json", b"{}")
    with pytest.raises(UserError, match=r"e: a dataset without the split train \(its splits: none\)"):
        expand_paths(f"{tmp_path}/e")


def test_of_a_saved_dataset_the_training_part_is_read(write, tmp_path):
    for part in ("train", "test"):
        write(f"d/{part}/data-00000-of-00001.arrow", b"x")
        write(f"d/{part}/state.json", b"{}")
    write("d/dataset_dict.json", b"{}")
    assert expand_paths(f"{tmp_path}/d") == [f"{tmp_path}/d/train/data-00000-of-00001.arrow"]
    assert expand_paths(f"{tmp_path}/d/test") == [f"{tmp_path}/d/test/data-00000-of-00001.arrow"]


@pytest.mark.parametrize("path", ["missing.jsonl", "nothing*.jsonl", "empty", "pipe", "good.jsonl,missing"])
def test_paths_without_data_are_one_line(path, write, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    write("good.jsonl", [{}])
    monkeypatch.chdir(tmp_path)
    name = path.split(",")[-1].replace("*", r"\*")
    with pytest.raises(UserError, match=f"^{name}: no such file, or a folder without data"):
        expand_paths(path)
    with pytest.raises(UserError, match="--data_path is empty"):
        expand_paths(" , ")


# --- the same records in every kind of file


WRITERS = {
    "x.jsonl": lines_of,
    "x.JSON": lines_of,
    "x.log": lines_of,
    "array.json": lambda rows: json.dumps(rows).encode(),
    "indented.json": lambda rows: b"\xef\xbb\xbf \n" + json.dumps(rows, indent=2).encode(),
    "x.csv": csv_of,
    "x.tsv": partial(csv_of, delimiter="\t"),
    "semicolons.csv": partial(csv_of, delimiter=";"),
    "tabs.csv": partial(csv_of, delimiter="\t"),
    "bars.csv": partial(csv_of, delimiter="|"),
    "array.jsonl": lambda rows: json.dumps(rows).encode(),
    "brackets.jsonl": lambda rows: b"[\n" + b",\n".join(lines_of(rows).splitlines()) + b"\n]",
    "array.data": lambda rows: b" " + json.dumps(rows, indent=1).encode(),
    "x.parquet": parquet,
    "stream.arrow": arrow,
    "file.arrow": lambda rows: arrow(rows, pa.ipc.new_file),
}
PACKED = [name for name in WRITERS if not name.endswith(("parquet", "arrow"))]


COMPRESSED = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
    "zst": lambda content: b"".join(  # in two frames, as zstd's own program appends them
        pa.compress(part, "zstd", asbytes=True) for part in (content[:5000], content[5000:])
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        *WRITERS,
        *(f"{name}.gz" for name in PACKED),
        *("x.jsonl.bz2", "x.jsonl.xz", "x.jsonl.zst", "x.csv.zst", "indented.json.zst", "x.tsv.xz"),
    ],
)
def test_the_same_records_in_every_kind_of_file(name, write):
    rows = [{"text": f'row {i}, "河"', "url": "u"} for i in range(1500)]
    plain, _, suffix = name.rpartition(".") if name.split(".")[-1] in COMPRESSED else (name, "", "")
    path = write(name, COMPRESSED.get(suffix, bytes)(WRITERS[plain](rows)))
    found = records_of(path)
    assert [record for _, record in found] == rows
    first, last = format_source(path, found[0][0]), format_source(path, found[-1][0])
    if "array" in name or "indented" in name or "brackets" in name:
        assert (first, last) == (f"{path}[0]", f"{path}[1499]")
    else:
        begin = 2 if "csv" in name or "tsv" in name else 1
        assert (first, last) == (f"{path}:{begin}", f"{path}:{begin + 1499}")


def test_lines_keep_their_numbers(write):
    lines = b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "four"}\n\xef\xbb\xbf{"text": "five"}'
    assert records_of(write("x.jsonl", lines)) == [
        (1, {"text": "one"}), (4, {"text": "four"}), (5, {"text": "five"})
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_numbers_of_any_size_and_nan_do_no_harm(name, write):
    """In a field that nothing reads; lines and arrays alike."""
    record = '{"text": "a", "id": 123456789012345678901234567890, "x": NaN, "y": 1e999}'
    content = f"[{record}]" if name == "x.json" else record
    ((_, found),) = records_of(write(name, content.encode()))
    assert (found["text"], found["id"]) == ("a", 123456789012345678901234567890)


def test_conversations_as_json_text_in_a_table(write):
    rows = [["messages", "system"], [json.dumps(CHAT), ""], [str(CHAT), ""], ["", "s"]]
    csv.writer(memory := io.StringIO(newline="")).writerows(rows)
    (_, good), (_, python), (_, empty) = records_of(write("x.csv", memory.getvalue().encode()))
    assert parse(good, "sft").chats[0].messages == CHAT and empty == {"system": "s"}
    assert "'messages' is not JSON" in python
    table = parquet(
        [{"messages": CHAT, "n": 1}, {"messages": [{"role": "user", "content": "q", "name": "n"}]}]
    )
    (_, first), (_, second) = records_of(write("x.parquet", table))
    assert first == {"messages": CHAT, "n": 1}  # null is absent
    assert second == {"messages": [{"role": "user", "content": "q", "name": "n"}]}


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\ufeff"), max_size=20)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXTS, min_size=1, max_size=9))
def test_what_csv_writes_is_read(write, texts):
    path = write("x.csv", csv_of([{"id": "", "text": text} for text in texts]))
    assert [record["text"] for _, record in records_of(path)] == texts


# --- plain text


def test_plain_text_is_one_document_or_several(write):
    novel = write("novel.txt", "\ufeff\r\n\r\n第一章\r\n\r\nIt was night.\r\n\r\n".encode())
    assert [record for _, record in records_of(novel)] == [{"text": "第一章\n\nIt was night."}]
    path = write("x.txt", b"***\none\n*** not\n ***\n\n***  \r\n\n***\n\nt\xc3\xa9\n***\n  three\n***")
    assert records_of(path, "***") == [
        (2, {"text": "one\n*** not\n ***"}), (10, {"text": "té"}), (12, {"text": "  three"})
    ]  # fmt: skip


def test_line_ends_of_old_macs(write):
    """Also in a file that has others, and in records."""
    for content in (b"one\rtwo\r\rthree\r", b"one\r\ntwo\r\n\rthree\n"):
        assert records_of(write("x.txt", content)) == [(1, {"text": "one\ntwo\n\nthree"})]
    assert records_of(write("y.txt", b"one\r***\rtwo"), "***") == [(1, {"text": "one"}), (3, {"text": "two"})]
    assert records_of(write("x.csv", b'q,a\rx,"one\rtwo"\ry,z\r')) == [
        (2, {"q": "x", "a": "one\ntwo"}), (4, {"q": "y", "a": "z"})
    ]  # fmt: skip
    assert records_of(write("x.jsonl", b'{"text": "a"}\r{"text": "b"}\r')) == [
        (1, {"text": "a"}),
        (2, {"text": "b"}),
    ]


DAMAGED = {  # "at byte 4 of line 3"
    "x.txt": b"water \xe6\xb0\xb4\nmill \xe6\xb0\xb4\nca \xe6 x\n",
    "x.jsonl": b'{"text": "\xe6\xb0\xb4"}\n{"text": "\xe6\xb0\xb4"}\n{"a\xff": "b"}\n',
    "x.json": b'[{"text": "\xe6\xb0\xb4"},\n{"text": "\xe6\xb0\xb4"},\n{"a\xff": "b"}]\n',
    "x.csv": b"a,text\n\xe6\xb0\xb4,\xe6\xb0\xb4\nq,a\xff\n\xe6\xb0\xb4,\xe6\xb0\xb4\n",
    "x.tsv": b"a\ttext\n\xe6\xb0\xb4\t\xe6\xb0\xb4\nq\ta\xff\n\xe6\xb0\xb4\tb\n",
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_damaged_byte_of_utf8_is_named(name, packed, write):
    path = write(name + packed, gzip.compress(DAMAGED[name]) if packed else DAMAGED[name])
    bad = [(line, said) for line, said in records_of(path) if isinstance(said, str)]
    ((line, said),) = bad
    assert said.startswith(
        "not UTF-8 at byte 4 of line 3, though most of the file is; write this character again"
    )
    assert line == {"x.txt": 1, "x.json": -3}.get(name, 3)


def test_a_long_text_comes_in_parts_of_whole_lines(write, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 500)
    lines = [f"Chapter {i}. 港口在河口 {i * 7919}." for i in range(100)]
    found = records_of(write("x.txt", "\n".join(lines).encode()))
    assert len(found) > 5 and "\n".join(record["text"] for _, record in found) == "\n".join(lines)
    for line, record in found:
        assert record["text"].startswith(lines[line - 1])


# --- what cannot be read


def test_bad_lines_and_rows_cost_only_themselves(write):
    content = b'{"a": 1}\n{"b": \n["c"]\n{"d": "\xc4\xe3"}\n7\n' + b"[" * 100_000 + b'\n{"e": 2}\n'
    found = dict(records_of(write("x.jsonl", content)))
    assert (found.pop(1), found.pop(7)) == ({"a": 1}, {"e": 2})
    assert found[2].startswith("not valid JSON (Expecting value: line 1 column") and ICONV in found[4]
    assert found[5] == "no JSON object; write {...}" and "not valid JSON" in found[6]
    assert found[3] == "a JSON list, not an object; write {...}"
    rows = dict(records_of(write("x.csv", b"text,n\na,1\nb,1,2\nc\n\ne,4\n")))
    assert rows[2] == {"text": "a", "n": "1"} and rows[6] == {"text": "e", "n": "4"}
    assert "3 cells, but 2 columns" in rows[3] and "1 cells, but 2 columns" in rows[4]


BROKEN = {
    "a quote": b'{"b": "x}',
    "a comma": b'{"b": 2} {"b": 3}',
    "another encoding": '{"b": "你说"}'.encode("gb18030"),
    "too deep": b'{"b": ' + b"[" * 100_000 + b"}",
}


@pytest.mark.parametrize("bad", BROKEN.values(), ids=BROKEN)
def test_a_broken_element_of_an_array_costs_only_itself(bad, write):
    """Where elements begin lines; one that is no object does anyway."""
    content = b'[\n  {"a": 1},\n  ' + bad + b',\n  {"c": [\n  3]}, 7\n]'
    (_, first), (line, why), *rest = records_of(path := write("x.json", content))
    assert first == {"a": 1} and format_source(path, line) == f"{path}[1]"
    assert ICONV in why if bad in BROKEN["another encoding"] else "not valid JSON (" in why
    assert rest == [(-3, {"c": [3]}), (-4, "no JSON object; write {...}")]


@pytest.mark.parametrize("rest", [b'{"b": "x}, {"c": 3}]', b'{"b": 2} {"c": 3}]', b'{"b": 2', b"", b"3}]"])
def test_an_array_that_cannot_be_read_on_names_element_and_line(rest, write):
    path = write("x.json", b'[{"a": 1},\n' + rest)
    with pytest.raises(UserError, match=r"x\.json\[\d\]: after it the file cannot be read \(.*: line 2 "):
        records_of(path)
    with pytest.raises(UserError, match=r"x\.json\[0\]: after it the file .*more follows"):
        records_of(write("x.json", b'[\n{"a": 1}]\n[{"a": 2}]'))


@pytest.mark.parametrize("text", ["中文小说", "你说"])  # the second holds a backslash in GBK
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.jsonl.gz", "one_line.json"])
def test_another_encoding_is_met_with_iconv(name, text, write):
    form = {"x.csv": 'text\n"%s"\n', "x.txt": "%s", "x.json": '[\n{"text": "%s"}\n]'}
    form["one_line.json"] = '[{"text": "%s"}]'
    content = (form.get(name, '{"text": "%s"}') % text).encode("gb18030")
    path = write(name, gzip.compress(content) if name.endswith(".gz") else content)
    try:
        said = records_of(path)[0][1]
    except UserError as error:
        said = str(error)
        assert said.startswith(path) and "\n" not in said
    assert ICONV in said and "Expecting" not in said and "escape" not in said


def damaged(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"", "x.jsonl holds no record"),
        ("x.json", b" [ ]\n", "x.json holds no record"),
        ("x.csv", b"text\n", "x.csv holds no record"),
        ("x.txt", b"\n \n", "x.txt holds no record"),
        (
            "x.csv",
            b'text,n\na,1\n"never closed,\n2 b\n',
            r"x.csv:2: after it .*line 3: a quote opens a cell that does",
        ),
        ("x.csv", b'"text,n\na,1\n', "x.csv: it cannot be read .unexpected end of data"),
        ("x.csv", b"text,text\na,b\n", "x.csv: it .*two columns have the same name"),
        (
            "x.jsonl.gz",
            damaged(gzip.compress(lines_of([{"text": str(i)} for i in range(9999)]), mtime=0)),
            "after it",
        ),
        ("x.jsonl.gz", b"not gzip at all", "x.jsonl.gz: it cannot be read"),
        ("x.parquet", damaged(parquet([{"text": "a"}])), "x.parquet: it cannot be read"),
        ("x.arrow", b"not Arrow at all", "x.arrow: it cannot be read"),
        ("x.arrow", damaged(arrow([{"text": f"row {i}"} for i in range(3000)])), r"x.arrow:\d+: after it"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(name, content, message, write):
    with pytest.raises(UserError, match=message) as caught:
        records_of(write(name, content))
    assert "\n" not in str(caught.value)


# --- what is something else


def zip_of(*names: str) -> bytes:
    with zipfile.ZipFile(memory := io.BytesIO(), "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return memory.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n"
PAGE = b"\n<!DOCTYPE html>\n<html><body>404</body></html>"
TOKENS = np.arange(0, 60000, 7, dtype=np.uint16).tobytes()
FOREIGN = [
    ("x.jsonl", LFS, "a Git LFS pointer, not the file itself; fetch that with `git lfs pull`"),
    ("x.txt", LFS, "a Git LFS pointer"),
    ("x.parquet", LFS, "a Git LFS pointer"),
    ("x.jsonl.gz", LFS, "a Git LFS pointer"),
    ("x.csv", b"/annex/objects/SHA256E-s1--aa.csv\n", "a git-annex pointer"),
    ("x.txt", PAGE, "a saved web page"),
    ("x.json", b"<HTML lang=en>", "a saved web page"),
    ("x.jsonl.gz", gzip.compress(PAGE, mtime=0), "a saved web page"),
    ("x.arrow", b'<?xml version="1.0"?>\n<!-- c -->\n<html>', "a saved web page"),
    ("x.csv", zip_of("[Content_Types].xml", "xl/workbook.xml"), "an Excel workbook; save it as CSV"),
    ("x", zip_of("[Content_Types].xml", "word/document.xml"), "a Word document"),
    ("x.txt", zip_of("archive/data.pkl", "archive/data/0"), "a file of PyTorch"),
    ("x.jsonl", zip_of("a.jsonl"), "a zip archive; unpack it"),
    ("x.jsonl", b"%PDF-1.7\n", "a PDF document"),
    ("x.jsonl.gz", gzip.compress(b"a.jsonl".ljust(257, b"\0") + b"ustar\0", mtime=0), "a tar archive"),
    ("x.bin", TOKENS, "binary, perhaps tokens of another trainer"),
    ("x.txt", TOKENS, "binary, perhaps tokens"),
    ("x.jsonl", np.ones(99, np.uint16).tobytes(), "binary, perhaps tokens"),
    ("x.bin", b"\x93NUMPY\x01\x00", "a NumPy array"),
    ("x.jsonl", parquet([{"text": "a"}]), "a Parquet file; name it"),
    ("x.txt", b'{"text": "a"}\n{"text": "b"}\n', "JSON, not plain text; name it x.jsonl"),
    ("x.md", b'\n[ {"text": "a"}]', "JSON, not plain text"),
    ("x.txt", b'{"text": "' + b"long " * 9999, "JSON, not plain text"),
    ("x.jsonl", '{"text": "a"}'.encode("utf-16"), "not UTF-8; save the file as UTF-8: iconv -f UTF-16 -t"),
    ("x.csv", "text\nä\n".encode("utf-16"), "iconv -f UTF-16"),
    ("x.jsonl", '{"text": "河"}\n'.encode("utf-16-le"), "not UTF-8; save the file as UTF-8: iconv -f UTF-16LE"),
    ("x.txt", "河边\n水车\n".encode("utf-16-be"), "iconv -f UTF-16BE"),
    ("x.jsonl", '{"text": "a"}'.encode("utf-32"), "iconv -f UTF-32 -t"),
    ("x.csv.gz", gzip.compress("text\na\n".encode("utf-16-le"), mtime=0), "iconv -f UTF-16LE"),
    ("x.sub", b"1\n00:00:01,000 --> 00:00:02,000\nHello there.\n", "no JSON; name it x.txt if it is plain text"),
    ("x.txt", b"1\r\n00:00:01,000 --> 00:00:02,000\r\nHello\r\n", "a file of subtitles, not plain text; name it x.srt"),
    ("x.txt", b"\xef\xbb\xbfWEBVTT\n\n00:01.000 --> 00:02.000\n- Hello\n", "a file of subtitles, not plain text; name it x.vtt"),
    ("x.tab", b"question\tanswer\nq\ta\n", "no JSON; name it x.txt if it is plain text, or .csv or .tsv if"),
    ("book.tex", b"\\chapter{One}\n", "no JSON; name it book.txt"),
    ("x.csv", b'{"text": "a"}\n{"text": "b"}\n', "JSON, not CSV; name it x.jsonl"),
    ("x.tsv", b'[{"text": "a"}]', "JSON, not TSV; name it x.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), FOREIGN, ids=range(len(FOREIGN)))
def test_a_file_that_is_something_else_is_named(name, content, message, write):
    path = write(name, content)
    with pytest.raises(UserError) as caught:
        records_of(path)
    assert str(caught.value).startswith(f"{path} is {message}") or message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "{}\nis how an empty object is written",
        '{\n  "text": "an object over several lines"\n}',
        "[1] A footnote, and [2] another",
        "A page begins with <html>.",
        "version 2 of the text\0",
    ],
)
def test_text_that_only_looks_so_is_text(text, write):
    assert records_of(write("x.txt", text.encode())) == [(1, {"text": text})]


OBJECTS = [{"a": i, "b": {"c": ["x\n", {}]}} for i in range(9)]
SPREAD = {
    "indent": lambda each: json.dumps(each, indent=2),
    "no indent": lambda each: json.dumps(each, indent=0),
    "first key in the first line": lambda each: json.dumps(each, indent=1).replace("{\n", "{", 1),
}


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.log", "x.jsonl.gz"])
@pytest.mark.parametrize("between", ["\n", "\n\n", ",\n", ""])
@pytest.mark.parametrize("form", SPREAD.values(), ids=SPREAD)
def test_objects_over_several_lines(form, between, name, write):
    texts = [form(each) for each in OBJECTS]
    content = between.join(texts).encode() + b"\n"
    found = records_of(write(name, gzip.compress(content) if name.endswith(".gz") else content))
    assert [record for _, record in found] == OBJECTS
    lines = [1 + "".join(text + between for text in texts[:i]).count("\n") for i in range(len(texts))]
    assert [line for line, _ in found] == lines


def test_a_broken_object_over_several_lines_costs_only_itself(write):
    texts = [json.dumps(each, indent=2) for each in OBJECTS[:3]]
    found = records_of(
        path := write("x.jsonl", "\n".join([texts[0], texts[1].replace('"b"', "b"), texts[2]]).encode())
    )
    assert [record for _, record in found[::2]] == [OBJECTS[0], OBJECTS[2]]
    (line, said) = found[1]
    assert format_source(path, line).endswith(":10") and said.startswith("not valid JSON (Expecting property")
    bad = b'{\n  "text": "caf\xe9"\n}\n{\n  "text": "\xe6\xb0\xb4\xe6\xb0\xb4"\n}\n'
    (line, said), (_, good) = records_of(write("y.json", bad))
    assert (
        line == 1 and "at byte 15 of line 2, though most of the file is" in said and good == {"text": "水水"}
    )


def test_one_object_over_several_lines_is_one_record(write):
    record = {"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "t"}]}
    assert records_of(write("x.json", json.dumps(record, indent=1).encode())) == [(1, record)]
    sets = {"version": 1, "train set": [{"text": "a"}], "valid": [{"text": "b"}], "test": []}
    assert records_of(write("x.json", json.dumps(sets, indent=1).encode())) == [
        (1, "an object over several lines that holds records under 'train set', 'valid'; write one of them as a file: "
            "jq '.[\"train set\"]' OLD > NEW")
    ]  # fmt: skip
    cut = b'{"text":\n{"text": "a"}\n{"text": "b"}\n'  # not these
    (_, said), *rest = records_of(write("x.jsonl", cut))
    assert said.startswith("not valid JSON (Expecting value: line 1") and rest == [
        (2, {"text": "a"}),
        (3, {"text": "b"}),
    ]


LISTS = [
    [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a " * n}] for n in (9, 9000, 1)
]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.data"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1,), (0,)])
def test_a_list_of_messages_in_each_line_is_a_conversation(name, order, write):
    """However long the first line is, and also if it is the only one."""
    lists = [LISTS[index] for index in order]
    found = records_of(write(name, b"\n" + b"\n".join(json.dumps(each).encode() for each in lists) + b"\n"))
    assert found == [(line, {"messages": each}) for line, each in enumerate(lists, 2)]


def test_lists_of_messages_over_several_lines_and_in_an_array(write):
    spread = "\n".join(json.dumps(each, indent=2) for each in LISTS)
    assert [record for _, record in records_of(write("x.json", spread.encode()))] == [
        {"messages": each} for each in LISTS
    ]
    shared = [[{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]] * 2
    for name in ("y.json", "y.jsonl"):
        found = records_of(write(name, json.dumps(shared, indent=1).encode()))
        assert [record for _, record in found] == [{"messages": each} for each in shared]
    documents = [{"role": "teacher", "text": "a"}, {"from": "a book", "text": "b"}]  # these are records
    assert [record for _, record in records_of(write("z.json", json.dumps(documents).encode()))] == documents


def test_a_list_in_each_line_is_no_array(write):
    found = records_of(write("x.jsonl", b'[{"role": "user"}]\n[{"role": "user"}]\n'))
    assert found == [(line, "a JSON list, not an object; write {...}") for line in (1, 2)]


@pytest.mark.parametrize(
    ("text", "encoding", "iconv"),
    [
        ("café crème", "cp1252", "WINDOWS-1252"),
        ("Ein Gruß aus Köln", "latin-1", "WINDOWS-1252"),
        ("中文，小说。", "gb18030", "GB18030"),
        ("你说", "gbk", "GB18030"),
        ("привет, как дела", "cp1251", "WINDOWS-1251"),
        ("привет, как дела", "koi8-r", "KOI8-R"),
        ("강물은 천천히 흐른다", "euc-kr", "EUC-KR"),
        ("湖の水は静かです", "euc-jp", "EUC-JP"),
        ("湖の水は静かです", "shift-jis", "CP932"),
        ("河水慢慢流過老橋，孩子們在玩。", "big5", "BIG5"),
        ("Młyn stoi nad rzeką, a woda płynie", "cp1250", "WINDOWS-1250"),
        ("แม่น้ำไหลช้าใต้สะพาน", "tis-620", "TIS-620"),
    ],
)
def test_the_advice_for_another_encoding_fits_it(text, encoding, iconv, write):
    for name, form in (("x.jsonl", '{"text": "%s"}'), ("x.txt", "%s\n"), ("x.json", '[{"text": "%s"}]')):
        try:
            said = records_of(write(name, (form % text).encode(encoding)))[0][1]
        except UserError as error:
            said = str(error)
        assert f"iconv -f {iconv} -t UTF-8" in said


def test_cells_of_other_delimiters(write):
    found = records_of(write("x.csv", b"question;answer\r\nSay hi;Hi, friend\r\nno;a;b\r\n"))
    assert found[0] == (2, {"question": "Say hi", "answer": "Hi, friend"})
    assert "3 cells, but 2 columns; put text with semicolons into quotes" in found[1][1]
    assert records_of(write("x.tsv", b"text,x\tn\na\t1\n")) == [(2, {"text,x": "a", "n": "1"})]


def test_another_kind_of_file_is_one_entry(write, monkeypatch, tmp_path):
    def read_pairs(file):
        for number, raw in enumerate(file, 1):
            yield number, {"text": raw.decode().strip()}

    path = write("d/a.lines", b"one\ntwo\n")
    monkeypatch.setitem(files.READERS, ".lines", read_pairs)
    assert expand_paths(f"{tmp_path}/d") == [path]
    assert records_of(path) == [(1, {"text": "one"}), (2, {"text": "two"})]
