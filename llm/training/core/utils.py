"""The parts of the engine around the loop: processes, console output, speed, and kept checkpoints."""

import math
import sys
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

from common.command_line import log_to
from common.errors import log, say, warn
from common.launcher import launch
from llm.training.core.callbacks import MetricsLogger
from llm.training.core.config import Config
from trainer.callbacks.train_state import TrainState
from trainer.checkpoint.run import save_checkpoint
from trainer.devices.device import select_device
from trainer.devices.process_group import leave_process_group, reduce_sum, world_size
from trainer.devices.wrapping import unwrap
from trainer.trainer_utils import init_distributed_mode, is_main_process
from trainer.weights.paths import log_path, run_name


class DistributedManager:
    """The processes of a run, started by torchrun or spawned by `train.py`.

    Args:
        config: its `distributed` section says how many processes to start and where they meet.
    """

    def __init__(self, config: Config):
        self.config = config.distributed
        self.launched = launch().world_size > 1 or dist.is_torchelastic_launched()

    def get_world_size(self) -> int:
        """Number of processes: torchrun's, --world_size, one per visible GPU, or 1."""
        if self.launched:
            return launch().world_size
        if self.config.world_size:
            return self.config.world_size
        if self.config.device in ("auto", "cuda"):
            return max(1, torch.cuda.device_count())
        return 1

    def setup(self) -> int:
        """Join the process group described by the environment; returns the local rank."""
        return init_distributed_mode(self.config.rank_timeout, select_device(self.config.device))

    def cleanup(self, state: TrainState | None = None) -> None:
        """Destroy the process group, in a `finally`: on all ranks together, or on this one if an exception
        ends it. DDP must be freed first, so the model is unwrapped."""
        if state is not None:
            state.model = unwrap(state.model)
        leave_process_group(sys.exc_info()[1])

    def reduce_mean(self, value: float) -> float:
        """Mean of a number over all ranks."""
        return float(reduce_sum(torch.tensor(value, dtype=torch.float64)) / world_size())


class Logger:
    """Prints messages of a level, on rank 0. From its creation on, lines below the level are hidden, and all
    other lines of the run are also appended to a log file, if one is given.

    Args:
        path: the log file.
        level: least severe lines that are shown: debug, info, warning or error.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str | Path | None = None, level: str = "info"):
        self.path, self.level = Path(path) if path is not None else None, level
        log_to(self.path, level)

    @classmethod
    def of(cls, config: Config) -> "Logger":
        """The logger that the settings describe."""
        name = run_name(config.checkpoint.save_weight, config.model)
        return cls(log_path(config.logging, name), config.logging.log_level)

    def debug(self, text: str) -> None:
        """Print `debug: ...` lines."""
        if is_main_process():
            for line in text.splitlines():
                log.debug(f"debug: {line}")

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
            log.error(f"error: {text}")


class CheckpointManager:
    """The checkpoints of a run. The loop writes them by itself, and keeps the previous one, the numbered ones
    and the best one (`save_checkpoint` in trainer/checkpoint/run.py)."""

    def __init__(self):
        self.state: TrainState | None = None  # of the engine, once it is set up

    def save_checkpoint(self) -> None:
        """Write the state of the last update and wait until it is on the disk. All ranks must call it. A
        callback may call it in `on_batch_end`."""
        assert self.state is not None
        save_checkpoint(self.state)
        self.state.writer.wait()


class PerformanceMonitor(MetricsLogger):
    """Speed and memory of this process's part of a run, from the log records."""

    def summary(self) -> dict[str, float]:
        """Seconds per update (with saving and evaluating), the last mean loss (NaN: not finite), mean
        tokens/s and MFU (0: not known), peak memory in MB; empty if there are no records."""
        if not self.records:
            return {}
        first, last = self.records[0], self.records[-1]
        updates, seconds = last["update"] - first["update"], last["seconds"] - first["seconds"]
        if updates == 0:
            updates, seconds = last["update"], last["seconds"]
        return {
            "batch_time": seconds / updates,
            "loss": math.nan if last["mean_loss"] is None else last["mean_loss"],
            "tokens_per_second": fmean(record["tokens_per_second"] for record in self.records),
            "mfu": fmean(record["mfu"] or 0.0 for record in self.records),
            "memory_mb": last["memory_mb"],
        }
