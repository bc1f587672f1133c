"""Measure training speed: real tokens per second, the share of the machine's own matrix rate, and another trainer's.

    python scripts/benchmark.py --preset 30m --stage sft --data_path data/sft.jsonl --batch_size 8
    python scripts/benchmark.py --stage pretrain --data_path data/pretrain.jsonl --packing 1 --json out/speed.json
    python scripts/benchmark.py --data_path data/sft.jsonl --peer minimind --peer_path ../minimind --png out/speed.png

It runs the loop's own updates on random weights with the stage's own data and settings, and keeps nothing but the
figures. With --peer another trainer runs in turn with ours, block by block, on the same samples (see
scripts/benchmark_pairs.py). docs/BENCHMARKS.md says what each figure means and holds results.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from dataset.errors import Parser, UserError, run_main
from dataset.lm_dataset import PretrainDataset, SFTDataset
from model.model_minimind import MiniMindConfig
from scripts.benchmark_pairs import Peer, check_peer, compare_losses
from trainer import stage, train_full_sft, train_pretrain
from trainer import trainer_utils as utils
from trainer.arguments import check_args, model_config, stage_parser
from trainer.files import snapshot
from trainer.loop import leave_group, save_checkpoint, train_update, update_size
from trainer.optim import make_optimizer
from trainer.parallel import wrap_model
from trainer.resume import data_of, describe_run, lm_shape
from trainer.speed import Meter, peak_memory_mb
from trainer.state import TrainState, next_token_loss

STAGES = {"pretrain": (PretrainDataset, train_pretrain.PRETRAIN), "sft": (SFTDataset, train_full_sft.FULL_SFT)}
PRESETS = {
    "30m": {"hidden_size": 512, "num_hidden_layers": 8},
    "64m": {"hidden_size": 768, "num_hidden_layers": 8},
    "moe": {"hidden_size": 512, "num_hidden_layers": 8, "use_moe": 1},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28},
}
SHAPES = {  # what has no flag
    "0.6b": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072}
}


def parse_args() -> Namespace:
    """The stage's own flags, and what to measure."""
    chosen = Parser(add_help=False)
    own_flags(chosen)
    known = chosen.parse_known_args()[0]
    parser = stage_parser(__doc__, **STAGES[known.stage][1])
    own_flags(parser.add_argument_group("benchmark"))
    parser.set_defaults(**PRESETS[known.preset])
    return parser.parse_args()


def own_flags(parser: argparse._ActionsContainer) -> None:
    """The flags that only the benchmark has."""
    flag = parser.add_argument
    flag("--stage", choices=sorted(STAGES), default="sft", help="whose data and defaults")
    flag("--preset", choices=list(PRESETS), default="30m", help="shape of the model; the shape's own flags go before")
    flag("--warmup", type=int, default=3, help="updates before the clock starts")
    flag("--updates", type=int, default=10, help="updates of a block; a block is timed as a whole")
    flag("--peer", choices=["minimind", "trl"], help="another trainer to compare with")
    flag("--peer_path", help="folder of a checkout of jingyaogong/minimind")
    flag("--peer_python", help="Python that has the peer's packages (default: this one)")
    flag("--repeat", type=int, default=3, help="blocks; with --peer pairs of them, ours and the peer's in turn")
    flag("--json", help="also write the figures to this file")
    flag("--png", help="also draw them as a bar chart")


class Block(NamedTuple):
    """Some updates, timed together."""

    seconds: float
    wait: float  # seconds of them, for the loader
    tokens: float
    flops: float
    samples: int

    @property
    def rate(self) -> float:
        """Real tokens per second."""
        return self.tokens / self.seconds


class Ours:
    """This trainer, set up as a stage is, but for files and schedule."""

    def __init__(self, args: Namespace):
        self.args, self.data = args, stage.load_data(STAGES[args.stage][0], args)
        local_rank = utils.init_distributed_mode()
        utils.setup_seed(args.seed)
        config = model_config(args, self.data.tokenizer)
        config = MiniMindConfig(**config.to_dict() | SHAPES.get(args.preset, {}))
        device = utils.pick_device(args.device, local_rank)
        autocast, scaler = utils.mixed_precision(args.dtype, device)
        self.model, _ = utils.init_model(config, "none", args.tokenizer_path, args.save_dir)
        self.initial = snapshot(self.model.state_dict()) if args.peer else None
        run = describe_run(args, lm_shape(config), data_of(self.data.train.cache), len(self.data.train))
        wrapped = wrap_model(self.model, device, args)
        parts = (wrapped, self.new_optimizer(), scaler, autocast, device, next_token_loss)
        self.state = TrainState(args, config, *parts, total_updates=1, run=run)
        loaders = (
            utils.epoch_loader(self.data.train, args.batch_size, args.seed, epoch, 0, args.num_workers)
            for epoch in range(100)
        )
        self.batches: Iterator[dict] = chain.from_iterable(loaders)

    def new_optimizer(self) -> torch.optim.Optimizer:
        """One that has not stepped yet."""
        args = self.args
        return make_optimizer(self.model, args.learning_rate, args.weight_decay, args.optimizer)

    def restart(self) -> None:
        """Back to the initial weights."""
        self.model.load_state_dict(self.initial)
        self.state.optimizer = self.new_optimizer()

    def update(self, window: list[dict], meter: Meter | None = None) -> Tensor:
        """One update on these micro-batches, which the meter counts; returns the mean cross entropy per target, on the
        device."""
        sizes = [self.state.size(batch) for batch in window]
        if meter is not None:
            meter.count(sizes)
        targets, tokens, _ = update_size(self.state, sizes)
        return train_update(self.state, window, self.args.learning_rate, targets, tokens)[0][0]

    def train(self, updates: int) -> Block:
        """Time the next updates with their data. As in training, the device is waited for at the end only.

        Raises:
            UserError: the data end before.
        """
        meter = Meter()
        for _ in range(updates):
            window = meter.fetch(self.batches, self.args.accumulation_steps)
            if len(window) < self.args.accumulation_steps:
                raise UserError("--data_path holds too little; take fewer --updates or a smaller --batch_size")
            loss = self.update(window, meter)
        float(loss)  # waits for all that was asked of the device
        return Block(time.perf_counter() - meter.mark["clock"], meter.wait, meter.tokens, meter.flops, meter.samples)

    def save_stall(self) -> float:
        """Seconds that the loop stands still for one checkpoint; a thread writes it afterwards."""
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            places = {name: getattr(self.args, name) for name in ("save_dir", "checkpoint_dir")}
            vars(self.args).update(dict.fromkeys(places, folder))
            begin = time.perf_counter()
            save_checkpoint(self.state)
            seconds = time.perf_counter() - begin
            self.state.writer.wait()
            vars(self.args).update(places)
        return seconds


def figures_of(ours: Ours, blocks: list[Block]) -> dict[str, float]:
    """Rates and shares of the timed blocks, over all ranks (rank 0 stands for each)."""
    total, ranks = Block(*map(sum, zip(*blocks, strict=True))), utils.world_size()
    memory = peak_memory_mb(ours.state.device)  # before anything is measured that a training does not do
    peak = stage.measured_peak(ours.state.autocast, ours.state.device)
    return {
        "tokens_per_second": total.rate * ranks,
        "tokens_per_second_median": statistics.median(block.rate for block in blocks) * ranks,
        "mfu": total.flops / total.seconds / peak * ranks,
        "matrix_rate_tflops": peak / 1e12,
        "padded_share": 1 - total.tokens / (total.samples * ours.args.max_seq_len),
        "data_wait": total.wait / total.seconds,
        "peak_memory_mb": memory,
        "tokens_per_update": total.tokens / (len(blocks) * ours.args.updates),
    }


def measure_pairs(ours: Ours, peer: Peer) -> tuple[list[Block], dict[str, Any]]:
    """Blocks of updates in turn, who goes first changes: our blocks, and the peer's figures with all its
    `micro_batches`."""
    args, blocks, pairs = ours.args, [], []
    count = args.updates * args.accumulation_steps
    seen = peer.train(args.warmup * args.accumulation_steps)["micro_batches"]
    for pair in range(args.repeat):
        done: dict[str, Any] = {}
        for who in ("ours", "peer") if pair % 2 else ("peer", "ours"):
            done[who] = ours.train(args.updates) if who == "ours" else peer.train(count)
        blocks.append(done["ours"])
        seen += done["peer"]["micro_batches"]
        mine, theirs = done["ours"].rate, done["peer"]["tokens"] / done["peer"]["seconds"]
        pairs.append({"ours": mine, "peer": theirs, "ratio": mine / theirs})
        utils.Logger(f"pair {pair + 1}: {mine:,.0f} and {theirs:,.0f} real tokens/s, ratio {mine / theirs:.2f}")
    tokens = sum(len(row["input_ids"]) for batch in seen for row in batch["rows"])
    return blocks, {
        "peer": args.peer,
        "pairs": pairs,
        "ratio_median": statistics.median(pair["ratio"] for pair in pairs),
        "peer_tokens_per_second": statistics.median(pair["peer"] for pair in pairs),
        "peer_padded_share": 1 - tokens / sum(batch["padded"] for batch in seen),
        "micro_batches": seen,
    }


def tell(figures: dict[str, Any]) -> None:
    """Print the figures as a table, and what was found about the peer."""
    numbers = {name: value for name, value in figures.items() if isinstance(value, float)}
    for name, value in numbers.items():
        utils.Logger(f"{name:26} {value:,.3f}")
    if "losses" in figures:
        losses = figures["losses"]
        verdict = "agree" if losses["agree"] else "DISAGREE: the speeds are not those of the same training"
        count, furthest = len(losses["ours"]), losses["largest_difference"]
        utils.Logger(f"losses of {count} updates on the same targets {verdict}; furthest apart {furthest:.4%}")


def check_outputs(args: Namespace) -> None:
    """Raises UserError for files that could not be written at the end."""
    for name in ("json", "png"):
        path = Path(getattr(args, name) or ".")
        if not path.parent.is_dir():
            raise UserError(f"--{name} {path}: there is no folder {path.parent}; make it first")
    if args.png:
        figure_class()


def figure_class() -> type:
    """Matplotlib's figure. Raises UserError if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--png needs matplotlib: pip install -e '.[bench]'") from error
    return Figure


def draw(figures: dict[str, Any], path: str, title: str) -> None:
    """Bars of real tokens per second: the peer, ours, and what the matrix rate would allow ours."""
    bars = {figures["peer"]: figures["peer_tokens_per_second"]} if "peer" in figures else {}
    bars["this trainer"] = figures["tokens_per_second"]
    bars["at the matrix rate"] = figures["tokens_per_second"] / figures["mfu"]
    figure = figure_class()(figsize=(7, 1.2 + 0.6 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    colours = ["#1f77b4" if name == "this trainer" else "#b0b0b0" for name in bars]
    axes.bar_label(axes.barh(list(bars), list(bars.values()), color=colours), fmt="{:,.0f}", padding=3)
    axes.set(title=title, xlabel="real tokens per second")
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def device_name(device: torch.device) -> str:
    """The machine in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def measure(ours: Ours) -> dict[str, Any]:
    """All figures: ours alone, or in turn with the peer's."""
    args = ours.args
    ours.train(1)
    # interpreter, imports, token cache (built if there was none), model, optimizer, one update
    startup = time.time() - psutil.Process().create_time()
    if args.warmup > 1:
        ours.train(args.warmup - 1)
    comparison: dict[str, Any] = {}
    if args.peer:
        with Peer(args, ours.data, ours.initial, ours.state) as peer:
            blocks, comparison = measure_pairs(ours, peer)
    else:
        blocks = [ours.train(args.updates) for _ in range(args.repeat)]
    figures = figures_of(ours, blocks) | {"startup_seconds": startup, "save_stall_seconds": ours.save_stall()}
    if args.peer:
        seen = comparison.pop("micro_batches")
        comparison["losses"] = compare_losses(ours, seen, args.accumulation_steps)
    return figures | comparison


def main() -> None:
    """Build the stage, measure, print and write the figures."""
    args = parse_args()
    check_args(args)
    if min(args.warmup, args.updates, args.repeat) < 1:
        raise UserError("--warmup, --updates and --repeat must be 1 or more")
    check_peer(args)
    check_outputs(args)
    ours = Ours(args)
    figures = measure(ours)
    tell(figures)
    if utils.is_main_process():
        write(figures, ours)
    leave_group(ours.state)


def write(figures: dict[str, Any], ours: Ours) -> None:
    """The JSON file and the chart, where asked for."""
    args, device = ours.args, device_name(ours.state.device)
    if args.json:
        about = {"command": shlex.join(sys.argv), "date": str(date.today()), "machine": device}
        about |= {"torch": torch.__version__, "device": str(ours.state.device), "run": ours.state.run}
        Path(args.json).write_text(json.dumps(figures | about, indent=1), encoding="utf-8")
    if args.png:
        title = f"{args.stage}, {args.preset}, batch {args.batch_size}, {date.today()}\n{device}"
        draw(figures, args.png, title)


if __name__ == "__main__":
    run_main(main)
