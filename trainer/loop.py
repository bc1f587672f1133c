"""The one training loop of the repository: `train_epoch` and `evaluate` over a `TrainState` (run/state.py).

Units: a step is one micro-batch of one rank; an update is one optimizer step, made of `accumulation_steps`
micro-batches on every rank (fewer at the end of an epoch). The loss of an update is the sum over its target
tokens, on all ranks and micro-batches, divided by their number: how it was cut into micro-batches and ranks
changes nothing.
"""

import gc
import math
import shlex
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from common.errors import UserError
from dataset.lm_dataset import StageDataset
from dataset.mixing import split_weights
from trainer.data.datasets import epoch_tokens
from trainer.devices.device import describe_device
from trainer.devices.process_group import Logger, gather, reduce_sum, this_rank, world_size
from trainer.devices.wrapping import backward_on_gpu, full_tensor, gradient_sync, is_sharded, unwrap
from trainer.objectives.next_token import to_device
from trainer.optim.build import should_step
from trainer.report.metrics import duration
from trainer.report.speed import Size, read_meter
from trainer.report.trackers import drawable
from trainer.run.saving import interrupted, save_and_stop, save_checkpoint, write_weights
from trainer.run.state import Batch, TrainState

# fewer updates in more seconds are better spent on a smaller model
FEW_UPDATES_TO_ADVISE, SECONDS_TO_ADVISE = 100, 600


def train_epoch(
    state: TrainState, epoch: int, loader: DataLoader, iters: int, start_step: int = 0, wandb=None
) -> None:
    """Train on micro-batches `start_step` to `iters` of an epoch.

    Args:
        state: the run; its progress is advanced.
        epoch: number of the epoch, from 0.
        loader: yields this rank's micro-batches from `start_step` on, equally many on every rank.
        iters: micro-batches of the whole epoch.
        start_step: micro-batches trained before (always at the end of an update).
        wandb: the tracker, or None.

    Raises:
        Interrupted: a signal asked for it; the state is saved, on all ranks at the same update.
        UserError: too many updates in a row with a non-finite loss or gradient, or a file cannot be written.
    """
    if not isinstance(state, TrainState):
        raise UserError(
            "train_epoch takes the run first, then MiniMind's arguments: "
            "train_epoch(state, epoch, loader, iters, start_step, wandb), with the state that the stage's "
            "main makes"
        )
    if state.finished and start_step == 0:  # it ended in an epoch before
        return
    state.wandb = wandb
    state.callbacks.call("on_epoch_start", epoch)
    if state.record is not None:
        finish_update(state)  # the run was stopped between saving an update and reporting it
    args, meter, batches, step = state.args, state.meter, iter(loader), start_step
    state.model.train()
    # After the first backward pass of a process DDP rebuilds its buckets, and then sums in another order. So
    # the first pass is one over an empty batch: all updates, also of a resumed run, come after it.
    if isinstance(state.model, DistributedDataParallel) and not meter.updates:
        window = [cast(Any, loader).collate_fn([])]
        trial_pass(state, (window if state.prepare is None else state.prepare(state, window))[0])
    state.iters = iters
    state.stop_request.seconds_left = lambda: meter.seconds_per_update() if meter.updates else None
    meter.restart()
    while step < iters and not state.finished:
        # the update's micro-batches
        with meter.timing("wait"):
            fetched = list(islice(batches, min(args.accumulation_steps, iters - step)))
        window = fetched if state.prepare is None else state.prepare(state, fetched)
        sizes = [state.size_fn(batch, state.lm_config) for batch in window]
        targets, tokens, stop_requested = update_size(state, sizes)  # all-reduced on the hosts
        if stop_requested:
            read_meter(state)
            save_and_stop(state)
        if not meter.updates:
            Logger(describe_run(state, loader.dataset, window, tokens))
            gc.freeze()  # what start-up made lives as long as the run: no collection looks at it again
            meter.restart()  # what came before the first update is not training time
        state.callbacks.call("on_batch_start", state.update + 1)
        losses, grad_norm = train_update(state, window, targets, tokens)
        meter.count(sizes, state.device)
        before, step = step, step + len(fetched)
        state.epoch, state.step, state.update = epoch, step, state.update + 1
        state.callbacks.call("on_optimizer_step", state.update)

        # What is due, alike on all ranks. While updates are skipped nothing is saved: what is due then stays
        # due.
        if state.eval_loader is not None:
            is_near_end = 0 < iters - step < args.eval_interval / 2  # the evaluation there is enough
            state.evaluate_due |= reached(args.eval_interval, before, step, iters) and not is_near_end
        if args.keep_every and state.update % args.keep_every == 0:
            state.keep_due = True
        state.save_due |= reached(args.save_interval, before, step, iters)
        state.save_due |= state.evaluate_due or state.keep_due
        log_due = reached(args.log_interval, before, step, iters) or state.save_due
        if log_due and state.device.type == "cuda":
            meter.wait_for_device()
        if log_due or state.device.type == "cpu":  # on a CPU after each update: to read waits for nothing
            state.skipped_updates.read_and_warn()
        # while updates are skipped the last good checkpoint stays, but the last update of a run is saved
        is_last = state.update == state.total_updates
        save_now = state.save_due and (is_last or not state.skipped_updates.in_a_row)
        if log_due:
            state.record = make_record(state, losses, grad_norm, state.evaluate_due and save_now)
        if save_now:
            state.evaluate_due = False
            save_checkpoint(state)
        finish_update(state)  # log, after evaluating if that is due
        if log_due:
            state.peak.remeasure_if_due()
            meter.restart()  # saving and evaluating are not training time
    if step == iters:
        next(batches, None)  # exhausts the loader, which then ends its worker processes
        state.callbacks.call("on_epoch_end", epoch)


def train_update(
    state: TrainState, window: list[Batch], targets: float, tokens: float
) -> tuple[Tensor, Tensor]:
    """One optimizer update over a window of micro-batches.

    Args:
        state: the run.
        window: this rank's micro-batches.
        targets, tokens: of the whole update, over all ranks.

    Returns:
        On the device, over all ranks: losses [2 + K], the mean loss per target, the mean auxiliary loss per
        token and the means per target of the K metrics, in float64 (float32 on MPS), NaN without any target;
        the gradient norm [] before clipping. The loop reads them only to log.
    """
    args, model, optimizer, scaler = state.args, state.model, state.optimizer, state.scaler
    rate = state.schedule(state.update + 1, state.total_updates, args)
    if rate is not None:  # None: a scheduler of torch sets it
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
    is_empty = targets == 0  # then there is nothing to learn from: no step, and no loss
    targets, tokens = max(targets, 1.0), max(tokens, 1.0)
    # over the update: loss, auxiliary loss, the K metrics, cross entropy
    sums = state.losses.new_zeros(3 + len(state.metric_names))
    for i, batch in enumerate(window):
        seed_dropout(args.seed, state.update, i)
        if world_size() > 1:  # the ranks exchange gradients after the last micro-batch
            gradient_sync(model, enabled=i == len(window) - 1)
        with state.autocast:
            loss, aux_loss, *rest = state.loss_fn(model, to_device(batch, state.device), args)
        metrics = rest[0] if rest else {}
        if not set(state.metric_names) <= metrics.keys() <= {*state.metric_names, "cross_entropy"}:
            raise other_names_error(metrics, state.metric_names)
        # DDP and FSDP average the gradients over the ranks; times world_size makes the average a sum
        scaled_loss = scaler.scale((loss / targets + aux_loss / tokens) * world_size())
        if state.device.type == "cuda":
            backward_on_gpu(scaled_loss, model)
        else:
            scaled_loss.backward()
        state.loss_is_cross_entropy = "cross_entropy" in metrics
        values = [loss, aux_loss]
        values += [metrics[name] for name in state.metric_names]
        values.append(metrics.get("cross_entropy", loss))
        sums += torch.stack([value.detach().to(sums.dtype) for value in values])
    counts = [targets, tokens] + [targets] * (len(state.metric_names) + 1)
    losses = torch.stack([total / count for total, count in zip(reduce_sum(sums), counts, strict=True)])
    scaler.unscale_(optimizer)  # float16: clip the true gradient, not the scaled one
    grad_norm = full_tensor(clip_grad_norm_(unwrap(model).parameters(), args.grad_clip or math.inf))
    # alike on all ranks
    skip = state.skipped_updates.check_on_device(state.update + 1, window, losses[:2], grad_norm, scaler)
    if not is_empty and should_step(optimizer, skip):  # fused optimizers read `skip` on the device
        optimizer.step()
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if is_empty:
        losses = losses * math.nan
    losses, cross_entropy = losses[:-1], losses[-1]
    loss = losses[:2].sum()
    is_finite = torch.isfinite(loss)
    # as in `state.losses`, for the means over the updates since the last record: loss, number of updates,
    # metrics
    of_update = torch.cat((torch.stack((loss, torch.ones_like(loss))), losses[2:]))
    state.losses += torch.where(is_finite, of_update, 0.0)
    state.update_loss = torch.where(is_finite, cross_entropy, math.nan)
    return losses, grad_norm


def other_names_error(metrics: dict[str, Tensor], names: tuple[str, ...]) -> UserError:
    """The error for a `loss_fn` that gives other metrics than those of these names, and `cross_entropy`,
    which needs no naming."""
    given, named = ", ".join(metrics) or "nothing", ", ".join(names) or "empty"
    return UserError(f"loss_fn gives {given} beside the loss, but TrainState's metric_names are {named}")


def reached(interval: int, before: int, step: int, iters: int) -> bool:
    """Whether an update took the step count past a multiple of `interval` or to the end of the epoch (0: only
    that)."""
    return step == iters or (interval > 0 and before // interval != step // interval)


def update_size(state: TrainState, sizes: list[Size]) -> tuple[float, float, bool]:
    """Targets and tokens of an update over all ranks, and whether any rank was asked to stop.

    sizes: of this rank's micro-batches. The hosts exchange them over gloo: the device is not waited for, and
    a lost rank is noticed here.
    """
    targets, tokens = sum(size.targets for size in sizes), sum(size.tokens for size in sizes)
    host = torch.tensor([targets, tokens, state.stop_request.signal], dtype=torch.float64)
    with state.meter.timing("comm"):
        total_targets, total_tokens, stop = reduce_sum(host).tolist()
    return total_targets, total_tokens, stop > 0


def seed_dropout(seed: int, update: int, micro_batch: int) -> None:
    """Make dropout a function of (seed, update, micro-batch, rank), so that there is no random state to
    save."""
    torch.manual_seed(
        int(np.random.SeedSequence([seed, update, micro_batch, this_rank()]).generate_state(1)[0])
    )


# --- before the first update


def trial_pass(state: TrainState, batch: Batch) -> float:
    """Seconds of a micro-batch forward and backward that changes nothing: the gradients are thrown away;
    buffers, such as token counts, and random streams are put back. Sync point."""
    buffers = [(buffer, buffer.clone()) for buffer in state.model.buffers()]
    begin = time.perf_counter()
    with torch.random.fork_rng([state.device] if state.device.type == "cuda" else []):
        with state.autocast:
            loss, aux_loss, *_ = state.loss_fn(state.model, to_device(batch, state.device), state.args)
        (loss + aux_loss).backward()
    loss.item()  # a device works in order: then the backward pass is done as well
    seconds = time.perf_counter() - begin
    state.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return seconds


def describe_run(state: TrainState, data: Any, window: list[Batch], tokens: float) -> str:
    """The line before the first update of this process: the updates that are left, their tokens, passes over
    the data and time (saves and evaluations not included), device and dtype. Of rollouts, which take most of
    the time, it says neither tokens nor time. Called on all ranks.

    data: what the run trains on. window: this rank's micro-batches of the first update. tokens: of that
    update, over all ranks.
    """
    left, updates = state.total_updates - state.update, f"{state.total_updates:,} updates"
    passes = state.args.epochs * left / state.total_updates
    parts = [f"run: {left:,} of {updates} are left" if state.update else f"run: {updates}"]
    time_left: list[str] = []
    advice = ""
    if state.prepare is None and tokens:
        # in batches that share prompts (`key_index`) a prompt is counted once, unlike in the data
        is_exact = isinstance(data, StageDataset) and "key_index" not in window[0]
        amount = epoch_tokens(data, state.args) * passes if is_exact else tokens * left
        in_all = f"{amount / 1e6:,.1f} M" if amount >= 1e6 else f"{amount:,.0f}"
        parts[0] += f" of about {amount / left:,.0f} tokens"
        parts.append(f"{in_all} tokens in all")
        if rate := trial_rate(state, window):
            time_left.append(f"about {duration(amount / rate)}")
            is_few = state.total_updates < FEW_UPDATES_TO_ADVISE
            if is_exact and is_few and amount / rate > SECONDS_TO_ADVISE:
                advice = plan_advice(str(state.args.data_path), getattr(data, "kind", ""), amount / rate)
    parts += [f"{passes:.3g} {'pass' if passes == 1 else 'passes'} over the data", *time_left]
    return f"{', '.join(parts)}; {describe_device(state.device, state.autocast)}{advice}"


def trial_rate(state: TrainState, window: list[Batch]) -> float:
    """Tokens per second of all ranks, in a trial of each rank's first micro-batch."""
    if world_size() > 1:
        gradient_sync(state.model, enabled=len(window) == 1 or is_sharded(state.model))
    trial_pass(state, window[0])  # it compiles, and asks for memory
    tokens = state.size_fn(window[0], state.lm_config).tokens
    trials = gather((tokens, trial_pass(state, window[0])))
    return sum(size for size, _ in trials) / max(seconds for _, seconds in trials)


def plan_advice(data_path: str, kind: str, seconds: float) -> str:
    """A second line for a run that takes long and makes few updates: the command of the plan that fits the
    model to the data and to this time."""
    flag = {"pretrain": "--pretrain_data", "sft": "--sft_data"}.get(kind)
    if flag is None:
        return ""
    command = ["python", "scripts/plan.py", flag, ",".join(split_weights(data_path)[0])]
    command += ["--hours", f"{seconds / 3600:.2g}"]
    return (
        "\nso few updates in so long a time teach little; a plan chooses the model and the batch that learn "
        f"most in it: {shlex.join(command)}"
    )


# --- the log


def make_record(state: TrainState, losses: Tensor, grad_norm: Tensor, evaluate_due: bool) -> dict[str, Any]:
    """The log record of the update just made: `loss` is its own; `mean_loss` and the stage's metrics are
    means over the updates since the last record. Sync point: the host waits for the device."""
    total, count, *sums = state.losses.tolist()
    state.losses.zero_()
    count = count or math.nan  # no update had a loss: then there is no mean
    logits_loss, aux_loss = losses[:2].tolist()
    rate = state.schedule(state.update, state.total_updates, state.args)
    if rate is None:  # a scheduler of torch sets it
        rate = float(state.optimizer.param_groups[0]["lr"])
    values = {
        "loss": logits_loss + aux_loss,
        "mean_loss": total / count,
        "logits_loss": logits_loss,
        "aux_loss": aux_loss,
        "grad_norm": float(grad_norm),
        "learning_rate": rate,
    }
    for name, value in zip(state.metric_names, sums, strict=True):
        values[name] = value / count
    record: dict[str, Any] = {
        "update": state.update,
        "epoch": state.epoch,
        "step": state.step,
        "iters": state.iters,
    }
    record |= {key: finite(value) for key, value in values.items()} | read_meter(state)
    state.callbacks.call("on_record", record)
    if state.skipped_updates.skipped or state.skipped_updates.overflows:
        record |= state.skipped_updates.pop_record_fields()
    if evaluate_due:
        record["evaluating"] = True
    return record


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinities, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def finish_update(state: TrainState) -> None:
    """Complete the pending record, if there is one: evaluate if due, keep the best weights, log. A resumed
    run does so before its first update. Raises Interrupted if a signal came during the evaluation. The
    checkpoint just written holds the record, and the resumed run evaluates again."""
    if state.metrics is not None:
        state.metrics.bar.update(state.update - state.metrics.bar.n)
    if state.record is None:
        state.callbacks.call("on_batch_end", state.update, None)
        return
    record, state.record = dict(state.record), None
    if record.pop("evaluating", False) and state.eval_loader is not None:
        state.callbacks.call("on_validation_start")
        held_out = evaluate(state, state.eval_loader)
        if held_out is None:  # a signal interrupted it
            raise interrupted(state)
        record |= held_out
        if state.is_best(held_out):
            write_weights(state, f"{state.args.save_weight}_best")
        state.callbacks.call("on_validation_end", held_out)
    state.callbacks.call("on_log", record)
    iters = record.pop("iters")
    state.writer.check()
    if state.metrics is not None:
        share = record["update"] / state.total_updates
        head = f"Epoch:[{record['epoch'] + 1}/{state.args.epochs}]({record['step']}/{iters}) {share:.0%}"
        state.metrics.write(record, head)
    if state.wandb is not None:
        texts = [f"{sample['prompt']}\n-> {sample['answer']}" for sample in record.get("samples", ())]
        points = drawable(record, leave_out=("update", "seconds"))
        state.wandb.log(points | ({"samples": texts} if texts else {}), record["update"])
    state.callbacks.call("on_batch_end", state.update, record)


# --- held-out data


@torch.no_grad()
def evaluate(state: TrainState, loader: Iterable[Batch]) -> dict[str, float | None] | None:
    """Held-out loss (nats per target) and bits per byte of the text that the targets spell, over all ranks.

    Bits per byte do not depend on the tokenizer. The micro-batches do not depend on the world size. None if a
    signal interrupted it.
    """
    model = unwrap(state.model)
    model.eval()
    sums: dict[str, Tensor] = {}  # on the device: the host reads them once, at the end
    targets = text_bytes = 0
    stop = False
    for batch in loader:
        stop = state.stop_request.signal > 0
        if is_sharded(model):  # a forward pass takes all ranks, so all stop at the same batch
            stop = bool(reduce_sum(torch.tensor(float(stop))) > 0)
        if stop:
            break
        size = state.size_fn(batch, state.lm_config)
        with state.autocast:
            batch_sums = state.eval_fn(model, to_device(batch, state.device), state.args)
        for name, value in batch_sums.items():
            value = torch.as_tensor(value, dtype=state.losses.dtype)
            sums[name] = sums[name] + value if name in sums else value
        targets, text_bytes = targets + size.targets, text_bytes + size.text_bytes
    model.train()
    # let go of gathered weights: a callback may have put others in place for the validation alone
    for module in filter(is_sharded, model.modules()):
        cast(Any, module).reshard()
    names = sorted(set().union(*gather(list(sums))))  # a rank may have had no batch
    own = [float(sums.get(name, 0.0)) for name in names]  # sync point
    host = torch.tensor([*own, targets, text_bytes, stop], dtype=torch.float64)
    *totals, all_targets, all_bytes, any_stop = reduce_sum(host).tolist()
    if any_stop:
        return None
    if "loss" not in names:
        raise UserError(f"validation gives {', '.join(names) or 'nothing'}; `loss` must be one of its sums")
    metrics = {f"eval_{name}": total / max(all_targets, 1) for name, total in zip(names, totals, strict=True)}
    if all_bytes:
        metrics["eval_bpb"] = totals[names.index("loss")] / math.log(2) / all_bytes
    return {name: finite(value) for name, value in metrics.items()}
