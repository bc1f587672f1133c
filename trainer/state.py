"""The state of a run, and the points at which others may look in: what `trainer/loop.py` works on."""

import math
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dataset.errors import UserError
from model.model_minimind import MiniMindConfig, filler
from trainer.bad_updates import BadUpdates
from trainer.console import MetricsLog
from trainer.expert_load import ExpertLoad
from trainer.files import Writer
from trainer.interrupt import StopRequest
from trainer.parallel import unwrap
from trainer.sharded import with_tensors
from trainer.speed import Meter, training_flops
from trainer.trainer_utils import warmup_cosine, world_size

Batch = dict[str, Any]
LossFn = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
EvalFn = Callable[[nn.Module, Batch], dict[str, Tensor]]
MODEL_INPUTS = ("input_ids", "position_ids", "cu_seqlens", "max_seqlen", "target_index", "targets")
SAVED = ("update", "tokens", "seconds", "best_eval", "record", "save_due")


class Size(NamedTuple):
    """How large a micro-batch is: a loss is a mean over targets, an auxiliary loss one over tokens."""

    targets: int
    tokens: int
    text_bytes: int = 0  # that the targets spell; 0: bits per byte mean nothing here
    flops: float = 0.0
    samples: int = 0
    filler: int = 0  # rows that a model adds on the CPU


def flat_size(batch: Batch, lm_config: MiniMindConfig) -> Size:
    """How large a flat batch of tokens is for a language model of this shape."""
    targets, tokens = len(batch["targets"]), len(batch["input_ids"])
    flops = training_flops(lm_config, tokens, targets, batch["cu_seqlens"])
    samples, extra = len(batch["cu_seqlens"]) - 1, filler(batch["input_ids"])
    return Size(targets, tokens, batch["target_bytes"], flops, samples, extra)


def next_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of a flat batch's targets, and the load-balancing loss summed over its tokens."""
    out = model(**{key: batch[key] for key in MODEL_INPUTS})
    return out.loss, out.aux_loss


class Hooks:
    """What others may do at points of the loop, on every rank. Here: nothing. The engine's callbacks hang in here."""

    def batch_start(self, state: "TrainState") -> None:
        """Before an update."""

    def wants_checkpoint(self, state: "TrainState") -> bool:
        """Whether this update's state is to be saved though no interval asks for it; the same on all ranks."""
        return False

    def batch_end(self, state: "TrainState", record: dict[str, Any] | None) -> None:
        """After an update and its report; `record` at a log point, else None."""

    def checkpoint_saved(self, state: "TrainState", path: Path) -> None:
        """The state of this update was handed to the writer, which will put it at `path`."""

    def validate(self, state: "TrainState", evaluate: Callable[..., dict[str, float] | None]) -> dict | None:
        """Evaluate the held-out data with the loop's own `evaluate`; None if a signal cut it short."""
        return evaluate(state, state.eval_loader)

    def validation_end(self, state: "TrainState", metrics: dict[str, float], is_best: bool) -> None:
        """After it; `metrics` are the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves of them."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take it back."""


@dataclass
class TrainState:
    """Everything that a run holds. What changes while it runs stands below the line; checkpoints save it."""

    args: Namespace
    lm_config: MiniMindConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: AbstractContextManager
    device: torch.device
    loss_fn: LossFn
    total_updates: int
    run: dict[str, Any]  # the contract: what must not differ on resume
    metrics: MetricsLog | None = None  # rank 0 only
    eval_loader: DataLoader | None = None
    eval_fn: EvalFn | None = None  # sums over a batch's targets, by name; None: the loss alone
    size_fn: Callable[[Batch], Size] | None = None  # None: of a flat batch of tokens
    schedule: Callable[[int], float | None] | None = None  # learning rate of an update (from 1); None: the cosine
    hooks: Hooks = field(default_factory=Hooks)
    peak_flops: float = float("inf")  # of all ranks together
    writer: Writer = field(default_factory=Writer)
    stop: StopRequest = field(default_factory=StopRequest)
    bad_updates: BadUpdates = field(default_factory=BadUpdates)
    expert_load: ExpertLoad = field(default_factory=ExpertLoad)
    meter: Meter = field(default_factory=Meter)  # of this process
    monitor: tuple[str, str] = ("eval_loss", "min")  # the held-out metric that tells which weights are best
    iters: int = 0  # micro-batches of an epoch
    finished: bool = False  # somebody wants no further update, on all ranks alike
    # ---- progress
    epoch: int = 0
    step: int = 0
    update: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of the whole run: training, evaluating and saving
    best_eval: float = float("inf")  # of the monitored metric; its negative where more is better
    record: dict[str, Any] | None = None  # of the last update, until it is reported
    save_due: bool = False  # put off while updates are left out

    def __post_init__(self):
        self.clock = time.perf_counter()  # when `seconds` was last brought up to date

    def learning_rate(self, update: int) -> float | None:
        """Learning rate of an update, from 1: a pure function of it, so there is nothing to save. None: a scheduler of
        torch sets it."""
        if self.schedule is not None:
            return self.schedule(update)
        return warmup_cosine(update, self.total_updates, self.args.learning_rate, self.args.warmup_updates)

    def size(self, batch: Batch) -> Size:
        """How large a micro-batch is."""
        if self.size_fn is not None:
            return self.size_fn(batch)
        return flat_size(batch, self.lm_config)

    def held_out_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums over a held-out batch's targets, by name; `loss` is one of them."""
        if self.eval_fn is not None:
            return self.eval_fn(unwrap(self.model), batch)
        return {"loss": self.loss_fn(unwrap(self.model), batch)[0]}

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Whether the monitored metric is better than ever; then it is the one to beat.

        Raises:
            UserError: there is no such metric.
        """
        name, mode = self.monitor
        if name not in metrics:
            raise UserError(f"--monitor {name}: validation gives no such metric, only {', '.join(sorted(metrics))}")
        if metrics[name] is None:
            return False
        value = metrics[name] if mode == "min" else -metrics[name]
        better = value < self.best_eval
        self.best_eval = value if better else self.best_eval
        return better

    @property
    def samples_done(self) -> int:
        """Samples of the current epoch that are trained, over all ranks."""
        return min(self.run["samples"], self.step * self.args.batch_size * world_size())

    @property
    def reported_update(self) -> int:
        """The last update whose record, if it has one, is in the metrics file."""
        return self.update - (self.record is not None)

    def progress(self) -> dict[str, Any]:
        """What a checkpoint saves beside weights and optimizer."""
        parts = {"scaler": self.scaler, "bad_updates": self.bad_updates, "hooks": self.hooks}
        parts["expert_load"] = self.expert_load
        return {key: getattr(self, key) for key in (*SAVED, "samples_done", "run")} | parts

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over a checkpoint: weights, optimizer, scaler and progress."""
        saved = with_tensors(saved, unwrap(self.model))
        unwrap(self.model).load_state_dict(saved["model"], strict=True)
        self.optimizer.load_state_dict(saved["optimizer"])
        if saved["scaler"]:  # empty unless that part of the run was in float16
            self.scaler.load_state_dict(saved["scaler"])
        self.bad_updates.load_state_dict(saved["bad_updates"])
        self.expert_load.load_state_dict(saved["expert_load"])
        self.hooks.load_state_dict(saved["hooks"])
        for key in SAVED:
            setattr(self, key, saved[key])
        self.epoch = saved["epoch"]
        # in micro-batches of the present size and ranks: whole global batches are done, or the whole epoch
        self.step = math.ceil(saved["samples_done"] / (self.args.batch_size * world_size()))
