"""The cache on disk: found again, rebuilt when anything changes, whole or not there, whoever builds it."""

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import psutil
import pytest

from common.command_line import one_line_errors
from common.errors import UserError
from common.settings import ROOT
from dataset import files, show_samples, token_cache
from dataset.token_cache import file_hash
from tests.dataset.conftest import build

TEXTS = [{"text": f"Document {i}: the river 河流 {'is long ' * (i % 50)}"} for i in range(400)]
ARRAYS = ("tokens", "offsets", "target_bytes", "sources")


def chats(count):
    return [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": "a " * (i % 30) + "河"},
            ]
        }
        for i in range(count)
    ]


def contents(cache):
    names = sorted(path.name for path in cache.path.glob("*.bin"))
    return {name: (cache.path / name).read_bytes() for name in names}


def arguments(kind, path, cache_dir, *options):
    return ["--kind", kind, "--data_path", str(path), "--cache_dir", str(cache_dir), *map(str, options)]


def command(*args):
    return [sys.executable, "-m", "dataset.show_samples", "--samples", "0", *arguments(*args)]


# What a process of its own starts with: a tokenizer that needs no torch, whose import takes longer than the
# tests.
PRELUDE = f"""
import os, time
from types import SimpleNamespace
from tokenizers import Tokenizer
from common.command_line import one_line_errors
from dataset import files, token_cache
from dataset.token_cache import CacheOptions, build_token_cache

tokenizer = SimpleNamespace(
    backend_tokenizer=Tokenizer.from_file({str(ROOT / "model" / "tokenizer.json")!r}),
    chat_template=None, special_tokens_map={{}}, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)

def build(kind, path, *options):
    return build_token_cache(path, tokenizer, CacheOptions(kind, *options))
"""


def slowed(seconds):
    """Code that lets a build rest before each block."""
    return f"""
def iter_slowly(*args, blocks=token_cache.iter_blocks):
    for block in blocks(*args):
        time.sleep({seconds})
        yield block
token_cache.iter_blocks = iter_slowly
"""


def start(code, **options):
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code], stdout=pipe, stderr=pipe, text=True, **options
    )


def run(code, **options):
    """Run the code to its end, in a process of its own; stdout and stderr come with it."""
    return subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, **options)


def build_code(path, cache_dir, processes=1):
    """Code that builds as `python -m dataset.show_samples` does, without torch."""
    build = f"build('pretrain', {str(path)!r}, 64, {str(cache_dir)!r}, {processes})"
    return f"with one_line_errors():\n    {build}\n"


def test_what_a_cache_holds(write, tokenizer, cache_dir):
    path = write("a.jsonl", TEXTS)
    cache = build("pretrain", path, tokenizer, 64, cache_dir)
    assert cache.tokens.dtype == np.uint16 and cache.offsets.dtype == np.int64
    assert all(isinstance(getattr(cache, name), np.memmap) for name in ARRAYS)
    assert (
        cache.offsets[0] == 0
        and cache.offsets[-1] == len(cache.tokens)
        and len(cache.offsets) == cache.num_samples + 1
    )
    assert cache.target_bytes.sum() == sum(len(record["text"].encode()) for record in TEXTS)
    report = cache.report
    assert (report["records"], report["documents"], report["samples"]) == (400, 400, cache.num_samples)
    assert report["tokens"] == len(cache.tokens)
    assert report["targets"] == report["tokens"] - report["samples"]
    lengths = np.diff(cache.offsets)
    assert report["length_percentiles"]["100"] == lengths.max() and report["length_mean"] == round(
        lengths.mean(), 1
    )
    assert report["padding_efficiency"] == round(len(cache.tokens) / (64 * cache.num_samples), 4)
    assert cache.source(cache.num_samples - 1) == f"{path}:400"
    assert pickle.loads(pickle.dumps(cache)).path == cache.path


def test_a_cache_is_found_again_wherever_the_same_content_lies(write, tokenizer, cache_dir, capsys):
    first = build("pretrain", write("a.jsonl", TEXTS), tokenizer, 64, cache_dir)
    made = (first.path / "tokens.bin").stat()
    assert "tokenised " in capsys.readouterr().out
    again = build("pretrain", write("sub/b.jsonl", TEXTS), tokenizer, 64, cache_dir, on_bad_data="skip")
    assert again.path == first.path
    assert (again.path / "tokens.bin").stat() == made
    assert again.source(0).endswith("sub/b.jsonl:1")  # the name of today, not that of the first build
    assert capsys.readouterr().out == ""


def test_another_content_tokenizer_or_setting_is_another_cache(write, tokenizer, other_tokenizer, cache_dir):
    path = write("a.jsonl", TEXTS)
    prints = {build("pretrain", path, tokenizer, 64, cache_dir).path}
    prints.add(build("pretrain", path, tokenizer, 65, cache_dir).path)
    prints.add(build("pretrain", path, other_tokenizer, 64, cache_dir).path)
    write("a.jsonl", [*TEXTS[:-1], {"text": "changed"}])
    prints.add(build("pretrain", path, tokenizer, 64, cache_dir).path)
    both = write("c.jsonl", TEXTS)
    prints.add(build("pretrain", f"{path},{both}", tokenizer, 64, cache_dir).path)
    prints.add(build("pretrain", f"{both},{path}", tokenizer, 64, cache_dir).path)
    sft = write("s.jsonl", chats(5))
    prints.add(build("sft", sft, other_tokenizer, 64, cache_dir).path)
    template = other_tokenizer.chat_template
    try:
        other_tokenizer.chat_template = template.replace("|im_start|>{{", "|im_start|> {{")
        prints.add(build("sft", sft, other_tokenizer, 64, cache_dir).path)
    finally:
        other_tokenizer.chat_template = template
    assert len(prints) == 8


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_the_number_of_processes_changes_no_bit(kind, write, tokenizer, tmp_path, monkeypatch):
    records = TEXTS if kind == "pretrain" else chats(400)
    records = [*records[:300], {"neither": 1}, *records[300:]]
    path = write("a.jsonl", records)
    alone = build(kind, path, tokenizer, 32, tmp_path / "one", 1, "skip")
    monkeypatch.setattr(token_cache, "PARALLEL_ABOVE", 0)
    monkeypatch.setattr(files, "BLOCK_BYTES", 1500)
    several = build(kind, path, tokenizer, 32, tmp_path / "two", 2, "skip")
    assert contents(alone) == contents(several) and alone.report == several.report
    assert alone.path.name == several.path.name


def test_worker_processes_report_the_first_bad_record(write, tokenizer, cache_dir, monkeypatch):
    monkeypatch.setattr(token_cache, "PARALLEL_ABOVE", 0)
    monkeypatch.setattr(files, "BLOCK_BYTES", 500)
    path = write("a.jsonl", [{"text": None} if i % 100 == 50 else record for i, record in enumerate(TEXTS)])
    with pytest.raises(UserError, match=r"a\.jsonl:51: 'text' is null instead of text"):
        build("pretrain", path, tokenizer, 64, cache_dir, num_proc=2)
    assert not list(cache_dir.glob("*.tmp*")) and not list(cache_dir.glob("*/meta.json"))


def test_worker_processes_need_neither_torch_nor_the_started_script():
    code = "import sys, dataset.token_cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_two_processes_at_once_build_one_cache(write, cache_dir):
    path = write("a.jsonl", TEXTS)
    code = f"build('pretrain', {path!r}, 64, {str(cache_dir)!r}, 1)\nprint('ready')"
    both = [start(slowed(1) + code) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("tokenised " in out for out, _ in outputs) == 1
    assert all(out.endswith("ready\n") for out, _ in outputs)
    assert len(list(cache_dir.glob("*/meta.json"))) == 1


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_build_leaves_nothing_that_is_used(processes, write, cache_dir, tmp_path):
    exec(PRELUDE, here := {})
    tokenizer, path = here["tokenizer"], write("a.jsonl", TEXTS)
    code = (
        "token_cache.PARALLEL_ABOVE, files.BLOCK_BYTES = 0, 500\n"
        f"{slowed(0.1)}"  # some 100 blocks: slow enough to be killed
        f"build('pretrain', {path!r}, 64, {str(cache_dir)!r}, {processes})\n"
    )
    building = start(code)
    wait_for(lambda: any(f.stat().st_size > 0 for f in cache_dir.glob("*.tmp*/tokens.bin")))
    workers = psutil.Process(building.pid).children(recursive=True)
    assert processes == 1 or len(workers) >= 2
    building.send_signal(signal.SIGKILL)
    building.communicate()
    assert not list(cache_dir.glob("*/meta.json")) and list(cache_dir.glob("*.tmp*"))
    wait_for(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers))
    cache = build("pretrain", path, tokenizer, 64, cache_dir, 1)
    assert not list(cache_dir.glob("*.tmp*"))
    fresh = build("pretrain", path, tokenizer, 64, tmp_path / "fresh", 1)
    assert contents(cache) == contents(fresh)


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    """Text that takes some seconds to tokenise, so that a build is caught half-way without slowing it
    down."""
    rng, path = random.Random(3), tmp_path_factory.mktemp("long") / "long.jsonl"
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(20_000)]
    records = [json.dumps({"text": " ".join(rng.choices(words, k=900))}) for _ in range(500)]
    path.write_text("".join(f"{record}\n" for record in records) * 8, encoding="utf-8")
    assert path.stat().st_size > 2 * token_cache.PARALLEL_ABOVE
    return path


def under_way(cache_dir):
    return any(file.stat().st_size > 0 for file in cache_dir.glob("*.tmp*/tokens.bin"))


@pytest.mark.parametrize(("processes", "moment"), [(2, "start"), (1, "under way")])
def test_ctrl_c_ends_a_build_at_once(processes, moment, long_file, cache_dir):
    building = start(build_code(long_file, cache_dir, processes), start_new_session=True)
    wait_for(lambda: under_way(cache_dir) if moment == "under way" else list(cache_dir.glob("*.tmp*")))
    time.sleep(0.1)  # somewhere in the start of the workers, or between two blocks
    workers = psutil.Process(building.pid).children(recursive=True)
    os.killpg(building.pid, signal.SIGINT)
    out, err = building.communicate(timeout=20)
    # a build of more than ten seconds has a bar, which is blanked at the end
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith("tokenising:")]
    assert lines == ["stopped: by Ctrl-C"]
    assert building.returncode == 128 + signal.SIGINT and "built" not in out
    assert not list(cache_dir.glob("*.tmp*")) and not list(cache_dir.glob("*/meta.json"))
    wait_for(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers), 5)


def test_a_signal_just_after_the_folder_is_made_leaves_nothing(write, tokenizer, cache_dir, monkeypatch):
    mkdir = Path.mkdir

    def make_and_be_stopped(self, *args, **kwargs):
        mkdir(self, *args, **kwargs)
        if ".tmp-" in self.name:
            signal.raise_signal(signal.SIGINT)

    path = write("a.jsonl", TEXTS)
    monkeypatch.setattr(Path, "mkdir", make_and_be_stopped)
    with pytest.raises(KeyboardInterrupt):
        build("pretrain", path, tokenizer, 64, cache_dir)
    assert not list(cache_dir.glob("*.tmp-*"))


def test_who_waits_can_be_stopped_and_takes_over_from_who_is_killed(write, cache_dir):
    build = build_code(write("a.jsonl", TEXTS), cache_dir)
    slow = "files.BLOCK_BYTES = 500\n" + slowed(0.4)
    building = start(slow + build)
    wait_for(lambda: under_way(cache_dir))
    waiting = [start(build), start(build)]
    message = (
        f"waiting for the token cache {next(cache_dir.glob('*.tmp*')).stem}, which another process builds\n"
    )
    for process in waiting:  # one may first wait for the other, which reads the file
        assert message in iter(process.stdout.readline, "")
    waiting[0].send_signal(signal.SIGINT)
    _, err = waiting[0].communicate(timeout=10)
    assert waiting[0].returncode == 130 and err == "stopped: by Ctrl-C\n"
    assert building.poll() is None and waiting[1].poll() is None
    building.kill()
    building.communicate()
    out, err = waiting[1].communicate(timeout=60)
    assert waiting[1].returncode == 0 and "tokenised " in out and err == ""
    assert len(list(cache_dir.glob("*/meta.json"))) == 1 and not list(cache_dir.glob("*.tmp*"))


def test_a_worker_that_is_killed_ends_in_one_line(long_file, cache_dir):
    building = start(build_code(long_file, cache_dir, 2))
    wait_for(lambda: under_way(cache_dir))
    workers = [c for c in psutil.Process(building.pid).children() if "worker_pool" in " ".join(c.cmdline())]
    workers[0].kill()  # as the system does where memory runs out
    _, err = building.communicate(timeout=20)
    (line,) = (
        line for line in err.splitlines() if not line.startswith("tokenising:") and line
    )  # a slow build has a bar
    assert building.returncode == 2
    assert line.startswith("error: a process of the token cache died, perhaps out of memory")
    assert not list(cache_dir.glob("*.tmp*")) and not list(cache_dir.glob("*/meta.json"))


@pytest.mark.parametrize("damage", ["truncate", "remove", "meta", "in place"])
def test_a_damaged_cache_is_built_again(damage, write, tokenizer, cache_dir, capsys):
    path = write("a.jsonl", TEXTS)
    cache = build("pretrain", path, tokenizer, 64, cache_dir)
    before = contents(cache)
    if damage == "truncate":
        os.truncate(cache.path / "tokens.bin", 1000)
    elif damage == "remove":
        (cache.path / "offsets.bin").unlink()
    elif damage == "meta":
        (cache.path / "meta.json").write_text('{"sizes": {"tok')
    else:
        file, times = cache.path / "tokens.bin", (cache.path / "tokens.bin").stat()
        with open(file, "r+b") as changed:
            changed.seek(1000)
            changed.write(b"\xff" * 8)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    capsys.readouterr()
    assert contents(build("pretrain", path, tokenizer, 64, cache_dir)) == before
    assert f"warning: the token cache {cache.path} is damaged or was changed" in capsys.readouterr().err


def test_a_copied_cache_is_read_once(write, tokenizer, cache_dir, monkeypatch, settle):
    path, read = write("a.jsonl", TEXTS), []
    digest = hashlib.file_digest

    def noting(file, algorithm):
        read.append(Path(file.name).name)
        return digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", noting)
    settle(path)
    cache = build("pretrain", path, tokenizer, 64, cache_dir)
    read.clear()
    build("pretrain", path, tokenizer, 64, cache_dir)
    assert read == []
    shutil.copytree(cache.path, cache_dir / "copy")
    shutil.rmtree(cache.path)
    shutil.move(cache_dir / "copy", cache.path)
    for file in cache.path.glob("*"):
        settle(file)
    # opened for the first time since it was copied, and again
    for expected in (list(cache.meta["files"]), []):
        read.clear()
        build("pretrain", path, tokenizer, 64, cache_dir)
        assert sorted(read) == sorted(expected)


@pytest.mark.parametrize("content", ["", "null", "[]", "{}", '{"files": 1}', '{"files": []}'])
def test_damaged_notes_are_written_again(content, write, tokenizer, cache_dir, settle):
    path = write("a.jsonl", TEXTS[:20])
    settle(path)
    cache = build("pretrain", path, tokenizer, 64, cache_dir)
    before = contents(cache)
    (cache.path / "meta.json").write_text(content)
    (known,) = (cache_dir / "hashes").glob("*.json")
    known.write_text(content)
    assert contents(build("pretrain", path, tokenizer, 64, cache_dir)) == before


@pytest.mark.parametrize("limit", [100, 50_000])
def test_a_file_size_limit_ends_in_one_line_and_leaves_nothing(limit, write, tokenizer, cache_dir):
    path = write("a.jsonl", TEXTS * 10)
    os.utime(path, (1e9, 1e9))  # its hash is remembered: that file is written as well
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    done = run(limited + build_code(path, cache_dir))
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: the token cache in {cache_dir} cannot be written or read (File too large)"
    )
    assert done.stderr.count("\n") == 1
    assert not list(cache_dir.glob("*.tmp*")) and not list(cache_dir.glob("*/meta.json"))
    build("pretrain", path, tokenizer, 64, cache_dir)  # and nothing is in the way of the next attempt


@pytest.mark.parametrize("which", ["cache", "data"])
def test_missing_rights(which):
    with tempfile.TemporaryDirectory() as folder:
        path, cache_dir = Path(folder, "a.jsonl"), Path(folder, "cache")
        path.write_text('{"text": "the river"}\n')
        cache_dir.mkdir()
        cache_dir.chmod(0o555 if which == "cache" else 0o777)
        path.chmod(0o000 if which == "data" else 0o444)
        os.chmod(folder, 0o755)
        nobody = "if os.getuid() == 0:\n    os.setuid(65534)\n"  # root may do anything
        done = run(nobody + build_code(path, cache_dir))
    expected = {
        "cache": f"the token cache in {cache_dir} cannot be written or read (Permission denied); ",
        "data": f"{path} cannot be read (Permission denied); check the file and its permissions\n",
    }
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {expected[which]}")


def test_any_name_of_a_file_and_any_encoding_of_the_console(tmp_path, cache_dir):
    path = tmp_path / os.fsdecode("文-\udcff.jsonl".encode("utf-8", "surrogateescape"))
    path.write_text('{"text": "a"}\n' * 20 + '{"键🙂": 1}\n', encoding="utf-8")
    os.utime(path, (1e9, 1e9))
    name = os.fsencode(path)
    build = f"build('pretrain', os.fsdecode({name!r}), 64, {str(cache_dir)!r}, 1, ON)"
    build = f"with one_line_errors():\n    {build}"
    skip = run(build.replace("ON", "'skip'"), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert skip.returncode == 0 and skip.stderr == ""
    assert "1 of 21 records" in skip.stdout
    (cache,) = cache_dir.glob("*/meta.json")
    shutil.rmtree(cache.parent)
    stop = run(build.replace("ON", "'stop'"))
    assert stop.returncode == 2 and stop.stderr.startswith("error: ") and stop.stderr.count("\n") == 1
    assert r"\udcff.jsonl:21: no 'text' in this record (its keys: '键🙂')" in stop.stderr


FOLDERS = {
    "empty": {},
    "empty file": {"tokenizer.json": ""},
    "not JSON": {"tokenizer.json": "{oops"},
    "another JSON": {"tokenizer.json": "[]"},
    "half a model": {
        "tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}}'
    },
    "settings": {"tokenizer_config.json": "[]"},
    "code": {
        "config.json": '{"model_type": "zzz"}',
        "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["x.T", null]}, "tokenizer_class": "T"}',
        "x.py": "raise SystemExit('this must not run')",
    },
}


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_folders_that_hold_no_tokenizer(files, tmp_path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a run in the night can answer no question"))
    with pytest.raises(UserError) as caught:
        token_cache.load_tokenizer(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"--tokenizer_path {tmp_path} holds no tokenizer that transformers can load (")
    assert "\n" not in text


def test_a_file_that_changes_while_it_is_read_is_refused(write, tokenizer, cache_dir, monkeypatch):
    path = write("a.jsonl", TEXTS)
    iter_blocks = token_cache.iter_blocks

    def append(*args):
        for block in iter_blocks(*args):
            with open(path, "a") as file:
                file.write('{"text": "more"}\n')
            yield block

    monkeypatch.setattr(token_cache, "iter_blocks", append)
    with pytest.raises(UserError, match="changed while it was read"):
        build("pretrain", path, tokenizer, 64, cache_dir)
    assert not list(cache_dir.glob("*/meta.json"))


@pytest.fixture
def settle(monkeypatch):
    """Have some seconds pass since a file was changed."""
    return lambda path: monkeypatch.setattr(token_cache.time, "time", lambda: os.stat(path).st_ctime + 5)


def test_hashes_are_remembered_only_of_files_that_have_settled(write, cache_dir, settle):
    cache_dir.mkdir()
    path = Path(write("a.jsonl", b"first content"))
    first = file_hash(str(path), cache_dir)
    path.write_bytes(b"other content")  # same size, within the same moments
    second = file_hash(str(path), cache_dir)
    assert first != second and not list((cache_dir / "hashes").glob("*.json"))
    settle(path)
    assert file_hash(str(path), cache_dir) == second
    (known,) = (cache_dir / "hashes").glob("*.json")
    known.write_text(known.read_text().replace(second, "remembered"))
    assert file_hash(str(path), cache_dir) == "remembered"  # not read again: same path, size and times


def test_a_file_whose_time_was_set_back_is_read_again(write, cache_dir, settle):
    """As `cp -p` and `rsync -t` do: equal size, equal modification time, other content."""
    cache_dir.mkdir()
    path = Path(write("a.jsonl", b"first content"))
    settle(path)
    first = file_hash(str(path), cache_dir)
    times = path.stat()
    path.write_bytes(b"other content")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_hash(str(path), cache_dir) == hashlib.sha256(b"other content").hexdigest() != first


def test_a_hash_that_cannot_be_remembered_is_still_a_hash(write, tmp_path, settle):
    path = write("a.jsonl", b"content")
    settle(path)  # else it would not be remembered anyway
    (tmp_path / "file").write_text("")
    assert file_hash(path, tmp_path / "file") == hashlib.sha256(b"content").hexdigest()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data_path", "missing.jsonl"], "error: missing.jsonl: no such file; check --data_path"),
        (["--tokenizer_path", "nowhere"], "error: --tokenizer_path nowhere: no such folder"),
        (
            ["--tokenizer_path", "."],
            "error: --tokenizer_path . holds no tokenizer that transformers can load",
        ),
        (["--max_seq_len", "1"], "error: argument --max_seq_len: must be greater than or equal to 8"),
        (["--samples", "-1"], "error: --samples -1 is negative"),
        (["--kind", "sft"], "error: {path}:1: no 'conversations'"),
        (["--max_bad_share", "2"], "error: argument --max_bad_share: must be less than or equal to 1"),
    ],
)
def test_mistakes_on_the_command_line_end_in_one_line(
    options, message, write, cache_dir, tmp_path, monkeypatch, capsys
):
    path = write("a.jsonl", TEXTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["token_cache", *arguments("pretrain", path, cache_dir), *options])
    with pytest.raises(SystemExit) as ended, one_line_errors():
        show_samples.main()
    captured = capsys.readouterr()
    assert ended.value.code == 2 and captured.err.startswith(message.format(path=path))
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_what_cannot_be_trained_on_is_said(write, tokenizer, cache_dir):
    long_question = [
        {"messages": [{"role": "user", "content": "q " * 200}, {"role": "assistant", "content": "a"}]}
    ]
    path = write("a.jsonl", long_question * 3)
    with pytest.raises(
        UserError, match=r"none of the 3 records gives .*dropped for lack of a label 3\); raise --max_"
    ):
        build("sft", path, tokenizer, 64, cache_dir)


def test_skip_stops_above_a_share_of_bad_records(write, tokenizer, cache_dir, capsys):
    def built(share=None, path=None):
        options = {} if share is None else {"max_bad_share": share}
        where = path or write(
            "a.jsonl", [{"txt": 1} if i % 8 == 5 else {"text": f"text {i}"} for i in range(80)]
        )
        return build("pretrain", where, tokenizer, 64, cache_dir, on_bad_data="skip", **options)

    with pytest.raises(UserError) as caught:
        built()
    text, (folder,) = str(caught.value), cache_dir.glob("*/meta.json")
    assert "a.jsonl:6: no 'text' in this record (its keys: 'txt')" in text and "\n" not in text
    assert "10 of 80 records (12.5%) are bad, more than --max_bad_share 0.1 allows" in text
    assert (
        f"all of them are listed in {folder.parent / 'bad_records.txt'}; fix them or raise --max_bad_share"
        in text
    )
    listed = (folder.parent / "bad_records.txt").read_text().splitlines()
    assert [int(line.split(": ")[0].rsplit(":", 1)[1]) for line in listed] == list(range(6, 80, 8))
    assert "tokenised " in capsys.readouterr().out
    for share in (0.125, 1, 1.0):  # exactly the share is allowed, and the cache is there already
        assert built(share).num_samples == 70
        told = capsys.readouterr().out  # a later run says it, too
        assert "tokenised " not in told and "bad records are skipped: 10 of 80 records (12.5%)" in told
    for share in (0, 0.1249):
        with pytest.raises(UserError, match="are bad, more than --max_bad_share"):
            built(share)
    assert built(0, write("good.jsonl", TEXTS)).num_samples > 0


def test_messages_name_the_data_where_they_lie_now(write, tokenizer, cache_dir):
    path = write("old.jsonl", [*TEXTS, {"text": 1}, {"text": 2}])
    build("pretrain", path, tokenizer, 64, cache_dir, on_bad_data="skip")
    moved = str(Path(path).rename(Path(path).with_name("new.jsonl")))
    for options in ({"on_bad_data": "stop"}, {"on_bad_data": "skip", "max_bad_share": 0}):
        with pytest.raises(UserError) as caught:
            build("pretrain", moved, tokenizer, 64, cache_dir, **options)
        assert str(caught.value).startswith(f"{moved}:401: 'text' is a number")


def test_memory_stays_flat_whatever_the_size_of_the_file(write, fake_backend, other_tokenizer, cache_dir):
    line = json.dumps({"text": "x" * 4000}).encode() + b"\n"
    peaks = []
    for megabytes in (2, 6):
        path = write(f"{megabytes}.jsonl", line * (megabytes * 250))
        tracemalloc.start()
        build("pretrain", path, other_tokenizer, 512, cache_dir, 1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2e6, peaks


def test_other_code_makes_another_cache(write, cache_dir, tmp_path, tokenizer, monkeypatch):
    """Whoever changes how a form is read would else train on the tokens of before."""
    path = write("a.jsonl", TEXTS)
    before = build("pretrain", path, tokenizer, 64, cache_dir).path
    assert build("pretrain", path, tokenizer, 64, cache_dir).path == before
    monkeypatch.setattr(token_cache, "CODE", tmp_path / "code")
    for file in Path(token_cache.__file__).parent.glob("*.py"):
        write(f"code/{file.name}", file.read_bytes())
    assert build("pretrain", path, tokenizer, 64, cache_dir).path == before
    with open(tmp_path / "code/records.py", "a") as file:
        file.write("# changed\n")
    assert build("pretrain", path, tokenizer, 64, cache_dir).path != before
