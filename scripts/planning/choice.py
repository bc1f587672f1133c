"""Chooses the model, and how often it reads the data."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from common.errors import UserError, say
from scripts.planning import rules
from scripts.planning.machine import MEMORY_SHARE, state_bytes
from scripts.planning.stages import START_SECONDS, Stage
from trainer.report.metrics import duration

DATA_FACTOR = 0.95  # factor by which the part of the data is reduced until it fits into the time


class Plan(NamedTuple):
    """The stages of one model, and what limits the model: data, memory, hours or size."""

    stages: list[Stage]
    limit: str

    @property
    def disk(self) -> float:
        """Bytes that the runs write."""
        return sum(stage.disk for stage in self.stages)


def total_seconds(stages: list[Stage]) -> float:
    """Seconds of all stages, from the first command to the last weights."""
    return sum(START_SECONDS + stage.seconds + stage.evaluation for stage in stages)


def choose(stages: list[Stage], depths: Sequence[int], memory: float, seconds: float) -> Plan:
    """Choose the largest of these models that fits into memory and time and reads enough for its size. It
    gets as many passes as the time allows. Models are measured from the smallest up to the first that does
    not fit.

    Args:
        memory: limit of the bytes of this process.
        seconds: limit for all stages together.

    Raises:
        UserError: not even the smallest model fits.
    """
    best: list[Stage] = []
    models: list[Stage] = []
    limit, passes = "size", stages[0].most_passes
    goes_on = stages[0].goes_on  # then the model is given
    text_tokens = stages[0].own_data.num_tokens
    given_width = stages[0].args.hidden_size if goes_on else None
    for depth in depths:
        if best and rules.tokens_needed(depth, passes) > passes * text_tokens:
            limit = "data"
            break
        # what a forward pass keeps may be half as much again
        if 1.5 * state_bytes(rules.layer_weights(depth, given_width)) > memory:
            limit = "memory"
            break
        try:
            models = [stage.measured() if goes_on else stage.with_depth(depth) for stage in stages]
        except torch.OutOfMemoryError:
            limit = "memory"
            break
        say(describe_cost(models))
        planned = passes_that_fit(models, memory, seconds)
        if max(stage.memory for stage in planned) > memory:
            limit = "memory"
            break
        first = planned[0]
        teaches_little = first.passes < 1 and first.updates < rules.MIN_USEFUL_UPDATES
        reads_too_little = bool(best) and first.tokens < rules.tokens_needed(depth, first.passes)
        if total_seconds(planned) > seconds or teaches_little or reads_too_little:
            limit = "hours"
            break
        best = planned
    if not best:
        size = f"{given_width or rules.WIDTH * depths[0]} x {depths[0]}"
        if limit == "hours":
            least = least_seconds(models, memory)
            hours = round_up(least / 3600)
            raise UserError(
                f"--hours {seconds / 3600:g}: the {'given' if goes_on else 'smallest'} model, {size}, needs "
                f"{duration(least)} for one pass over the data or {rules.MIN_USEFUL_UPDATES} updates; fewer "
                f"teach little. Give --hours {hours}"
            )
        room = f"{memory / 1e9:.1f} GB, {MEMORY_SHARE:.0%} of the free memory"
        raise UserError(f"out of memory: a model of {size} does not fit into {room}")
    if best[0].passes < passes:
        limit = "hours"
    return Plan(best, limit)


def passes_that_fit(models: list[Stage], memory: float, seconds: float) -> list[Stage]:
    """The stages with as many passes as fit into the time. If the time is too short for one pass, they take a
    part of the data, with at least MIN_USEFUL_UPDATES updates."""
    passes: float = models[0].most_passes
    planned = with_passes(models, passes, memory)
    while total_seconds(planned) > seconds:
        passes = passes - 1 if passes > 1 else passes * DATA_FACTOR
        planned = with_passes(models, passes, memory)
        if passes < 1 and planned[0].updates < rules.MIN_USEFUL_UPDATES:
            break
    return planned


def least_seconds(models: list[Stage], memory: float) -> float:
    """Seconds of the shortest plan: one pass over the data, or MIN_USEFUL_UPDATES updates on a part."""
    passes, planned = 1.0, with_passes(models, 1.0, memory)
    while planned[0].updates > rules.MIN_USEFUL_UPDATES:
        passes *= DATA_FACTOR
        shorter = with_passes(models, passes, memory)
        if shorter[0].updates < rules.MIN_USEFUL_UPDATES:
            break
        planned = shorter
    return total_seconds(planned)


def round_up(hours: float) -> str:
    """Hours plus 10 %, because speeds vary, rounded up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(hours)) - 1)
    return f"{math.ceil(1.1 * hours / unit) * unit:.2g}"


def with_passes(models: list[Stage], passes: float, memory: float) -> list[Stage]:
    """The stages with this many passes of pretraining, and the passes of SFT that `sft_passes` gives."""
    first, *others = models
    return [
        first.with_passes(passes, memory),
        *(stage.with_passes(sft_passes(stage, passes), memory) for stage in others),
    ]


def sft_passes(stage: Stage, passes: float) -> float:
    """The passes of SFT in a plan with this many passes of pretraining. If the time allows only a part of the
    text, SFT reads the same part of the conversations. If it allows fewer than PASSES passes, SFT of few
    conversations is shortened in proportion, too (docs/dev/LOG.md, "Dropout in many passes")."""
    most = stage.most_passes
    if not stage.has_few_conversations:
        return most * min(1, passes)
    return max(min(1, passes), most * min(1, passes / rules.PASSES))


def describe_cost(models: list[Stage]) -> str:
    """A line with the measured cost of a model."""
    shape, speeds = models[0].args, []
    for model in models:
        tokens = model.own_data.num_tokens
        speed = model.cost.speed(rules.update_tokens(model.most_passes * tokens))
        speeds.append(f"{model.args.save_weight} {speed:,.0f} tokens/s")
    size = f"{models[0].cost.parameters / 1e6:,.2f} M parameters"
    return f"  {shape.hidden_size} x {shape.num_hidden_layers}: {size}; {', '.join(speeds)}"
