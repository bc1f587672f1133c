"""Which model, and how often it reads the data."""

from collections.abc import Sequence
from typing import NamedTuple

from common.errors import UserError, say
from scripts.planning import rules
from scripts.planning.machine import LIBRARIES, STATE, USABLE, count_parameters, measured_tokens
from scripts.planning.stages import Stage
from trainer.devices.device import select_device

SHORTER = 0.95  # a part of the data is made smaller by this factor until it fits into the time
LONG_UPDATE = 10.0  # seconds; models that take longer for an update are not measured


class Plan(NamedTuple):
    """The stages of one model, and what keeps it from being better: data, memory, hours or speed."""

    stages: list[Stage]
    limit: str

    @property
    def seconds(self) -> float:
        """Of all stages, from the first command to the last weights."""
        return sum(stage.total_seconds for stage in self.stages)


def choose(stages: list[Stage], depths: Sequence[int], memory: float, seconds: float) -> Plan:
    """The largest of these models that fits into memory and time and reads enough for its size, with as many
    passes as the time allows.

    The models are measured, from the smallest up to the first one that does not fit.

    Args:
        memory: bytes of a rank.
        seconds: of all stages; may be infinite.

    Raises:
        UserError: not even the smallest fits.
    """
    best: list[Stage] = []
    limit = "data"
    for depth in depths:
        models = [stage.with_depth(depth) for stage in stages]
        limit = why_not_measured(models, best, memory)
        if limit:
            break
        models = [model.measured() for model in models]
        say(describe_cost(models))
        planned = most_passes(models, memory, seconds)
        limit = why_not_taken(planned, best, memory, seconds)
        if limit:
            break
        best = planned
    if not best:
        size = f"{rules.WIDTH * depths[0]} x {depths[0]}"
        raise UserError(
            f"{memory / 1e9:.1f} GB, {USABLE:.0%} of the free memory, do not hold a model of {size}"
        )
    if best[0].passes < rules.PASSES:
        limit = "hours"
    return Plan(best, limit or "largest model that is planned")


def why_not_measured(models: list[Stage], smaller: list[Stage], memory: float) -> str:
    """What rules these models out before they are measured; empty: nothing. smaller: the best so far."""
    first = models[0]
    if LIBRARIES + STATE * count_parameters(first.args) > memory:
        return "memory"
    if not smaller:
        return ""
    depth, known = first.args.num_hidden_layers, smaller[0]
    if rules.layer_weights(depth) * rules.TOKENS_PER_WEIGHT > rules.PASSES * first.data.num_tokens:
        return "data"
    growth = depth / known.args.num_hidden_layers
    tokens = measured_tokens(select_device(first.args.device))
    if known.cost.memory(growth**2 * tokens) > memory:
        return "memory"
    return "speed" if growth**3 * tokens * known.cost.token > LONG_UPDATE else ""


def why_not_taken(planned: list[Stage], smaller: list[Stage], memory: float, seconds: float) -> str:
    """What rules these measured models out; empty: nothing. Raises UserError where even the smallest model
    has too little time."""
    if max(stage.memory for stage in planned) > memory:
        return "memory"
    first, total = planned[0], sum(stage.total_seconds for stage in planned)
    if not smaller and (total > seconds or (first.passes < 1 and first.updates < rules.FEW_UPDATES)):
        raise UserError(
            f"--hours {seconds / 3600:g}: in this time the smallest model makes fewer than "
            f"{rules.FEW_UPDATES} updates, which teach little; give more time"
        )
    needed = rules.layer_weights(first.args.num_hidden_layers) * rules.TOKENS_PER_WEIGHT
    return "hours" if smaller and (total > seconds or first.tokens < needed) else ""


def most_passes(models: list[Stage], memory: float, seconds: float) -> list[Stage]:
    """The stages with as many passes as fit into the time; of a time too short for one pass over a part of
    the data, of at least FEW_UPDATES updates."""

    def with_passes(passes: float) -> list[Stage]:
        planned = [models[0].with_passes(passes, memory)]
        for model in models[1:]:
            planned.append(model.with_passes(min(rules.SFT_PASSES, rules.SFT_PASSES * passes), memory))
        return planned

    passes: float = rules.PASSES
    planned = with_passes(passes)
    while sum(stage.total_seconds for stage in planned) > seconds:
        passes = passes - 1 if passes > 1 else passes * SHORTER
        planned = with_passes(passes)
        if passes < 1 and planned[0].updates < rules.FEW_UPDATES:
            break
    return planned


def describe_cost(models: list[Stage]) -> str:
    """A line of what was measured of a model."""
    shape, speeds = models[0].args, []
    for model in models:
        speed = model.cost.speed(rules.update_tokens(rules.PASSES * model.data.num_tokens))
        speeds.append(f"{model.args.save_weight} {speed:,.0f} tokens/s")
    size = f"{models[0].cost.parameters / 1e6:,.2f} M parameters"
    return f"  {shape.hidden_size} x {shape.num_hidden_layers}: {size}; {', '.join(speeds)}"
