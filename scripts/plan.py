"""Plan a run before it starts: from your data, this machine and your hours to every setting of pretraining
and SFT.

    python scripts/plan.py --pretrain_data data/pretrain.jsonl --sft_data data/sft.jsonl --hours 8
    python scripts/plan.py --pretrain_data data/book.txt --depth 8
    python scripts/plan.py --sft_data data/sft.jsonl --hours 1
    python scripts/plan.py --pretrain_data data/pretrain.jsonl --sft_data data/sft.jsonl --gpu rtx4090

It tokenises the data as the stages do, times a few updates of models of growing size on them (a minute in
all), and takes size, passes over the data, batch and learning rate from measured rules
(trainer/optim/rules.py). Where the time is short it takes a part of the data. It prints the plan, the
held-out loss to expect if such runs were measured, what limits it and what is unwise, and writes a shell file
that runs it. Without --pretrain_data the conversations are what is pretrained on, too.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
import psutil
import torch

from common.errors import UserError, say
from common.files import atomic_write
from common.hub import local_settings
from common.launcher import available_cores
from common.settings import ROOT, ModelConfig, StageArgs, add_flags, settings_of
from dataset.files import expand_paths, iter_blocks, parts_of
from dataset.lm_dataset import StageDataset, collate_flat
from dataset.mixing import split_weights
from dataset.token_cache import load_tokenizer
from dataset.tokenizing import DocumentTokenizer, TokenizerSpec
from scripts.planning.machine import (
    MEASURED,
    SHARE_OF_SHEET,
    STATE,
    Cost,
    count_parameters,
    cpu_seconds_of_others,
    free_memory,
    training_cost,
)
from scripts.planning.trigrams import trigram_loss
from scripts.runs.run import FORECAST
from trainer import train_full_sft, train_pretrain
from trainer.data.datasets import epoch_items, epoch_tokens
from trainer.devices.device import describe_device, mixed_precision, select_device
from trainer.objectives.next_token import model_config
from trainer.optim import rules
from trainer.report.metrics import duration
from trainer.report.speed import GPUS, layer_weights
from trainer.run.paths import run_name

if TYPE_CHECKING:
    from model.model_minimind import MiniMindConfig

WIDTH = 64  # of a model, per layer: --depth 8 is the default model, 512 x 8
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
PASSES, SFT_PASSES = 4, 2  # over the data, at most: more teach little (arXiv:2305.16264)
# seconds after which no larger model is measured; of an update, at most
MEASURING, MEASURED_TOKENS = 40.0, 8192
COUNTED = 4  # layers of the largest model of which the bytes are counted for a GPU that is not here
USABLE = 0.8  # share of the memory
# of a part of the data: the least share, and the share of the time that it may take by proportion
SMALLEST_SHARE, PART_SAFETY = 1e-4, 0.9
SLACK = 0.25  # cores that other programs may use without being named
START = 12.0  # seconds of a stage before it trains
LOG_POINTS = 20  # of a stage
N_EVALS, EVAL_COST = 5, 0.4  # of a stage; the cost of a token in one, where training it costs 1
FEW_UPDATES, COSTLY_STEP = 100, 0.3  # share of an update
LITTLE_TEXT = 2e6  # bytes: tokenised in seconds
FEW_BYTES = 2.5  # of text per token
TOKENS_PER_PARAMETER = (0.5, 1000)  # outside of them the size of the model does not fit the data
SHARED = ("eval_share", "text_separator", "cache_dir", "device", "dtype")  # flags that are the stages' own


@dataclass(frozen=True)
class Stage:
    """A stage of a plan: its script and settings, its data, and what the model costs."""

    script: Any
    args: StageArgs
    data: StageDataset
    held_out: StageDataset
    ranks: int
    cost: Cost

    @property
    def tokens(self) -> int:
        """Tokens to train."""
        return round(epoch_tokens(self.data, self.args)) * self.args.epochs

    @property
    def updates(self) -> int:
        """Optimizer steps."""
        per_update = self.args.batch_size * self.args.accumulation_steps * self.ranks
        return math.ceil(epoch_items(self.data, self.args) / per_update) * self.args.epochs

    @property
    def seconds(self) -> float:
        """From its start to its weights, with evaluations."""
        tokens = self.tokens + N_EVALS * EVAL_COST * self.held_out.num_tokens
        return START + tokens / self.ranks * self.cost.token + self.updates * self.cost.update

    @property
    def memory(self) -> float:
        """Bytes of a rank."""
        return self.cost.memory(self.data.mean_tokens * self.args.batch_size)

    def with_model(self, depth: int, cost: Cost, epochs: int, memory: float, share: float = 1.0) -> "Stage":
        """With a model of so many layers and this share of the data: batch and rate by the rules, the
        micro-batch as the memory allows."""
        args = replace(self.args, hidden_size=WIDTH * depth, num_hidden_layers=depth, epochs=epochs)
        if share < 1:
            args = replace(args, max_tokens=max(1, round(share * self.data.num_tokens)))
        stage = replace(self, args=rules.chosen(args, self.data, self.ranks), cost=cost)
        while stage.memory > memory and stage.args.batch_size > 1:
            half, twice = stage.args.batch_size // 2, stage.args.accumulation_steps * 2
            stage = replace(stage, args=replace(stage.args, batch_size=half, accumulation_steps=twice))
        return replace(stage, args=replace(stage.args, warmup_updates=rules.warmup(stage.updates)))


class Plan(NamedTuple):
    """The stages of one model, the held-out loss of pretraining to expect, seconds of all stages, bytes of a
    rank."""

    stages: list[Stage]
    loss: float
    seconds: float
    memory: float


def choose(
    stages: list[Stage],
    costs: dict[int, Cost],
    memory: float,
    limit: float,
    trigram: Callable[[float], float],
) -> tuple[Plan, str]:
    """The plan with the least loss that fits into `memory` bytes and `limit` seconds, and what limits it.
    `trigram`: the loss of a trigram model of so many tokens. Raises UserError if none fits."""
    tokens = stages[0].data.num_tokens
    plans = []
    for depth, cost in costs.items():
        weights = layer_weights(depth, WIDTH * depth)
        is_too_large = weights > PASSES * tokens and len(costs) > 1 and depth > 1
        if is_too_large:
            continue

        def planned(passes: int, share: float = 1.0, depth=depth, cost=cost, weights=weights) -> Plan:
            of_stages = [stages[0].with_model(depth, cost, passes, memory, share)]
            if len(stages) > 1:
                sft_passes = max(1, int(SFT_PASSES * share))
                sft_share = min(1.0, SFT_PASSES * share / sft_passes)  # rather other data than another pass
                of_stages.append(stages[1].with_model(depth, cost, sft_passes, memory, sft_share))
            loss = rules.expected_loss(trigram(share * tokens), weights, share * tokens, passes)
            seconds = sum(stage.seconds for stage in of_stages)
            return Plan(of_stages, loss, seconds, max(stage.memory for stage in of_stages))

        plans += [planned(passes) for passes in range(1, PASSES + 1)]
        once, least = plans[-PASSES], planned(1, SMALLEST_SHARE)
        if least.seconds < limit < once.seconds:  # a part of the data, once
            share = PART_SAFETY * (limit - least.seconds) / (once.seconds - least.seconds)
            part = planned(1, max(SMALLEST_SHARE, share))
            while part.seconds > limit and share > SMALLEST_SHARE:  # updates do not shrink with the data
                share *= PART_SAFETY
                part = planned(1, max(SMALLEST_SHARE, share))
            plans.append(part)

    fitting = [plan for plan in plans if plan.memory <= memory]
    if not fitting:
        raise UserError(
            f"{memory / 1e9:.1f} GB, {USABLE:.0%} of the free memory, do not hold the smallest model"
        )
    in_time = [plan for plan in fitting if plan.seconds <= limit]
    if not in_time:
        least = duration(min(plan.seconds for plan in fitting))
        raise UserError(f"--hours {limit / 3600:g}: the smallest plan takes {least}; give more time")

    best = min(in_time, key=lambda plan: plan.loss)
    best_any_time = min(fitting, key=lambda plan: plan.loss)
    best_any_memory = min(plans, key=lambda plan: plan.loss)
    if best.loss > best_any_time.loss:
        return best, "hours"
    if best.loss > best_any_memory.loss:
        return best, "memory"
    return best, "data"


def measure(
    stage: Stage,
    shape: Callable[[int], "MiniMindConfig"],
    depths: Iterable[int],
    gpu: str | None,
    memory: float,
) -> dict[int, Cost]:
    """Depth -> what training costs, from the smallest model on; what would take too long or too much memory
    is extrapolated from the largest that was measured. `shape`: the model of a depth."""
    device, data = select_device("cpu" if gpu else stage.args.device), stage.data
    wanted = min(rules.update_tokens(data.num_tokens * PASSES), MEASURED_TOKENS) / (8 if gpu else 1)
    count = max(1, round(wanted / data.mean_tokens))
    batch = data.collate([data[i * len(data) // count] for i in range(count)])
    costs: dict[int, Cost] = {}
    begin = time.monotonic()
    for depth in depths:
        if costs:
            last = costs[max(costs)]
            guess = last.extrapolate(shape(depth), batch, depth / max(costs))
            late = time.monotonic() - begin + (MEASURED + 2) * wanted * guess.token > MEASURING
            if depth > COUNTED if gpu else late or not last.measured or guess.memory(wanted) > memory:
                costs[depth] = guess
                continue
        costs[depth] = training_cost(shape(depth), batch, device, stage.args.dtype, rules.OPTIMIZER, gpu)
    return costs


def check_first(
    args: argparse.Namespace, shape: Callable[[int], "MiniMindConfig"], depth: int, memory: float, ranks: int
) -> None:
    """Raise UserError if the memory does not hold a model of this depth, or FEW_UPDATES updates of it take
    longer than --hours. The first block of the text tells, before all of it is tokenised; it also says how
    long that takes."""
    config = shape(depth)
    if STATE * count_parameters(config) > memory:
        raise UserError(f"{memory / 1e9:.1f} GB of memory do not hold a model of {WIDTH * depth} x {depth}")
    paths = expand_paths(args.pretrain_data, plain_text=True)
    size = sum(os.path.getsize(path) for path in paths)
    if size < LITTLE_TEXT:
        return
    spec = TokenizerSpec.of(load_tokenizer(args.tokenizer_path or ModelConfig.tokenizer_path))
    begin = time.monotonic()
    block = next(iter_blocks(paths, args.text_separator or ""))
    samples = DocumentTokenizer(spec, train_pretrain.Args.max_seq_len)(block)
    seconds = (time.monotonic() - begin) * size / block.size / available_cores()
    if seconds > 60:
        say(f"tokenising {size / 1e6:,.0f} MB takes about {duration(seconds)}")
    items, last, wanted = [], 0, rules.update_tokens(0)
    for length in samples.lengths.tolist():
        if last >= wanted:
            break
        tokens, mask = samples.tokens[last : last + length], samples.loss_mask[last : last + length]
        items.append([{"input_ids": tokens, "loss_mask": mask, "sample_id": 0, "target_bytes": 0}])
        last += length
    if not items or args.hours == math.inf:
        return
    device = select_device("cpu" if args.gpu else args.device)
    cost = training_cost(config, collate_flat(items), device, args.dtype, rules.OPTIMIZER, args.gpu)
    stages = 1 if args.sft_data is None else 2
    least = stages * START + FEW_UPDATES * (wanted * cost.token / ranks + cost.update)
    if least > 3600 * args.hours:
        raise UserError(
            f"--hours {args.hours:g}: {FEW_UPDATES} updates of a model of {WIDTH * depth} x {depth} take "
            f"{duration(least)}; give more time, or a smaller model"
        )


# --- the command
# -----------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag, rows = parser.add_argument, settings_of(StageArgs)
    flag(
        "--pretrain_data",
        help="text to learn from, as --data_path of train_pretrain.py; without it the conversations",
    )
    flag(
        "--sft_data", help="conversations, as --data_path of train_full_sft.py; without it pretraining alone"
    )
    flag(
        "--hours",
        type=float,
        default=math.inf,
        help="time for all stages; without it as long as the data are worth",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--depth", type=int, help=f"layers of the model, {WIDTH} times as wide: the one dial")
    size.add_argument("--size", help="parameters of the model, such as 5m or 30m, instead of --depth")
    flag("--gpu", choices=sorted(GPUS), help="plan for this GPU by its data sheet; nothing is measured")
    flag("--save_dir", default=str(ROOT / "out" / "plan"), help="folder for run.sh and what it writes")
    flag(
        "--tokenizer_path",
        help="folder of a tokenizer; without it the shipped one, or for few data a smaller one",
    )
    flag(
        "--eval_share",
        type=rows["eval_share"].parse_flag,
        default=0.02,
        help="share of the records to hold out",
    )
    add_flags(parser, [rows[name] for name in SHARED if name != "eval_share"])
    args = parser.parse_args()
    for name in ("hours", "eval_share", "depth"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise UserError(f"--{name} {getattr(args, name)} must be above 0")
    args.pretrain_data = args.pretrain_data or args.sft_data
    if not args.pretrain_data:
        raise UserError("give --pretrain_data, --sft_data or both")
    least = START * (2 if args.sft_data else 1)
    if 3600 * args.hours <= least:  # said before anything is tokenised
        raise UserError(
            f"--hours {args.hours:g}: starting the stages alone takes {least:.0f} s; give more time"
        )
    for name, value in local_settings(vars(args)).items():
        setattr(args, name, value)
    for path in filter(None, (args.pretrain_data, args.sft_data)):
        if split_weights(path)[1]:
            raise UserError(
                f"{path}: a plan is for data without weights; leave them out, and add them to run.sh"
            )
        expand_paths(path)  # missing data are named before anything takes time
    for name in ("save_dir", "cache_dir", "tokenizer_path"):  # run.sh runs in another folder
        if getattr(args, name):
            setattr(args, name, os.path.abspath(getattr(args, name)))
    return args


def depths_for(args: argparse.Namespace, shape: Callable[[int], "MiniMindConfig"]) -> Iterable[int]:
    """The depths to choose from. Raises UserError for a --size that is none."""
    if args.size is None:
        return [args.depth] if args.depth else DEPTHS
    number, unit = args.size[:-1], args.size[-1:].lower()
    try:
        wanted = float(number) * {"k": 1e3, "m": 1e6, "b": 1e9}[unit]
    except (ValueError, LookupError):
        wanted = math.nan
    if not 0 < wanted < math.inf:
        raise UserError(f"--size {args.size} must be a number above 0 with k, m or b, such as 30m")
    distance = {depth: abs(math.log(count_parameters(shape(depth)) / wanted)) for depth in range(1, 41)}
    return [min(distance, key=distance.__getitem__)]


def open_stage(args: argparse.Namespace, script: Any, path: str, tokenizer_path: str, ranks: int) -> Stage:
    """A stage with its data and what is the same for all sizes of the model."""
    settings: dict[str, Any] = {name: getattr(args, name) for name in SHARED} | {
        "data_path": ",".join(os.path.abspath(os.path.expanduser(part)) for part in parts_of(path)),
        "save_dir": args.save_dir, "checkpoint_dir": f"{args.save_dir}/checkpoints",
        "tokenizer_path": tokenizer_path,
        "packing": script is train_pretrain, "optimizer": rules.OPTIMIZER,
        "batch_size": None, "learning_rate": None, "accumulation_steps": 1,
    }  # fmt: skip
    stage_args = script.Args(**settings)
    data, held_out = script.open_data(stage_args, load_tokenizer(tokenizer_path))
    return Stage(script, stage_args, data, held_out, ranks, Cost())


def own_tokenizer(args: argparse.Namespace, data: StageDataset) -> str | None:
    """The folder of a tokenizer whose vocabulary is made for these data; None where the shipped one, with
    which they are tokenised, suits them. Raises UserError if none can be made."""
    size = rules.vocabulary(*spelling(data))
    if size is None:
        return None
    folder, paths = f"{args.save_dir}/tokenizer", filter(None, (args.pretrain_data, args.sft_data))
    command = [sys.executable, str(ROOT / "scripts/train_tokenizer.py"), "--vocab_size", str(size)]
    command += ["--output_dir", folder, "--data_path", *paths]
    command += ["--text_separator", args.text_separator] if args.text_separator else []
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError("no tokenizer could be made for these data (see above); give --tokenizer_path")
    return folder


def spelling(data: StageDataset) -> tuple[int, float]:
    """Bytes of text of the targets, and bytes per target."""
    report = data.cache.report
    return report["target_bytes"], report["target_bytes"] / report["targets"]


def unwise(plan: Plan, size_is_given: bool) -> list[str]:
    """What to think about again, one line each. `size_is_given`: the user has fixed the model; else it is the
    best of those that fit, and says nothing of its size."""
    first, lines = plan.stages[0], []
    for stage in plan.stages:
        if stage.updates < FEW_UPDATES:
            advice = "more time helps" if stage.args.max_tokens else "more data help"
            lines.append(f"{stage.args.save_weight}: {stage.updates} updates teach little; {advice}")
    ratio, (low, high) = first.tokens / first.cost.parameters, TOKENS_PER_PARAMETER
    if size_is_given and ratio < low and first.args.num_hidden_layers > min(DEPTHS):
        lines.append(f"{ratio:,.2f} tokens per parameter: a smaller model learns as much")
    if size_is_given and ratio > high:
        lines.append(f"{ratio:,.0f} tokens per parameter: a larger model learns more")
    share = first.updates * first.cost.update / first.seconds
    if share > COSTLY_STEP:
        lines.append(f"--optimizer {rules.OPTIMIZER} takes {share:.0%} of the time here; compare with adamw")
    _, spelled = spelling(first.data)
    if spelled < FEW_BYTES and first.args.tokenizer_path == ModelConfig.tokenizer_path:
        lines.append(
            f"{spelled:.1f} bytes per token: the vocabulary was made for other text (docs/tokenizer.md)"
        )
    return lines


def describe(plan: Plan, limit: str) -> list[str]:
    """The plan as a table with a column for each stage."""
    first = plan.stages[0]
    rows = {
        "": lambda stage: stage.args.save_weight,
        "tokens held out": lambda stage: f"{stage.held_out.num_tokens:,}",
        "tokens to train": lambda stage: f"{stage.tokens:,}",
        "share of the data": lambda stage: f"{epoch_items(stage.data, stage.args) / len(stage.data):.3g}",
        "passes over the data": lambda stage: stage.args.epochs,
        "updates": lambda stage: f"{stage.updates:,}",
        "tokens of an update": lambda stage: f"{stage.tokens / stage.updates:,.0f}",
        "learning rate": lambda stage: f"{stage.args.learning_rate:g}",
        "time": lambda stage: duration(stage.seconds),
        "memory, at least": lambda stage: f"{stage.memory / 1e9:.1f} GB",
        # fp16 weights twice, two checkpoints
        "disk": lambda stage: f"{26 * stage.cost.parameters / 1e9:.2f} GB",
    }
    if not any(stage.args.max_tokens for stage in plan.stages):
        del rows["share of the data"]
    size = f"{first.args.hidden_size} x {first.args.num_hidden_layers}, "
    size += f"{first.cost.parameters / 1e6:.2f} M parameters"
    return [
        f"plan: {size}; {duration(plan.seconds)} in all; limited by the {limit}",
        *(
            f"  {name:22}" + "".join(f"{value(stage):>14}" for stage in plan.stages)
            for name, value in rows.items()
        ),
        f"  {loss_forecast(plan)}",
    ]


def is_forecast(plan: Plan) -> bool:
    """Whether runs like the first stage were measured."""
    first = plan.stages[0]
    weights = layer_weights(first.args.num_hidden_layers, first.args.hidden_size)
    return rules.was_checked(weights, first.tokens / first.args.epochs, first.args.epochs)


def loss_forecast(plan: Plan) -> str:
    """The held-out loss to expect of pretraining; none where no such run was measured."""
    first = plan.stages[0]
    if not is_forecast(plan):
        return (
            "no forecast of the loss: the runs behind it had texts of at least "
            f"{rules.MIN_TOKENS / 1e6:g} M tokens, at most {rules.MAX_TRAINED / 1e6:g} M tokens in all "
            f"passes, and layers with {rules.MIN_WEIGHTS / 1e6:.2f} to "
            f"{rules.MAX_WEIGHTS / 1e6:.1f} M weights"
        )
    low, high = plan.loss * (1 - rules.SPREAD), plan.loss * (1 + rules.SPREAD)
    bits = plan.loss / math.log(2) / spelling(first.held_out)[1]
    text = f"held-out loss to expect of pretraining: {plan.loss:.2f} ({low:.2f} to {high:.2f}), "
    return text + f"{bits:.2f} bits a byte"


def forecast_file(plan: Plan) -> str:
    """What is expected of each stage, as JSON; the report compares it with what came."""
    stages: dict[str, dict[str, Any]] = {}
    for stage in plan.stages:
        name = run_name(stage.args.save_weight, stage.args)
        stages[name] = {"seconds": stage.seconds, "tokens": stage.tokens, "eval_loss": None}
    first = plan.stages[0]
    if is_forecast(plan):
        low, high = plan.loss * (1 - rules.SPREAD), plan.loss * (1 + rules.SPREAD)
        name = run_name(first.args.save_weight, first.args)
        stages[name]["eval_loss"] = [low, plan.loss, high]
    return json.dumps(stages, indent=1)


def shell_file(plan: Plan) -> str:
    """A shell file that runs the plan; run again, it goes on where it was stopped. It prints what was planned
    before each stage, which measures the speed anew for the line that it prints before its first update."""
    lines = [
        "#!/usr/bin/env bash",
        "# Written by scripts/plan.py. Run it again to go on after an interruption.",
    ]
    again = ["echo", f"not finished; to go on: bash {shlex.quote(str(shell_path(plan)))}"]
    lines += ["set -e", f"trap {shlex.quote(shlex.join(again))} ERR", f"cd {shlex.quote(str(ROOT))}"]
    for stage in plan.stages:
        plan_of_it = f"planned {duration(stage.seconds)}, at {stage.ranks / stage.cost.token:,.0f} tokens/s"
        text = f'== {stage.args.save_weight}: {plan_of_it}; the line "run:" has the time at the present speed'
        lines.append(f"echo {shlex.quote(text)}")
        steps = stage.updates * stage.args.accumulation_steps
        log_interval = max(1, steps // LOG_POINTS)
        eval_interval = log_interval * max(1, round(steps / N_EVALS / log_interval))
        args = replace(stage.args, from_resume=True, log_interval=log_interval, eval_interval=eval_interval)
        start = (
            ["python"]
            if stage.ranks == 1
            else f"torchrun --standalone --nproc_per_node {stage.ranks}".split()
        )
        command = [*start, f"trainer/{Path(stage.script.__file__).name}"]
        for name in settings_of(type(args)):
            if (value := getattr(args, name)) != getattr(type(args), name):
                command += [f"--{name}", str(int(value) if isinstance(value, bool) else value)]
        lines.append(shlex.join(command))
    command = ["python", "scripts/plot_metrics.py", args.save_dir, "--html", f"{args.save_dir}/report.html"]
    lines += [shlex.join(command), shlex.join(["echo", f"next: {chat_command(plan)}"])]
    return "\n".join(lines) + "\n"


def shell_path(plan: Plan) -> Path:
    """Where the shell file is."""
    return Path(plan.stages[0].args.save_dir, "run.sh")


def chat_command(plan: Plan) -> str:
    """The command that tries out the weights of the last stage. After pretraining alone they continue a
    text."""
    last = plan.stages[-1]
    command = ["python", "scripts/chat.py", "--save_dir", last.args.save_dir]
    if last.script is train_pretrain:
        command += ["--weight", last.args.save_weight, "--form", "text"]
    return shlex.join(command)


def main() -> None:
    """Read, measure, choose, print, write."""
    args = parse_args()
    device, gpu = select_device("cpu" if args.gpu else args.device), args.gpu
    memory = free_memory(device, gpu)
    machine = describe_device(device, mixed_precision(args.dtype, device)[0])
    if gpu:
        machine = f"arithmetic for {gpu}: {SHARE_OF_SHEET:.0%} of {GPUS[gpu][0]} TFLOP/s, its data sheet"
    say(f"{machine}; {memory / 1e9:.0f} GB of memory")
    ranks = torch.cuda.device_count() if device.type == "cuda" else 1
    tokenizer_path = args.tokenizer_path or ModelConfig.tokenizer_path
    tokenizer = load_tokenizer(tokenizer_path)

    def shape(depth: int) -> "MiniMindConfig":
        return model_config(tokenizer, ModelConfig(hidden_size=WIDTH * depth, num_hidden_layers=depth))

    check_first(args, shape, min(depths_for(args, shape)), USABLE * memory, ranks)
    stages = [open_stage(args, train_pretrain, args.pretrain_data, tokenizer_path, ranks)]
    if not args.tokenizer_path and (own := own_tokenizer(args, stages[0].data)):
        tokenizer_path = own
        stages = [open_stage(args, train_pretrain, args.pretrain_data, own, ranks)]
    if args.sft_data:
        stages.append(open_stage(args, train_full_sft, args.sft_data, tokenizer_path, ranks))
    tokenizer = load_tokenizer(tokenizer_path)
    trigram = trigram_loss(stages[0].data, stages[0].held_out, len(tokenizer))
    begin, before = time.monotonic(), cpu_seconds_of_others()
    costs = measure(stages[0], shape, depths_for(args, shape), gpu, USABLE * memory)
    others = (cpu_seconds_of_others() - before) / (time.monotonic() - begin)
    for depth, cost in costs.items():
        size, kind = (
            f"{cost.parameters / 1e6:,.2f} M parameters",
            "measured" if cost.measured else "arithmetic",
        )
        say(f"  {WIDTH * depth} x {depth}: {size}, {1 / cost.token:,.0f} tokens/s, {kind}")
    cores = psutil.cpu_count() or 1
    if not gpu and device.type == "cpu" and others + torch.get_num_threads() > cores + SLACK:
        say(
            f"  other programs used {others:.1f} of {cores} cores meanwhile; without them these speeds are "
            "higher, and the plan may be another: plan again then"
        )
    plan, limit = choose(stages, costs, USABLE * memory, 3600 * args.hours, trigram)
    size_is_given = bool(args.depth or args.size)
    for line in describe(plan, limit) + [f"  unwise: {text}" for text in unwise(plan, size_is_given)]:
        say(line)
    path = shell_path(plan)
    # names of files need not be UTF-8
    atomic_write(path, lambda file: file.write(os.fsencode(shell_file(plan))))
    forecast = forecast_file(plan)
    atomic_write(Path(args.save_dir, FORECAST), lambda file: file.write(forecast.encode()))
    say(f"wrote {path}; next, in this order (the first ends with {args.save_dir}/report.html):")
    say(f"  bash {shlex.quote(str(path))}")
    say(f"  {chat_command(plan)}")


if __name__ == "__main__":
    with one_line_errors():
        main()
