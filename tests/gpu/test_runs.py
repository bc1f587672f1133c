"""Checks that start runs: resuming, a killed rank, SIGTERM, too little memory, speed on samples of usual
lengths."""

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dataset.token_cache import load_tokenizer
from scripts.demo.world import make_corpus
from tests.conftest import ROOT, write_jsonl

pytestmark = pytest.mark.slow
PATIENCE = 90.0  # seconds: for a run to begin, and to end after a signal or the loss of a rank
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_seq_len": 128,
    "batch_size": 4,
    "accumulation_steps": 1,
}
SMALL |= {"epochs": 50, "log_interval": 1, "save_interval": 10, "eval_interval": 1000}


@pytest.mark.parametrize("parallel", ["one_rank", "ddp", "fsdp"])
def test_resume(parallel, gpus, ranks_to_check):
    """scripts/verify_resume.py with --deterministic 1."""
    if parallel != "one_rank" and not gpus:
        pytest.skip("needs 2 CUDA GPUs; torch sees 0")
    count = 1 if parallel == "one_rank" else min(3, ranks_to_check())
    options = ["--kills", 2, "--ranks", count, "--use_moe", "0,1" if gpus else 0, "--seed", 1]
    stage_flags = ["--deterministic", 1, *(["--parallel", "fsdp"] if parallel == "fsdp" else [])]
    words = [sys.executable, ROOT / "scripts/verify_resume.py", *options, "--", *stage_flags]
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    reasons = [line for line in done.stdout.splitlines() if line.startswith(("FAIL", "error"))]
    assert done.returncode == 0, (reasons or [f"verify_resume ended with status {done.returncode}"])[0]


# --- a killed rank, SIGTERM


@contextmanager
def running(folder: Path, ranks: int) -> Iterator[list[subprocess.Popen]]:
    """The ranks of a small pretraining run in this folder, once it has trained; killed at the end."""
    data = write_jsonl(folder / "pretrain.jsonl", make_corpus(0)["pretrain.jsonl"])
    settings = (
        {"data_path": data}
        | {f"{kind}_dir": folder / kind for kind in ("save", "checkpoint", "cache")}
        | SMALL
    )
    words = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, str(ROOT / "trainer/train_pretrain.py"), *words]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(probe.getsockname()[1]),
            "WORLD_SIZE": str(ranks),
        }
    started = []
    for rank in range(ranks):
        own = place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        with open(folder / f"rank_{rank}.log", "wb") as log:
            environment = os.environ | (own if ranks > 1 else {})
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    try:
        assert wait(lambda: has_updates(folder), started), f"the run does not begin; {tail(folder)}"
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def has_updates(folder: Path) -> bool:
    """Whether some updates are logged."""
    return any(path.read_bytes().count(b"\n") > 5 for path in folder.glob("save/*.jsonl"))


def wait(condition: Callable[[], object], processes: list[subprocess.Popen]) -> bool:
    """Poll until the condition holds; False if the time is over or a process has ended."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end or any(process.poll() is not None for process in processes):
            return False
        time.sleep(0.1)
    return True


def output(folder: Path, rank: int) -> list[str]:
    """The lines that a rank has printed."""
    return (folder / f"rank_{rank}.log").read_text("utf-8", "replace").splitlines()


def tail(folder: Path) -> str:
    """The last line of each rank's output."""
    texts = [output(folder, rank) for rank in range(len(list(folder.glob("rank_*.log"))))]
    return " | ".join(lines[-1] for lines in texts if lines)


def test_killed_rank(tmp_path, ranks_to_check, record_property):
    """When a rank is killed, each other one ends soon, with status 2 and one line."""
    with running(tmp_path, min(3, ranks_to_check())) as started:
        started[-1].kill()
        begin, others = time.monotonic(), started[:-1]
        wait(lambda: all(process.poll() is not None for process in others), [])
        record_property("seconds to notice", round(time.monotonic() - begin, 1))
        statuses = [process.poll() for process in others]
    for rank, status in enumerate(statuses):
        lines = [line for line in output(tmp_path, rank) if line.startswith("error: ")]
        record_property("line", lines[:1])
        assert status == 2 and len(lines) == 1 and "ended while this one waited" in lines[0], tail(tmp_path)


def test_sigterm(tmp_path, gpus, device, ranks_to_check, record_property):
    """SIGTERM to one rank has all of them save at the same update and leave."""
    ranks = 1 if gpus == 1 or device.type == "mps" else min(3, ranks_to_check())
    with running(tmp_path, ranks) as started:
        started[-1].send_signal(signal.SIGTERM)
        wait(lambda: all(process.poll() is not None for process in started), [])
        statuses = [process.poll() for process in started]
    lines = [line for line in output(tmp_path, 0) if line.startswith("stopped: ")]
    record_property("line", lines[:1])
    assert statuses == [128 + signal.SIGTERM] * ranks and "which is saved" in "".join(lines), tail(tmp_path)


def test_out_of_memory(tmp_path, gpus):
    """A run that may use little of the GPU ends with status 2 and one line that says what to do."""
    if not gpus:
        pytest.skip("needs a CUDA GPU, whose memory can be limited; the tests take a CPU's memory away")
    data = long_samples(tmp_path / "pretrain.jsonl", 64)
    folders = [
        part for kind in ("save", "checkpoint", "cache") for part in (f"--{kind}_dir", str(tmp_path / kind))
    ]
    flags = ["--data_path", str(data), *folders, "--batch_size", "64", "--device", "cuda"]
    little = "import runpy, sys, torch; torch.cuda.set_per_process_memory_fraction(1e9 / torch.cuda.mem_get_info()[1]); "
    little += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", little, str(ROOT / "trainer/train_pretrain.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    errors = [line for line in done.stderr.splitlines() if "Error" in line or line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and "out of memory" in errors[0], done.stderr[-2000:]


@pytest.mark.parametrize("preset", ["30m", "moe"])
def test_speed(preset, tmp_path, gpus, device, record_property):
    """scripts/benchmark.py on samples of 200 to 700 tokens: the loader keeps up; the figures are to send
    in."""
    figures = benchmark(preset, tmp_path, gpus, device, 0, record_property)
    assert figures["data_wait"] < 0.1, "the GPU waits for data"


def test_compiled_speed(tmp_path, gpus, device, needs_compiler, record_property):
    """Compiled layers are faster than those that are not, by scripts/benchmark.py."""
    needs_compiler()
    rates = {}
    for name, use_compile in (("plain", 0), ("compiled", 1)):
        figures = benchmark("30m", tmp_path, gpus, device, use_compile, record_property)
        rates[name] = figures["tokens_per_second"]
    record_property("ratio", round(rates["compiled"] / rates["plain"], 2))
    assert rates["compiled"] > rates["plain"], f"compiled layers are slower: tokens/s {rates}"


def benchmark(preset: str, folder: Path, gpus: int, device, use_compile: int, record_property) -> dict:
    """The figures of scripts/benchmark.py with this model, in this folder."""
    path = folder / "pretrain.jsonl"
    settings = {"data_path": path if path.exists() else long_samples(path, 1000 if gpus else 24)}
    settings |= {"stage": "pretrain", "preset": preset, "cache_dir": folder / "cache", "device": device.type}
    settings |= {"json": folder / "figures.json", "max_seq_len": 768, "use_compile": use_compile}
    if gpus:
        settings |= {"batch_size": 16}
    else:
        settings |= {"batch_size": 2, "hidden_size": 64, "warmup": 1, "updates": 2, "repeat": 1}
        settings |= {"accumulation_steps": 1}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    command = [sys.executable, str(ROOT / "scripts/benchmark.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads((folder / "figures.json").read_text())
    for name in (
        "tokens_per_second",
        "mfu",
        "mfu_of_sheet",
        "matmul_peak_tflops",
        "data_wait",
        "peak_memory_mb",
    ):
        if name in figures:
            record_property(name, float(f"{figures[name]:.4g}"))
    return figures


def long_samples(path: Path, count: int) -> Path:
    """A file of so many documents of 200 to 700 tokens."""
    tokenizer, numbers = load_tokenizer(ROOT / "model"), random.Random(0)
    texts = itertools.cycle(record["text"] for record in make_corpus(0)["pretrain.jsonl"])
    documents = []
    for _ in range(count):
        tokens, wanted = [], numbers.randint(200, 690)
        while len(tokens) < wanted:
            tokens += tokenizer(next(texts) + "\n", add_special_tokens=False)["input_ids"]
        documents.append({"text": tokenizer.decode(tokens[:wanted])})
    return write_jsonl(path, documents)
