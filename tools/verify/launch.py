"""A run that is started, watched from outside and ended in one of several ways; used by verify_resume.py."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import psutil

from common.arguments import parse_args as parse_stage_args
from trainer.objectives.lora import WEIGHTS as ADAPTER
from trainer.report.metrics import complete_lines, log_record
from trainer.run.checkpoint import UNREADABLE, previous_path, read_state
from trainer.run.paths import metrics_path, resume_path, run_name, weight_path
from trainer.trainer_utils import read_start_weights

# a small run with several epochs, incomplete accumulation windows, saves and evaluations, and with dropout
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2}
SMALL = {"from_weight": "none", "dropout": 0.1, "max_seq_len": 128, "epochs": 3, "batch_size": 4}
SMALL |= {"accumulation_steps": 2, "learning_rate": 1e-3}
SMALL |= {"log_interval": 1, "save_interval": 5, "eval_interval": 9}
ROLLOUTS = {"reward": "length,repetition", "max_gen_len": 16}
GROUPS = ROLLOUTS | {"num_generations": 4}
AFTER_SFT: dict[str, dict[str, Any]] = {
    "dpo": {},
    "lora": {"lora_dropout": 0.1},
    "distillation": {},
    "grpo": GROUPS,
    "ppo": ROLLOUTS | {"num_iterations": 3, "early_stop_kl": 0.002},  # some passes are not made
    "agent": GROUPS | {"environment": "calculator", "max_seq_len": 512},
}
STAGES = ("pretrain", "sft", *AFTER_SFT)
WAYS = {
    "all": "SIGKILL to all processes",
    "torchrun": "SIGKILL to torchrun alone",
    "rank": "SIGKILL to one rank, which torchrun restarts",
    "term": "SIGTERM",
}
MARK = "VERIFY_RESUME_LAUNCH"  # variable by which the processes of a launch are found
POLL = 0.01  # seconds between two looks at a run
TIMEOUT = 600.0  # seconds without output
GRACE = 60.0  # seconds for a run to save and end


class Run:
    """A run in its own folder: its command and the files that it writes.

    Args:
        folder: for the data and start weights of all runs, and below it, under `name`, this run's own files.
        typed: flags of the stage, which come before those that this script needs.
    """

    def __init__(self, stage: str, ranks: int, use_moe: int, folder: Path, name: str, typed: list[str]):
        script = importlib.import_module(f"trainer.train_{'full_sft' if stage == 'sft' else stage}")
        self.stage, self.ranks, self.folder, self.launches = stage, ranks, folder / name, 0
        self.start, self.teacher = folder / "start.pth", folder / "teacher.pth"
        names = {word.partition("=")[0] for word in typed}
        own = {f"{place}_dir": self.folder / place for place in ("save", "checkpoint", "cache")}
        own |= {"use_moe": use_moe, "from_resume": int(name == "killed")}
        words = [*words_of(self.built_in_flags(names)), *typed, *words_of(own)]
        args = parse_stage_args(script.Args, script.__doc__, words)
        if "--from_weight" in names and args.from_weight != "none":
            args, _ = read_start_weights(args)
        self.args = args
        self.command = [sys.executable]
        if ranks > 1:
            self.command += ["-m", "torch.distributed.run", "--standalone"]
            self.command += ["--max-restarts=1", f"--nproc_per_node={ranks}"]
        self.command += [str(script.__file__), *words]
        self.weights = weight_path(args.save_dir, args.save_weight, args)
        self.best_weights = weight_path(args.save_dir, f"{args.save_weight}_best", args)
        if stage == "lora":
            self.weights = self.weights.with_suffix("") / ADAPTER
            self.best_weights = self.best_weights.with_suffix("") / ADAPTER
        self.metrics = metrics_path(args.save_dir, run_name(args.save_weight, args))
        self.checkpoint = resume_path(args.checkpoint_dir, args.save_weight, args)

    def built_in_flags(self, names: set[str]) -> dict[str, Any]:
        """The flags of a small run on the built-in data, before the user's own flags of these names."""
        if "--config" in names:
            return {}
        flags: dict[str, Any] = {"data_path": self.start.with_name(f"{self.stage}.jsonl")}
        if not names & {"--eval_share", "--eval_data_path"}:
            flags["eval_data_path"] = self.start.with_name(f"{self.stage}_eval.jsonl")
        flags |= SMALL
        if "--from_weight" not in names:
            flags |= SHAPE
        if self.stage in AFTER_SFT:
            flags |= {"from_weight": self.start} | AFTER_SFT[self.stage]
        if self.stage == "distillation":
            flags["from_teacher_weight"] = self.teacher
        return flags

    def saved_update(self) -> int | None:
        """The update at which a resumed run must continue; None if there is no checkpoint."""
        for path in (self.checkpoint, previous_path(self.checkpoint)):
            with suppress(*UNREADABLE):
                return read_state(path)["update"]
        return None

    def last_update(self) -> int:
        """The update of the last record in the metrics file; 0 if there is none."""
        last = log_record(b"".join(complete_lines(self.metrics)[-1:]))
        return last["update"] if last else 0


def words_of(flags: dict[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def stamp(path: Path) -> tuple | None:
    """A value that changes whenever the file is written or replaced; None if there is no file."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size
    return None


class Launch:
    """One start of a run, observed from outside."""

    def __init__(self, run: Run):
        run.launches += 1
        self.run, self.log = run, run.folder / f"launch_{run.launches}.log"
        self.saved, self.metrics = run.saved_update(), stamp(run.metrics)
        self.mark, self.begin = str(self.log), time.monotonic()
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                run.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {MARK: self.mark},
            )

    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.begin

    def is_training(self) -> bool:
        """Whether it has opened its metrics file, the last thing before the first update."""
        return stamp(self.run.metrics) not in (None, self.metrics)

    def wait(self, condition: Callable[[], object] = lambda: False, seconds: float = inf) -> bool:
        """Poll until the condition holds or the time is over; False if the process ends first."""
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            if self.process.poll() is not None:
                return False
            written = [path.stat().st_mtime for path in (self.log, self.run.metrics) if path.exists()]
            if time.time() - max(written) > TIMEOUT:
                self.fail(f"no output for {TIMEOUT:.0f} s")
            time.sleep(POLL)
        return True

    def processes(self) -> list[psutil.Process]:
        """Those of its processes that run, also without their parent."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or is somebody else's
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def end(self, way: str) -> None:
        """End it in one of WAYS; no process of it is left afterwards. FAIL if one that could save and end is
        still there after GRACE."""
        if way == "rank":
            self.kill_rank()
        elif way != "all":
            self.process.send_signal(signal.SIGTERM if way == "term" else signal.SIGKILL)
            last = time.monotonic() + GRACE
            while self.processes():
                if time.monotonic() > last:
                    self.fail(f"processes are left {GRACE:.0f} s after {WAYS[way]}")
                time.sleep(POLL)
        self.close()

    def kill_rank(self) -> None:
        """Kill a rank, and wait until the ranks that torchrun starts in their place have begun."""
        begun = len(self.begins())
        ranks = psutil.Process(self.process.pid).children()
        if ranks:
            ranks[-1].kill()
            self.wait(lambda: len(self.begins()) > begun)

    def close(self) -> None:
        """SIGKILL to all its processes, until none is left."""
        while left := self.processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def begins(self) -> list[str]:
        """Where its ranks began, for each start of theirs: an update, or "" for the beginning."""
        text = self.log.read_text("utf-8", "replace")
        return re.findall(r"^resuming .*\bupdate (\d+)|^new run: ", text, re.M)

    def check_begin(self) -> str:
        """Where it began, as text. FAIL if not at the checkpoint that there was."""
        begin = (self.begins() or [""])[0]
        if self.saved is None:
            return "from the start"
        if self.is_training() and begin != str(self.saved):
            where = f"at update {begin}" if begin else "anew"
            self.fail(f"there was a checkpoint of update {self.saved}, but the run began {where}")
        return f"resumed from update {self.saved}"

    def fail(self, what: str) -> None:
        """End the script with the last lines that the run printed, without torchrun's report on a rank."""
        text = re.split(r".*torch/distributed/elastic", self.log.read_text("utf-8", "replace"))[0]
        lines = "".join(f"\n    {line}" for line in text.splitlines()[-15:])
        sys.exit(f"FAIL: {what}; the last lines of {self.log}:{lines}")
