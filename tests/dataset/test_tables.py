"""Tables: what of Parquet, Arrow and CSV files becomes a record, and the errors of those that cannot be
read."""

import csv
import gzip
import io
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from dataset import files
from dataset.files import expand_paths, iter_blocks
from dataset.json_values import BadRecord
from dataset.records import to_chat
from tests.dataset.conftest import records_of

CHAT = [{"role": "user", "content": "河?"}, {"role": "assistant", "content": 'the "river",\nbrown'}]


def write_arrow(path, table, form="stream", **options):
    new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with new(str(path), table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=700)
    return str(path)


def write_parquet(path, table):
    pq.write_table(table, path, row_group_size=700)
    return str(path)


@pytest.mark.parametrize("form", ["stream", "file", "parquet"])
def test_rows_are_records(tmp_path, form):
    table = pa.table({"text": [f"row {i}" for i in range(3000)], "url": ["u"] * 3000})
    if form == "parquet":
        path = write_parquet(tmp_path / "x.parquet", table)
    else:
        path = write_arrow(tmp_path / "x.arrow", table, form)
    assert records_of(path) == [(i + 1, {"text": f"row {i}", "url": "u"}) for i in range(3000)]
    with open(path, "r+b") as file:
        content = file.read()
        file.truncate(len(content) // 2)
    with pytest.raises(UserError, match=r"x\.\w+:\d+: unreadable (Arrow|Parquet) from this row on"):
        records_of(path)


def test_conversations_as_columns(tmp_path):
    path = write_arrow(tmp_path / "x.arrow", pa.table({"messages": [CHAT], "id": [1]}))
    assert records_of(path) == [(1, {"messages": CHAT, "id": 1})]
    (tmp_path / "z.arrow").write_bytes(b"not Arrow at all")
    with pytest.raises(UserError, match=r"z.arrow:1: unreadable Arrow from this row on"):
        records_of(str(tmp_path / "z.arrow"))


def test_a_time_that_python_has_not(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", pa.table({"when": pa.array([2**62], pa.timestamp("us"))}))
    with pytest.raises(UserError, match=r"x.parquet:1: unreadable Parquet from this row on"):
        records_of(path)


def save_to_disk(folder, texts, shards=2):
    """A folder as `datasets.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        write_arrow(folder / name, pa.table({"text": texts[i::shards]}))
    saved = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(saved))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return [str(folder / name) for name in names]


def test_folders_of_saved_datasets(tmp_path):
    shards = save_to_disk(tmp_path / "one", ["a", "b", "c"])
    write_arrow(tmp_path / "one" / "cache-0123.arrow", pa.table({"text": ["stale"]}))
    assert expand_paths(tmp_path / "one") == expand_paths(tmp_path) == shards
    assert [record["text"] for path in shards for _, record in records_of(path)] == ["a", "c", "b"]
    state = json.loads((tmp_path / "one" / "state.json").read_text()) | {
        "_indices_data_files": [{"filename": "i.arrow"}]
    }
    (tmp_path / "one" / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"one holds a selection of rows .*flatten_indices\(\)\.save_to_disk"):
        expand_paths(tmp_path)
    several = tmp_path / "several"
    train, test = save_to_disk(several / "train", ["a"], 1), save_to_disk(several / "test", ["b"], 1)
    (several / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert expand_paths(several) == train and expand_paths(several / "test") == test
    shutil.rmtree(several / "train")
    with pytest.raises(
        UserError, match=r"several/train cannot be read \(No such file or directory\); check --data_path"
    ):
        expand_paths(several)


def test_csv_reads_rows(write, monkeypatch):
    content = (
        '\ufefftext,id\r\nplain,1\r\n"quoted, ""twice""\nover lines",2\r\n\r\n,3\r\n  spaces ,4'.encode()
    )
    expected = [(2, "plain"), (3, 'quoted, "twice"\nover lines'), (6, ""), (7, "  spaces ")]
    for block_bytes in (1, 1 << 20):
        monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes)
        for name, data in (("X.CSV", content), ("x.csv.gz", gzip.compress(content))):
            path = write(name, data)
            assert [(line, record["text"]) for line, record in records_of(path)] == expected
            assert sum(block.size for block in iter_blocks([path])) == len(data)


def test_conversations_as_json_in_a_table(tmp_path, write):
    csv_file = tmp_path / "x.csv"
    with open(csv_file, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [["messages", "system"], [json.dumps(CHAT), ""], [str(CHAT), ""], ["hi", ""]]
        )
    (_, good), (_, python), (_, text) = records_of(str(csv_file))
    assert to_chat(good).messages == CHAT
    assert "'messages' does not parse as JSON" in str(python) and "write json.dumps" in str(python)
    with pytest.raises(BadRecord, match="'messages' is text instead of a list"):
        to_chat(text)
    alpaca = write("y.csv", b'instruction,input,output,history\nq,i,a,"[[""q0"", ""a0""]]"\nq,,a,\n')
    turns = [[message["content"] for message in to_chat(record).messages] for _, record in records_of(alpaca)]
    assert turns == [["q0", "a0", "q\ni", "a"], ["q", "a"]]
    arrow = write_arrow(tmp_path / "x.arrow", pa.table({"conversations": [json.dumps(CHAT)]}))
    assert to_chat(records_of(arrow)[0][1]).messages == CHAT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"a;b\nx;y\n",
            r"x.csv:1: no known column in the header \('a;b'\); name one of them text, conversations",
        ),
        (b"text\n", "x.csv holds no record"),
        (b'text,n\na,1\n"never closed,2\nb,3\n', "x.csv:3: a quote that this row opens is never closed"),
        ("列名,n\n中文小说".encode("gb18030"), "x.csv:1: not UTF-8 .byte 0xc1"),
        (b'"text\na', "x.csv:1: a quote that this row opens is never closed"),
    ],
)
def test_csv_that_cannot_be_read(write, content, message):
    with pytest.raises(UserError, match=message):
        records_of(write("x.csv", content))


def test_bad_rows_cost_only_themselves(write):
    rows = [b"text,n", b"a,1", b"b,1,2", b"c", b'"d"x,2', b"e,4"]
    found = dict(records_of(write("x.csv", b"\n".join(rows))))
    assert {line: record["text"] for line, record in found.items() if isinstance(record, dict)} == {
        2: "a",
        6: "e",
    }
    assert "3 cells, but the header names 2 columns" in str(found[3])
    assert "1 cells, but the header names 2 columns" in str(found[4])
    assert "not valid CSV (',' expected after '\"')" in str(found[5])
    with pytest.raises(UserError, match=r"x.csv:6: not UTF-8 .byte 0xb0"):
        records_of(write("x.csv", b"\n".join([*rows[:5], b"\xb0\xa1,3", b"e,4"])))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=20), min_size=1, max_size=9
    )
)
def test_what_csv_writes_is_read(write, texts):
    memory = io.StringIO(newline="")
    csv.writer(memory).writerows([["id", "text"], *enumerate(texts)])
    path = write("x.csv", memory.getvalue().encode())
    assert [record["text"] for _, record in records_of(path)] == texts
