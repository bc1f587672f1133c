"""Measure training speed: real tokens per second, MFU against the measured matmul peak, and the ratio to a
peer.

    python scripts/benchmark.py --data_path data/sft.jsonl --batch_size 8
    python scripts/benchmark.py --stage pretrain --data_path data/pretrain.jsonl --packing 1
    python scripts/benchmark.py --data_path data/sft.jsonl --peer minimind --peer_path ../minimind
    python scripts/benchmark.py --stage pretrain --data_path data/pretrain.jsonl --eval_share 0.05 \\
        --until_loss 6.5 --peer minimind --peer_path ../minimind

It runs updates of the training loop on random weights, with the data and settings of the stage, and keeps
only the figures. With --peer another trainer and ours alternate in blocks of updates, on the same samples
(see benchmarks/comparison.py). With --until_loss each trains by its own recipe until its held-out loss is at
most this. docs/BENCHMARKS.md explains the figures and contains results.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from typing import Any, cast

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # before torch, as in the stages

# isort: split
import numpy as np
import torch

from benchmarks.comparison import Peer, check_peer, compare_losses
from common.arguments import parse_args
from common.errors import UserError
from common.settings import StageArgs
from dataset.batch import Batch
from dataset.order import eval_loader, train_loader
from dataset.token_cache import load_tokenizer
from scripts.timing import time_updates
from trainer import train_full_sft, train_pretrain
from trainer import trainer_utils as utils
from trainer.callbacks.train_state import TrainState
from trainer.checkpoint.same_run import with_weight_decay
from trainer.devices.device import autocast_dtype, device_and_precision, matrix_rate
from trainer.devices.process_group import leave_process_group, world_size
from trainer.devices.wrapping import unwrap
from trainer.loop import evaluate
from trainer.report.speed import Meter
from trainer.stage import compile_and_wrap
from trainer.weights.config import model_config

STAGES: dict[str, Any] = {"pretrain": train_pretrain, "sft": train_full_sft}


def read_args() -> tuple[argparse.Namespace, StageArgs]:
    """What to measure, and the settings of the stage."""
    parser = Parser(
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog="All other flags are those of the stage script; see its --help.",
    )
    flag = parser.add_argument
    flag("--stage", choices=STAGES, default="sft", help="stage whose data and settings to use")
    flag("--warmup", type=int, default=3, help="updates before the clock starts")
    flag("--updates", type=int, default=10, help="updates of a block, which is timed as a whole")
    flag("--repeat", type=int, default=3, help="timed blocks; with --peer pairs of blocks")
    flag("--peer", choices=("minimind", "trl"), help="another trainer to compare with")
    flag("--peer_path", help="folder of a checkout of jingyaogong/minimind")
    flag("--until_loss", type=float, metavar="NATS", help="train until this held-out loss (nats per token)")
    flag("--peer_flags", default="", metavar="FLAGS", help="the peer's flags with --until_loss, in quotes")
    flag("--json", type=Path, metavar="FILE", help="JSON file to write the figures to")
    options, rest = parser.parse_known_args()
    if min(options.warmup, options.updates, options.repeat) < 1:
        raise UserError("--warmup, --updates and --repeat must be at least 1")
    if options.json and not options.json.parent.is_dir():
        raise UserError(f"--json {options.json}: there is no folder {options.json.parent}; create it first")
    if options.peer:
        check_peer(options)
    args = parse_args(STAGES[options.stage].Args, None, rest)
    if options.until_loss is not None and not (args.eval_data_path or args.eval_share):
        raise UserError("--until_loss needs held-out data: --eval_data_path or --eval_share")
    if options.peer and options.until_loss is None and args.optimizer != "adamw":
        raise UserError(f"--peer {options.peer} trains with AdamW: add --optimizer adamw")
    return options, args


class Ours:
    """This trainer, set up like a stage but without writing files. It uses the stage's schedule only with
    --until_loss."""

    def __init__(self, options: argparse.Namespace, args: StageArgs):
        self.args, stage = args, STAGES[options.stage]
        self.has_schedule = options.until_loss is not None
        device, autocast, scaler = device_and_precision(args)
        self.tokenizer = load_tokenizer(args.tokenizer_path)
        self.train_set, self.eval_set = stage.open_data(args, self.tokenizer)
        utils.init_distributed_mode(args.rank_timeout, device)
        self.args = args = with_weight_decay(args, None, self.train_set)
        utils.setup_seed(args.seed)
        config, objective = model_config(self.tokenizer, args), stage.Objective()
        model, _ = utils.init_model(config, "none", args.tokenizer_path, args.save_dir)
        model = compile_and_wrap(model, args, device, autocast, self.train_set)
        self.state = TrainState(
            args=args,
            lm_config=config,
            fingerprint={
                "samples": self.train_set.epoch_samples(args),
                "global_batch": args.batch_size * args.accumulation_steps * world_size(),
                "epochs": args.epochs,
            },
            model=model,
            optimizer=objective.optimizer(model, args),
            scaler=scaler,
            autocast=autocast,
            device=device,
            objective=objective,
            schedule=stage.schedule if self.has_schedule else lambda *_: args.learning_rate,
            meter=Meter(matrix_rate(device, autocast_dtype(autocast, device))),
        )
        self.windows = self.endless_windows()
        self.losses: list[float] = []  # per target, of each update

    def endless_windows(self) -> Iterator[list[Batch]]:
        """The micro-batches of each update, epoch after epoch."""
        batches = chain.from_iterable(train_loader(self.train_set, self.args, epoch) for epoch in count())
        while True:
            yield list(islice(batches, self.args.accumulation_steps))

    def train(self, updates: int) -> dict[str, float]:
        """Make the next updates. Returns their speed including data loading (see `Meter.speed_metrics`),
        seconds and tokens."""
        if self.has_schedule:  # which has an end
            updates = min(updates, self.state.total_updates - self.state.progress.update)
        seconds, losses = time_updates(self.state, self.windows, updates)
        self.losses += losses
        figures = self.state.meter.speed_metrics(0, self.state.device)
        return figures | {"seconds": seconds, "tokens": figures["tokens_per_second"] * seconds}

    @property
    def is_over(self) -> bool:
        """Whether a run with a schedule has reached its end."""
        return self.state.progress.update >= self.state.total_updates

    def held_out_loss(self) -> float:
        """Nats per token."""
        loader = eval_loader(self.eval_set, self.args.batch_size, self.eval_set.collate)
        return cast(float, evaluate(self.state, loader)["eval_loss"])


def median_figures(ours: Ours, blocks: list[dict[str, float]]) -> dict[str, Any]:
    """The medians of the timed blocks."""
    return {
        "tokens_per_second": median(block["tokens_per_second"] for block in blocks),
        "mfu": median(block["mfu"] for block in blocks),
        "matmul_peak_tflops": ours.state.meter.peak * world_size() / 1e12,
        "data_wait": median(block["data_wait"] for block in blocks),
        "peak_memory_mb": blocks[-1]["memory_mb"],
    }


def measure_pairs(ours: Ours, peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate blocks of updates with the peer, in changing order. Returns our figures and the
    comparison."""
    steps, blocks = ours.args.accumulation_steps, []
    replies = [peer.train(options.warmup * steps)]  # of the peer, block by block
    pairs: list[dict[str, float]] = []
    for number in range(options.repeat):
        if number % 2 == 0:
            replies.append(peer.train(options.updates * steps))
            blocks.append(ours.train(options.updates))
        else:
            blocks.append(ours.train(options.updates))
            replies.append(peer.train(options.updates * steps))
        mine = blocks[-1]["tokens_per_second"]
        theirs = sum(replies[-1]["tokens"]) / replies[-1]["seconds"]
        pairs.append({"ours": mine, "peer": theirs, "ratio": mine / theirs})
        utils.Logger(f"ours: {mine:,.0f} tokens/s, {options.peer}: {theirs:,.0f}, ratio: {mine / theirs:.2f}")
    figures = median_figures(ours, blocks) | {"peer": options.peer, "pairs": pairs}
    figures["ratio_median"] = median(pair["ratio"] for pair in pairs)
    if not ours.args.packing:  # else our micro-batches hold more samples
        figures["losses"] = losses = compare_losses(ours.losses, replies, steps)
        verdict = "agree" if losses["agree"] else "DISAGREE, so the speeds are not comparable"
        largest = f"the largest difference is {losses['largest_difference']:.4%}"
        utils.Logger(f"losses of {len(ours.losses)} updates on the same targets {verdict}; {largest}")
    return figures


def measure_until(ours: Ours, peer: Peer | None, options: argparse.Namespace) -> dict[str, Any]:
    """Train until the held-out loss is at most --until_loss. --updates updates of ours alternate with as many
    micro-batches of the peer, until each reaches the loss or its run is over. Returns for each the loss
    reached, and the seconds and tokens of training, without start-up and evaluations."""
    sides: dict[str, Any] = {"ours": ours} | ({options.peer: peer} if peer else {})
    results = {
        name: {"loss": side.held_out_loss(), "seconds": 0.0, "tokens": 0.0} for name, side in sides.items()
    }
    while sides:
        for name, side in list(sides.items()):
            block, figures = side.train(options.updates), results[name]
            figures["loss"] = side.held_out_loss()
            figures["seconds"] += block["seconds"]
            figures["tokens"] += float(np.sum(block["tokens"]))
            is_reached = figures["loss"] <= options.until_loss
            if is_reached or side.is_over:
                del sides[name]
                end = "reached" if is_reached else "not reached at the end of its run"
                spent = f"{figures['seconds']:,.1f} s, {figures['tokens']:,.0f} tokens"
                utils.Logger(f"{name}: {end}: {figures['loss']:.4f} after {spent}")
    return {"until_loss": options.until_loss, **results}


def main() -> None:
    """Set up, measure, print the figures and write them to --json."""
    options, args = read_args()
    ours = Ours(options, args)
    if options.peer:
        with Peer(options, ours.train_set, ours.eval_set, ours.tokenizer, ours.state) as peer:
            if options.until_loss is not None:
                figures = measure_until(ours, peer, options)
            else:
                ours.train(options.warmup)
                figures = measure_pairs(ours, peer, options)
    elif options.until_loss is not None:
        figures = measure_until(ours, None, options)
    else:
        ours.train(options.warmup)
        figures = median_figures(ours, [ours.train(options.updates) for _ in range(options.repeat)])
    for name, value in figures.items():
        if isinstance(value, float):
            utils.Logger(f"{name}: {value:,.3f}")
    if options.json and utils.is_main_process():
        about = {"command": shlex.join(sys.argv), "device": str(ours.state.device)}
        about |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps(figures | about, indent=1), encoding="utf-8")
    ours.state.model = unwrap(ours.state.model)
    leave_process_group()


if __name__ == "__main__":
    with one_line_errors():
        main()
