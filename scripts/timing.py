"""The time of updates: one measurement for scripts/plan.py and scripts/benchmark.py."""

import time
from collections.abc import Iterator

from dataset.batch import Batch
from trainer.callbacks.train_state import TrainState
from trainer.loop import train_update, update_size


def time_updates(
    state: TrainState, windows: Iterator[list[Batch]], updates: int = 1
) -> tuple[float, list[float]]:
    """Train this many updates with the training loop's own `train_update`, and wait until the device has
    finished. `state.meter` is reset first; its figures then give tokens per second, MFU and waiting time.

    Args:
        state: a run without files; its weights change. windows: the micro-batches of each update.

    Returns:
        The seconds of all updates, including making their windows, and the loss per target of each update.
    """
    state.meter.restart()
    losses = []
    for _ in range(updates):
        with state.meter.timing("wait"):
            micro_batches = next(windows)
        sizes = [state.objective.size(batch, state.lm_config) for batch in micro_batches]
        targets, tokens, *_ = update_size(state, sizes, missing=0)
        losses.append(train_update(state, micro_batches, targets, tokens)["logits_loss"][0])
        state.progress.update += 1
        state.meter.count(sizes)
    return time.perf_counter() - state.meter.begin, losses
