"""A run that is started, watched from outside and killed; used by verify_resume.py and compare.py."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from common.errors import UserError
from common.settings import StageArgs
from trainer.checkpoint.file import read_checkpoint
from trainer.report.metrics import read_metrics
from trainer.weights.paths import METRICS_SUFFIX

KILL_METHODS = ("SIGKILL to all processes", "SIGTERM", "SIGKILL to torchrun alone")
LAUNCH_VARIABLE = "VERIFY_RESUME_LAUNCH"  # variable by which the processes of a launch are found
POLL_SECONDS = 0.01  # between two checks of a run
GRACE_SECONDS = 60.0  # for a run to save and end


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
        return max((state["update"] for state in self.states()), default=None)

    def saved_seconds(self) -> float:
        """The seconds of training until that update; 0 without one, or if older code did not count them."""
        return max((state.get("seconds", 0.0) for state in self.states()), default=0.0)

    def states(self) -> Iterator[dict[str, Any]]:
        """Its checkpoints: the newest, the one before, the best."""
        return map(read_checkpoint, self.folder.glob("checkpoint/*_resume*.pth"))

    def last_update(self) -> int:
        """The update of the last record in the metrics file; 0 before the first record."""
        (metrics,) = self.folder.glob(f"save/*{METRICS_SUFFIX}")
        records = read_metrics(metrics)
        return records[-1]["update"] if records else 0

    def metrics_time(self) -> list[int]:
        """When the metrics file was last written; empty without a file."""
        return [path.stat().st_mtime_ns for path in self.folder.glob(f"save/*{METRICS_SUFFIX}")]


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
        self.begin, self.known_processes = time.monotonic(), set[psutil.Process]()
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                run.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {LAUNCH_VARIABLE: str(self.log)},
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
            time.sleep(POLL_SECONDS)

    def ends_within(self, seconds: float | None) -> bool:
        """Whether it ends by itself in this time; None: wait for it. FAIL if it ends with an error."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        if self.process.returncode:
            self.fail(f"a launch ended by itself with status {self.process.returncode}")
        return self.process.returncode is not None

    def processes(self) -> set[psutil.Process]:
        """Its running processes, also those whose parent has ended."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or is somebody else's
                if process.environ().get(LAUNCH_VARIABLE) == str(self.log):
                    self.known_processes.add(process)
        # one that is about to end has no environment any more, but still holds its files and locks
        self.known_processes = {process for process in self.known_processes if is_alive(process)}
        return self.known_processes

    def kill(self, method: str) -> None:
        """Kill it by one of KILL_METHODS. FAIL if a process is left GRACE_SECONDS after SIGTERM or the
        kill of torchrun."""
        if method != "SIGKILL to all processes":
            self.process.send_signal(signal.SIGTERM if method == "SIGTERM" else signal.SIGKILL)
            end = time.monotonic() + GRACE_SECONDS
            while self.processes():
                if time.monotonic() > end:
                    self.fail(f"processes are left {GRACE_SECONDS:.0f} s after {method}")
                time.sleep(POLL_SECONDS)
        self.close()

    def check_begin(self) -> str:
        """Where it began, as text. FAIL if not at the checkpoint before it: a run from the start would end
        with the same bits, too."""
        if self.saved is None:
            return "from the start"
        begin = re.search(r"^resuming .*\bupdate (\d+)", self.log.read_text("utf-8", "replace"), re.M)
        if self.is_training() and (begin is None or int(begin[1]) != self.saved):
            where = f"at update {begin[1]}" if begin else "anew"
            self.fail(f"there was a checkpoint of update {self.saved}, but the run began {where}")
        return f"resumed from update {self.saved}"

    def fail(self, what: str) -> NoReturn:
        """End the script with the last lines of the run. Raises UserError if a run without a checkpoint
        ended with an error line: a mistake in the flags."""
        lines = self.log.read_text("utf-8", "replace").splitlines()
        refusals = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if refusals and self.saved is None:
            raise UserError(refusals[0])
        sys.exit("\n    ".join([f"FAIL: {what}; the last lines of {self.log}:", *lines[-15:]]))


def finish(run: Run) -> dict[str, float]:
    """Start a run, or resume it, and wait for its end. A launch of it that is left from a starter that was
    killed is ended first.

    Returns:
        `wall_seconds` of the launch, with those of the training that earlier launches did and saved; and
        `cpu_per_update`: CPU seconds of training with its evaluations, per update; without an update the
        second is left out.

    Raises:
        UserError: the run ends with an error, whose line this is.
    """
    log = str(run.folder / "launch_1.log")
    while left := [process for process in psutil.process_iter() if belongs_to(process, log)]:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_SECONDS)
    run.launches, before, earlier = 0, child_cpu_seconds(), run.saved_seconds()
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
        times = {"wall_seconds": earlier + launch.seconds()}
        updates = run.last_update() - (launch.saved or 0)
    if updates:
        times["cpu_per_update"] = (child_cpu_seconds() - before - start) / updates
    return times


def belongs_to(process: psutil.Process, log: str) -> bool:
    """Whether a process runs for the launch with this log."""
    with suppress(psutil.Error):  # it has ended, or is somebody else's
        return process.environ().get(LAUNCH_VARIABLE) == log and is_alive(process)
    return False


def child_cpu_seconds() -> float:
    """CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
