"""Bad data, met as a user meets them: through a stage script, which ends in one line that names file and
line."""

import functools
import gzip
import io
import json
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from common.command_line import STOP_SIGNALS
from dataset.lm_dataset import PretrainDataset, SFTDataset
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT, write_jsonl
from tests.stage_process import StageProcess, run
from trainer import train_full_sft, train_pretrain
from trainer.devices.errors import training_errors

BOM = b"\xef\xbb\xbf"
TEXT, USER, BOT = (
    {"text": "the river"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
)
CHAT = {"conversations": [USER, BOT]}
SYSTEM = {"role": "system", "content": "s"}
GOOD = {"pretrain": TEXT, "sft": CHAT}
STAGES = {"pretrain": train_pretrain, "sft": train_full_sft}
read_once = functools.cache(AutoTokenizer.from_pretrained)


def line(record) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def parquet(columns: dict) -> bytes:
    pq.write_table(pa.table(columns), memory := io.BytesIO())
    return memory.getvalue()


def chat(*messages, **beside) -> dict:
    return {"conversations": list(messages), **beside}


class Case(NamedTuple):
    """What is wrong, in which kind of data, and what the line says.

    content: of the file; a dict is a record, which stands on line 2; a function prepares the path.
    says: from where the line begins, behind FILE:2 for a record, behind FILE for text that begins with a
    colon; otherwise anywhere in the line, with {data} and {tmp} for the path and its folder.
    """

    kind: str
    content: bytes | dict | Callable[[Path], None]
    says: str
    name: str = "x.jsonl"
    tokenizer: str = ""


def nothing(path: Path) -> None:
    pass


def folder_of(*names: str) -> Callable[[Path], None]:
    def prepare(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).write_text("not data")

    return prepare


PRE, SFT = "pretrain", "sft"
GZ = gzip.compress(b"".join(line({"text": f"text {i * 7919}"}) for i in range(3000)), mtime=0)
CUT_GZ = GZ[:-20]
PARQUET = parquet({"text": [f"text {i}" for i in range(100)]})
MALFORMED = b'{"text": "c",}'
SURROUNDED = BOM + b'{"text": "a"}\r\n\r\n  \r\n\t\r\n{"text": "b"}\r\n\n%b\r\n{"text": "d"}\r\n' % MALFORMED
LONG_QUESTION = chat({"role": "user", "content": "the river " * 900}, BOT)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n"
BROKEN_CALL = {**BOT, "tool_calls": "{oops"}


def python_says(text: bytes) -> str:
    """Why a text is no JSON, in this Python's words."""
    with pytest.raises(json.JSONDecodeError) as error:
        json.loads(text)
    return error.value.msg


CASES = {
    "missing file": Case(PRE, nothing, ": no such file, or a folder without data; check the path"),
    "empty folder": Case(PRE, folder_of(), ": no such file, or a folder without data; check", "x"),
    "GB18030": Case(
        PRE, '{"text": "中文"}\n'.encode("gb18030"), ":1: not UTF-8; save the file as UTF-8: iconv"
    ),
    "array in one line": Case(
        PRE, json.dumps([TEXT] * 17 + [{}]).encode(), "[17]: no 'text' (its keys: )", "x.json"
    ),
    "malformed behind odd lines": Case(PRE, SURROUNDED, f":7: not valid JSON ({python_says(MALFORMED)}"),
    "plain text": Case(
        PRE, b"Call me Ishmael.\n", "{data} is no JSON; name it x.txt if it is plain text", "x.rst"
    ),
    "an LFS pointer": Case(PRE, LFS, "{data} is a Git LFS pointer, not the file itself; fetch", "x.txt"),
    "a web page": Case(PRE, b"<!doctype html><html>", "{data} is a saved web page (HTML)", "x.txt"),
    "JSON Lines as text": Case(
        PRE, line(TEXT) * 3, "{data} is JSON, not plain text; name it x.jsonl", "x.txt"
    ),
    "a folder of pictures": Case(
        PRE, folder_of("a.png", "b.png"), ": a folder without data; it contains 2 .png", "x"
    ),
    "a blank answer": Case(SFT, {"instruction": "q", "output": ""}, "'output' is blank; write the text"),
    "conversation that must not be trained": Case(
        PRE,
        chat(USER, {"role": "assistant", "content": "no", "train": False}),
        "a turn is marked as not trained, but pretraining trains every turn",
    ),
    "only empty texts": Case(
        PRE, b'{"text": ""}\n' * 3, "{data}: none of the 3 records can be used (3 records, 0 samples, empty 3"
    ),
    "tool_calls that do not parse": Case(
        SFT, chat(USER, BROKEN_CALL), "'tool_calls' of message 2 is not JSON"
    ),
    "all samples dropped": Case(
        SFT, line(LONG_QUESTION) * 2, "dropped for lack of a target 2 (100.0%)); raise --max_s"
    ),
    "cut .gz": Case(PRE, CUT_GZ, "after it the file cannot be read (Compressed file ended", "x.jsonl.gz"),
    "truncated Parquet": Case(
        PRE, PARQUET[:-30], ": it cannot be read (Parquet magic bytes not found", "x.parquet"
    ),
    "CSV without a known column": Case(PRE, b"body\na\n", ":2: no 'text' (its keys: 'body')", "x.csv"),
    "text for SFT": Case(
        SFT, b"Call me Ishmael.", "{data} is plain text, which only pretraining can use", "x.txt"
    ),
    "no tokenizer": Case(
        PRE, line(TEXT), "--tokenizer_path {tmp}/bad holds no tokenizer that", tokenizer="bad"
    ),
}


def expected(case: Case, path: Path) -> str:
    """What the error line holds."""
    if isinstance(case.content, dict):
        return f"error: {path}:2: {case.says}"
    return (
        f"error: {path}{case.says}" if case.says[0] in ":[" else case.says.format(data=path, tmp=path.parent)
    )


def prepare(case: Case, path: Path) -> bytes | None:
    """Write the case's file; returns what it holds."""
    if callable(case.content):
        return case.content(path)
    content = line(GOOD[case.kind]) + line(case.content) if isinstance(case.content, dict) else case.content
    path.write_bytes(content)
    return content


@pytest.fixture
def stage(tmp_path, monkeypatch, capfd):
    """stage(kind, data_path, *options) runs a stage script up to the mistake, and gives its error line and
    stdout."""

    def run(kind: str, data_path: str, *options) -> tuple[str, str]:
        folders = [f"--{name}={tmp_path / name}" for name in ("save_dir", "checkpoint_dir", "cache_dir")]
        shape = ["--hidden_size", "32", "--num_hidden_layers", "1", "--from_weight", "none"]
        monkeypatch.setattr(
            sys, "argv", [kind, "--data_path", data_path, *folders, *shape, *map(str, options)]
        )
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", read_once)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended, training_errors():
            STAGES[kind].main()
        out, err = capfd.readouterr()
        assert ended.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
        assert "Traceback" not in out + err
        left = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
        assert ".pth" not in left and not list(tmp_path.rglob("*metrics*"))
        assert not list((tmp_path / "cache_dir").rglob("*.tmp*"))
        return err, out

    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}  # a stage leaves its own behind
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_data_end_in_one_line(case, stage, tmp_path):
    path = tmp_path / case.name
    content = prepare(case, path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("[]")
    err, _ = stage(
        case.kind, str(path), *([f"--tokenizer_path={tmp_path / case.tokenizer}"] if case.tokenizer else [])
    )
    assert expected(case, path) in err
    assert not list(tmp_path.glob("cache_dir/*/meta.json"))
    assert content is None or path.read_bytes() == content  # nobody touches the user's data


def test_held_out_data_are_checked_like_the_others(stage, tmp_path):
    good, bad = (
        write_jsonl(tmp_path / "good.jsonl", [TEXT] * 3),
        write_jsonl(tmp_path / "bad.jsonl", [TEXT, {}]),
    )
    err, _ = stage("pretrain", str(good), "--eval_data_path", bad)
    assert err.startswith(f"error: {bad}:2: no 'text'")


def test_stop_names_the_first_bad_record(stage, tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", [TEXT, {"text": 1}, TEXT])
    two = write_jsonl(tmp_path / "two.jsonl", [TEXT, {"text": None}, *[TEXT] * 50, {"text": 1}])
    assert f"{two}:2: 'text' is null instead of text" in stage("pretrain", str(two))[0]
    assert "(with --on_bad_data skip" in stage("pretrain", str(two))[0]
    err, _ = stage("pretrain", f"{one},{two}")
    assert err.startswith(f"error: {one}:2: 'text' is 1 instead") and "(with --on_bad_data skip" in err


def test_skip_lists_each_bad_record_and_stops_above_the_share(stage, tmp_path):
    records = [TEXT if i % 4 else {"text": i} for i in range(60)]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    err, out = stage("pretrain", str(path), "--on_bad_data", "skip", "--max_bad_share", 0.2)
    assert err.startswith(f"error: {path}:1: 'text' is 0 instead of text")
    assert "15 of 60 records (25.0%) are bad, more than --max_bad_share 0.2 allows" in err
    listed = Path(err.split("all of them are listed in ")[1].split(";")[0])
    numbers = [i + 1 for i in range(0, 60, 4)]
    assert [entry.split(": ")[0] for entry in listed.read_text().splitlines()] == [
        f"{path}:{n}" for n in numbers
    ]
    assert "bad 15 (25.0%)" in out


# --- data that look odd and are fine


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "model")


@pytest.fixture
def texts(tokenizer, tmp_path):
    """texts(content) is what the samples of a pretraining file spell."""

    def read(content: bytes, name: str = "x.jsonl", max_length: int = 64) -> list[str]:
        path = tmp_path / name
        path.write_bytes(content)
        ds = PretrainDataset(str(path), tokenizer, max_length, cache_dir=tmp_path / "cache")
        return [tokenizer.decode(ds[i][0]["input_ids"].tolist()[1:-1]) for i in range(len(ds))]

    return read


FINE = {
    "BOM": BOM + b'{"text": "one"}\n{"text": "two"}\n',
    "BOM in the middle": b'{"text": "one"}\n' + BOM + b'{"text": "two"}\n',
    "CRLF": b'{"text": "one"}\r\n{"text": "two"}\r\n',
    "blank lines": b'\n\n{"text": "one"}\n \t\n\r\n{"text": "two"}\n\n\n',
    "no newline at the end": b'{"text": "one"}\n{"text": "two"}',
    "spaces around": b'   {"text" : "one"}  \n\t{"text":"two"} ',
    "other keys": b'{"id": 1, "text": "one", "meta": {"a": [null]}}\n{"text": "two", "url": null}\n',
    "an empty text": b'{"text": "one"}\n{"text": ""}\n{"text": "two"}\n',
    "blank texts": b'{"text": "one"}\n{"text": " \\n"}\n{"text": "\\u200b"}\n{"text": "two"}\n',
}


@pytest.mark.parametrize("content", FINE.values(), ids=FINE)
def test_odd_but_fine(content, texts):
    assert texts(content) == ["one", "two"]


@pytest.mark.parametrize(
    "text", ["a\x00b", "\x00", "a\u2028b\u2029c\x85d", "\ufeffa", "🙂\U0010ffff", " \n\t a ", "\\ud800"]
)
def test_odd_characters_are_kept(text, texts):
    assert texts(json.dumps({"text": text}).encode()) == [text]
    assert texts(json.dumps({"text": text}, ensure_ascii=False).encode()) == [text]


def test_the_same_records_in_every_kind_of_file(texts):
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    assert texts(gzip.compress(lines), "x.jsonl.gz") == ["one", "two"]
    assert texts(lines, "x.json") == ["one", "two"]
    assert texts(b"[" + lines.replace(b"\n", b",", 1) + b"]", "y.json") == ["one", "two"]
    assert texts(parquet({"text": ["one", "two"], "other": [None, 1]}), "x.parquet") == ["one", "two"]
    assert texts(b"id,text\n1,one\n2,two\n", "x.csv") == ["one", "two"]
    assert texts(b"one\n\ntwo\n", "x.txt") == ["one\n\ntwo"]


def test_spellings_may_be_mixed_over_records(tokenizer, tmp_path):
    records = [CHAT, {"messages": [USER, BOT]}]
    records += [chat({"from": "human", "value": "q"}, {"from": "gpt", "value": "a"})]
    records += [chat(USER, {"from": "gpt", "value": "a"}), {"instruction": "q", "output": "a"}]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    ds = SFTDataset(str(path), tokenizer, 64, cache_dir=tmp_path / "cache")
    assert len(ds) == 5 and len({ds[i][0]["input_ids"].tobytes() for i in range(5)}) == 1


def test_a_line_of_50_mb(texts):
    """The text of the record is short: text of that size works as well, but a tokenizer needs its time for
    it."""
    content = b'{"text": "one", "html": "' + b"x" * 50_000_000 + b'"}\n{"text": "two"}\n'
    begin = time.monotonic()
    tracemalloc.start()
    assert texts(content) == ["one", "two"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250e6 and time.monotonic() - begin < 20


def test_a_document_of_200_000_tokens(tokenizer, tmp_path):
    text = " ".join(f"the {word} 河流" for word in range(30_000))
    tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert tokens > 200_000
    path = write_jsonl(tmp_path / "x.jsonl", [TEXT, {"text": text}])
    ds = PretrainDataset(str(path), tokenizer, 512, cache_dir=tmp_path / "cache")
    (long,) = (ds.cache.sources[:, 1] == 2).nonzero()
    assert sum(ds[i][0]["loss_weight"].sum() for i in long) == tokens + 1  # the end of the text is one more
    assert ds.cache.target_bytes[long].sum() == len(text.encode())


# --- the same in processes of their own


def start_script(kind: str, tmp_path: Path, data_path, ranks: int = 1) -> StageProcess:
    folders = [f"--{name}={tmp_path / name}" for name in ("save_dir", "checkpoint_dir", "cache_dir")]
    script = ROOT / "trainer" / {"pretrain": "train_pretrain.py", "sft": "train_full_sft.py"}[kind]
    return run(
        str(script), ["--data_path", data_path, "--from_weight", "none", *folders], ranks=ranks, status=2
    )


@pytest.mark.parametrize(
    "name", ["missing file", "malformed behind odd lines", "tool_calls that do not parse"]
)
def test_the_real_script_ends_the_same_way(name, stage, tmp_path):
    case, path = CASES[name], tmp_path / CASES[name].name
    prepare(case, path)
    done = start_script(case.kind, tmp_path, path)
    assert expected(case, path) in done.err
    assert done.err == stage(case.kind, str(path))[0]


def test_all_ranks_end_soon(tmp_path):
    path, begin = write_jsonl(tmp_path / "x.jsonl", [TEXT, TEXT, {"text": 7}, {}]), time.monotonic()
    done = start_script("pretrain", tmp_path, path, ranks=2)
    assert time.monotonic() - begin < 60
    message = f"error: {path}:3: 'text' is 7 instead of text"
    assert any(entry.startswith(message) for entry in done.error_lines)
    assert not list(tmp_path.rglob("*.pth")) and not list(tmp_path.rglob("*.tmp*"))
