"""A run that is started, watched from outside and ended in one of several ways; used by verify_resume.py."""

import importlib
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Any

import psutil

from common.arguments import parse_args as parse_stage_args
from trainer.objectives.lora import WEIGHTS as ADAPTER
from trainer.report.metrics import complete_lines, log_record
from trainer.run.checkpoint import UNREADABLE, previous_path, read_state
from trainer.run.paths import metrics_path, resume_path, run_name, weight_path

# A small run with many epochs, incomplete accumulation windows, saves and evaluations, and with dropout.
SMALL = {"from_weight": "none", "hidden_size": 64, "num_hidden_layers": 2, "dropout": 0.1, "max_seq_len": 128}
SMALL |= {"epochs": 3, "batch_size": 4, "accumulation_steps": 2, "learning_rate": 1e-3}
SMALL |= {"log_interval": 1, "save_interval": 5, "eval_interval": 9}
ROLLOUTS = {"reward": "length,repetition", "max_gen_len": 16}
GROUPS = ROLLOUTS | {"num_generations": 4}
AFTER_SFT = {"dpo": {}, "lora": {"lora_dropout": 0.1}, "distillation": {}}
AFTER_SFT |= {"grpo": GROUPS, "agent": GROUPS | {"environment": "calculator", "max_seq_len": 512}}
AFTER_SFT |= {"ppo": ROLLOUTS | {"num_iterations": 3, "early_stop_kl": 0.002}}  # some passes are not made
STAGES = ("pretrain", "sft", *AFTER_SFT)
POLL, TIMEOUT = 0.001, 600.0  # seconds: between polls; without output
GRACE = 60.0  # seconds for a run to save and end


class Run:
    """A run in its own folder: its command and the files that it writes."""

    def __init__(self, stage: str, ranks: int, use_moe: int, folder: Path, name: str, typed: list[str]):
        """folder: for the data and start weights of all runs, and below it, under `name`, this run's own
        files. typed: flags of the stage, which come before those that this script needs."""
        script = importlib.import_module(f"trainer.train_{'full_sft' if stage == 'sft' else stage}")
        self.stage, self.ranks, self.folder, self.launches = stage, ranks, folder / name, 0
        self.start, self.teacher = folder / "start.pth", folder / "teacher.pth"  # of the stages after SFT
        flags = {"data_path": folder / f"{stage}.jsonl", "eval_data_path": folder / f"{stage}_eval.jsonl"}
        flags |= SMALL
        if stage in AFTER_SFT:
            flags |= {"from_weight": self.start} | AFTER_SFT[stage]
        if stage == "distillation":
            flags["from_teacher_weight"] = self.teacher
        own = {f"{place}_dir": self.folder / place for place in ("save", "checkpoint", "cache")}
        own |= {"use_moe": use_moe, "from_resume": int(name == "killed")}
        words = [*words_of(flags), *typed, *words_of(own)]
        self.args = args = parse_stage_args(script.Args, script.__doc__, words)
        self.command = [sys.executable]
        if ranks > 1:
            self.command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        self.command += [str(script.__file__), *words]
        self.weights = weight_path(args.save_dir, args.save_weight, args)
        self.best_weights = weight_path(args.save_dir, f"{args.save_weight}_best", args)
        if stage == "lora":
            self.weights = self.weights.with_suffix("") / ADAPTER
            self.best_weights = self.best_weights.with_suffix("") / ADAPTER
        self.metrics = metrics_path(args.save_dir, run_name(args.save_weight, args))
        self.checkpoint = resume_path(args.checkpoint_dir, args.save_weight, args)

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

    def unfinished_caches(self) -> set[str]:
        """The names of token caches that are being built, or that a killed launch left behind."""
        return {path.name for path in Path(self.args.cache_dir).glob("*.tmp")}


def words_of(flags: dict[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def stamp(path: Path) -> tuple | None:
    """A value that changes whenever the file is written or replaced; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class Launch:
    """One start of a run, observed from outside.

    Args:
        way: how it will be ended. `all`: SIGKILL to all its processes at once; `signal`: SIGTERM, after which
            it saves and ends; `launcher`: SIGKILL to torchrun alone; `rank`: SIGKILL to one rank, after which
            torchrun starts all of them anew.
    """

    def __init__(self, run: Run, way: str = "all"):
        run.launches += 1
        self.run, self.way, self.log = run, way, run.folder / f"launch_{run.launches}.log"
        self.saved, self.caches = run.saved_update(), run.unfinished_caches()
        self.metrics = stamp(run.metrics)
        self.begin = time.monotonic()
        command = list(run.command)
        if way == "rank":
            command.insert(command.index("--standalone"), "--max-restarts=1")
        with open(self.log, "wb") as out:
            options = {"stdin": DEVNULL, "stdout": out, "stderr": STDOUT, "start_new_session": True}
            self.process = psutil.Popen(command, **options)
        self.processes: list[psutil.Process] = [self.process]

    def training(self) -> bool:
        """Whether it has opened its metrics file, the last thing before the first update."""
        return stamp(self.run.metrics) not in (None, self.metrics)

    def wait(self, condition: Callable[[], object] = lambda: False, seconds: float = inf) -> bool:
        """Poll until the condition holds or the time is over; False if the process ends first."""
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            if self.process.poll() is not None:
                return False
            written = (path.stat().st_mtime for path in (self.log, self.run.metrics) if path.exists())
            if time.time() - max(written) > TIMEOUT:
                sys.exit(f"FAIL: no output for {TIMEOUT:.0f} s; {self.tail()}")
            time.sleep(POLL)
        return True

    def find_processes(self) -> None:
        """List its processes; done early, it makes a kill faster."""
        with suppress(psutil.NoSuchProcess):
            self.processes = [self.process, *self.process.children(recursive=True)]

    def end(self) -> None:
        """End it in its way; `close` sends SIGKILL to whatever is still there. FAIL if a process that could
        save and end is left after GRACE."""
        self.find_processes()
        if self.way == "rank":  # wait until the ranks that torchrun starts in their place train
            begun = len(self.resumed_from())
            with suppress(psutil.NoSuchProcess, IndexError):
                self.process.children()[-1].kill()
            self.wait(lambda: len(self.resumed_from()) > begun)
        elif self.way != "all":
            self.process.send_signal(signal.SIGTERM if self.way == "signal" else signal.SIGKILL)
            _, left = psutil.wait_procs(self.processes, timeout=GRACE)
            left = [
                process
                for process in left
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            ]
            if left:
                ended = "a SIGTERM" if self.way == "signal" else "the launcher was killed"
                sys.exit(f"FAIL: {len(left)} processes are left {GRACE:.0f} s after {ended}; {self.tail()}")

    def resumed_from(self) -> list[str]:
        """Where its ranks began, for each start of theirs: an update, or "" for the beginning."""
        begun = r"^resuming .*\bupdate (\d+)|^new run: "
        return re.findall(begun, self.log.read_text("utf-8", "replace"), re.M)

    def close(self) -> None:
        """Send SIGKILL to all its processes and wait until they have ended. torchrun's ranks have their own
        sessions, and a process may be starting another one: so all are suspended first, until there are no
        new ones."""
        suspended: list[psutil.Process] = []
        new = self.processes
        while new:
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            suspended += new
            self.find_processes()
            new = [process for process in self.processes if process not in suspended]
        for process in suspended:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                while process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
                    time.sleep(POLL)
        self.process.wait()
        self.seconds = time.monotonic() - self.begin

    def tail(self) -> str:
        """The last lines that it printed, without torchrun's report on a failed rank."""
        text = self.log.read_text("utf-8", "replace")
        lines = re.split(r".*torch/distributed/elastic", text)[0].splitlines()[-15:]
        return f"the last lines of {self.log}:\n" + "\n".join(f"    {line}" for line in lines)

    def result(self, killed: bool) -> str:
        """A description of this launch. FAIL if it ended in another way, or did not resume from the
        checkpoint."""
        status, resumed = self.process.returncode, self.resumed_from()[:1]
        if not killed:
            is_expected = status == 0
        elif self.way == "signal":
            is_expected = status != 0
        else:
            is_expected = status == -signal.SIGKILL
        if not is_expected:
            sys.exit(f"FAIL: a launch ended by itself with status {status}; {self.tail()}")
        saved = "" if self.saved is None else str(self.saved)
        if self.training() and (resumed or [""]) != [saved]:
            begin = resumed or ["the start"]
            sys.exit(
                f"FAIL: checkpoint of update {self.saved}, but the run resumed from {begin}; {self.tail()}"
            )
        where = f"at update {self.run.last_update()}" if self.training() else "before training"
        origin = "from the start" if self.saved is None else f"resumed from update {self.saved}"
        return f"{where} after {self.seconds:.1f} s, {origin}"
