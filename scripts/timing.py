"""The time of updates, measured alike by scripts/plan.py and scripts/benchmark.py."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from trainer.loop import train_update, update_size
from trainer.objectives.next_token import Batch
from trainer.report.speed import Meter
from trainer.run.state import TrainState


class Timing(NamedTuple):
    """Measurements of some updates of this rank, timed together."""

    seconds: float
    wait: float  # seconds of these in which the windows were made
    tokens: float
    flops: float
    samples: float
    losses: list[float]  # per target, of each update


def time_updates(state: TrainState, windows: Iterator[list[Batch]], updates: int = 1) -> Timing:
    """Train so many updates by the training loop's own `train_update`, which ends when the device has
    finished.

    Args:
        state: a run that no file belongs to; its weights change.
        windows: the micro-batches of each update.
    """
    meter, losses = Meter(), []
    for _ in range(updates):
        with meter.timing("wait"):
            window = next(windows)
        sizes = [state.objective.size(batch, state.lm_config) for batch in window]
        targets, tokens, *_ = update_size(state, sizes, missing=0)
        losses.append(train_update(state, window, targets, tokens)["logits_loss"][0])
        meter.count(sizes)
    seconds, counts = time.perf_counter() - meter.begin, meter.counts
    return Timing(seconds, counts["wait"], counts["tokens"], counts["flops"], counts["samples"], losses)
