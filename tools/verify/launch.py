"""A run that is started, watched from outside and killed; used by verify_resume.py and compare.py."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from common.errors import UserError
from common.settings import StageArgs
from trainer.report.metrics import read_metrics
from trainer.weights.checkpoint import read_state

WAYS = ("SIGKILL to all processes", "SIGTERM", "SIGKILL to torchrun alone")
MARK = "VERIFY_RESUME_LAUNCH"  # variable by which the processes of a launch are found
POLL = 0.01  # seconds between two looks at a run
GRACE = 60.0  # seconds for a run to save and end


@dataclass
class Run:
    """A run with its files in the new folder, in `save/` and `checkpoint/`; its settings and its command."""

    folder: Path
    args: StageArgs
    command: list[str]
    launches: int = 0

    def __post_init__(self):
        self.folder.mkdir(parents=True, exist_ok=True)

    def saved_update(self) -> int | None:
        """The update at which a resumed run must continue; None if there is no checkpoint."""
        states = self.folder.glob("checkpoint/*_resume*.pth")  # the newest, the one before, the best
        return max((read_state(path)["update"] for path in states), default=None)

    def last_update(self) -> int:
        """The update of the last record in the metrics file; 0 before the first record."""
        (metrics,) = self.folder.glob("save/*_metrics.jsonl")
        records = read_metrics(metrics)
        return records[-1]["update"] if records else 0

    def metrics_time(self) -> list[int]:
        """When the metrics file was last written; empty without a file."""
        return [path.stat().st_mtime_ns for path in self.folder.glob("save/*_metrics.jsonl")]


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Launch:
    """One start of a run; `close` leaves no process behind."""

    def __init__(self, run: Run):
        run.launches += 1
        self.run, self.log = run, run.folder / f"launch_{run.launches}.log"
        self.saved, self.metrics_time = run.saved_update(), run.metrics_time()
        self.begin, self.seen = time.monotonic(), set[psutil.Process]()
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                run.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {MARK: str(self.log)},
            )

    def close(self) -> None:
        """SIGKILL to all its processes, until none is left."""
        while processes := self.processes():
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.begin

    def is_training(self) -> bool:
        """Whether it has opened its metrics file, the last thing before the first update."""
        return self.run.metrics_time() not in ([], self.metrics_time)

    def wait_for_training(self) -> None:
        """Return when it trains, or has ended."""
        while self.process.poll() is None and not self.is_training():
            time.sleep(POLL)

    def ends_within(self, seconds: float | None) -> bool:
        """Whether it ends by itself in this time; None: wait for it. FAIL if it ends with an error."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        if self.process.returncode:
            self.fail(f"a launch ended by itself with status {self.process.returncode}")
        return self.process.returncode is not None

    def processes(self) -> set[psutil.Process]:
        """Those of its processes that run, also without their parent."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or is somebody else's
                if process.environ().get(MARK) == str(self.log):
                    self.seen.add(process)
        # one that is about to end has no environment any more, but still holds its files and locks
        self.seen = {process for process in self.seen if is_alive(process)}
        return self.seen

    def kill(self, way: str) -> None:
        """Kill it in one of WAYS. FAIL if it was to save and end, and a process is left after GRACE."""
        if way != "SIGKILL to all processes":
            self.process.send_signal(signal.SIGTERM if way == "SIGTERM" else signal.SIGKILL)
            end = time.monotonic() + GRACE
            while self.processes():
                if time.monotonic() > end:
                    self.fail(f"processes are left {GRACE:.0f} s after {way}")
                time.sleep(POLL)
        self.close()

    def check_begin(self) -> str:
        """Where it began, as text. FAIL if not at the checkpoint that there was: it would reach the same
        bits, too."""
        if self.saved is None:
            return "from the start"
        begin = re.search(r"^resuming .*\bupdate (\d+)", self.log.read_text("utf-8", "replace"), re.M)
        if self.is_training() and (begin is None or int(begin[1]) != self.saved):
            where = f"at update {begin[1]}" if begin else "anew"
            self.fail(f"there was a checkpoint of update {self.saved}, but the run began {where}")
        return f"resumed from update {self.saved}"

    def fail(self, what: str) -> NoReturn:
        """End the script with the last lines of the run. What a new run refuses is a mistake of the user."""
        lines = self.log.read_text("utf-8", "replace").splitlines()
        refusals = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if refusals and self.saved is None:
            raise UserError(refusals[0])
        sys.exit("\n    ".join([f"FAIL: {what}; the last lines of {self.log}:", *lines[-15:]]))


def finish(run: Run) -> dict[str, float]:
    """Start a run, or resume it, and wait for its end. A launch of it that is left from a starter that was
    killed is ended first.

    Returns:
        `wall_seconds` of the launch, and `cpu_per_update`: CPU seconds of training with its evaluations, per
        update; without an update the second is left out.

    Raises:
        UserError: the run ends with an error, whose line this is.
    """
    log = str(run.folder / "launch_1.log")
    while left := [process for process in psutil.process_iter() if belongs_to(process, log)]:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL)
    run.launches, before = 0, child_cpu_seconds()
    with closing(Launch(run)) as launch:
        launch.wait_for_training()
        start = 0.0
        with suppress(psutil.Error):  # it had nothing left to train
            start = sum(psutil.Process(launch.process.pid).cpu_times()[:2])
        if launch.process.wait():
            lines = launch.log.read_text("utf-8", "replace").split("\n")
            errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
            what = (errors or [line for line in lines if line.strip()] or ["it was killed"])[-1]
            raise UserError(f"{run.folder.name}: {what} (all of it: {launch.log})")
        times = {"wall_seconds": launch.seconds()}
        updates = run.last_update() - (launch.saved or 0)
    if updates:
        times["cpu_per_update"] = (child_cpu_seconds() - before - start) / updates
    return times


def belongs_to(process: psutil.Process, log: str) -> bool:
    """Whether a process runs for the launch with this log."""
    with suppress(psutil.Error):  # it has ended, or is somebody else's
        return process.environ().get(MARK) == log and is_alive(process)
    return False


def child_cpu_seconds() -> float:
    """CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
