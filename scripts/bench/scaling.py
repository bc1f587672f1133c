"""How the time per token of a training update grows with the length of the samples, the width, and the experts.

    python scripts/bench/scaling.py --json out/scaling.json --png_dir out/scaling
    python scripts/bench/scaling.py --curves length --length 512 1024 2048 --tokens 8192 --hidden_size 768

A curve changes one setting and leaves all others as they are. Its points are trained in turn, round by round, with the
updates that scripts/benchmark.py measures, on random tokens: --tokens of them in each update, cut into samples of equal
length. The figure of a point is the median of its rounds. Beside its growth since the first point of the curve stands
that of the arithmetic, the floating-point operations per token by trainer/components/flops.py.

All models of a curve are in memory together. 64 experts in each layer would be a billion parameters at 512 x 8, so the
curves of experts have a smaller shape.
"""

import argparse
import shlex
import statistics
import sys
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors  # before torch, as in the stages

# isort: split
import numpy as np
import psutil
import torch

from common.durable_files import write_json
from common.errors import UserError, reason, say
from common.launcher import launch
from common.settings import add_flags, settings_of
from dataset.lm_dataset import collate_flat
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.benchmark import BenchmarkArgs, Block, Ours, device_name
from scripts.plot_metrics import new_figure
from trainer.components.device import autocast_dtype, mixed_precision, prepare_device, select_device
from trainer.components.language_model import SHAPE
from trainer.components.optimizer import build_optimizer
from trainer.components.parallel import wrap_model
from trainer.components.resume import model_fingerprint, run_fingerprint
from trainer.components.state import TrainState
from trainer.trainer_utils import next_token_loss, setup_seed

STATE = 12  # bytes per parameter that an update adds to the weights: the gradient and AdamW's two moments


@dataclass(frozen=True)
class Curve:
    """What a curve changes."""

    setting: str
    label: str
    points: list[int]
    others: dict[str, Any] = field(default_factory=dict)  # settings that all points share


CURVES = {
    "length": Curve("max_seq_len", "tokens per sample", [128, 256, 512, 1024, 2048, 4096]),
    "width": Curve("hidden_size", "hidden size", [256, 512, 768, 1024]),
    "experts": Curve("num_experts", "experts, top-1", [4, 8, 16, 32, 64], {"use_moe": True}),
    "top_k": Curve("num_experts_per_tok", "k of top-k, 8 experts", [1, 2, 4, 8], {"use_moe": True, "num_experts": 8}),
}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser, rows, names = Parser(description=__doc__.split("\n", 1)[0]), settings_of(BenchmarkArgs), list(CURVES)
    parser.add_argument("--curves", nargs="+", choices=names, default=names, help="curves to measure")
    for name, curve in CURVES.items():
        told = {"help": f"points of the curve {name}: {curve.label}", "unit": "", "default": curve.points}
        add_flags(parser, [replace(rows[curve.setting], name=name, **told)], nargs="+")
    moe = "of the curves experts and top_k"
    own = [
        replace(rows["batch_size"], name="tokens", default=4096, help="in each update", unit="tokens"),
        replace(rows["max_seq_len"], help="length of the samples, but in the curve length"),
        replace(rows["hidden_size"], help="width of the curve length"),
        replace(rows["num_hidden_layers"], help="depth of the curves length and width"),
        replace(rows["hidden_size"], name="moe_hidden_size", default=256, help=f"width {moe}"),
        replace(rows["num_hidden_layers"], name="moe_num_hidden_layers", default=4, help=f"depth {moe}"),
        replace(rows["warmup"], default=2, help="of each point, before the clock starts"),
        replace(rows["repeat"], name="rounds", help="rounds over the points of a curve"),
        replace(rows["updates"], default=1, help="of each point in a round, timed together"),
    ]
    add_flags(parser, [*own, rows["dtype"], rows["device"], rows["seed"]])
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--png_dir", help="also draw each curve, in this folder")
    args = parser.parse_args()
    if launch().world_size > 1:
        raise UserError("this measures a single process; start it with python, not with torchrun")
    return args


def settings_of_point(args: argparse.Namespace, name: str, value: int) -> BenchmarkArgs:
    """The settings of a curve's point.

    Raises:
        UserError: they do not go together, or the tokens of an update are not whole samples.
    """
    curve = CURVES[name]
    moe = "moe_" if curve.others else ""
    told = {key: getattr(args, moe + key) for key in ("hidden_size", "num_hidden_layers")}
    told |= {key: getattr(args, key) for key in ("max_seq_len", "dtype", "device", "seed")}
    settings = BenchmarkArgs(**told | curve.others | {curve.setting: value})
    if wrong := settings.contradictions():
        raise UserError(f"--{name} {value}: {'; '.join(wrong)}")
    if args.tokens % settings.max_seq_len:
        flag = f"--{'length' if name == 'length' else 'max_seq_len'} {settings.max_seq_len}"
        raise UserError(f"--tokens {args.tokens} must be divisible by the length of the samples, {flag}")
    return replace(settings, batch_size=args.tokens // settings.max_seq_len)


# --- what is trained -------------------------------------------------------------------------------------------------


def random_batch(rng: np.random.Generator, samples: int, length: int) -> dict[str, Any]:
    """A flat batch of random tokens; all of a sample but its first are targets."""
    rows = rng.integers(MiniMindConfig.vocab_size, size=(samples, length))
    whole = {"loss_mask": np.ones(length, bool), "target_bytes": 0}
    return collate_flat([[{"input_ids": row, "sample_id": number} | whole for number, row in enumerate(rows)]])


class OnRandomTokens(Ours):
    """The trainer of the benchmark on random tokens. Points of one shape share a state."""

    def __init__(self, settings: BenchmarkArgs, state: TrainState, updates: int):
        """updates: how many there will be; their data lie ready."""
        self.args, self.state, rng = settings, state, np.random.default_rng(settings.seed)
        size = (settings.batch_size, settings.max_seq_len)
        self.batches = iter([random_batch(rng, *size) for _ in range(updates)])


def build_state(settings: BenchmarkArgs, device: torch.device) -> TrainState:
    """A model with random weights, its optimizer, and what else an update needs.

    Raises:
        UserError: the device cannot compute in --dtype, or there is too little memory.
    """
    setup_seed(settings.seed)
    config = MiniMindConfig(**{name: getattr(settings, name) for name in SHAPE})
    model = wrap_model(MiniMindForCausalLM(config), device)
    autocast, scaler = mixed_precision(settings.dtype, device)
    optimizer = build_optimizer(model, settings.learning_rate, settings.weight_decay, settings.optimizer)
    run = run_fingerprint(settings, model_fingerprint(config), {}, 1)
    return TrainState(
        args=settings,
        lm_config=config,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        autocast=autocast,
        device=device,
        loss_fn=next_token_loss,
        schedule=lambda update, total, args: args.learning_rate,
        run=run,
    )


def parameters(state: TrainState) -> int:
    """Parameters of a model."""
    return sum(p.numel() for p in state.model.parameters())


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(name: str, points: dict[int, BenchmarkArgs], args: argparse.Namespace) -> dict[str, Any]:
    """Train the points of a curve in turn; from round to round another goes first.

    Returns:
        The label of the curve, its title, and the figures of each point.

    Raises:
        UserError: there is no such device or dtype, or too little memory.
    """
    device = select_device(args.device)
    prepare_device(device)
    states, trainers, blocks = {}, {}, {value: [] for value in points}
    for value, own in points.items():
        shape = tuple(getattr(own, key) for key in SHAPE)
        states[shape] = states.get(shape) or build_state(own, device)
        trainers[value] = OnRandomTokens(own, states[shape], args.warmup + args.rounds * args.updates)
    needed, free = STATE * sum(map(parameters, states.values())), psutil.virtual_memory().available
    if device.type == "cpu" and needed > free:
        raise UserError(f"--{name}: all points together need {needed / 1e9:.1f} GB, {free / 1e9:.1f} free; give fewer")
    for number in range(args.rounds + 1):
        for value in list(points)[:: 1 if number % 2 else -1]:
            block = trainers[value].train(args.updates if number else args.warmup)
            blocks[value] += [block] if number else []
            told = f"round {number} of {args.rounds}" if number else "warm-up"
            print(f"{name} {value}: {told}, {block.seconds:.2f} s", file=sys.stderr, flush=True)
    found = [figures_of(value, blocks[value], trainer.state) for value, trainer in trainers.items()]
    for figures in found:
        figures["growth"] = figures["seconds_per_token"] / found[0]["seconds_per_token"]
        figures["flops_growth"] = figures["flops_per_token"] / found[0]["flops_per_token"]
    return {"label": CURVES[name].label, "title": title_of(name, args, trainers[value].state), "points": found}


def figures_of(value: int, blocks: list[Block], state: TrainState) -> dict[str, Any]:
    """The figures of a point: its size, and seconds and floating-point operations per token."""
    seconds = [block.seconds / block.tokens for block in blocks]
    found = {"value": value, "parameters": parameters(state), "flops_per_token": blocks[0].flops / blocks[0].tokens}
    return found | {"seconds_per_token": statistics.median(seconds), "seconds_per_token_of_rounds": seconds}


def title_of(name: str, args: argparse.Namespace, state: TrainState) -> str:
    """What all points of a curve share."""
    moe = "moe_" if CURVES[name].others else ""
    width, depth = (getattr(args, moe + key) for key in ("hidden_size", "num_hidden_layers"))
    shape = f"depth {depth}" if name == "width" else f"hidden size {width}, depth {depth}"
    length = "" if name == "length" else f" in samples of {args.max_seq_len}"
    dtype = str(autocast_dtype(state.autocast, state.device)).removeprefix("torch.")
    return f"{name}: {shape}; updates of {args.tokens} tokens{length}; {dtype} on {device_name(state.device)}"


# --- output ----------------------------------------------------------------------------------------------------------


def check_outputs(args: argparse.Namespace) -> None:
    """Make the file and the folder to write, before anything is measured. Raises UserError if that is not possible."""
    try:
        if args.json:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            Path(args.json).open("a").close()
        if args.png_dir:
            new_figure()  # matplotlib is there
            Path(args.png_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--json or --png_dir cannot be written ({reason(error)}); give another place") from error


def print_table(curve: dict[str, Any]) -> None:
    """Print a curve; the growths are relative to its first point."""
    say(f"\n{curve['title']}")
    say(f"{curve['label']:>22} {'parameters':>14} {'seconds per token':>18} {'growth':>8} {'of arithmetic':>14}")
    for point in curve["points"]:
        told = f"{point['value']:>22} {point['parameters']:>14,} {point['seconds_per_token']:>18.3e}"
        say(f"{told} {point['growth']:>8.2f} {point['flops_growth']:>14.2f}")


def draw(curve: dict[str, Any], path: Path) -> None:
    """Draw the growths of a curve, on logarithmic axes."""
    figure, points = new_figure(figsize=(6.5, 4.5)), curve["points"]
    axes, values = figure.add_subplot(), [point["value"] for point in points]
    lines = {"growth": ("time per token, measured", "-"), "flops_growth": ("arithmetic per token", "--")}
    for key, (label, style) in lines.items():
        axes.plot(values, [point[key] for point in points], style, marker="o", label=label)
    for point in points:
        at, text = (point["value"], point["growth"]), f"{point['growth']:.2f}"
        axes.annotate(text, at, (0, 7), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.yaxis.set_major_formatter("{x:g}")
    growths = [point[key] for point in points for key in lines]
    axes.set_ylim(min(growths) * 0.8, max(2.2, max(growths) * 1.25))
    axes.set(xlabel=curve["label"], ylabel=f"growth (1: at {values[0]})")
    axes.set_title(curve["title"].replace("; ", "\n"), fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, write and draw curve after curve."""
    args = parse_args()
    curves = {}
    for name in dict.fromkeys(args.curves):
        curves[name] = {value: settings_of_point(args, name, value) for value in getattr(args, name)}
    check_outputs(args)
    report: dict[str, Any] = {"command": shlex.join(sys.argv), "date": str(date.today()), "torch": torch.__version__}
    report |= {"tokens": args.tokens, "rounds": args.rounds, "curves": {}}
    for name, points in curves.items():
        report["curves"][name] = curve = measure(name, points, args)
        print_table(curve)
        if args.json:
            write_json(Path(args.json), report)
        if args.png_dir:
            draw(curve, Path(args.png_dir) / f"{name}.png")


if __name__ == "__main__":
    with one_line_errors():
        main()
