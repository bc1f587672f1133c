"""The one training loop of the repository: `train_epoch` and `evaluate` over a `TrainState` (trainer/state.py).

Units: a step is one micro-batch of one rank; an update is one optimizer step, made of `accumulation_steps`
micro-batches on every rank (fewer at the end of an epoch). An update's loss is the sum over its target tokens, on all
ranks and micro-batches, divided by their number: how the update was cut into micro-batches and ranks changes nothing.
"""

import gc
import math
import signal
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dataset.errors import Interrupted, UserError
from trainer.checkpoint import lm_checkpoint, resume_path, save_weights, weight_path
from trainer.console import headline
from trainer.diagnosis import explain_speed
from trainer.files import forms
from trainer.parallel import accumulate, is_sharded, unwrap, whole
from trainer.state import Batch, Size, TrainState
from trainer.tracker import drawable
from trainer.trainer_utils import gather, is_main_process, reduce_sum, this_rank, world_size


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


def seed_micro_batch(seed: int, update: int, micro_batch: int) -> None:
    """Dropout depends on (seed, update, micro-batch, rank) alone: a resume has no random stream to restore."""
    torch.manual_seed(int(np.random.SeedSequence([seed, update, micro_batch, this_rank()]).generate_state(1)[0]))


def update_size(state: TrainState, sizes: list[Size]) -> tuple[float, float, bool]:
    """Targets and tokens of an update over all ranks, and whether a rank was asked to stop. `sizes`: of this rank's
    micro-batches.

    The ranks' hosts meet here, over gloo; the device is not waited for, and a rank that is gone is noticed.
    """
    targets, tokens = sum(size.targets for size in sizes), sum(size.tokens for size in sizes)
    host = torch.tensor([targets, tokens, state.stop.signal], dtype=torch.float64)
    with state.meter.timing("comm"):
        targets, tokens, stop = reduce_sum(host).tolist()
    return targets, tokens, stop > 0


def train_update(
    state: TrainState, window: list[Batch], lr: float | None, targets: float, tokens: float
) -> tuple[Tensor, Tensor]:
    """One optimizer update over a window of micro-batches.

    Args:
        state: the run.
        window: this rank's micro-batches.
        lr: learning rate; None leaves the rates of the optimizer's groups as they are.
        targets, tokens: of the whole update, over all ranks.

    Returns:
        On the device, over all ranks: [cross entropy, aux loss] as means per target and per token, float64 (float32 on
        MPS), and the gradient norm before clipping. The loop reads them only to log.
    """
    args, model = state.args, state.model
    for group in state.optimizer.param_groups if lr is not None else ():
        group["lr"] = lr * group.get("rate", 1.0)
    exact = torch.float32 if state.device.type == "mps" else torch.float64
    targets, tokens = max(targets, 1.0), max(tokens, 1.0)  # an update without any target has loss and gradient zero
    sums = torch.zeros(2, dtype=exact, device=state.device)
    for i, batch in enumerate(window):
        seed_micro_batch(args.seed, state.update, i)
        with accumulate(model, last=i == len(window) - 1):
            with state.autocast:
                loss, aux_loss = state.loss_fn(model, to_device(batch, state.device))
            # the gradients are averaged over the ranks, once per update; times world_size makes it their sum
            update_loss = (loss / targets + aux_loss / tokens) * world_size()
            # 1 for a finite loss; else NaN, so that the gradient, which all ranks share, tells of it
            contagion = 1.0 + 0.0 * update_loss.detach()
            state.scaler.scale(update_loss * contagion).backward()
        sums += torch.stack((loss.detach(), aux_loss.detach())).to(exact)
    state.scaler.unscale_(state.optimizer)
    limit = args.grad_clip or float("inf")
    grad_norm = whole(nn.utils.clip_grad_norm_(unwrap(model).parameters(), limit))
    means = reduce_sum(sums) / torch.tensor([targets, tokens], dtype=exact, device=state.device)
    state.bad_updates.step(state.optimizer, state.scaler, means, grad_norm)
    state.optimizer.zero_grad(set_to_none=True)
    return means, grad_norm


def train_epoch(state: TrainState, epoch: int, loader: DataLoader, iters: int, start_step: int = 0, wandb=None) -> None:
    """Train on micro-batches `start_step` to `iters` of an epoch.

    Args:
        state: the run; its progress is advanced.
        epoch: number of the epoch, from 0.
        loader: yields this rank's micro-batches from `start_step` on, equally many on every rank.
        iters: micro-batches of the whole epoch.
        start_step: micro-batches done before (always at an update's end).
        wandb: the tracker, or None.

    Raises:
        Interrupted: a signal asked for it; the state is saved, on all ranks at the same update.
        UserError: too many updates in a row without a finite gradient, or a file cannot be written.
    """
    args = state.args
    batches, step, meter = iter(loader), start_step, state.meter
    meter.restart()
    state.iters = iters
    state.model.train()
    while step < iters and not state.finished:
        window = meter.fetch(batches, min(args.accumulation_steps, iters - step))
        sizes = [state.size(batch) for batch in window]
        targets, tokens, stop = update_size(state, sizes)
        if stop:
            save_and_leave(state, wandb)
        state.hooks.batch_start(state)
        meter.count(sizes)
        before, step = step, step + len(window)
        lr = state.learning_rate(state.update + 1)
        means, grad_norm = train_update(state, window, lr, targets, tokens)
        meter.launch(state.device)
        state.epoch, state.step, state.update = epoch, step, state.update + 1
        if state.metrics is not None:
            state.metrics.tick(state.update)
        due = partial(reached, before=before, step=step, iters=iters)
        evaluating = state.eval_loader is not None and due(args.eval_interval)
        state.save_due |= evaluating or due(args.save_interval) or state.hooks.wants_checkpoint(state)
        logging = due(args.log_interval) or state.save_due
        state.bad_updates.note(state.update, window, read=logging or state.device.type == "cpu")
        saving = state.save_due and not state.bad_updates.in_a_row  # else what is saved stays the last good state
        if logging:
            state.record = make_record(state, iters, means, grad_norm, evaluating)
        if saving:
            with meter.timing("save"):
                save_checkpoint(state, wandb)
        finish_update(state, wandb)
        explain_speed(state)
        if logging:
            meter.restart()  # saving and evaluating are not training time
    if step == iters:
        next(batches, None)  # a loader ends its processes when it is asked for more than there is


def reached(interval: int, before: int, step: int, iters: int) -> bool:
    """Whether an update took the step count past a multiple of `interval` (0: never), or to the end of the epoch."""
    return step == iters or (interval > 0 and before // interval != step // interval)


def make_record(state: TrainState, iters: int, means, grad_norm, evaluating: bool) -> dict:
    """The log record of the update just made. The host waits for the device here, and nowhere else in the loop."""
    logits_loss, aux_loss = means.tolist()
    record = {"update": state.update, "epoch": state.epoch, "step": state.step, "iters": iters}
    values = {"loss": logits_loss + aux_loss, "logits_loss": logits_loss, "aux_loss": aux_loss}
    values |= {"learning_rate": float(state.optimizer.param_groups[0]["lr"]), "grad_norm": float(grad_norm)}
    record |= {key: finite(value) for key, value in values.items()} | state.meter.read(state)
    record |= state.expert_load.take(unwrap(state.model))
    skipped = state.bad_updates.take()
    return record | ({"evaluating": True} if evaluating else {}) | ({"skipped": skipped} if skipped else {})


def finite(value: float) -> float | None:
    """The value, or None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def save_checkpoint(state: TrainState, wandb=None) -> None:
    """Write the resume state, then the weights for use, in the background; called on all ranks. The pending record is
    saved too: a run killed while it evaluates finishes that report when it is resumed."""
    state.save_due = False
    args = state.args
    state.writer.wait()  # at most one copy of the state waits in memory
    where = {"epoch": state.epoch, "step": state.step, "wandb": wandb, "save_dir": args.checkpoint_dir}
    parts = where | {"writer": state.writer} | state.progress()
    lm_checkpoint(state.lm_config, args.save_weight, state.model, state.optimizer, **parts)
    save_weights(state.model, weight_path(args.save_dir, args.save_weight, state.lm_config), state.writer)
    path = resume_path(args.checkpoint_dir, args.save_weight, state.lm_config)
    state.hooks.checkpoint_saved(state, forms(path)[is_sharded(state.model)])


def save_and_leave(state: TrainState, wandb=None) -> None:
    """Grant a wish to stop, at the end of an update: save, and raise Interrupted."""
    state.meter.read(state)  # what was trained since the last record counts
    state.expert_load.read(unwrap(state.model))
    state.bad_updates.read()
    save_checkpoint(state, wandb)
    raise interrupted(state)


def interrupted(state: TrainState) -> Interrupted:
    """How a run says goodbye that was asked to stop; another rank may have got the signal.

    All ranks come here, and wait until the state is on the disk: whoever starts ranks ends all when the first one ends.
    """
    state.writer.wait()
    if dist.is_initialized():
        dist.barrier()
    number = state.stop.signal or signal.SIGTERM
    name, done = signal.Signals(number).name, f"update {state.update} of {state.total_updates}"
    return Interrupted(number, f"by {name} after {done}, which is saved; --from_resume 1 goes on from there")


def finish_update(state: TrainState, wandb=None) -> None:
    """Report the pending record, if there is one; a resumed run does so first."""
    state.hooks.batch_end(state, report(state, wandb) if state.record is not None else None)


def report(state: TrainState, wandb=None) -> dict[str, Any]:
    """Finish the pending record and return it: evaluate if it is time, keep the best weights, log.

    Raises:
        Interrupted: a signal came while it evaluated. The checkpoint just written holds the record, and the resumed run
            evaluates again.
    """
    record, state.record = dict(state.record), None
    if record.pop("evaluating", False) and state.eval_loader is not None:
        with state.meter.timing("evaluate"):
            held_out = state.hooks.validate(state, evaluate)
        if held_out is None:
            raise interrupted(state)
        record |= held_out
        is_best = state.is_best(held_out)
        if is_best:
            best = weight_path(state.args.save_dir, f"{state.args.save_weight}_best", state.lm_config)
            save_weights(state.model, best, state.writer)
        state.hooks.validation_end(state, held_out, is_best)
    head = headline(record, state.args.epochs, record.pop("iters"))
    if is_main_process():
        state.writer.check()
    if state.metrics is not None:
        state.metrics.write(record, head)
    if wandb is not None:
        wandb.log(drawable(record, leave_out=("update", "seconds")), record["update"])
    return record


@torch.no_grad()
def evaluate(state: TrainState, loader: DataLoader) -> dict[str, float | None] | None:
    """Held-out loss (nats per target) and bits per byte of the text that the targets spell, over all ranks.

    Bits per byte do not depend on the tokenizer. The micro-batches are the same whatever the world size. None if a
    signal cut it short.
    """
    model = unwrap(state.model)
    model.eval()
    sums: dict[str, float] = {}
    targets = text_bytes = 0
    stop = False
    for batch in loader:
        stop = state.stop.signal > 0
        if is_sharded(model):  # each forward pass takes all ranks
            stop = bool(reduce_sum(torch.tensor(float(stop))) > 0)
        if stop:
            break
        size = state.size(batch)
        with state.autocast:
            found = state.held_out_sums(to_device(batch, state.device))
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        targets, text_bytes = targets + size.targets, text_bytes + size.text_bytes
    model.train()
    names = sorted(set().union(*gather(list(sums))))  # a rank may have had no batch
    host = torch.tensor([*(sums.get(name, 0.0) for name in names), targets, text_bytes, stop], dtype=torch.float64)
    *totals, targets, text_bytes, stop = reduce_sum(host).tolist()
    if stop:
        return None
    if "loss" not in names:
        raise UserError(f"validation gives {', '.join(names) or 'nothing'}; `loss` must be one of its sums")
    metrics = {f"eval_{name}": total / max(targets, 1) for name, total in zip(names, totals, strict=True)}
    if text_bytes:
        metrics["eval_bpb"] = totals[names.index("loss")] / math.log(2) / text_bytes
    return {name: finite(value) for name, value in metrics.items()}
