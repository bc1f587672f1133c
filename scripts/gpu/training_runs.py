"""Checks that start runs: resuming, a killed rank, SIGTERM."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.settings import ROOT
from dataset.demo_corpus import make_corpus
from scripts.gpu.runner import Failed, Machine

PATIENCE = 90.0  # seconds: for a run to begin, and to end after a signal or the loss of a rank
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "max_seq_len": 128, "batch_size": 4, "accumulation_steps": 1}
SMALL |= {"epochs": 50, "log_interval": 1, "save_interval": 10, "eval_interval": 1000}


def ranks_of(machine: Machine) -> int:
    """Processes of a check with several: one per GPU, three if possible; two on a CPU."""
    return min(3, machine.gpus) or 2


# --- resuming --------------------------------------------------------------------------------------------------------


def resume(machine: Machine, ranks: bool = False, flags: str = "") -> dict[str, Any]:
    """scripts/verify_resume.py with --deterministic 1 and these flags of the stage. ranks: with several processes."""
    count, kills = ranks_of(machine) if ranks else 1, 4 if machine.gpus else 2
    options = {"kills": kills, "ranks": count, "use_moe": "0,1" if machine.gpus else "0", "seed": 1}
    words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    stage_flags = f"-- --deterministic 1 {flags}".split()
    command = [sys.executable, str(ROOT / "scripts/verify_resume.py"), *words, *stage_flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    if done.returncode == 0:
        return {"ranks": count, "kills": kills}
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAIL", "error"))]
    raise Failed(lines[0] if lines else f"verify_resume ended with status {done.returncode}")


# --- a killed rank, SIGTERM -------------------------------------------------------------------------------------------


@contextmanager
def running(machine: Machine, name: str, ranks: int, *flags: str) -> Iterator[list[subprocess.Popen]]:
    """The ranks of a small pretraining run, started by hand, once it has trained; killed at the end."""
    folder = machine.folder / f"{name}_run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    places = {f"{kind}_dir": folder / kind for kind in ("save", "checkpoint", "cache")}
    lines = [json.dumps(record) + "\n" for record in make_corpus(0)["pretrain.jsonl"]]
    (folder / "pretrain.jsonl").write_text("".join(lines), encoding="utf-8")
    settings = {"data_path": folder / "pretrain.jsonl"} | places | SMALL
    words = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, str(ROOT / "trainer/train_pretrain.py"), *words, *flags]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} if ranks > 1 else {}
        with open(folder / f"rank_{rank}.log", "wb") as log:
            environment = os.environ | (place if ranks > 1 else {}) | own
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    try:
        if not wait(lambda: any(folder.glob("save/*.jsonl")) and has_updates(folder), started):
            raise Failed(f"the run does not begin; {tail(folder)}")
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def has_updates(folder: Path) -> bool:
    """Whether some updates are logged."""
    return any(path.read_bytes().count(b"\n") > 5 for path in folder.glob("save/*.jsonl"))


def wait(condition: Callable[[], object], processes: list[subprocess.Popen], patience: float = PATIENCE) -> bool:
    """Poll until the condition holds; False if the time is over or a process has ended."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end or any(process.poll() is not None for process in processes):
            return False
        time.sleep(0.1)
    return True


def output(machine: Machine, name: str, rank: int) -> list[str]:
    """The lines that a rank has printed."""
    return (machine.folder / f"{name}_run/rank_{rank}.log").read_text("utf-8", "replace").splitlines()


def tail(folder: Path) -> str:
    """The last line of each rank's output."""
    texts = [path.read_text("utf-8", "replace").strip().splitlines() for path in sorted(folder.glob("rank_*.log"))]
    return " | ".join(lines[-1] for lines in texts if lines)


def killed_rank(machine: Machine) -> dict[str, Any]:
    """When a rank is killed, each other one ends soon, with status 2 and one line."""
    ranks, name = ranks_of(machine), "killed_rank"
    with running(machine, name, ranks) as started:
        started[-1].kill()
        begin, others = time.monotonic(), started[:-1]
        wait(lambda: all(process.poll() is not None for process in others), [])
        seconds = round(time.monotonic() - begin, 1)
    figures: dict[str, Any] = {"ranks": ranks, "seconds to notice": seconds}
    for rank, process in enumerate(others):
        lines = [line for line in output(machine, name, rank) if line.startswith("error: ")]
        figures["line"] = lines[0] if lines else ""
        if process.returncode != 2 or len(lines) != 1 or "another rank ended" not in lines[0]:
            last = (output(machine, name, rank) or [""])[-1]
            raise Failed(f"rank {rank} ended with status {process.returncode} and {len(lines)} lines; {last}", figures)
    return figures


def sigterm(machine: Machine) -> dict[str, Any]:
    """SIGTERM to one rank has all of them save at the same update and leave."""
    ranks, name = 1 if machine.gpus == 1 else ranks_of(machine), "sigterm"
    with running(machine, name, ranks) as started:
        started[-1].send_signal(signal.SIGTERM)
        wait(lambda: all(process.poll() is not None for process in started), [])
        statuses = [process.poll() for process in started]
    lines = [line for line in output(machine, name, 0) if line.startswith("stopped: ")]
    figures = {"ranks": ranks, "line": lines[0] if lines else ""}
    if statuses != [128 + signal.SIGTERM] * ranks or "which is saved" not in figures["line"]:
        raise Failed(f"the ranks ended with status {statuses}; {tail(machine.folder / f'{name}_run')}", figures)
    return figures
