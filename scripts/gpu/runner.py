"""Runs checks one after another, each in a process of its own with a time limit: a check that fails, crashes or hangs
stops no other one, and a GPU that a check has brought down is fresh for the next."""

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

context = multiprocessing.get_context("forkserver")  # its processes have torch loaded, and CUDA not started
context.set_forkserver_preload(["scripts.gpu.numbers", "scripts.gpu.training_runs"])
MARKS = {"pass": "pass", "fail": "FAIL", "left out": "left out"}


class LeftOut(Exception):
    """Raised by a check that cannot be made here, with the reason."""


class Failed(Exception):
    """Raised by a check whose guarantee does not hold, with the reason and the figures measured."""

    def __init__(self, reason: str, figures: dict[str, Any] | None = None):
        super().__init__(reason)
        self.figures = figures or {}


@dataclass(frozen=True)
class Machine:
    """What a check may use."""

    gpus: int  # that torch sees
    capability: tuple[int, int]  # of the first one; (0, 0) without
    folder: Path  # for files of checks

    @property
    def device(self) -> str:
        """Where a check of one process computes."""
        return "cuda:0" if self.gpus else "cpu"


@dataclass(frozen=True)
class Check:
    """One check: `work` returns figures, and raises Failed or LeftOut with the reason (any exception is a failure)."""

    name: str
    guarantee: str  # what holds if it passes
    work: Callable[[Machine], dict[str, Any]]
    limit: float  # seconds
    gpus: int = 0  # as many are needed; 0: a CPU is enough
    ranks: bool = False  # several processes: two GPUs, or none


@dataclass
class Result:
    """How a check ended."""

    name: str
    guarantee: str
    result: str  # pass, fail or left out
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def obstacle(check: Check, machine: Machine) -> str:
    """Why a check cannot be made on this machine; empty if it can."""
    if check.gpus > machine.gpus:
        return f"needs {check.gpus} GPU{'s' * (check.gpus > 1)}; torch sees {machine.gpus}"
    if check.ranks and machine.gpus == 1:
        return "needs 2 GPUs: several processes cannot share the one that torch sees"
    return ""


def run_check(check: Check, machine: Machine) -> Result:
    """Make one check."""
    result = Result(check.name, check.guarantee, "left out", obstacle(check, machine))
    if result.reason:
        return result
    begin = time.monotonic()
    out, log = (machine.folder / f"{check.name}.{end}" for end in ("json", "log"))
    process = context.Process(target=_work, args=(check, machine, str(out), str(log)), name=check.name)
    process.start()
    process.join(check.limit)
    late = process.exitcode is None
    end_tree(process.pid or 0)
    process.join()
    result.seconds = round(time.monotonic() - begin, 1)
    if late:
        result.result, result.reason = "fail", f"no end within {check.limit:.0f} s; its output is in {log}"
    elif out.exists():
        written = json.loads(out.read_text(encoding="utf-8"))
        result.result, result.reason, result.figures = written["result"], written["reason"], written["figures"]
    else:
        result.result, result.reason = "fail", f"its process ended with status {process.exitcode}; see {log}"
    return result


def _work(check: Check, machine: Machine, out: str, log: str) -> None:
    """In the process of a check."""
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    result, reason, figures = "pass", "", {}
    try:
        figures = check.work(machine)
    except LeftOut as error:
        result, reason = "left out", str(error)
    except Exception as error:
        traceback.print_exc()
        result, reason = "fail", (str(error) or type(error).__name__).strip()
        figures = error.figures if isinstance(error, Failed) else {}
    text = json.dumps({"result": result, "reason": reason, "figures": figures})
    Path(out).write_text(text, encoding="utf-8")
    sys.stdout.flush()


def end_tree(pid: int) -> None:
    """Kill a process and all that it has started; no process with this number is fine."""
    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in tree:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(tree, timeout=10)


def shown(value: Any) -> str:
    """A figure in the table."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:90]


def table_row(result: Result) -> str:
    """A line of the table; the first line of the reason, and the figures."""
    figures = ", ".join(f"{name} {shown(value)}" for name, value in result.figures.items())
    text = "; ".join(part for part in ((result.reason.splitlines() or [""])[0], figures) if part)
    return f"{result.name:27} {MARKS[result.result]:9} {result.seconds:6.1f} s  {text}"


def run_all(checks: Iterable[Check], machine: Machine, show: Callable[[str], None] = print) -> list[Result]:
    """Make the checks in turn and show a row for each."""
    results = []
    for check in checks:
        results.append(run_check(check, machine))
        show(table_row(results[-1]))
    return results
