"""Which model, and how often it reads the data."""

from collections.abc import Sequence
from typing import NamedTuple

from common.errors import UserError, say
from scripts.planning import rules
from scripts.planning.machine import LARGE_UPDATE, LIBRARIES, STATE, USABLE, count_parameters
from scripts.planning.stages import START, Stage

SHORTER = 0.95  # a part of the data is made smaller by this factor until it fits into the time
LONG_UPDATE = 10.0  # seconds; models that take longer for an update are not measured


class Plan(NamedTuple):
    """The stages of one model, and what limits it: data, memory, hours, speed or size."""

    stages: list[Stage]
    limit: str

    @property
    def seconds(self) -> float:
        """From the first command to the last weights."""
        return total_seconds(self.stages)


def total_seconds(stages: list[Stage]) -> float:
    """Of all stages, from the first command to the last weights."""
    return sum(START + stage.seconds + stage.evaluation for stage in stages)


def choose(stages: list[Stage], depths: Sequence[int], memory: float, seconds: float) -> Plan:
    """The largest of these models that fits into memory and time and reads enough for its size, with as many
    passes as the time allows. They are measured from the smallest up to the first one that does not fit.

    Args:
        memory: bytes of a rank.
        seconds: of all stages; may be infinite.

    Raises:
        UserError: not even the smallest fits.
    """
    best: list[Stage] = []
    limit = ""
    for depth in depths:
        models = [stage.with_depth(depth) for stage in stages]
        limit = why_not_measured(models[0], best, memory)
        if limit:
            break
        models = [model.measured() for model in models]
        say(describe_cost(models))
        planned = most_passes(models, memory, seconds)
        limit = why_not_taken(planned, memory, seconds, is_smallest=not best)
        if limit:
            break
        best = planned
    if not best:
        size = f"{rules.WIDTH * depths[0]} x {depths[0]}"
        if limit == "hours":
            raise UserError(
                f"--hours {seconds / 3600:g}: in this time a model of {size} makes fewer than "
                f"{rules.FEW_UPDATES} updates, which teach little; give more time"
            )
        raise UserError(
            f"{memory / 1e9:.1f} GB, {USABLE:.0%} of the free memory, do not hold a model of {size}"
        )
    if best[0].passes < rules.PASSES:
        limit = "hours"
    return Plan(best, limit or "size")


def why_not_measured(model: Stage, smaller: list[Stage], memory: float) -> str:
    """What rules a model out before it is measured; empty: nothing. smaller: the best so far."""
    depth, least = model.args.num_hidden_layers, LIBRARIES + STATE * count_parameters(model.args)
    if not smaller:
        return "memory" if least > memory else ""
    if rules.layer_weights(depth) * rules.TOKENS_PER_WEIGHT > rules.PASSES * model.data.num_tokens:
        return "data"
    known = smaller[0]
    growth = depth / known.args.num_hidden_layers
    if least + growth**2 * known.cost.kept * LARGE_UPDATE > memory:
        return "memory"
    return "speed" if growth**3 * known.cost.token * LARGE_UPDATE > LONG_UPDATE else ""


def why_not_taken(planned: list[Stage], memory: float, seconds: float, is_smallest: bool) -> str:
    """What rules a measured model out; empty: nothing."""
    first = planned[0]
    if max(stage.memory for stage in planned) > memory:
        return "memory"
    if total_seconds(planned) > seconds or (first.passes < 1 and first.updates < rules.FEW_UPDATES):
        return "hours"
    needed = rules.layer_weights(first.args.num_hidden_layers) * rules.TOKENS_PER_WEIGHT
    return "hours" if not is_smallest and first.tokens < needed else ""


def most_passes(models: list[Stage], memory: float, seconds: float) -> list[Stage]:
    """The stages with as many passes as fit into the time; of a time too short for one pass over a part of
    the data, of at least FEW_UPDATES updates."""

    def with_passes(passes: float) -> list[Stage]:
        planned = [models[0].with_passes(passes, memory)]
        for model in models[1:]:
            planned.append(model.with_passes(rules.SFT_PASSES * min(1, passes), memory))
        return planned

    passes: float = rules.PASSES
    planned = with_passes(passes)
    while total_seconds(planned) > seconds:
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
