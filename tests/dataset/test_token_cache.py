"""The cache on disk: found again, built anew when anything changes, whole or not there, whoever builds it;
which data were read, and which not; bad records."""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.settings import ROOT
from dataset import token_cache
from dataset.held_out import Split
from dataset.lm_dataset import SFTDataset
from dataset.report import describe_records
from dataset.token_cache import load_tokenizer
from tests.dataset.conftest import build, contents

TEXTS = [{"text": f"Document {i}: the river 河流 {'is long ' * (i % 50)}"} for i in range(400)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"q{i}"},
            {"role": "assistant", "content": "a " * (i % 30) + "河"},
        ]
    }
    for i in range(60)
]

# What a process of its own starts with: a tokenizer that needs no torch, whose import takes longer than the
# tests, and a build that rests after each record.
PRELUDE = f"""
import os, sys, time
from types import SimpleNamespace
from tokenizers import Tokenizer
from common.command_line import one_line_errors
from dataset import token_cache
from dataset.token_cache import CacheOptions, build_token_cache

tokenizer = SimpleNamespace(
    backend_tokenizer=Tokenizer.from_file({str(ROOT / "model" / "tokenizer.json")!r}),
    chat_template=None, special_tokens_map={{}}, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
path, cache_dir, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])

def read_slowly(*args, read=token_cache.read_records):
    for record in read(*args):
        time.sleep(seconds)
        yield record

token_cache.read_records = read_slowly
with one_line_errors():
    build_token_cache(path, tokenizer, CacheOptions("pretrain", 64, cache_dir))
"""


def start(path: str, cache_dir: Path, seconds: float = 0.0, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", PRELUDE, path, str(cache_dir), str(seconds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


# --- what is in it, and when it is built


def test_what_a_cache_holds(write, tokenizer, cache_dir):
    path = write("a.jsonl", TEXTS)
    cache = build("pretrain", path, tokenizer, cache_dir)
    assert cache.tokens.dtype == np.uint16 and isinstance(cache.tokens, np.memmap)
    assert cache.offsets[0] == 0 and cache.offsets[-1] == len(cache.tokens) == len(cache.loss_mask)
    assert cache.target_bytes.sum() == sum(len(record["text"].encode()) for record in TEXTS)
    report, lengths = cache.report, np.diff(cache.offsets)
    assert (report["records"], report["samples"], len(lengths)) == (400, cache.num_samples, cache.num_samples)
    assert report["tokens"] == len(cache.tokens)
    assert report["targets"] == cache.loss_mask.sum() == report["tokens"] - report["samples"]
    assert report["percentiles"]["100"] == lengths.max() == 64
    assert cache.source(cache.num_samples - 1) == f"{path}:400"
    assert contents(pickle.loads(pickle.dumps(cache))) == contents(cache)


def test_a_cache_is_found_again(write, tokenizer, cache_dir, capsys, monkeypatch):
    path = write("a.jsonl", TEXTS)
    first = build("pretrain", path, tokenizer, cache_dir)
    made = (first.path / "tokens.bin").stat()
    assert f"tokenised {path}: 400 records" in capsys.readouterr().out
    monkeypatch.chdir(Path(path).parent)
    again = build("pretrain", "a.jsonl", tokenizer, cache_dir, on_bad_data="skip")
    assert (again.path / "tokens.bin").stat() == made and capsys.readouterr().out == ""
    assert again.source(0) == "a.jsonl:1"  # as it is called now


def test_whatever_decides_the_samples_makes_another_cache(
    write, tokenizer, other_tokenizer, cache_dir, tmp_path, monkeypatch
):
    path, other = write("a.jsonl", TEXTS[:9]), write("b.jsonl", TEXTS[:9])
    found = [build("pretrain", path, tokenizer, cache_dir)]
    found.append(build("pretrain", path, tokenizer, cache_dir, 65))
    found.append(build("pretrain", path, tokenizer, cache_dir, text_separator="---"))
    found.append(build("pretrain", path, tokenizer, cache_dir, split=Split(0.3)))
    found.append(build("pretrain", path, tokenizer, cache_dir, split=Split(0.3, True)))
    found.append(build("pretrain", path, other_tokenizer, cache_dir))
    found.append(build("pretrain", f"{path},{other}", tokenizer, cache_dir))
    found.append(build("pretrain", f"{other},{path}", tokenizer, cache_dir))
    os.utime(path, ns=(0, os.stat(path).st_mtime_ns + 1))
    found.append(build("pretrain", path, tokenizer, cache_dir))
    with open(path, "a") as file:
        file.write('{"text": "more"}\n')
    os.utime(path, ns=(0, os.stat(path).st_mtime_ns))
    found.append(build("pretrain", path, tokenizer, cache_dir))
    monkeypatch.setattr(token_cache, "ROOT", tmp_path / "code")
    for name in token_cache.CODE_FILES:
        write(f"code/{name}", (ROOT / name).read_bytes())
    write("code/dataset/show_samples.py", b"")  # which only shows them
    assert build("pretrain", path, tokenizer, cache_dir).path == found[-1].path
    for name in ("model/prompts.py", "dataset/records.py"):
        write(f"code/{name}", (ROOT / name).read_bytes() + b"# changed\n")
        found.append(build("pretrain", path, tokenizer, cache_dir))
    chats = write("c.jsonl", CHATS)
    found.append(build("sft", chats, other_tokenizer, cache_dir))
    monkeypatch.setattr(other_tokenizer, "chat_template", other_tokenizer.chat_template + " ")
    found.append(build("sft", chats, other_tokenizer, cache_dir))
    assert len({cache.path for cache in found}) == len(found) == 14


def test_data_replaced_with_the_same_size_and_time_are_noticed(write, tokenizer, cache_dir, monkeypatch):
    """As `cp -p` or rsync leave them; a file whose content is the same is not tokenised again."""
    path, other = (
        write("a.jsonl", TEXTS[:9]),
        write("b.jsonl", [{"text": "x" + t["text"][1:]} for t in TEXTS[:9]]),
    )
    old = build("pretrain", path, tokenizer, cache_dir)
    first, times = contents(old), os.stat(path)
    os.chmod(path, 0o600)  # changes the system's time, not the content
    made = (old.path / "tokens.bin").stat().st_mtime_ns
    again = build("pretrain", path, tokenizer, cache_dir)
    assert contents(again) == first and (again.path / "tokens.bin").stat().st_mtime_ns == made
    hashed = []
    monkeypatch.setattr(
        token_cache, "file_hash", lambda path, h=token_cache.file_hash: hashed.append(path) or h(path)
    )
    build("pretrain", path, tokenizer, cache_dir)
    assert not hashed  # nothing is read while nothing changed
    os.replace(other, path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    new = build("pretrain", path, tokenizer, cache_dir)
    assert new.path == old.path and contents(new) != first and new.meta["data"] != old.meta["data"]


def test_weights_stand_in_the_cache_only_if_a_record_has_one(write, tokenizer, cache_dir):
    plain = build("sft", write("a.jsonl", [chat | {"weight": 1} for chat in CHATS]), tokenizer, cache_dir)
    assert plain.weights is None and not (plain.path / "weights.bin").exists()
    assert plain.report["weighted"] == 0
    weights = [None, 0.5, "", 0, 3, "0.25"]  # a cell of CSV is text
    chats = [chat | {"weight": weights[i % 6]} for i, chat in enumerate(CHATS)]
    some = build("sft", path := write("b.jsonl", chats), tokenizer, cache_dir)
    assert some.report["weighted"] == 40 and some.report["dropped"] == 10
    assert some.weights is not None and some.weights[:5].tolist() == [1, 0.5, 1, 3, 0.25]
    data = SFTDataset(path, tokenizer, 64, cache_dir=cache_dir)
    (one,), (half,) = data[0], data[1]
    assert set(one["loss_weight"].tolist()) == {0, 1} and set(half["loss_weight"].tolist()) == {0, 0.5}
    assert half["target_bytes"] == 0.5 * some.target_bytes[1] and one["target_bytes"] == some.target_bytes[0]
    texts = write(
        "c.jsonl", [{"text": "the river " * 60, "weight": 0.3}, {"text": "a b", "weight": 0}, {"text": "c"}]
    )
    documents = build("pretrain", texts, tokenizer, cache_dir)
    assert documents.weights is not None
    assert [round(float(weight), 6) for weight in documents.weights] == [0.3] * (
        documents.num_samples - 1
    ) + [1]
    assert documents.report["dropped"] == 1 and "with a weight 2 (66.7%)" in describe_records(
        documents.report
    )


def test_packing_shares_the_cache(write, tokenizer, cache_dir):
    path = write("a.jsonl", CHATS)
    plain, packed = (SFTDataset(path, tokenizer, 64, packing, cache_dir) for packing in (False, True))
    assert plain.cache.path == packed.cache.path and len(packed) < len(plain)
    assert len(list(cache_dir.glob("*/meta.json"))) == 1


def test_the_fingerprint_of_the_data_is_that_of_their_content(write, tokenizer, cache_dir):
    """Wherever they lie: a run is resumed with a copy."""
    first, copy = write("a.jsonl", CHATS), write("sub/b.jsonl", CHATS)
    other = write("c.jsonl", CHATS[1:])
    prints = [
        SFTDataset(path, tokenizer, 64, cache_dir=cache_dir).fingerprint for path in (first, copy, other)
    ]
    assert prints[0] == prints[1] != prints[2]
    split = SFTDataset(first, tokenizer, 64, cache_dir=cache_dir, split=Split(0.2)).fingerprint
    assert split["data"] != prints[0]["data"] and split["eval_share"] == 0.2


def test_the_build_names_what_was_read_held_out_and_not_read(write, tokenizer, cache_dir, tmp_path, capsys):
    data = [write(f"d/{name}.jsonl", [*TEXTS[:50], {"text": "x", "url": "u"}]) for name in "ab"]
    left = [write(f"d/{name}", b"x") for name in ("c.png", "d.pptx")]
    for is_held_out in (False, True):
        build("pretrain", f"{tmp_path}/d", tokenizer, cache_dir, split=Split(0.2, is_held_out))
        notes = "held out; " if is_held_out else ""
        out = capsys.readouterr().out
        assert out.startswith(f"tokenised {', '.join(data)} ({notes}not read: {', '.join(left)}): ")
    build("pretrain", data[0], tokenizer, cache_dir)
    assert "unused fields: url 1" in (out := capsys.readouterr().out) and "not read" not in out
    for number in range(30):
        write(f"d/more/{number:02d}.jsonl", TEXTS[:1])
    build("pretrain", f"{tmp_path}/d", tokenizer, cache_dir)
    assert " and 12 more (not read: " in capsys.readouterr().out


# --- whole, or not there


def test_two_processes_at_once_build_one_cache(write, cache_dir):
    path = write("a.jsonl", TEXTS)
    both = [start(path, cache_dir, seconds=0.003) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sorted("tokenised " in out for out, _ in outputs) == [False, True]
    assert len(list(cache_dir.glob("*/meta.json"))) == 1


def test_a_killed_build_leaves_nothing_in_the_way(write, cache_dir, tmp_path):
    path = write("a.jsonl", TEXTS * 4)
    building = start(path, cache_dir, seconds=0.002)
    wait_for(lambda: list(cache_dir.glob("*.tmp/tokens.bin")))
    building.send_signal(signal.SIGKILL)
    building.communicate()
    assert not list(cache_dir.glob("*/meta.json")) and list(cache_dir.glob("*.tmp"))
    arrays = []
    for folder in (cache_dir, tmp_path / "fresh"):
        again = start(path, folder)
        out, err = again.communicate(timeout=60)
        assert again.returncode == 0 and "tokenised " in out and not err
        arrays.append([file.read_bytes() for file in sorted(folder.glob("*/*.bin"))])
    assert arrays[0] == arrays[1] and len(arrays[0]) == 5
    assert not list(cache_dir.glob("*.tmp"))


@pytest.mark.parametrize("damage", ["truncated", "removed", "meta.json"])
def test_a_damaged_cache_is_built_again(damage, write, tokenizer, cache_dir):
    path = write("a.jsonl", TEXTS)
    cache = build("pretrain", path, tokenizer, cache_dir)
    before = contents(cache)
    if damage == "truncated":
        os.truncate(cache.path / "tokens.bin", 1000)
    elif damage == "removed":
        (cache.path / "offsets.bin").unlink()
    else:
        (cache.path / "meta.json").write_text('{"sizes": {"tok')
    assert contents(build("pretrain", path, tokenizer, cache_dir)) == before


def test_a_full_disk_is_one_line_and_leaves_nothing(write, cache_dir):
    path = write("a.jsonl", TEXTS * 3)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    building = start(path, cache_dir, preexec_fn=limit)
    _, err = building.communicate(timeout=60)
    line = f"error: the token cache in {cache_dir} cannot be written or read (File too large)"
    assert building.returncode == 2 and err.startswith(line) and err.count("\n") == 1
    assert not list(cache_dir.glob("*.tmp")) and not list(cache_dir.glob("*/meta.json"))


def test_a_file_that_changes_while_it_is_read_is_refused(write, tokenizer, cache_dir, monkeypatch):
    path, read = write("a.jsonl", TEXTS), token_cache.read_records

    def append(*args):
        yield from read(*args)
        with open(path, "a") as file:
            file.write('{"text": "more"}\n')

    monkeypatch.setattr(token_cache, "read_records", append)
    with pytest.raises(UserError, match="changed while it was read"):
        build("pretrain", path, tokenizer, cache_dir)
    assert not list(cache_dir.glob("*/meta.json")) and not list(cache_dir.glob("*.tmp"))


# --- bad records


def test_the_first_bad_record_ends_the_build_at_once(write, tokenizer, cache_dir, monkeypatch):
    path, read = write("a.jsonl", [{"txt": i} for i in range(1000)]), token_cache.read_records
    seen = []

    def noting(*args):
        for source, record in read(*args):
            seen.append(source.line)
            yield source, record

    monkeypatch.setattr(token_cache, "read_records", noting)
    with pytest.raises(UserError, match=r"a.jsonl:1: no 'text' \(its keys: 'txt'\).*--on_bad_data skip"):
        build("pretrain", path, tokenizer, cache_dir)
    assert seen == [1] and not list(cache_dir.glob("*.tmp"))


def test_skip_stops_above_a_share_of_bad_records(write, tokenizer, cache_dir, capsys):
    path = write("a.jsonl", [{"txt": 1} if i % 8 == 5 else {"text": f"text {i}"} for i in range(80)])
    options = {"on_bad_data": "skip"}
    with pytest.raises(UserError) as caught:
        build("pretrain", path, tokenizer, cache_dir, **options)
    (meta,) = cache_dir.glob("*/meta.json")
    assert str(caught.value).startswith(f"{path}:6: no 'text'") and "\n" not in str(caught.value)
    assert (
        "10 of 80 records (12.5%) are bad, more than --max_bad_share 0.1 allows; all of them are listed in "
        f"{meta.parent / 'bad_records.txt'}; correct them or raise"
    ) in str(caught.value)
    capsys.readouterr()
    for share in (0.125, 1):  # exactly the share is allowed, and the cache is there already
        cache = build("pretrain", path, tokenizer, cache_dir, max_bad_share=share, **options)
        out = capsys.readouterr().out  # a later run says it, too
        assert "tokenised " not in out and "bad records are skipped: 10 of 80 records (12.5%)" in out
        assert cache.num_samples == 70
    with pytest.raises(UserError, match="are bad, more than --max_bad_share"):
        build("pretrain", path, tokenizer, cache_dir, max_bad_share=0.1249, **options)


def test_data_without_a_sample_are_one_line(write, tokenizer, cache_dir):
    question = {"role": "user", "content": "q " * 200}
    path = write("a.jsonl", [{"messages": [question, {"role": "assistant", "content": "a"}]}] * 3)
    line = r"none of the 3 records can be used .*dropped for lack of a target 3 \(100.0%\)\); raise --max_"
    with pytest.raises(UserError, match=line):
        build("sft", path, tokenizer, cache_dir)
    with pytest.raises(UserError, match="--max_seq_len 1 leaves no token to predict"):
        build("sft", path, tokenizer, cache_dir, 1)
    with pytest.raises(UserError, match="is plain text, which only pretraining can use"):
        build("sft", write("x.txt", b"Call me Ishmael."), tokenizer, cache_dir)


CODE_FILES = {"auto_map": {"AutoTokenizer": ["x.T", None]}, "tokenizer_class": "T"}


@pytest.mark.parametrize(
    "files",
    [{}, {"tokenizer.json": "[]"}, {"tokenizer_config.json": json.dumps(CODE_FILES), "x.py": "exit(1)"}],
)
def test_folders_that_hold_no_tokenizer(files, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"^--tokenizer_path {tmp_path} holds no tokenizer that .*") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_cache_needs_no_torch():
    code = "import sys, dataset.token_cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
