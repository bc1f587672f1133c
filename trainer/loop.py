"""The only training loop of the repository: `train_epoch` and `evaluate` for a `TrainState`
(callbacks/train_state.py).

Units: a step is one micro-batch of one rank; an update is one optimizer step, made of `accumulation_steps`
micro-batches on every rank (fewer at the end of an epoch). The loss of an update is the sum over its target
tokens, on all ranks and micro-batches, divided by their number. So it does not matter how the update is split
into micro-batches and ranks."""

import math
import random
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

from common.errors import UserError, warn
from dataset.batch import Batch, Size, to_device
from trainer.callbacks.base import is_better, monitored
from trainer.callbacks.train_state import TrainState
from trainer.checkpoint.run import interrupted, save_checkpoint, where_to_go_on, write_weights
from trainer.devices.device import seed_torch
from trainer.devices.process_group import (
    Logger,
    all_gather,
    is_main_process,
    reduce_sum,
    this_rank,
    world_size,
)
from trainer.devices.wrapping import full_tensor, gradient_sync, is_sharded, unwrap
from trainer.optim.build import MuonWithAdamW
from trainer.report.metrics import value_text
from trainer.report.sums import COUNT, Means, add_means, add_sums, check_names, quotient, update_means
from trainer.report.trackers import drawable
from trainer.report.warnings import find_warnings

Record = dict[str, Any]


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
        call = "train_epoch(state, epoch, loader, iters, start_step, wandb)"
        raise UserError(f"train_epoch takes the run before MiniMind's arguments: {call}")
    if state.args.max_steps:  # --max_steps may end within the epoch
        updates_left = state.total_updates - state.progress.update
        iters = min(iters, start_step + updates_left * state.args.accumulation_steps)
    if state.stopped or start_step == iters:
        return
    args, progress, meter, callbacks = state.args, state.progress, state.meter, state.callbacks
    state.wandb = wandb
    state.model.train()
    collate = cast(Any, loader).collate_fn
    if state.eval_loader is not None:
        evaluate_start(state, state.eval_loader)  # before the seed of the first update is set
    seed_update(args.seed, progress.update)
    if isinstance(state.model, DistributedDataParallel) and meter.updates == 0:
        first_pass(state, collate([]))
    if start_step == 0:
        callbacks.call("on_epoch_start", epoch)
    batches, step = iter(loader), start_step
    meter.restart()
    while step < iters and not state.stopped:
        # the update's micro-batches
        seed_update(args.seed, progress.update)
        number = min(args.accumulation_steps, iters - step)
        with meter.timing("wait"):
            fetched = list(islice(batches, number))
        missing = number - len(fetched)
        micro_batches = state.objective.prepare(state, fetched or [collate([])])
        sizes = [state.objective.size(batch, state.lm_config) for batch in micro_batches]
        targets, tokens, stop_requested, time_is_over, missing = update_size(state, sizes, missing)
        if stop_requested or time_is_over:
            if state.saved_update != progress.update:
                save_checkpoint(state)
            if stop_requested:
                raise interrupted(state)
            state.is_out_of_time = True
            state.stop(f"--stop_after {args.stop_after}")
            break

        if missing == number * world_size() and step == start_step:
            raise UserError(f"epoch {epoch + 1}: the data loader gave no batch at all; it must give {iters}")

        callbacks.call("on_batch_start", progress.update + 1)
        means = train_update(state, micro_batches, targets, tokens)
        meter.count(sizes)
        before, step = step, step + number
        if missing:
            given = f"{step - missing / world_size():g} of {iters} micro-batches"
            warn(f"epoch {epoch + 1}: the data loader gave only {given}; the epoch ends here")
            step = iters
        progress.epoch, progress.step, progress.update = epoch, step, progress.update + 1
        progress.samples_done = min(state.fingerprint["samples"], step * args.batch_size * world_size())
        progress.tokens += int(tokens)
        count_update(state, micro_batches, means, targets)
        callbacks.call("on_optimizer_step", progress.update)

        # What is due, equal on all ranks. The first update of a run is saved as well, so that a state that a
        # checkpoint cannot hold shows at once.
        is_near_end = 0 < iters - step < args.eval_interval / 2  # the evaluation there is enough
        evaluate_due = state.eval_loader is not None and not is_near_end
        evaluate_due = evaluate_due and reached(args.eval_interval, before, step, iters)
        save_due = evaluate_due or reached(args.save_interval, before, step, iters)
        save_due = save_due or not state.saved_update
        save_due = save_due or bool(args.keep_every and progress.update % args.keep_every == 0)
        log_due = save_due or reached(args.log_interval, before, step, iters)
        record = make_record(state, means, iters) if log_due else None
        if record is not None:
            if evaluate_due:
                record |= validate(state)
            callbacks.call("on_log", record)
            write_record(state, record)
        callbacks.call("on_batch_end", progress.update, record)
        if step == iters:
            callbacks.call("on_epoch_end", epoch)
        if save_due or state.stopped:
            save_checkpoint(state)  # last, because a resumed run repeats everything after it
        if log_due:
            meter.restart()  # saving and evaluating do not count as training time
    if step == iters:
        next(batches, None)  # exhausts the loader, which then ends its worker processes


def first_pass(state: TrainState, batch: Batch) -> None:
    """A pass over an empty batch, which changes nothing. DDP rebuilds its buckets after the first backward
    pass of a process and then sums in another order. After this pass, all updates sum in the same order, also
    in a resumed run."""
    (batch,) = state.objective.prepare(state, [batch])
    with state.autocast:
        loss, aux_loss, _ = state.objective.loss(state.model, to_device(batch, state.device), state.args)
    (loss + aux_loss).backward()
    state.optimizer.zero_grad(set_to_none=True)


def train_update(state: TrainState, micro_batches: list[Batch], targets: float, tokens: float) -> Means:
    """One optimizer update over micro-batches; it is skipped if a loss or the gradient is not finite, or
    there is no target.

    Args:
        state: the run.
        micro_batches: this rank's micro-batches.
        targets, tokens: of the whole update, over all ranks.

    Returns:
        Means over all ranks as (sum, count), whose quotient is reported: `logits_loss` and the objective's
        metrics, `aux_loss`, `loss` and `grad_norm` before clipping. A mean over the targets or tokens of the
        update counts once.
    """
    args, model, optimizer, scaler = state.args, state.model, state.optimizer, state.scaler
    set_learning_rate(state)
    sums: dict[str, Tensor] = {}
    for i, batch in enumerate(micro_batches):
        seed_torch(update_seed(args.seed, state.progress.update, i))  # of dropout
        if world_size() > 1:  # the ranks exchange gradients after the last micro-batch
            gradient_sync(model, enabled=i == len(micro_batches) - 1)
        with state.autocast:
            loss, aux_loss, metrics = state.objective.loss(model, to_device(batch, state.device), args)
        # DDP and FSDP average the gradients over the ranks; times world_size makes the average a sum
        mean = loss / (targets or 1.0) + aux_loss / (tokens or 1.0)  # without a target there is no step
        scaler.scale(mean * world_size()).backward()
        add_sums(sums, {"logits_loss": loss, "aux_loss": aux_loss, **metrics}, state.device)
        state.objective.after_micro_batch(state, i)
    scaler.unscale_(optimizer)  # float16: clip the true gradient, not the scaled one
    of_gradient = state.objective.before_step(state, micro_batches)
    add_sums(sums, of_gradient, state.device)
    state.callbacks.call("on_before_step", micro_batches)
    if state.meter.updates == 0:
        check_names(list(sums), [*metrics, *of_gradient])
    grad_norm = full_tensor(clip_grad_norm_(unwrap(model).parameters(), args.grad_clip or math.inf))
    totals = reduce_sum(torch.stack(list(sums.values())))
    *totals, norm = torch.cat((totals, grad_norm.to(totals).reshape(1))).tolist()  # the only sync point

    means = update_means(dict(zip(sums, totals, strict=True)), targets, tokens)
    loss = means["logits_loss"][0] + means["aux_loss"][0]
    if math.isfinite(loss) and math.isfinite(norm):  # alike on all ranks
        optimizer.step()
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return means | {"loss": (loss, 1.0), "grad_norm": (norm, 1.0)}


def set_learning_rate(state: TrainState) -> None:
    """Set the learning rate of the next update, unless a torch scheduler does, and Muon's momentum."""
    rate = learning_rate(state, state.progress.update + 1)
    if isinstance(state.optimizer, MuonWithAdamW):
        state.optimizer.set_momentum(state.progress.update + 1)
    for group in state.optimizer.param_groups:
        if rate is not None:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        elif not isinstance(group["lr"], Tensor):
            group["lr"] = float(group["lr"])  # a scheduler may compute with NumPy


def learning_rate(state: TrainState, update: int) -> float | None:
    """The learning rate of an update; None if a torch scheduler sets it. Raises UserError if the schedule
    returns anything but a rate."""
    rate = state.schedule(update, state.total_updates, state.args)
    if rate is None:
        return None
    try:
        value = float(rate)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"the schedule gives {rate!r} at update {update}; it must give a learning rate")
    return value


def update_size(state: TrainState, sizes: list[Size], missing: int) -> tuple[float, float, bool, bool, float]:
    """Targets and tokens of an update over all ranks, whether any rank was asked to stop, whether rank 0's
    --stop_after is over, and how many micro-batches are missing from the loaders.

    sizes: of this rank's micro-batches. The hosts exchange them over gloo. This does not wait for the device,
    and it detects a lost rank."""
    targets, tokens = sum(size.targets for size in sizes), sum(size.tokens for size in sizes)
    time_is_over = is_main_process() and state.time_is_over()
    values = [targets, tokens, state.stop_request.signal, time_is_over, missing]
    with state.meter.timing("comm"):
        totals = reduce_sum(torch.tensor(values, dtype=torch.float64)).tolist()
    total_targets, total_tokens, signals, over, total_missing = totals
    return total_targets, total_tokens, signals > 0, over > 0, total_missing


def update_seed(seed: int, update: int, *more: int) -> int:
    """A random seed that is a function of (seed, update, ..., rank), so that there is no random state to
    save."""
    return int(np.random.SeedSequence([seed, update, *more, this_rank()]).generate_state(1)[0])


def seed_update(seed: int, update: int) -> None:
    """Seed the random numbers that a user's data set, collate function or callback draws for an update."""
    number = update_seed(seed, update)
    random.seed(number)
    np.random.seed(number)
    seed_torch(number)


def reached(interval: int, before: int, step: int, iters: int) -> bool:
    """Whether an update took the step count past a multiple of `interval`, or to the end of the epoch. With
    interval 0 only the end counts."""
    return step == iters or (interval > 0 and before // interval != step // interval)


# --- the log record


def count_update(state: TrainState, micro_batches: list[Batch], means: Means, targets: float) -> None:
    """Add the means of an update to the sums since the last record, or count the update as skipped. Raises
    UserError if too many updates in a row were skipped."""
    progress, limit = state.progress, state.args.max_bad_updates
    is_finite = {name: math.isfinite(means[name][0]) for name in ("loss", "grad_norm")}
    if all(is_finite.values()):
        progress.bad_updates = 0
        add_means(progress.sums, means)
        return
    if targets == 0:
        return
    if is_finite["loss"] and state.scaler.is_enabled() and state.scaler.get_scale() > 1.0:
        progress.overflows += 1  # the scaler has lowered its scale
        return
    own = [i for batch in micro_batches if "sample_ids" in batch for i in batch["sample_ids"].tolist()]
    samples = sum(all_gather(own), [])
    progress.bad_updates += 1
    progress.skipped.append({"update": progress.update, "sample_ids": samples})
    named = ", ".join(f"{sample} ({state.source(sample)})" for sample in samples[:4])
    warn(
        f"update {progress.update} is skipped, its loss or gradient is not finite; its samples: {named}"
        f"{' ...' if len(samples) > 4 else ''}"
    )
    if progress.bad_updates >= limit:
        raise UserError(
            f"--max_bad_updates {limit}: the loss or gradient was not finite in {limit} updates in a row; "
            "lower --learning_rate, look at the samples named above, or use --dtype float32"
            f"{where_to_go_on(state)}"
        )


def make_record(state: TrainState, means: Means, iters: int) -> Record:
    """The log record of the latest update. It has the losses and gradient norm of this update; `mean_loss`
    and the objective's metrics are means over the updates since the last record."""
    progress = state.progress
    of_updates = {name: quotient(*progress.sums.get(name, (0.0, 0.0))) for name in means}
    own = {name: quotient(*means[name]) for name in ("loss", "logits_loss", "aux_loss", "grad_norm")}
    rate = learning_rate(state, progress.update)
    if rate is None:  # a scheduler of torch sets it
        rate = float(state.optimizer.param_groups[0]["lr"])
    now = time.perf_counter()
    progress.seconds, state.clock = progress.seconds + now - state.clock, now
    record: Record = {
        "update": progress.update,
        "epoch": progress.epoch,
        "step": progress.step,
        "iters": iters,
        **own,
        "mean_loss": of_updates["loss"],
        "learning_rate": rate,
        **{name: value for name, value in of_updates.items() if name not in own},
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        **state.meter.speed_metrics(state.total_updates - progress.update, state.device),
    }
    record |= progress.initial
    if progress.skipped:
        record["skipped"] = progress.skipped
    if progress.overflows:
        record["overflows"] = progress.overflows
    progress.sums, progress.initial, progress.skipped, progress.overflows = {}, {}, [], 0
    return record


def write_record(state: TrainState, record: Record) -> None:
    """Write a complete record to the metrics file, the console and the tracker, on rank 0, with the warnings
    that follow from it."""
    state.writer.check()
    iters = record.pop("iters")
    if state.log is not None:
        for name, text in find_warnings([*state.log.records, record], state.facts):
            if name not in state.log.warned:
                state.log.warned.add(name)
                record.setdefault("warnings", []).append(f"{name}: {text}")
                warn(f"{name}: {text}")
        share = record["update"] / state.total_updates
        head = f"Epoch:[{record['epoch'] + 1}/{state.args.epochs}]({record['step']}/{iters}) {share:.0%}"
        state.log.write(record, head)
    if state.wandb is not None:
        texts = [f"{sample['prompt']}\n-> {sample['answer']}" for sample in record.get("samples", ())]
        points = drawable(record, leave_out=("update", "seconds"))
        state.wandb.log(points | ({"samples": texts} if texts else {}), record["update"])


# --- held-out data


def evaluate_start(state: TrainState, loader: DataLoader) -> None:
    """Evaluate once before the first update of a run, for its first record. This evaluation cannot be the
    best one, and callbacks are not called for it. A run that is resumed with another --monitor or --mode
    starts without a best evaluation."""
    progress, followed = state.progress, f"{state.args.mode} {state.args.monitor}"
    if state.saved_update is not None:
        if progress.monitored != followed:
            check_monitored(state, evaluate(state, islice(loader, 1)))
            if progress.monitored is not None:  # older code does not say
                progress.best_eval = progress.best_update = None
            progress.monitored = followed
        return
    metrics = evaluate(state, loader)
    check_monitored(state, metrics)
    progress.monitored = followed
    progress.initial = {f"initial_{name}": value for name, value in metrics.items()}
    Logger("at the start: " + ", ".join(value_text(name, value, ".4f") for name, value in metrics.items()))


def check_monitored(state: TrainState, metrics: dict[str, float | None]) -> None:
    """Raise UserError if --monitor or a callback names a metric that validation does not give."""
    monitored("--monitor", state.args.monitor, metrics)
    for name, callback in state.callbacks.by_name().items():
        for metric in callback.held_out_metrics():
            monitored(f"callback {name}", metric, metrics)


def validate(state: TrainState) -> dict[str, float | None]:
    """Evaluate, and write the best weights if these are the best so far."""
    args, progress = state.args, state.progress
    state.callbacks.call("on_validation_start")
    metrics = evaluate(state, cast(DataLoader, state.eval_loader))
    value = monitored("--monitor", args.monitor, metrics)
    if value is not None and is_better(value, progress.best_eval, args.mode):
        progress.best_eval, progress.best_update = value, progress.update
        write_weights(state, f"{args.save_weight}_best")
    state.callbacks.call("on_validation_end", metrics)
    return metrics


@torch.no_grad()
def evaluate(state: TrainState, loader: Iterable[Batch]) -> dict[str, float | None]:
    """Held-out loss (nats per target), other metrics of the objective, and bits per byte of the text that the
    targets spell, over all ranks. Bits per byte do not depend on the tokenizer. The micro-batches do not
    depend on the number of ranks."""
    model = unwrap(state.model)
    model.eval()
    sums: dict[str, Tensor] = {}
    targets = text_bytes = 0
    for batch in loader:
        size = state.objective.size(batch, state.lm_config)
        with state.autocast:
            values = state.objective.held_out(model, to_device(batch, state.device), state.args)
        add_sums(sums, values, state.device)
        targets, text_bytes = targets + size.targets, text_bytes + size.text_bytes
    model.train()
    # free the gathered weights, because a callback may have swapped in others for this validation only
    for module in filter(is_sharded, model.modules()):
        cast(Any, module).reshard()
    names = sorted(set().union(*all_gather(list(sums))))  # a rank may have had no batch
    own = [float(sums.get(name, 0.0)) for name in names]  # sync point
    host = torch.tensor([*own, targets, text_bytes], dtype=torch.float64)
    *totals, all_targets, all_bytes = reduce_sum(host).tolist()
    total = dict(zip(names, totals, strict=True))
    if "loss" not in total:
        raise UserError(f"validation gives {', '.join(names) or 'nothing'}; `loss` must be one of its sums")
    metrics: dict[str, float | None] = {}
    for name in names:
        if not name.endswith(COUNT):
            metrics[f"eval_{name}"] = quotient(total[name], total.get(name + COUNT, all_targets or 1.0))
    if all_bytes:
        metrics["eval_bpb"] = quotient(total["loss"] / math.log(2), all_bytes)
    return metrics
