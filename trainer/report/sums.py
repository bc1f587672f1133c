"""Sums by name: of losses and metrics over the micro-batches and ranks of an update, and over updates."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from trainer.devices.process_group import all_gather

Means = dict[str, tuple[float, float]]  # a mean as (sum, count), of which the quotient is reported
COUNT = "/count"  # suffix of the count that belongs to a sum
# fields of every record; a metric must not have one of these names
RECORD_FIELDS = {
    *("update", "epoch", "step", "iters", "loss", "logits_loss", "aux_loss", "mean_loss", "grad_norm"),
    *("learning_rate", "tokens", "seconds", "tokens_per_second", "mfu", "data_wait", "comm_wait"),
    *("seconds_left", "memory_mb", "reserved_mb", "skipped", "overflows", "samples", "warnings"),
    *("asked", "new_asked", "wrong_answers"),
}


def add_sums(sums: dict[str, Tensor], values: Mapping[str, Any], device: torch.device) -> None:
    """Add values by name, each [], or a pair (sum, count), to the sums so far. The count of a pair gets the
    name `<name>/count`."""
    # float64, because sums run over many tokens; MPS has none
    exact = torch.float32 if device.type == "mps" else torch.float64
    for name, value in values.items():
        parts = {name: value}
        if isinstance(value, tuple):
            parts = {name: value[0], name + COUNT: value[1]}
        for key, part in parts.items():
            added = torch.as_tensor(part, dtype=exact, device=device).detach()
            sums[key] = sums.get(key, 0.0) + added


def check_names(names: list[str], metrics: Iterable[str]) -> None:
    """Raise UserError if one of the objective's metrics has the name of another field of a record, or the
    ranks do not all have the same sums. names: of the sums of an update. A collective."""
    if taken := RECORD_FIELDS.intersection(metrics):
        raise UserError(
            f"a metric of the loss is named {min(taken)!r}, a field of each record; give it another name"
        )
    if any(others != names for others in all_gather(names)):
        raise UserError("the loss must give the same metrics for each batch; (sum, 0) where there is nothing")


def update_means(total: dict[str, float], targets: float, tokens: float) -> Means:
    """The means of an update from its sums over all ranks. A mean over its targets or tokens counts
    once."""
    means = {}
    for name, value in total.items():
        if name + COUNT in total:
            means[name] = value, total[name + COUNT]
        elif not name.endswith(COUNT):
            number = tokens if name == "aux_loss" else targets
            means[name] = (value / (number or 1.0) if targets else math.nan), 1.0
    return means


def add_means(sums: Means, means: Means) -> None:
    """Add the sums and counts of means to those so far."""
    for name, (value, count) in means.items():
        total, total_count = sums.get(name, (0.0, 0.0))
        sums[name] = total + value, total_count + count


def quotient(total: float, count: float) -> float | None:
    """A sum over its count; None if there is none, or for NaN and infinities, which JSON cannot hold."""
    value = total / count if count else math.nan
    return value if math.isfinite(value) else None
