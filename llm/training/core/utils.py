"""What the engine needs around the loop: processes, console output, speed, and the checkpoints that are kept."""

import fcntl
import glob
import math
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from common.durable_files import link, remove, sync_folder
from common.errors import UserError, reason, say, warn
from common.launcher import launch
from llm.training.core.config import Config
from llm.training.core.console import LEVELS, copy_console
from trainer.components.checkpoint import UNREADABLE, lm_checkpoint, read_state, state_paths
from trainer.components.device import select_device
from trainer.components.distributed import abandon_process_group, reduce_sum, world_size
from trainer.components.parallel import unwrap
from trainer.components.run_files import is_state, resume_path, run_name
from trainer.components.saving import save_checkpoint
from trainer.components.state import TrainState
from trainer.trainer_utils import init_distributed_mode, is_main_process, leave_process_group


class DistributedManager:
    """The processes of a run, started by torchrun or spawned by `train.py`.

    Args:
        config: its `distributed` section says how many processes to start and where they meet.
    """

    def __init__(self, config: Config):
        self.config = config.distributed
        self.launched = launch().world_size > 1 or dist.is_torchelastic_launched()

    def get_world_size(self) -> int:
        """Number of processes: that of torchrun, or --world_size, or one per visible GPU, or 1."""
        if self.launched:
            return launch().world_size
        on_gpu = self.config.device in ("auto", "cuda")
        return self.config.world_size or (max(1, torch.cuda.device_count()) if on_gpu else 1)

    def address(self) -> dict[str, str]:
        """Where spawned processes meet, as the environment variables that torch reads."""
        host, port = self.config.master_addr, self.config.master_port
        if port == 0:
            with socket.socket() as probe:
                probe.bind((host, 0))
                port = probe.getsockname()[1]
        return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}

    def once(self, work: Callable[[], None]) -> None:
        """Run `work` in one process per machine while the others wait for it, without a timeout: there is no process
        group yet. If it fails, the next process tries again."""
        if not self.launched:
            work()
            return
        _remove_old_marks()
        with open(_mark(os.getppid()), "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not file.read():
                work()
                file.write("done")

    def setup(self) -> int:
        """Join the process group described by the environment; returns the local rank."""
        local_rank = init_distributed_mode(self.config.rank_timeout, select_device(self.config.device))
        if self.launched:
            _mark(os.getppid()).unlink(missing_ok=True)  # all ranks are here, so none will ask for it
        return local_rank

    def cleanup(self, state: TrainState | None = None) -> None:
        """Destroy the process group; for a `finally`. DDP must be freed before it, so the model is unwrapped.

        All ranks together; but while an exception is passed on, other ranks may be gone (`abandon_process_group`).
        """
        error = sys.exc_info()[1]
        if state is not None:
            state.model = unwrap(state.model)
        try:
            if error is None:
                leave_process_group()
        finally:
            abandon_process_group(error or sys.exc_info()[1])

    def reduce_mean(self, value: float) -> float:
        """Mean of a number over all ranks."""
        return float(reduce_sum(torch.tensor(value, dtype=torch.float64)) / world_size())


def _mark(launcher: int) -> Path:
    """The file that says what the processes of a launcher (its process id) have done once."""
    begin = psutil.Process(launcher).create_time()
    return Path(tempfile.gettempdir()) / f"minimind-{launcher}-{begin:.0f}-{os.getuid()}.prepared"


def _remove_old_marks() -> None:
    """Remove the marks of launchers that are gone: their runs were killed before all ranks had met."""
    for path in Path(tempfile.gettempdir()).glob(f"minimind-*-{os.getuid()}.prepared"):
        try:
            is_old = _mark(int(path.name.split("-")[1])) != path  # another process has its number
        except psutil.NoSuchProcess:
            is_old = True
        if is_old:
            path.unlink(missing_ok=True)


class Logger:
    """Prints messages of a level, on rank 0. From its creation on, lines of the console below the level are hidden, and
    all others, whoever prints them, are also appended to a log file, if one is given.

    Args:
        path: the log file.
        level: least severe lines that are shown: debug, info, warning or error.
        directory: folder of the log file if no `path` is given; the file is then `<name>.log`.
        name: of the run.

    Raises:
        UserError: there is no such level, or the file cannot be written.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        level: str = "info",
        directory: str | Path | None = None,
        name: str = "training",
    ):
        if level not in LEVELS:
            raise UserError(f"Logger: level {level!r} must be one of {', '.join(LEVELS)}")
        if path is None and directory is not None:
            path = Path(directory) / f"{name}.log"
        self.path, self.level = Path(path) if path is not None else None, level
        self.file = copy_console(self.path, level)

    @classmethod
    def of(cls, config: Config) -> "Logger":
        """The logger that the settings describe."""
        logging, run = config.logging, run_name(config.checkpoint.save_weight, config.model)
        return cls(logging.log_file, logging.log_level, logging.log_dir, run)

    def debug(self, text: str) -> None:
        """Print `debug: ...` lines."""
        if self.level == "debug" and is_main_process():
            say("\n".join(f"debug: {line}" for line in text.splitlines()))

    def info(self, text: str) -> None:
        """Print a line."""
        if is_main_process():
            say(text)

    def warning(self, text: str) -> None:
        """Print a `warning: ...` line on stderr."""
        if is_main_process():
            warn(text)

    def error(self, text: str) -> None:
        """Print an `error: ...` line on stderr."""
        if is_main_process():
            print(f"error: {text}", file=sys.stderr, flush=True)


class PerformanceMonitor:
    """Speed and memory of this process's part of a run, from the log records."""

    def __init__(self):
        self.records: list[dict[str, Any]] = []

    def update(self, record: dict[str, Any]) -> None:
        """Add a record."""
        names = ("update", "mean_loss", "tokens_per_second", "mfu", "memory_mb", "seconds")
        self.records.append({name: record[name] for name in names})

    def summary(self) -> dict[str, float]:
        """Seconds per update (with saving and evaluating), the last mean loss (NaN: not finite), mean tokens/s and MFU,
        peak memory in MB; empty if there are no records."""
        if not self.records:
            return {}
        first, last = self.records[0], self.records[-1]
        updates = last["update"] - first["update"]
        mean = {key: sum(r[key] for r in self.records) / len(self.records) for key in ("tokens_per_second", "mfu")}
        batch_time = (last["seconds"] - first["seconds"]) / updates if updates else last["seconds"] / last["update"]
        loss = math.nan if last["mean_loss"] is None else last["mean_loss"]
        return {"batch_time": batch_time, "loss": loss, **mean, "memory_mb": last["memory_mb"]}


class CheckpointManager:
    """The checkpoints that are kept besides the latest: every N updates the last K, and the best.

    Files: `<run>_update_<number>.pth` and `<run>_best_resume.pth` in --checkpoint_dir, hard links to the file that was
    written to resume from. --resume_from continues from any of them.
    """

    def __init__(self, config: Config, run_name: str):
        self.keep_every, self.keep_last = config.checkpoint.keep_every, config.checkpoint.keep_last
        self.folder, self.run_name = Path(config.checkpoint.checkpoint_dir), run_name
        self.args = config.to_args()
        self.best_update: int | None = None

    def save_checkpoint(self, state: TrainState) -> None:
        """Write the state of the last update now, as the newest checkpoint; all ranks together. The loop does it at
        --save_interval and at the end of each epoch. A callback should call it in `on_batch_start` or `on_epoch_end`,
        when the update before is complete."""
        save_checkpoint(state)

    def load_checkpoint(self, path: str | Path | None = None) -> dict[str, Any] | None:
        """The checkpoint to continue from: the one at `path` (by default --resume_from), a file or a folder, else with
        --from_resume 1 the newest; None if there is none.

        Raises:
            UserError: there is none at `path`, or it is damaged or something else.
        """
        path = path or self.args.resume_from
        if path is None:
            return (
                lm_checkpoint(self.args, self.args.save_weight, save_dir=self.folder) if self.args.from_resume else None
            )
        try:
            return read_state(Path(path))
        except UNREADABLE as error:
            why = "there is no such file" if not Path(path).exists() else reason(error)
            raise UserError(f"--resume_from {path} is no checkpoint that can be read ({why}); give another") from error

    def is_due(self, update: int) -> bool:
        """Whether to keep the state of this update."""
        return self.keep_every > 0 and update % self.keep_every == 0

    def saved(self, state: TrainState) -> None:
        """The state was just handed to the writer: keep it if due, and delete old ones."""
        if self.is_due(state.update) and is_main_process():
            self._keep(state, f"update_{state.update:08d}")
            state.writer.submit(self.prune)

    def best(self, state: TrainState) -> None:
        """Keep the state of this update as the best so far."""
        self.best_update = state.update
        if is_main_process():
            self._keep(state, "best_resume")

    def _keep(self, state: TrainState, name: str) -> None:
        source = resume_path(self.folder, state.args.save_weight, state.lm_config)
        state.writer.submit(lambda: _link_state(source, self.folder / f"{self.run_name}_{name}.pth"))

    def prune(self) -> None:
        """Delete the numbered checkpoints, files or folders, except for the last K (at least one) and the best."""
        paths = self.folder.glob(f"{glob.escape(self.run_name)}_update_*")
        states = (path for path in paths if is_state(self.run_name, path.name))
        numbered = dict(sorted((int(path.name.removesuffix(".pth").rpartition("_")[2]), path) for path in states))
        kept = {*list(numbered)[-max(1, self.keep_last) :], self.best_update}
        for update in numbered.keys() - kept:
            remove(numbered[update])

    def state_dict(self) -> dict[str, Any]:
        """The update of the best state."""
        return {"best_update": self.best_update}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.best_update = saved.get("best_update")


def _link_state(source: Path, name: Path) -> None:
    """Hard-link a checkpoint (each file, if it is a folder) under another name, atomically; copy where links fail."""
    for form, wanted in zip(state_paths(source), state_paths(name), strict=True):
        temp = wanted.with_name(f".{wanted.name}.tmp")
        remove(temp)
        if form.is_file():
            link(form, temp)
        elif form.is_dir():
            shutil.copytree(form, temp, copy_function=link)
        if not form.is_file():  # a folder can only be renamed to a free name; the other form is outdated
            remove(wanted)
        if form.exists():
            os.replace(temp, wanted)
            remove(temp)  # it is still there if both were links to the same file
    sync_folder(name.parent)
