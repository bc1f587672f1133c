"""The one training loop of the repository: `train_epoch` and `evaluate` over a small `TrainState`.

Units: a step is one micro-batch of one rank; an update is one optimizer step, made of `accumulation_steps`
micro-batches on every rank (fewer at the end of an epoch). An update's loss is the sum over its target tokens, on all
ranks and micro-batches, divided by their number: how the update was cut into micro-batches and ranks changes nothing.
"""

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from model.model_minimind import MiniMindConfig
from trainer.checkpoint import lm_checkpoint, save_weights, unwrap, weight_path
from trainer.console import MetricsLog
from trainer.speed import training_flops
from trainer.trainer_utils import get_lr, is_main_process, this_rank, world_size

try:
    import resource
except ImportError:  # Windows
    resource = None

Batch = dict[str, Any]
LossFn = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
MODEL_INPUTS = ("input_ids", "position_ids", "cu_seqlens", "max_seqlen", "target_index", "targets")
SAVED = ("update", "tokens", "seconds", "best_eval", "record")


def next_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of a flat batch's targets, and the load-balancing loss summed over its tokens."""
    out = model(**{key: batch[key] for key in MODEL_INPUTS})
    return out.loss, out.aux_loss


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
    peak_flops: float = float("inf")  # of all ranks together
    # ---- progress
    epoch: int = 0
    step: int = 0
    update: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of the whole run: training, evaluating and saving
    best_eval: float = float("inf")
    record: dict[str, Any] | None = None  # of the last update, until it is reported

    def __post_init__(self):
        self.clock = time.perf_counter()  # when `seconds` was last brought up to date

    @property
    def samples_done(self) -> int:
        """Samples of the current epoch that are trained, over all ranks."""
        return min(self.run["samples"], self.step * self.args.batch_size * world_size())

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over a checkpoint: weights, optimizer, scaler and progress."""
        unwrap(self.model).load_state_dict(saved["model"], strict=True)
        self.optimizer.load_state_dict(saved["optimizer"])
        if saved["scaler"]:  # empty unless that part of the run was in float16
            self.scaler.load_state_dict(saved["scaler"])
        self.epoch, self.step = saved["epoch"], saved["step"]
        for key in SAVED:
            setattr(self, key, saved[key])


def leave_group(state: TrainState) -> None:
    """Let all ranks leave together.

    DDP's reducer must go before the group: it would end the group's threads while it holds the interpreter lock, and
    gloo's threads need that lock to let go of their last tensors (a deadlock seen once in some dozen runs).
    """
    if dist.is_initialized():
        dist.barrier()
        state.model = unwrap(state.model)
        gc.collect()
        dist.destroy_process_group()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch without waiting. Off CUDA, cu_seqlens is read on the host and stays there."""
    if device.type == "cpu":
        return batch
    stay = () if device.type == "cuda" else ("cu_seqlens",)
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor) and k not in stay}
    return batch | {k: v.to(device, non_blocking=True) for k, v in tensors.items()}


def reduce_sum(values: Tensor) -> Tensor:
    """Sum over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def seed_micro_batch(seed: int, update: int, micro_batch: int) -> None:
    """Dropout depends on (seed, update, micro-batch, rank) alone: a resume has no random stream to restore."""
    torch.manual_seed(int(np.random.SeedSequence([seed, update, micro_batch, this_rank()]).generate_state(1)[0]))


def train_update(state: TrainState, window: list[Batch], lr: float) -> tuple[Tensor, Tensor]:
    """One optimizer update over a window of micro-batches.

    Returns:
        Sums over this rank's window, on the device: [cross entropy, aux loss, targets of the update, tokens of the
        update] in float64 (float32 on MPS), and the gradient norm before clipping. The loop reads them only to log.
    """
    args, model = state.args, state.model
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    exact = torch.float32 if state.device.type == "mps" else torch.float64
    sizes = [(len(batch["targets"]), len(batch["input_ids"])) for batch in window]
    counts = torch.tensor(sizes, dtype=exact).sum(dim=0)
    counts = counts.pin_memory() if state.device.type == "cuda" else counts  # else the copy would wait for the device
    counts = reduce_sum(counts.to(state.device, non_blocking=True))
    targets, tokens = counts.clamp(min=1).float()  # an update without any target has loss and gradient zero
    sums = torch.zeros(2, dtype=exact, device=state.device)
    for i, batch in enumerate(window):
        seed_micro_batch(args.seed, state.update, i)
        last = i == len(window) - 1
        # DDP averages the gradients over the ranks, once per update; times world_size makes it their sum
        with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            with state.autocast:
                loss, aux_loss = state.loss_fn(model, to_device(batch, state.device))
            update_loss = (loss / targets + aux_loss / tokens) * world_size()
            state.scaler.scale(update_loss).backward()
        sums += torch.stack((loss.detach(), aux_loss.detach())).to(exact)
    state.scaler.unscale_(state.optimizer)
    limit = args.grad_clip or float("inf")
    grad_norm = nn.utils.clip_grad_norm_(unwrap(model).parameters(), limit)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    return torch.cat((sums, counts)), grad_norm


class Meter:
    """Time, tokens and arithmetic since the last log point, counted on the host without waiting for the device."""

    def __init__(self):
        self.start = time.perf_counter()
        self.wait = self.flops = self.tokens = 0.0

    def fetch(self, batches: Iterable[Batch], count: int, config: MiniMindConfig) -> list[Batch]:
        """The next `count` micro-batches, and how long they kept us waiting."""
        begin = time.perf_counter()
        window = list(islice(batches, count))
        self.wait += time.perf_counter() - begin
        for batch in window:
            tokens, targets = len(batch["input_ids"]), len(batch["targets"])
            self.tokens += tokens
            self.flops += training_flops(config, tokens, targets, batch["cu_seqlens"])
        return window

    def read(self, state: TrainState) -> dict[str, float]:
        """Speed figures of all ranks since the last reading, and a new start. Waits for the device."""
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        seconds = time.perf_counter() - self.start
        host = torch.tensor([self.wait, self.flops, self.tokens], dtype=torch.float64)
        wait, flops, tokens = reduce_sum(host).tolist()
        state.seconds, state.clock = state.seconds + time.perf_counter() - state.clock, time.perf_counter()
        state.tokens += int(tokens)
        self.__init__()
        return {
            "tokens": state.tokens,
            "tokens_per_second": tokens / seconds,
            "mfu": flops / seconds / state.peak_flops,
            "data_wait": wait / seconds / world_size(),
            "seconds": state.seconds,
            "memory_mb": peak_memory_mb(state.device),
        }


def peak_memory_mb(device: torch.device) -> float:
    """Largest memory so far: of the GPU where there is one, else resident memory of this process, in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if resource is None:
        return psutil.Process().memory_info().peak_wset / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def train_epoch(state: TrainState, epoch: int, loader: DataLoader, iters: int, start_step: int = 0, wandb=None) -> None:
    """Train on micro-batches `start_step` to `iters` of an epoch.

    Args:
        state: the run; its progress is advanced.
        epoch: number of the epoch, from 0.
        loader: yields this rank's micro-batches from `start_step` on, equally many on every rank.
        iters: micro-batches of the whole epoch.
        start_step: micro-batches done before (always at an update's end).
        wandb: the tracker, or None.
    """
    args = state.args
    batches, step, meter = iter(loader), start_step, Meter()
    state.model.train()
    while step < iters:
        window = meter.fetch(batches, min(args.accumulation_steps, iters - step), state.lm_config)
        before, step = step, step + len(window)
        warmup = min(1.0, (state.update + 1) / max(1, args.warmup_updates))
        lr = warmup * get_lr(state.update + 1, state.total_updates, args.learning_rate)
        sums, grad_norm = train_update(state, window, lr)
        state.epoch, state.step, state.update = epoch, step, state.update + 1
        if state.metrics is not None:
            state.metrics.tick(state.update)
        due = partial(reached, before=before, step=step, iters=iters)
        evaluating = state.eval_loader is not None and due(args.eval_interval)
        saving = due(args.save_interval)
        if due(args.log_interval) or evaluating or saving:
            state.record = make_record(state, iters, lr, sums, grad_norm, meter, evaluating)
        if saving:
            save_checkpoint(state, wandb)
        if state.record is not None:
            report(state, wandb)
            meter = Meter()  # saving and evaluating are not training time


def reached(interval: int, before: int, step: int, iters: int) -> bool:
    """Whether an update took the step count past a multiple of `interval` (0: never), or to the end of the epoch."""
    return step == iters or (interval > 0 and before // interval != step // interval)


def make_record(state: TrainState, iters: int, lr: float, sums, grad_norm, meter: Meter, evaluating: bool) -> dict:
    """The log record of the update just made. The host waits for the device here, and nowhere else in the loop."""
    sums[:2] = reduce_sum(sums[:2].clone())
    loss, aux_loss, targets, tokens = sums.tolist()
    logits_loss, aux_loss = loss / max(targets, 1), aux_loss / max(tokens, 1)
    record = {"update": state.update, "epoch": state.epoch, "step": state.step, "iters": iters}
    record |= {"loss": logits_loss + aux_loss, "logits_loss": logits_loss, "aux_loss": aux_loss}
    record |= {"learning_rate": lr, "grad_norm": float(grad_norm), **meter.read(state)}
    return record | ({"evaluating": True} if evaluating else {})


def save_checkpoint(state: TrainState, wandb=None) -> None:
    """Write the resume state, then the weights for use (rank 0). The pending record is saved too: a run killed while
    it evaluates finishes that report when it is resumed."""
    if not is_main_process():
        return
    args = state.args
    progress = {key: getattr(state, key) for key in (*SAVED, "samples_done", "run")}
    where = {"epoch": state.epoch, "step": state.step, "wandb": wandb, "save_dir": args.checkpoint_dir}
    lm_checkpoint(
        state.lm_config, args.save_weight, state.model, state.optimizer, **where, scaler=state.scaler, **progress
    )
    save_weights(state.model, weight_path(args.save_dir, args.save_weight, state.lm_config))


def report(state: TrainState, wandb=None) -> None:
    """Finish the pending record: evaluate if it is time, keep the best weights, log."""
    record, state.record = state.record, None
    if record.pop("evaluating", False) and state.eval_loader is not None:
        record |= evaluate(state, state.eval_loader)
        if record["eval_loss"] < state.best_eval:
            state.best_eval = record["eval_loss"]
            if is_main_process():
                best = weight_path(state.args.save_dir, f"{state.args.save_weight}_best", state.lm_config)
                save_weights(state.model, best)
    if not is_main_process():
        return
    head = f"Epoch:[{record['epoch'] + 1}/{state.args.epochs}]({record['step']}/{record.pop('iters')})"
    state.metrics.write(record, head)
    if wandb is not None:
        wandb.log({key: value for key, value in record.items() if key not in ("update", "seconds")}, record["update"])


@torch.no_grad()
def evaluate(state: TrainState, loader: DataLoader) -> dict[str, float]:
    """Held-out loss (nats per target token) and bits per byte of the text that the targets spell, over all ranks.

    Bits per byte do not depend on the tokenizer. The micro-batches are the same whatever the world size.
    """
    model = unwrap(state.model)
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)  # cross entropy, targets, bytes
    for batch in loader:
        with state.autocast:
            loss, _ = state.loss_fn(model, to_device(batch, state.device))
        totals += torch.tensor([loss.item(), len(batch["targets"]), batch["target_bytes"]], dtype=torch.float64)
    loss, targets, text_bytes = reduce_sum(totals).tolist()
    model.train()
    return {"eval_loss": loss / max(targets, 1), "eval_bpb": loss / np.log(2) / max(text_bytes, 1)}
