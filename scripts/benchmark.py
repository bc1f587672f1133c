"""Measure training speed: real tokens per second, MFU against the measured matmul peak, and the ratio to a
peer.

    python scripts/benchmark.py --preset 30m --stage sft --data_path data/sft.jsonl --batch_size 8
    python scripts/benchmark.py --stage pretrain --data_path data/pretrain.jsonl --packing 1
    python scripts/benchmark.py --data_path data/sft.jsonl --peer minimind --peer_path ../minimind

It runs the updates of the training loop on random weights with the data and settings of the stage, and keeps
only the figures. With --peer another trainer and ours alternate in blocks of updates, on the same samples
(see tools/bench/comparison.py). docs/BENCHMARKS.md explains the figures and contains results.
"""

import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import date
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # before torch, as in the stages

# isort: split
import numpy as np
import torch

from common.arguments import add_flag, parse_args
from common.errors import UserError
from common.settings import StageArgs, setting
from dataset.token_cache import load_tokenizer
from tools.bench.comparison import Peer, check_peer
from trainer import train_full_sft, train_pretrain
from trainer import trainer_utils as utils
from trainer.data.datasets import train_loader
from trainer.devices.device import (
    autocast_dtype,
    matrix_rate,
    mixed_precision,
    peak_memory_mb,
    select_device,
    use_deterministic_kernels,
)
from trainer.devices.process_group import leave_process_group, world_size
from trainer.devices.wrapping import unwrap
from trainer.loop import train_update, update_size
from trainer.objectives.next_token import NextToken, model_config
from trainer.optim.build import build_optimizer
from trainer.report.speed import Meter
from trainer.run.state import TrainState

STAGES: dict[str, Any] = {"pretrain": train_pretrain, "sft": train_full_sft}
PRESETS: dict[str, dict[str, Any]] = {
    "30m": {"hidden_size": 512, "num_hidden_layers": 8},
    "64m": {"hidden_size": 768, "num_hidden_layers": 8},
    "moe": {"hidden_size": 512, "num_hidden_layers": 8, "use_moe": True},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28},
}
TOLERANCE = 0.02  # relative, of the losses: bfloat16 against float32 over the updates of a benchmark
SHAPES: dict[str, dict[str, int]] = {  # settings without a flag
    "0.6b": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072}
}


class BenchmarkArgs(StageArgs):
    """What to measure, beside the settings of the stage."""

    section: ClassVar[str] = "benchmark"
    aliases: ClassVar[dict[str, str]] = StageArgs.aliases | {"json": "json_path"}
    stage: Literal["pretrain", "sft"] = setting("sft", "stage whose data and defaults to use")
    preset: Literal["30m", "64m", "moe", "0.6b"] = setting(
        "30m", "shape of the model; --hidden_size and the like override it"
    )
    warmup: int = setting(3, "warm-up before the clock starts", "updates", ge=1)
    updates: int = setting(10, "length of a block, which is timed as a whole", "updates", ge=1)
    repeat: int = setting(3, "timed blocks; with --peer pairs of blocks, ours and the peer's", ge=1)
    peer: Literal["minimind", "trl", "none"] = setting("none", "another trainer to compare with")
    peer_path: str | None = setting(None, "folder of a checkout of jingyaogong/minimind")
    json_path: str | None = setting(None, "JSON file to write the figures to")


def read_args() -> BenchmarkArgs:
    """The command line; its defaults are those of --stage and --preset."""
    first = Parser(add_help=False)
    add_flag(first, BenchmarkArgs, "stage")
    add_flag(first, BenchmarkArgs, "preset")
    known = first.parse_known_args()[0]
    stage_args = STAGES[known.stage].Args
    preset = PRESETS[known.preset]
    kinds = {name: stage_args.model_fields[name].annotation for name in preset}
    content = {"__module__": __name__, "__annotations__": kinds, **preset}
    args_class: Any = type("Args", (stage_args, BenchmarkArgs), content)
    return parse_args(args_class, __doc__)


class Block(NamedTuple):
    """Measurements of some updates, timed together."""

    seconds: float
    wait: float  # seconds of these spent waiting for the loader
    tokens: float
    flops: float
    samples: float

    @property
    def rate(self) -> float:
        """Real tokens per second."""
        return self.tokens / self.seconds


class Ours:
    """This trainer, set up like a stage, without its files and schedule."""

    def __init__(self, args: BenchmarkArgs):
        use_deterministic_kernels(args.deterministic)
        self.args, device = args, select_device(args.device)
        autocast, scaler = mixed_precision(args.dtype, device)
        self.tokenizer = load_tokenizer(args.tokenizer_path)
        self.train_set, _ = STAGES[args.stage].open_data(args, self.tokenizer)
        utils.init_distributed_mode(args.rank_timeout, device)
        utils.setup_seed(args.seed)
        config = model_config(self.tokenizer, args, None, **SHAPES.get(args.preset, {}))
        model, _ = utils.init_model(config, "none", args.tokenizer_path, args.save_dir)
        wrapped = utils.compile_and_wrap(model, args, device, autocast, self.train_set)
        optimizer = build_optimizer(wrapped, args.learning_rate, args.weight_decay, args.optimizer)
        run = {"samples": len(self.train_set), "global_batch": args.batch_size, "epochs": 1}
        self.state = TrainState(
            args=args, lm_config=config, run=run,
            model=wrapped, optimizer=optimizer, scaler=scaler, autocast=autocast, device=device,
            objective=NextToken(), schedule=lambda update, total, args: args.learning_rate,
        )  # fmt: skip
        loaders = (train_loader(self.train_set, args, epoch) for epoch in range(100))
        self.batches: Iterator[dict] = chain.from_iterable(loaders)
        self.losses: list[float] = []  # per target, of each update
        self.peak = matrix_rate(device, autocast_dtype(autocast, device))

    def train(self, updates: int) -> Block:
        """Time the next updates with their data loading.
        Raises UserError if there are too few data."""
        meter, losses = Meter(), []
        for _ in range(updates):
            with meter.timing("wait"):
                window = list(islice(self.batches, self.args.accumulation_steps))
            if len(window) < self.args.accumulation_steps:
                raise UserError(
                    "--data_path holds too few samples; use fewer --updates or a smaller --batch_size"
                )
            sizes = [self.state.objective.size(batch, self.state.lm_config) for batch in window]
            targets, tokens, *_ = update_size(self.state, sizes, missing=0)
            losses.append(train_update(self.state, window, targets, tokens)["logits_loss"][0])
            meter.count(sizes)
        self.losses += losses
        seconds, counts = time.perf_counter() - meter.begin, meter.counts
        return Block(seconds, counts["wait"], counts["tokens"], counts["flops"], counts["samples"])


def figures_of(ours: Ours, blocks: list[Block]) -> dict[str, float]:
    """Rates and shares of the timed blocks over all ranks, as multiples of rank 0's."""
    total, ranks = Block(*np.sum(blocks, axis=0).tolist()), world_size()
    flops_per_second = total.flops / total.seconds
    peak = max(ours.peak, flops_per_second)
    return {
        "tokens_per_second": total.rate * ranks,
        "mfu": flops_per_second / peak,
        "matmul_peak_tflops": peak * ranks / 1e12,
        "padded_share": 1 - total.tokens / (total.samples * ours.args.max_seq_len),
        "data_wait": total.wait / total.seconds,
        "peak_memory_mb": peak_memory_mb(ours.state.device),
    }


def measure_pairs(ours: Ours, peer: Peer) -> tuple[list[Block], dict[str, Any]]:
    """Alternate blocks of updates, in changing order; returns our blocks, and the comparison with the
    peer."""
    args, blocks = ours.args, []
    replies = [peer.train(args.warmup * args.accumulation_steps)]  # of the peer, block by block
    pairs: list[dict[str, float]] = []
    for number in range(args.repeat):
        if number % 2 == 1:
            blocks.append(ours.train(args.updates))
        replies.append(peer.train(args.updates * args.accumulation_steps))
        if number % 2 == 0:
            blocks.append(ours.train(args.updates))
        mine, theirs = blocks[-1].rate, sum(replies[-1]["tokens"]) / replies[-1]["seconds"]
        pairs.append({"ours": mine, "peer": theirs, "ratio": mine / theirs})
        text = f"{mine:,.0f} and {theirs:,.0f} real tokens/s, ratio {mine / theirs:.2f}"
        utils.Logger(f"pair {number + 1}: {text}")
    padded_tokens = sum(sum(reply["size"]) for reply in replies)
    figures = {
        "peer": args.peer,
        "pairs": pairs,
        "ratio_median": statistics.median(pair["ratio"] for pair in pairs),
        "peer_tokens_per_second": statistics.median(pair["peer"] for pair in pairs),
        "peer_padded_share": 1 - sum(sum(reply["tokens"]) for reply in replies) / padded_tokens,
    }
    if not args.packing:  # else our micro-batches hold more samples
        figures["losses"] = compare_losses(ours.losses, replies, args.accumulation_steps)
    return blocks, figures


def compare_losses(ours: list[float], replies: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The losses of all updates, ours and the peer's, and whether they agree. steps: micro-batches of an
    update."""
    targets = np.concatenate([reply["targets"] for reply in replies]).reshape(-1, steps)
    losses = np.concatenate([reply["loss"] for reply in replies]).reshape(-1, steps)
    theirs = (losses * targets).sum(1) / targets.sum(1)
    largest = float((abs(np.array(ours) - theirs) / abs(theirs)).max())
    comparison = {"ours": ours, "peer": theirs.tolist(), "largest_difference": largest}
    return comparison | {"agree": largest <= TOLERANCE}


def print_figures(figures: dict[str, Any]) -> None:
    """Print the figures as a table, and whether the losses agree with the peer's."""
    for name, value in figures.items():
        if isinstance(value, float):
            utils.Logger(f"{name:26} {value:,.3f}")
    if "losses" in figures:
        losses = figures["losses"]
        verdict = "agree" if losses["agree"] else "DISAGREE, so the speeds are not comparable"
        count, largest = len(losses["ours"]), losses["largest_difference"]
        utils.Logger(
            f"losses of {count} updates on the same targets {verdict}; largest difference {largest:.4%}"
        )


def main() -> None:
    """Set up, measure, print the figures and write them to --json."""
    args = read_args()
    if args.peer != "none":
        check_peer(args.peer, args.stage, args.peer_path)
    if args.json_path and not Path(args.json_path).parent.is_dir():
        folder = Path(args.json_path).parent
        raise UserError(f"--json {args.json_path}: there is no folder {folder}; create it first")
    ours = Ours(args)
    if args.peer != "none":
        with Peer(args, ours.train_set, ours.tokenizer, ours.state) as peer:
            ours.train(args.warmup)
            blocks, comparison = measure_pairs(ours, peer)
    else:
        ours.train(args.warmup)
        blocks, comparison = [ours.train(args.updates) for _ in range(args.repeat)], {}
    figures = figures_of(ours, blocks) | comparison
    print_figures(figures)
    if args.json_path and utils.is_main_process():
        device = ours.state.device
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        about = {"command": shlex.join(sys.argv), "date": str(date.today()), "machine": machine}
        about |= {"device": str(device), "torch": torch.__version__, "threads": torch.get_num_threads()}
        Path(args.json_path).write_text(json.dumps(figures | about, indent=1), encoding="utf-8")
    ours.state.model = unwrap(ours.state.model)
    leave_process_group()


if __name__ == "__main__":
    with one_line_errors():
        main()
