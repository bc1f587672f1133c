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
import sys
from datetime import date
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # before torch, as in the stages

# isort: split
import torch

from common.arguments import add_flag, parse_args
from common.errors import UserError
from common.settings import StageArgs, setting
from dataset.token_cache import load_tokenizer
from scripts.text_table import text_table
from tools.bench.comparison import Peer, check_peer, compare_losses
from trainer import train_full_sft, train_pretrain
from trainer import trainer_utils as utils
from trainer.data.datasets import train_loader
from trainer.devices.device import autocast_dtype, device_and_precision, matrix_rate
from trainer.devices.process_group import leave_process_group, world_size
from trainer.devices.wrapping import unwrap
from trainer.loop import train_update, update_size
from trainer.objectives.next_token import NextToken, model_config
from trainer.optim.build import build_optimizer
from trainer.report.speed import Meter
from trainer.run.state import TrainState

PRESETS: dict[str, dict[str, int]] = {
    "30m": {"hidden_size": 512, "num_hidden_layers": 8},
    "64m": {"hidden_size": 768, "num_hidden_layers": 8},
    "moe": {"hidden_size": 512, "num_hidden_layers": 8, "use_moe": 1},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28},
}
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


class PretrainArgs(train_pretrain.Args, BenchmarkArgs):
    """The settings of `--stage pretrain`."""

    stage: Literal["pretrain", "sft"] = setting("pretrain", "stage whose data and defaults to use")


class SftArgs(train_full_sft.Args, BenchmarkArgs):
    """The settings of `--stage sft`."""


STAGES: dict[str, tuple[Any, Any]] = {
    "pretrain": (train_pretrain, PretrainArgs),
    "sft": (train_full_sft, SftArgs),
}


def read_args() -> Any:
    """The command line; its defaults are those of --stage and --preset."""
    first = Parser(add_help=False)
    add_flag(first, BenchmarkArgs, "stage")
    add_flag(first, BenchmarkArgs, "preset")
    known = first.parse_known_args()[0]
    shape = [f"--{name}={value}" for name, value in PRESETS[known.preset].items()]
    return parse_args(STAGES[known.stage][1], __doc__, [*shape, *sys.argv[1:]])


class Ours:
    """This trainer, set up like a stage, without its files and schedule."""

    def __init__(self, args: Any):
        self.args = args
        device, autocast, scaler = device_and_precision(args)
        self.tokenizer = load_tokenizer(args.tokenizer_path)
        self.train_set, _ = STAGES[args.stage][0].open_data(args, self.tokenizer)
        utils.init_distributed_mode(args.rank_timeout, device)
        utils.setup_seed(args.seed)
        config = model_config(self.tokenizer, args, None, **SHAPES.get(args.preset, {}))
        model, _ = utils.init_model(config, "none", args.tokenizer_path, args.save_dir)
        wrapped = utils.compile_and_wrap(model, args, device, autocast, self.train_set)
        self.state = TrainState(
            args=args,
            lm_config=config,
            run={"samples": len(self.train_set), "global_batch": args.batch_size, "epochs": 1},
            model=wrapped,
            optimizer=build_optimizer(wrapped, args.learning_rate, args.weight_decay, args.optimizer),
            scaler=scaler,
            autocast=autocast,
            device=device,
            objective=NextToken(),
            schedule=lambda update, total, args: args.learning_rate,
            meter=Meter(matrix_rate(device, autocast_dtype(autocast, device))),
        )
        loaders = (train_loader(self.train_set, args, epoch) for epoch in range(100))
        self.batches = chain.from_iterable(loaders)
        self.losses: list[float] = []  # per target, of each update

    def train(self, updates: int) -> dict[str, float]:
        """Make the next updates; returns the speed with their data loading, see `Meter.figures`.
        Raises UserError if there are too few data."""
        state = self.state
        state.meter.restart()
        for _ in range(updates):
            with state.meter.timing("wait"):
                window = list(islice(self.batches, self.args.accumulation_steps))
            if len(window) < self.args.accumulation_steps:
                raise UserError(
                    "--data_path holds too few samples; use fewer --updates or a smaller --batch_size"
                )
            sizes = [state.objective.size(batch, state.lm_config) for batch in window]
            targets, tokens, *_ = update_size(state, sizes, missing=0)
            self.losses.append(train_update(state, window, targets, tokens)["logits_loss"][0])
            state.meter.count(sizes)
        return state.meter.figures(0, state.device)


def figures_of(ours: Ours, blocks: list[dict[str, float]]) -> dict[str, Any]:
    """The medians of the timed blocks."""
    return {
        "tokens_per_second": median(block["tokens_per_second"] for block in blocks),
        "mfu": median(block["mfu"] for block in blocks),
        "matmul_peak_tflops": ours.state.meter.peak * world_size() / 1e12,
        "data_wait": median(block["data_wait"] for block in blocks),
        "peak_memory_mb": blocks[-1]["memory_mb"],
    }


def measure_pairs(ours: Ours, peer: Peer) -> dict[str, Any]:
    """Alternate blocks of updates, in changing order; returns our figures and the comparison with the
    peer."""
    args, blocks = ours.args, []
    steps = args.updates * args.accumulation_steps
    replies = [peer.train(args.warmup * args.accumulation_steps)]  # of the peer, block by block
    pairs: list[dict[str, float]] = []
    for number in range(args.repeat):
        if number % 2 == 0:
            replies.append(peer.train(steps))
            blocks.append(ours.train(args.updates))
        else:
            blocks.append(ours.train(args.updates))
            replies.append(peer.train(steps))
        mine = blocks[-1]["tokens_per_second"]
        theirs = sum(replies[-1]["tokens"]) / replies[-1]["seconds"]
        pairs.append({"ours": mine, "peer": theirs, "ratio": mine / theirs})
    figures = figures_of(ours, blocks) | {
        "peer": args.peer,
        "pairs": pairs,
        "ratio_median": median(pair["ratio"] for pair in pairs),
        "peer_tokens_per_second": median(pair["peer"] for pair in pairs),
    }
    if not args.packing:  # else our micro-batches hold more samples
        figures["losses"] = compare_losses(ours.losses, replies, args.accumulation_steps)
    return figures


def print_figures(figures: dict[str, Any]) -> None:
    """Print the pairs and the figures as tables, and whether the losses agree with the peer's."""
    if "pairs" in figures:
        rows = [["pair", "ours, tokens/s", f"{figures['peer']}'s", "ratio"]]
        for number, pair in enumerate(figures["pairs"], 1):
            rows.append([str(number), f"{pair['ours']:,.0f}", f"{pair['peer']:,.0f}", f"{pair['ratio']:.2f}"])
        utils.Logger(text_table(rows))
    rows = [[name, f"{value:,.3f}"] for name, value in figures.items() if isinstance(value, float)]
    utils.Logger(text_table(rows))
    if "losses" in figures:
        losses = figures["losses"]
        verdict = "agree" if losses["agree"] else "DISAGREE, so the speeds are not comparable"
        count, largest = len(losses["ours"]), losses["largest_difference"]
        utils.Logger(
            f"losses of {count} updates on the same targets {verdict}; largest difference {largest:.4%}"
        )


def write_figures(path: str, figures: dict[str, Any], device: torch.device) -> None:
    """Write the figures and what they were measured on as JSON."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    about = {"command": shlex.join(sys.argv), "date": str(date.today()), "machine": machine}
    about |= {"device": str(device), "torch": torch.__version__, "threads": torch.get_num_threads()}
    Path(path).write_text(json.dumps(figures | about, indent=1), encoding="utf-8")


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
            figures = measure_pairs(ours, peer)
    else:
        ours.train(args.warmup)
        figures = figures_of(ours, [ours.train(args.updates) for _ in range(args.repeat)])
    print_figures(figures)
    if args.json_path and utils.is_main_process():
        write_figures(args.json_path, figures, ours.state.device)
    ours.state.model = unwrap(ours.state.model)
    leave_process_group()


if __name__ == "__main__":
    with one_line_errors():
        main()
