"""The state of a run: what `trainer/loop.py` works on."""

import math
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from common.errors import UserError, warn
from common.settings import StageArgs
from trainer.devices.process_group import Logger, world_size
from trainer.devices.wrapping import is_sharded, unwrap
from trainer.objectives.next_token import Batch, flat_size, held_out_loss
from trainer.optim.build import SkippedUpdates
from trainer.report.metrics import MetricsLog
from trainer.report.speed import Meter, PeakRate, Size
from trainer.run.callbacks import CallbackList, monitored
from trainer.run.checkpoint import Writer, shard_like
from trainer.run.errors import StopRequest
from trainer.run.paths import run_name
from trainer.run.resume import Fingerprint, computing, held_out_fingerprint, total_updates, warn_of_changes

LossFn = Callable[
    [nn.Module, Batch, StageArgs], tuple[Tensor, Tensor] | tuple[Tensor, Tensor, dict[str, Tensor]]
]
EvalFn = Callable[[nn.Module, Batch, StageArgs], dict[str, Tensor]]
# (model, path of its .pth, writer, description)
SaveFn = Callable[[nn.Module, Path, Writer, dict[str, Any]], Path]
Schedule = Callable[[int, int, StageArgs], float | None]
SAVED_FIELDS = ("run_id", "branch_of", "went_on_from", "update", "tokens", "seconds")
SAVED_FIELDS += ("best_eval", "best_update", "eval_data", "record", "evaluate_due")


@dataclass(kw_only=True)
class TrainState:
    """Everything that a run holds. The fields under `progress` are saved in checkpoints."""

    args: StageArgs
    lm_config: Any  # shape of the model, or the settings that say it
    model: nn.Module  # wrapped
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: AbstractContextManager
    device: torch.device
    # (model, batch, settings) -> sums: losses of targets, auxiliary losses[, metrics by name; the one named
    # `cross_entropy` is the plain loss, with which warnings and verdict compare the held-out loss]
    loss_fn: LossFn
    # (update from 1, total updates, settings) -> learning rate; None: a torch scheduler sets it
    schedule: Schedule
    run: Fingerprint  # what must not differ on resume
    stop_request: StopRequest = field(default_factory=StopRequest)
    metric_names: tuple[str, ...] = ()  # of the metrics to report
    size_fn: Callable[[Batch, Any], Size] = flat_size  # (batch, model config) -> its size
    save_fn: SaveFn | None = None  # writes what is used of the model; None: `save_weights`
    # the weights that a checkpoint holds; None: all
    state_dict_fn: Callable[[nn.Module], dict[str, Tensor]] | None = None
    code: dict[str, str] = field(default_factory=dict)  # hashes of the stage script, the loop and the model
    metrics: MetricsLog | None = None  # rank 0 only
    eval_loader: DataLoader | None = None
    # (model, batch, settings) -> sums over its targets, by name; `loss` is one of them
    eval_fn: EvalFn = held_out_loss
    callbacks: CallbackList = field(default_factory=CallbackList)
    last_lines: list[str] = field(default_factory=list)  # for the end of the run
    # makes the micro-batches to train of those that the loader gave, such as rollouts of prompts
    prepare: Callable[["TrainState", list[Batch]], list[Batch]] | None = None
    shown: tuple[str, ...] = ()  # values of a record that stand on the console's line, before the metrics
    peak: PeakRate = field(default_factory=PeakRate)  # for the MFU
    writer: Writer = field(default_factory=Writer)
    skipped_updates: SkippedUpdates = field(default_factory=SkippedUpdates)
    meter: Meter = field(default_factory=Meter)  # of this process
    iters: int = 0  # micro-batches of an epoch
    finished: bool = False  # no further update, on all ranks alike; see `finish` and `stop`
    can_continue: bool = False  # `stop` ended the run early: resumed, it goes on
    resumed_update: int | None = None  # the last update reported before the resume; None in a new run
    is_new_branch: bool = False  # this process begins a branch of the run whose state it has restored
    saved_update: int | None = None  # of the newest checkpoint
    # due after this update, or postponed while updates are skipped
    save_due: bool = False
    keep_due: bool = False  # a numbered checkpoint of --keep_every
    state_file: Path | None = None  # the newest file with a state of this run, once there is one
    wandb: Any = None  # the tracker
    wandb_id: str | None = None  # of the tracker before the resume
    # ---- the update just made
    # [] on the device: the metric `cross_entropy`, else the loss; NaN if not finite
    update_loss: Tensor | None = None
    loss_is_cross_entropy: bool = False
    reward: float | None = None  # mean of its rollout, over all ranks; None without one
    # ---- progress
    run_id: str = ""  # of this run, or of this branch of it
    # the state that this branch began with: where it was, and of which run
    branch_of: dict[str, Any] | None = None
    # the state that --resume_from named when it was the newest of this run
    went_on_from: dict[str, Any] | None = None
    epoch: int = 0
    step: int = 0
    update: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of the whole run: training, evaluating and saving
    best_eval: float = float("inf")  # of the monitored metric; negated where more is better
    best_update: int | None = None  # the update with that value
    eval_data: str | None = None  # identifies the held-out data of the evaluations so far
    record: dict[str, Any] | None = None  # of the last update, until it is reported
    evaluate_due: bool = False  # an evaluation postponed while updates are skipped

    def __post_init__(self):
        # A callback reads `engine.state`. A stage script has no engine: there the state is both.
        self.callbacks.engine = self.state = self
        self.run_id = self.run_id or uuid.uuid4().hex
        self.clock = time.perf_counter()  # when `seconds` was last brought up to date
        self.total_updates = total_updates(self.run)  # of the whole run
        self.computing = computing(self.args, self.model, self.device, self.autocast)
        exact = torch.float32 if self.device.type == "mps" else torch.float64
        # sum of the losses since the last record, number of their updates, sums of the metrics; on the
        # device, checkpoints save it
        self.losses = torch.zeros(2 + len(self.metric_names), dtype=exact, device=self.device)

    def finish(self, reason: str) -> None:
        """End the run after this update: resumed, it is finished. To be called on all ranks, at the same
        update."""
        if not self.finished:
            Logger(f"stopping: {reason}")
        self.finished = True

    def stop(self, reason: str) -> None:
        """End training after this update: resumed, the run goes on. To be called on all ranks, at the same
        update."""
        self.finish(reason)
        self.can_continue = self.update < self.total_updates

    def check_held_out(self, monitor: tuple[str, str]) -> None:
        """After a resume: forget the earlier evaluations if they were of other held-out data, or only their
        best if another metric was monitored. monitor: its name and mode before the resume."""
        held_out = held_out_fingerprint(self.eval_loader)
        if None not in (held_out, self.eval_data) and held_out != self.eval_data:
            warn(
                "the held-out data are not those of before: earlier evaluations do not count, for the best "
                "weights, early stopping and the verdict"
            )
            self.best_eval, self.best_update = math.inf, None
            for callback in self.callbacks:
                callback.forget_evaluations(self)
        elif monitor != (self.args.monitor, self.args.mode):
            before, now = " ".join(monitor), f"{self.args.monitor} {self.args.mode}"
            warn(f"{now} is monitored instead of {before}: the best weights are those from here on")
            self.best_eval, self.best_update = math.inf, None
        self.eval_data = held_out or self.eval_data

    def report_more_epochs(self, before: Fingerprint) -> None:
        """Say what --extend_epochs does to the learning rate. before: the run that it extends."""
        group = self.optimizer.param_groups[0]  # as the checkpoint restored it
        last = group["lr"] / group.get("lr_scale", 1.0)
        rate = self.schedule(self.update + 1, self.total_updates, self.args)
        jump = "" if rate is None else f"; the learning rate goes from {last:.2e} to {rate:.2e}"
        Logger(
            f"--extend_epochs 1: {self.run['epochs']} epochs instead of {before['epochs']}. The schedule "
            f"spans all of them, so the result is not that of a run of so many from the start{jump}"
        )

    def is_best(self, metrics: dict[str, Any]) -> bool:
        """Whether the monitored metric is the best so far; then it becomes the one to beat. Raises UserError
        if there is no such metric."""
        value = monitored("--monitor", self.args.monitor, metrics)
        if value is None:
            return False
        if self.args.mode == "max":
            value = -value
        if value >= self.best_eval:
            return False
        self.best_eval, self.best_update = value, self.update
        return True

    def progress(self) -> dict[str, Any]:
        """What a checkpoint saves besides weights and optimizer."""
        args = self.args
        saved = {key: getattr(self, key) for key in SAVED_FIELDS}
        # samples of the epoch, over all ranks
        samples_done = min(self.run["samples"], self.step * args.batch_size * world_size())
        return saved | {
            "scaler": self.scaler,
            "skipped_updates": self.skipped_updates,
            "callbacks": self.callbacks.state_dict(),
            "callback_epochs": self.callbacks.epochs,
            "code": self.code,
            "loss_sum": self.losses.tolist(),
            "computing": self.computing,
            "monitor": (args.monitor, args.mode),
            "run": self.run,
            "run_name": run_name(args.save_weight, self.lm_config),
            "epoch": self.epoch,
            "step": self.step,
            "samples_done": samples_done,
            "wandb_id": getattr(self.wandb, "id", self.wandb_id),
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Load a checkpoint of `lm_checkpoint`: weights, optimizer, scaler and progress. Raises UserError if
        it is of another kind of model, such as that of another stage."""
        own = unwrap(self.model).state_dict()
        if self.state_dict_fn is not None:
            own = self.state_dict_fn(self.model)
        if other := checkpoint["model"].keys() ^ own.keys():
            raise UserError(
                f"--from_resume 1: the checkpoint is of another stage or model ({min(other)} is in one of "
                "them only); give another --save_weight, or --from_resume 0"
            )
        warn_of_changes(checkpoint, self.code, self.computing)
        saved = shard_like(self.model, checkpoint) if is_sharded(self.model) else checkpoint
        # not strict: the names were compared above, and a checkpoint of adapters holds these alone
        unwrap(self.model).load_state_dict(saved["model"], strict=False)
        optimizer_state = saved["optimizer"]
        # on a CPU the optimizer keeps these tensors, which should not be those of a file
        if self.device.type == "cpu":
            optimizer_state = deepcopy(optimizer_state)
        self.optimizer.load_state_dict(optimizer_state)
        if saved["scaler"]:  # empty unless that part of the run was in float16
            self.scaler.load_state_dict(saved["scaler"])
        self.skipped_updates.load_state_dict(saved["skipped_updates"])
        self.callbacks.load_state_dict(saved["callbacks"])
        self.callbacks.epochs = saved["callback_epochs"]
        new_run_id = self.run_id
        for key in SAVED_FIELDS:
            setattr(self, key, saved.get(key))
        self.saved_update = self.update
        self.resumed_update = self.update - (self.record is not None)  # its record is not reported yet
        self.state_file, self.is_new_branch = Path(saved["loaded_from"]), saved.get("is_new_branch", False)
        self.wandb_id = saved["wandb_id"]
        if self.is_new_branch:  # its best weights are those that it finds itself
            self.run_id, self.wandb_id = new_run_id, None
            self.best_eval, self.best_update = math.inf, None
        self.check_held_out(tuple(saved["monitor"]))
        sums = saved["loss_sum"]
        self.losses[: len(sums)] = torch.tensor(sums[: len(self.losses)], dtype=self.losses.dtype)
        self.epoch = saved["epoch"]
        # The samples that are done, in micro-batches of the present batch size and ranks. They are whole
        # updates; only the end of an epoch makes it necessary to round up.
        self.step = math.ceil(saved["samples_done"] / (self.args.batch_size * world_size()))
        if self.is_new_branch:
            Logger(f"a new branch of the run {saved['run_name']} begins, with the state in {self.state_file}")
        Logger(
            f"resuming {self.args.save_weight} at epoch {self.epoch + 1}, update {self.update} of "
            f"{self.total_updates}"
        )
        if saved["run"]["epochs"] != self.run["epochs"]:
            self.report_more_epochs(saved["run"])
