"""Which model and how much of the data: the plan with the least loss that fits into memory and time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import UserError
from scripts.planning.machine import USABLE, Cost
from scripts.planning.stages import WIDTH, Stage
from trainer.optim import rules
from trainer.report.metrics import duration
from trainer.report.speed import layer_weights

PASSES, SFT_PASSES = 4, 2  # over the data, at most: more teach little (arXiv:2305.16264)
# of a part of the data: the least share, and the share of the time that it may take by proportion
SMALLEST_SHARE, PART_SAFETY = 1e-4, 0.9


class Plan(NamedTuple):
    """The stages of one model, the held-out loss of pretraining to expect, seconds of all stages, bytes of a
    rank."""

    stages: list[Stage]
    loss: float
    seconds: float
    memory: float

    def loss_range(self) -> tuple[float, float] | None:
        """The lowest and the highest loss to expect of pretraining; None where no such run was measured."""
        args = self.stages[0].args
        weights = layer_weights(args.num_hidden_layers, args.hidden_size)
        if not rules.was_checked(weights, self.stages[0].tokens / args.epochs, args.epochs):
            return None
        return self.loss * (1 - rules.SPREAD), self.loss * (1 + rules.SPREAD)


@dataclass(frozen=True)
class Planner:
    """Makes plans of stages that have no model yet.

    memory, limit: bytes of a rank and seconds. trigram: the held-out loss of a trigram model of so many
    tokens of the first stage.
    """

    stages: list[Stage]
    memory: float
    limit: float
    trigram: Callable[[float], float]

    def plan(self, depth: int, cost: Cost, passes: int, share: float = 1.0) -> Plan:
        """The plan of a model of so many layers, for passes over this share of the data."""
        stages = [self.stages[0].with_model(depth, cost, passes, self.memory, share)]
        if len(self.stages) > 1:
            # of SFT rather more data than a second pass
            sft_passes = max(1, int(SFT_PASSES * share))
            sft_share = min(1.0, SFT_PASSES * share / sft_passes)
            stages.append(self.stages[1].with_model(depth, cost, sft_passes, self.memory, sft_share))
        tokens, weights = share * self.stages[0].data.num_tokens, layer_weights(depth, WIDTH * depth)
        loss = rules.expected_loss(self.trigram(tokens), weights, tokens, passes)
        seconds = sum(stage.seconds for stage in stages)
        return Plan(stages, loss, seconds, max(stage.memory for stage in stages))

    def plans(self, depth: int, cost: Cost) -> list[Plan]:
        """The plans of a model: one pass to PASSES over all data, and where one takes too long, one over a
        part."""
        plans = [self.plan(depth, cost, passes) for passes in range(1, PASSES + 1)]
        once, least = plans[0], self.plan(depth, cost, 1, SMALLEST_SHARE)
        if least.seconds < self.limit < once.seconds:
            share = PART_SAFETY * (self.limit - least.seconds) / (once.seconds - least.seconds)
            part = self.plan(depth, cost, 1, max(SMALLEST_SHARE, share))
            while part.seconds > self.limit and share > SMALLEST_SHARE:  # updates do not shrink with the data
                share *= PART_SAFETY
                part = self.plan(depth, cost, 1, max(SMALLEST_SHARE, share))
            plans.append(part)
        return plans


def choose(planner: Planner, costs: dict[int, Cost]) -> tuple[Plan, str]:
    """The plan with the least loss that fits into memory and time, of models of these depths, and what limits
    it: data, memory or hours. Raises UserError if none fits."""
    tokens = planner.stages[0].data.num_tokens
    plans = []
    for depth, cost in costs.items():
        is_too_large = layer_weights(depth, WIDTH * depth) > PASSES * tokens and depth > 1
        if len(costs) == 1 or not is_too_large:
            plans += planner.plans(depth, cost)

    fitting = [plan for plan in plans if plan.memory <= planner.memory]
    if not fitting:
        raise UserError(
            f"{planner.memory / 1e9:.1f} GB, {USABLE:.0%} of the free memory, do not hold the smallest model"
        )
    in_time = [plan for plan in fitting if plan.seconds <= planner.limit]
    if not in_time:
        least = duration(min(plan.seconds for plan in fitting))
        raise UserError(f"--hours {planner.limit / 3600:g}: the smallest plan takes {least}; give more time")

    best = min(in_time, key=lambda plan: plan.loss)
    best_any_time = min(fitting, key=lambda plan: plan.loss)
    best_any_memory = min(plans, key=lambda plan: plan.loss)
    if best.loss > best_any_time.loss:
        return best, "hours"
    if best.loss > best_any_memory.loss:
        return best, "memory"
    return best, "data"
