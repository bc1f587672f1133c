"""What the engine needs around the loop: processes, lines for people, speed over time, which checkpoints are kept."""

import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dataset.durable import fcntl
from dataset.errors import UserError
from llm.training.core.config import Config
from trainer.checkpoint import resume_path
from trainer.files import forms, remove
from trainer.loop import leave_group
from trainer.resume import Contract, find_checkpoint
from trainer.state import TrainState
from trainer.trainer_utils import init_distributed_mode, is_main_process, reduce_sum, world_size


class DistributedManager:
    """The processes of a run: those that torchrun started, or those that the engine spawns.

    Args:
        config: its `distributed` section says how many processes are wanted and where they meet.
    """

    def __init__(self, config: Config):
        self.config = config.distributed
        self.launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # by torchrun

    def get_world_size(self) -> int:
        """Processes of the run: torchrun's, the wanted number, or one per visible GPU, or 1."""
        if self.launched:
            return int(os.environ["WORLD_SIZE"])
        on_gpu = self.config.device in ("auto", "cuda")
        return self.config.world_size or (max(1, torch.cuda.device_count()) if on_gpu else 1)

    def address(self) -> dict[str, str]:
        """Where spawned processes meet, as the environment variables that torch reads."""
        port = self.config.master_port
        if port == 0:
            with socket.socket() as probe:
                probe.bind((self.config.master_addr, 0))
                port = probe.getsockname()[1]
        return {"MASTER_ADDR": self.config.master_addr, "MASTER_PORT": str(port)}

    def once(self, work: Callable[[], None]) -> None:
        """Run `work` in one process of this machine while the others wait, for as long as it takes: there is no process
        group yet whose collectives could time out. Fails in all of them if it fails."""
        if not self.launched or fcntl is None:
            work()
            return
        parent = psutil.Process(os.getppid())  # torchrun, or whatever started the ranks
        mark = Path(tempfile.gettempdir()) / f"minimind-{parent.pid}-{parent.create_time():.0f}-{os.getuid()}.prepared"
        with open(mark, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not file.read():
                work()
                file.write("done")

    def setup(self) -> int:
        """Join the process group that the environment describes; returns the local rank."""
        return init_distributed_mode(self.config.rank_timeout)

    def cleanup(self, state: TrainState | None = None) -> None:
        """Leave the group, all ranks together."""
        if state is not None:
            leave_group(state)

    def reduce_mean(self, value: float) -> float:
        """Mean over all ranks."""
        return float(reduce_sum(torch.tensor(value, dtype=torch.float64)) / world_size())

    def barrier(self) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return is_main_process()


class Logger:
    """Lines for people, on rank 0: on the console and, if wanted, in a file.

    Args:
        path: the file, to which lines are added.
    """

    def __init__(self, path: str | None = None):
        self.path = Path(path) if path else None

    def info(self, text: str) -> None:
        """One line.

        Raises:
            UserError: the file cannot be written.
        """
        if not is_main_process():
            return
        print(text, flush=True)
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError as error:
            raise UserError(f"--log_file {self.path} cannot be written ({error.strerror}); give another") from error


class PerformanceMonitor:
    """Speed of this process's part of a run, from the log records: seconds per update, tokens/s, MFU, memory."""

    def __init__(self):
        self.records: list[dict[str, Any]] = []

    def update(self, record: dict[str, Any]) -> None:
        """Take in a record; the first ones, in which a machine warms up, count less as more follow."""
        self.records.append(
            {key: record[key] for key in ("update", "tokens_per_second", "mfu", "memory_mb", "seconds")}
        )

    def summary(self) -> dict[str, float]:
        """Seconds per update (saving and evaluating included), means of tokens/s and MFU, largest memory in MB."""
        if not self.records:
            return {}
        first, last = self.records[0], self.records[-1]
        updates = last["update"] - first["update"]
        mean = {key: sum(r[key] for r in self.records) / len(self.records) for key in ("tokens_per_second", "mfu")}
        batch_time = (last["seconds"] - first["seconds"]) / updates if updates else last["seconds"] / last["update"]
        return {"batch_time": batch_time, **mean, "memory_mb": last["memory_mb"]}


class CheckpointManager:
    """Which states of a run are kept, beside the one to resume from: every N updates the last K, and the best.

    Files: `<run>_update_<number>.pth` and `<run>_best_resume.pth` in --checkpoint_dir, each the very file that was
    written to resume from (a second name for it, not a second format). Copied over `<run>_resume.pth` it is resumed.
    """

    def __init__(self, config: Config, run_name: str):
        self.keep_every, self.keep_last = config.checkpoint.keep_every, config.checkpoint.keep_last
        self.folder, self.run_name = Path(config.checkpoint.checkpoint_dir), run_name
        self.best_update: int | None = None

    def load_checkpoint(self, args: Any, run: Contract) -> dict[str, Any] | None:
        """The state that --from_resume 1 goes on from (trainer/resume.py)."""
        return find_checkpoint(args, args, run)

    def is_due(self, update: int) -> bool:
        """Whether this update's state is one of those to keep."""
        return self.keep_every > 0 and update % self.keep_every == 0

    def saved(self, state: TrainState) -> None:
        """Keep the state that was just handed to the writer, if it is due, and prune."""
        if self.is_due(state.update) and is_main_process():
            self._keep(state, f"update_{state.update:08d}")
            state.writer.submit(self.prune)

    def best(self, state: TrainState) -> None:
        """The state of this update is the best so far: keep it under a name of its own."""
        self.best_update = state.update
        if is_main_process():
            self._keep(state, "best_resume")

    def _keep(self, state: TrainState, name: str) -> None:
        source = resume_path(self.folder, state.args.save_weight, state.lm_config)
        state.writer.submit(lambda: _second_name(source, self.folder / f"{self.run_name}_{name}.pth"))

    def numbered(self) -> dict[int, Path]:
        """The numbered checkpoints by update, files or folders."""
        pattern = re.compile(re.escape(self.run_name) + r"_update_(\d+)(\.pth)?")
        found = ((pattern.fullmatch(path.name), path) for path in self.folder.glob(f"{self.run_name}_update_*"))
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def prune(self) -> None:
        """Delete numbered checkpoints but the last K, the newest and that of the best update."""
        numbered = self.numbered()
        kept = set(list(numbered)[-max(1, self.keep_last) :]) | {self.best_update}
        for update, path in numbered.items():
            if update not in kept:
                remove(path)

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint saves of it."""
        return {"best_update": self.best_update}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on, after a resume: later states belong to a future that is trained anew."""
        self.best_update = saved.get("best_update")


def _second_name(source: Path, name: Path) -> None:
    """A hard link to a checkpoint that appears whole (for a folder, to each of its files); a copy where the file system
    has none."""
    for form, wanted in zip(forms(source), forms(name), strict=True):
        temp = wanted.with_name(f".{wanted.name}.tmp")
        remove(temp)
        if form.is_file():
            _link(form, temp)
        elif form.is_dir():
            shutil.copytree(form, temp, copy_function=_link)
        if not form.is_file():  # a folder is renamed to a free name only; the other form is of the past
            remove(wanted)
        if form.exists():
            os.replace(temp, wanted)


def _link(source: str | Path, name: str | Path) -> None:
    try:
        os.link(source, name)
    except OSError:
        shutil.copyfile(source, name)
