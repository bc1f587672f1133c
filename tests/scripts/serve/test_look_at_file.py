"""What looks at an uploaded file is another process, whatever the file does to it: one line for the user, the server
goes on, its memory stays what it was."""

import gzip
import io
import json
import lzma
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from scripts.serve import limited, look_at_file, uploads
from scripts.serve.limited import run_limited
from scripts.serve.look_at_file import EXPORT_BYTES
from scripts.serve.protocol import ApiError
from scripts.serve.uploads import LOOK, look_at
from tests.conftest import ROOT
from tests.dataset.test_chat_exports import TELEGRAM
from tests.dataset.test_documents import partly_scanned, word_document

MEGABYTE = 1 << 20


def table(array: pa.Array) -> pa.Table:
    return pa.table({"text": array})


def arrow_of_nulls(path: Path) -> None:
    """A row that is a list of millions of nulls, which need no bytes."""
    nulls = pa.ListArray.from_arrays(pa.array([0, 30_000_000], pa.int32()), pa.nulls(30_000_000))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table(nulls).schema) as writer:
        writer.write_table(table(nulls))


def arrow_of_empty_objects(path: Path) -> None:
    """The same of objects without fields."""
    count = 20_000_000
    objects = pa.StructArray.from_buffers(pa.struct([]), count, [None])
    listed = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), objects)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table(listed).schema) as writer:
        writer.write_table(table(listed))


def parquet_of_one_word(path: Path) -> None:
    """A long string a thousand times, of which the file holds one."""
    word = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), pa.array(["x" * MEGABYTE]))
    parquet.write_table(table(word), path, compression="zstd", store_schema=False)


def arrow_of_one_letter(path: Path) -> None:
    """Texts of one letter, compressed together."""
    batch = pa.record_batch({"text": pa.array(["x" * MEGABYTE] * 200)})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema, options=options) as writer:
        writer.write_batch(batch)


def refusal(path: Path) -> ApiError:
    with pytest.raises(ApiError) as caught:
        look_at(path)
    assert len(str(caught.value).splitlines()) == 1 and path.name in str(caught.value)
    assert caught.value.status == 422 and list(path.parent.glob(".part*")) == []
    return caught.value


@pytest.mark.parametrize("make", [parquet_of_one_word, arrow_of_one_letter])
def test_a_small_table_that_becomes_gigabytes_is_one_line_and_its_memory_is_not_the_servers(
    tmp_path, make, monkeypatch
):
    monkeypatch.setattr(uploads, "LOOK_MEMORY", 400 * MEGABYTE)
    path = tmp_path / ("a.parquet" if make is parquet_of_one_word else "a.arrow")
    make(path)
    assert path.stat().st_size < MEGABYTE
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refusal(path).code == "too_much"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss == before
    if make is arrow_of_one_letter:
        monkeypatch.undo()
        assert look_at(path)["kind"] == "text"  # it is no damaged file


@pytest.mark.parametrize("make", [arrow_of_nulls, arrow_of_empty_objects])
def test_a_small_table_that_takes_minutes_is_one_line(tmp_path, make, monkeypatch):
    monkeypatch.setattr(uploads, "LOOK_SECONDS", 1)
    path = tmp_path / "a.arrow"
    make(path)
    assert path.stat().st_size < 2000
    assert refusal(path).values == {"file": "a.arrow", "seconds": 1, "most": uploads.LOOK_MEMORY}


def files() -> dict[str, bytes]:
    """One of each kind that is taken."""
    lines = b'{"text": "a river"}\n' * 3
    parquet_file, arrow_file, archive = io.BytesIO(), io.BytesIO(), io.BytesIO()
    texts = table(pa.array(["a river"] * 3))
    parquet.write_table(texts, parquet_file)
    with pa.ipc.new_file(arrow_file, texts.schema) as writer:
        writer.write_table(texts)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("word/document.xml", "a river")
    found = {"a.txt": b"a river\n", "a.jsonl": lines, "a.json": b'[{"text": "a river"}]'}
    found |= {"a.csv": b"text\na river\n", "a.jsonl.gz": gzip.compress(lines), "b.txt": lzma.compress(lines)}
    return found | {
        "a.parquet": parquet_file.getvalue(),
        "a.arrow": arrow_file.getvalue(),
        "c.txt": archive.getvalue(),
    }


@pytest.mark.parametrize("name", files())
def test_each_kind_of_file_is_looked_at_within_the_limits(tmp_path, name, monkeypatch):
    (tmp_path / name).write_bytes(files()[name])
    if name in ("b.txt", "c.txt"):
        assert refusal(tmp_path / name).code == "other"  # records in a text, a Word document
    else:
        assert look_at(tmp_path / name)["first"] == ["a river"] * (
            1 if name in ("a.txt", "a.json", "a.csv") else 3
        )
    monkeypatch.setattr(uploads, "LOOK_SECONDS", 0)
    assert refusal(tmp_path / name).code == "too_much"


def test_where_the_system_limits_no_memory_it_is_watched(tmp_path, monkeypatch):
    hog = tmp_path / "hog.py"
    hog.write_text("import time\nhog = b'x' * (300 << 20)\ntime.sleep(60)\n")
    monkeypatch.setattr(limited, "IS_LIMITED", False)
    assert run_limited(hog, memory=200 * MEGABYTE, seconds=60) is None
    hog.write_text("print('here')")
    assert run_limited(hog, memory=200 * MEGABYTE, seconds=60) == b"here\n"


def test_a_program_that_fails_or_says_no_json_is_a_line_too(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a river")
    for program in ("import os; os.abort()", "raise MemoryError", "print('[')", "print('x' * 200_000)", ""):
        (tmp_path / "program.py").write_text(program)
        monkeypatch.setattr(uploads, "LOOK", tmp_path / "program.py")
        assert refusal(tmp_path / "a.txt").code == "too_much"


def test_it_knows_no_key_and_starts_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIMIND_API_KEY", "secret")
    (tmp_path / "program.py").write_text("import os; print('MINIMIND_API_KEY' in os.environ)")
    assert run_limited(tmp_path / "program.py", memory=1 << 30, seconds=60) == b"False\n"
    program = f"import runpy, sys; runpy.run_path({str(LOOK)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == b"False\n"


def test_what_it_says_is_short_whatever_the_file_holds(tmp_path):
    """The server keeps it, and sends it with each look of the page."""
    for name, content in {
        "keys.jsonl": json.dumps({"k" * MEGABYTE: 1}),
        "text.jsonl": json.dumps({"text": "x" * MEGABYTE}),
        "bad.jsonl": json.dumps({"text": "x"}) + "\n" + json.dumps({"messages": "x" * MEGABYTE}),
    }.items():
        (tmp_path / name).write_text(content)
        assert len(json.dumps(look_at_file.look_at(tmp_path / name, name, tmp_path))) < 2000


def test_a_document_says_how_long_its_text_is_and_how_many_pages_have_none(tmp_path):
    """The bytes of an archive are not those of its text, of which the page shows the shares."""
    (tmp_path / "a.pdf").write_bytes(partly_scanned("A river ran.", None, "It was long."))
    found = look_at(tmp_path / "a.pdf")
    assert found["pages"] == ["2", 3] and found["text_bytes"] == len("A river ran.\nIt was long.")
    (tmp_path / "a.docx").write_bytes(word_document())
    found = look_at(tmp_path / "a.docx")
    assert "pages" not in found and 0 < found["text_bytes"] < (tmp_path / "a.docx").stat().st_size
    (tmp_path / "a.txt").write_text("1\n00:00:01,000 --> 00:00:02,000\nHello\n")
    assert refusal(tmp_path / "a.txt").code == "subtitles"


def test_an_exported_chat_shows_its_speakers_and_how_it_would_be_read(tmp_path):
    said = [("Anna", "Are you there?"), ("Ben", "Yes. " * 100), ("Anna", "Good."), ("Cleo", "hi")]
    lines = [f"1/2/21, 9:0{minute} AM - {who}: {text}\n" for minute, (who, text) in enumerate(said)]
    (tmp_path / "chat.txt").write_text("".join(lines))
    found = look_at(tmp_path / "chat.txt")
    assert (found["kind"], found["records"]) == ("text", 1)  # as which it can be read, too
    export = found["export"]
    assert (export["form"], export["assistant"], export["messages"]) == ("whatsapp", None, 4)
    counts = {each["name"]: (each["messages"], each["conversations"]) for each in export["speakers"]}
    assert counts == {"Anna": (2, 1), "Ben": (1, 1), "Cleo": (1, 1)}
    ben = next(each for each in export["speakers"] if each["name"] == "Ben")
    assert ben["turns"] == [["user", "Anna: Are you there?"], ["assistant", ("Yes. " * 100)[:160]]]
    with open(tmp_path / "log.txt", "wb") as file:  # the log of a machine
        file.write("".join(lines).encode())
        file.truncate(EXPORT_BYTES[".txt"] + 1)
    assert "export" not in look_at_file.look_at(tmp_path / "log.txt", "log.txt", tmp_path)
    (tmp_path / "result.json").write_text(json.dumps(TELEGRAM))
    found = look_at(tmp_path / "result.json")
    assert found["kind"] is None and found["export"]["form"] == "telegram"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "diary.txt",
            "12/31/20, 9:15 PM - Anna: hi\nThen we went home.\n",
        ),  # one line alone is like a message
        ("log.txt", "A text.\n12/31/20, 9:15 PM - Anna: hi\n12/31/20, 9:16 PM - Ben: ho\n"),
        ("alone.txt", "12/31/20, 9:15 PM - Anna: hi\n12/31/20, 9:16 PM - Anna: ho\n"),  # nobody is answered
        ("a.json", '[{"text": "\\"mapping\\": {", "author": {"name": "x"}}]'),
        ("b.json", '[{"mapping": {}, "author": {}, "text": "x"}]'),  # it is not what its beginning looks like
    ],
)
def test_what_is_no_exported_chat_is_read_as_before(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    found = look_at(tmp_path / name)
    assert found["kind"] == "text" and "export" not in found
