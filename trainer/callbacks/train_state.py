"""The state of a run: its progress, which checkpoints save, and all objects that take part in it."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from common.session import seconds_in, session_seconds
from common.settings import StageArgs
from trainer.callbacks.base import CallbackList
from trainer.devices.errors import StopRequest
from trainer.devices.process_group import Logger
from trainer.objectives.base import Objective
from trainer.report.metrics import MetricsLog
from trainer.report.speed import Meter
from trainer.weights.tensor_file import Writer

Fingerprint = dict[str, Any]  # values that must not change when a run is resumed
# (update from 1, total updates, settings) -> learning rate; None: a scheduler of torch sets it
Schedule = Callable[[int, int, StageArgs], float | None]


@dataclass
class Progress:
    """The progress of a run. A checkpoint saves all of it."""

    run_id: str = ""
    branch_of: str | None = None  # the file in --resume_from that this run began with
    epoch: int = 0
    step: int = 0  # micro-batches of this epoch that each rank has done
    samples_done: int = 0  # of this epoch, over all ranks
    update: int = 0
    tokens: int = 0
    seconds: float = 0.0  # training, evaluating and saving
    finished: bool = False  # no further update, even if it is resumed
    extended_to: int | None = None  # the number of updates to which --extend_epochs 1 extended a finished run
    best_eval: float | None = None  # of `monitored`
    monitored: str | None = None  # the --monitor and --mode of the evaluations so far
    best_update: int | None = None
    bad_updates: int = 0  # in a row, that were skipped
    wandb_id: str | None = None
    # other machines and other code since the run began, and what the results therefore equal
    changes: list[str] = field(default_factory=list)
    # since the last log record
    # (sum, count) of losses and metrics, of the updates whose loss was finite
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    initial: dict[str, float | None] = field(default_factory=dict)  # evaluation before the first update
    overflows: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)


@dataclass(kw_only=True)
class TrainState:
    """A run. Callbacks get it, too."""

    args: StageArgs
    lm_config: Any  # shape of the model, or the settings that say it
    fingerprint: Fingerprint  # what must not differ on resume
    model: nn.Module  # wrapped
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: AbstractContextManager
    device: torch.device
    objective: Objective
    schedule: Schedule
    progress: Progress = field(default_factory=Progress)
    callbacks: CallbackList = field(default_factory=CallbackList)
    eval_loader: DataLoader | None = None
    environment: dict[str, Any] = field(default_factory=dict)  # torch, device, dtype, threads ...
    code: dict[str, Any] = field(default_factory=dict)  # hashes of the sources, settings of the optimizer
    facts: dict[str, Any] = field(default_factory=dict)  # what warnings look at beside the records
    source: Callable[[int], str] = str  # FILE:LINE of a sample
    log: MetricsLog | None = None  # rank 0 only
    wandb: Any = None
    writer: Writer = field(default_factory=Writer)
    checkpoint_write: Future | None = None  # of the newest checkpoint, rank 0 only
    meter: Meter = field(default_factory=Meter)
    stop_request: StopRequest = field(default_factory=StopRequest)
    stopped: bool = False  # no further update of this process
    is_out_of_time: bool = False  # --stop_after has stopped it
    resumed_update: int | None = None  # None in a new run
    # of the newest checkpoint; None before the first one, 0 if a signal came before any update
    saved_update: int | None = None
    weights: Path | None = None  # what was written last for use

    def __post_init__(self):
        self.callbacks.state = self
        self.total_updates = total_updates(self.fingerprint)
        self.clock = time.perf_counter()
        self.stop_request.is_saved = lambda: (self.saved_update or 0) == self.progress.update

    @property
    def state(self) -> "TrainState":
        """This object itself, for callbacks that read `engine.state`."""
        return self

    def has_schedule(self) -> bool:
        """Whether a function, and not a torch scheduler, sets the learning rate at each update."""
        return self.schedule(self.progress.update + 1, self.total_updates, self.args) is not None

    def time_is_over(self) -> bool:
        """Whether --stop_after is over. Each process makes an update first, so that sessions which are too
        short still go on."""
        limit = self.args.stop_after
        return limit is not None and self.meter.updates > 0 and session_seconds() >= seconds_in(limit)

    def stop(self, reason: str) -> None:
        """End training after this update; if the run is resumed, it continues. Call it on all ranks at the
        same update."""
        if not self.stopped:
            Logger(f"stopping: {reason}")
        self.stopped = True

    def finish(self, reason: str) -> None:
        """End the run after this update; if it is resumed, it is already finished. Call it on all ranks at
        the same update."""
        self.stop(reason)
        self.progress.finished = True


def total_updates(fingerprint: Fingerprint) -> int:
    """Optimizer updates of the whole run. No update extends over two epochs, so the last update of an epoch
    may be small."""
    updates = math.ceil(fingerprint["samples"] / fingerprint["global_batch"]) * fingerprint["epochs"]
    return min(updates, fingerprint.get("max_steps") or updates)
