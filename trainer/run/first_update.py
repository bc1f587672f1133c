"""Before the first update: passes that change nothing, and the line that says what is ahead."""

import time

import torch
from torch.utils.data import DataLoader

from dataset.lm_dataset import TokenDataset
from trainer.devices.device import describe_device
from trainer.devices.process_group import gather
from trainer.devices.wrapping import gradient_sync, is_sharded
from trainer.objectives.next_token import to_device
from trainer.report.metrics import duration
from trainer.run.state import Batch, TrainState


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


def describe_run(
    state: TrainState,
    loader: DataLoader,
    fetched: list[Batch],
    window: list[Batch],
    own_tokens: int,
    tokens: float,
) -> str:
    """The line before the first update of this process: the updates that are left, their tokens, passes over
    the data and time, which two micro-batches tell (saves and evaluations not included), device and dtype. Of
    rollouts, which take most of the time, it says neither tokens nor time. Called on all ranks.

    own_tokens: of this rank's first micro-batch. tokens: of the first update, over all ranks.
    """
    left, updates = state.total_updates - state.update, f"{state.total_updates:,} updates"
    passes = state.args.epochs * left / state.total_updates
    parts = [f"run: {left:,} of {updates} are left" if state.update else f"run: {updates}"]
    time_left: list[str] = []
    if window[0] is fetched[0] and tokens:
        data = loader.dataset
        # else prompts are counted once
        is_exact = isinstance(data, TokenDataset) and "key_index" not in window[0]
        amount = data.num_tokens * passes if is_exact else tokens * left
        parts[0] += f" of about {amount / left:,.0f} tokens"
        parts.append(
            f"{amount / 1e6:,.1f} M tokens in all" if amount >= 1e6 else f"{amount:,.0f} tokens in all"
        )
        with gradient_sync(state.model, enabled=len(window) == 1 or is_sharded(state.model)):
            trial_pass(state, window[0])  # it compiles, and asks for memory
            trials = gather((own_tokens, trial_pass(state, window[0])))
        rate = sum(size for size, _ in trials) / max(seconds for _, seconds in trials)
        time_left += [f"about {duration(amount / rate)}"] if rate else []
    parts += [f"{passes:.3g} {'pass' if passes == 1 else 'passes'} over the data", *time_left]
    return f"{', '.join(parts)}; {describe_device(state.device, state.autocast)}"
