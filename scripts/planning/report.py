"""What a plan says: its table, the loss to expect, and what is unwise about it."""

import math

import psutil
import torch

from common.settings import ModelConfig
from dataset.lm_dataset import StageDataset
from scripts.planning.choice import Plan
from scripts.planning.machine import Cost, Machine
from scripts.planning.stages import FEW_UPDATES, WIDTH, spelling
from trainer.data.datasets import epoch_items
from trainer.optim import rules
from trainer.report.metrics import duration

SLACK = 0.25  # cores that other programs may use without being named
COSTLY_STEP = 0.3  # share of the time
FEW_BYTES = 2.5  # of text per token
TOKENS_PER_PARAMETER = (0.5, 1000)  # outside of them the size of the model does not fit the data


def describe_costs(costs: dict[int, Cost]) -> list[str]:
    """A line for each model."""
    lines = []
    for depth, cost in costs.items():
        size = f"{cost.parameters / 1e6:,.2f} M parameters"
        how = "measured" if cost.measured else "arithmetic"
        lines.append(f"  {WIDTH * depth} x {depth}: {size}, {1 / cost.token:,.0f} tokens/s, {how}")
    return lines


def describe_other_programs(machine: Machine, used: float) -> list[str]:
    """A line if other programs took time from the measurement. used: cores of these programs."""
    cores = psutil.cpu_count() or 1
    is_busy = used + torch.get_num_threads() > cores + SLACK
    if machine.gpu or machine.device.type != "cpu" or not is_busy:
        return []
    return [
        f"  other programs used {used:.1f} of {cores} cores meanwhile; without them these speeds are higher, "
        "and the plan may be another: plan again then"
    ]


def describe(plan: Plan, limit: str) -> list[str]:
    """The plan as a table with a column for each stage."""
    first, columns = plan.stages[0], []
    for stage in plan.stages:
        column = {
            "": stage.args.save_weight,
            "tokens held out": f"{stage.held_out.num_tokens:,}",
            "tokens to train": f"{stage.tokens:,}",
            "share of the data": f"{epoch_items(stage.data, stage.args) / len(stage.data):.3g}",
            "passes over the data": str(stage.args.epochs),
            "updates": f"{stage.updates:,}",
            "tokens of an update": f"{stage.tokens / stage.updates:,.0f}",
            "learning rate": f"{stage.args.learning_rate:g}",
            "time": duration(stage.seconds),
            "memory, at least": f"{stage.memory / 1e9:.1f} GB",
            # fp16 weights twice, two checkpoints
            "disk": f"{26 * stage.cost.parameters / 1e9:.2f} GB",
        }
        columns.append(column)
    size = f"{first.args.hidden_size} x {first.args.num_hidden_layers}, "
    size += f"{first.cost.parameters / 1e6:.2f} M parameters"
    lines = [f"plan: {size}; {duration(plan.seconds)} in all; limited by the {limit}"]
    takes_all = not any(stage.args.max_tokens for stage in plan.stages)
    for name in columns[0]:
        if name == "share of the data" and takes_all:
            continue
        lines.append(f"  {name:22}" + "".join(f"{column[name]:>14}" for column in columns))
    return [*lines, f"  {describe_loss(plan, first.held_out)}"]


def describe_loss(plan: Plan, held_out: StageDataset) -> str:
    """The held-out loss to expect of pretraining; none where no such run was measured."""
    loss_range = plan.loss_range()
    if loss_range is None:
        return (
            "no forecast of the loss: the runs behind it had texts of at least "
            f"{rules.MIN_TOKENS / 1e6:g} M tokens, at most {rules.MAX_TRAINED / 1e6:g} M tokens in all "
            f"passes, and layers with {rules.MIN_WEIGHTS / 1e6:.2f} to "
            f"{rules.MAX_WEIGHTS / 1e6:.1f} M weights"
        )
    low, high = loss_range
    bits = plan.loss / math.log(2) / spelling(held_out)[1]
    text = f"held-out loss to expect of pretraining: {plan.loss:.2f} ({low:.2f} to {high:.2f}), "
    return text + f"{bits:.2f} bits a byte"


def unwise(plan: Plan, size_is_given: bool) -> list[str]:
    """What to think about again, one line each. size_is_given: the user has fixed the model; else it is the
    best of those that fit, and nothing is said of its size."""
    first, lines = plan.stages[0], []
    for stage in plan.stages:
        if stage.updates < FEW_UPDATES:
            advice = "more time helps" if stage.args.max_tokens else "more data help"
            lines.append(f"{stage.args.save_weight}: {stage.updates} updates teach little; {advice}")
    ratio, (low, high) = first.tokens / first.cost.parameters, TOKENS_PER_PARAMETER
    if size_is_given and ratio < low and first.args.num_hidden_layers > 1:
        lines.append(f"{ratio:,.2f} tokens per parameter: a smaller model learns as much")
    if size_is_given and ratio > high:
        lines.append(f"{ratio:,.0f} tokens per parameter: a larger model learns more")
    share = first.updates * first.cost.update / first.seconds
    if share > COSTLY_STEP:
        lines.append(f"--optimizer {rules.OPTIMIZER} takes {share:.0%} of the time here; compare with adamw")
    _, bytes_per_token = spelling(first.data)
    if bytes_per_token < FEW_BYTES and first.args.tokenizer_path == ModelConfig().tokenizer_path:
        lines.append(
            f"{bytes_per_token:.1f} bytes per token: the vocabulary was made for other text "
            "(docs/tokenizer.md)"
        )
    return lines
