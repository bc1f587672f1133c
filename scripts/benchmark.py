"""Measure training speed: real tokens per second, MFU against the measured matmul peak, and the ratio to a peer.

    python scripts/benchmark.py --preset 30m --stage sft --data_path data/sft.jsonl --batch_size 8
    python scripts/benchmark.py --stage pretrain --data_path data/pretrain.jsonl --packing 1 --json out/speed.json
    python scripts/benchmark.py --data_path data/sft.jsonl --peer minimind --peer_path ../minimind --json out/ratio.json

It runs the updates of the training loop on random weights with the data and settings of the stage, and keeps only the
figures. With --peer another trainer and ours alternate in blocks of updates, on the same samples (see
scripts/bench/comparison.py). docs/BENCHMARKS.md explains the figures and contains results.
"""

import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors  # before torch, as in the stages

# isort: split
import numpy as np
import torch
from torch import Tensor

from common.config_sources import parse_args
from common.errors import UserError
from common.settings import StageArgs, add_flags, setting, settings_of
from dataset.lm_dataset import PretrainDataset, SFTDataset
from scripts.bench.comparison import Peer, check_peer, compare_losses
from trainer import train_full_sft, train_pretrain
from trainer.components.checkpoint import snapshot
from trainer.components.compiling import compiles
from trainer.components.data import open_datasets
from trainer.components.device import (
    mixed_precision,
    peak_memory_mb,
    prepare_device,
    select_device,
    use_deterministic_kernels,
)
from trainer.components.distributed import world_size
from trainer.components.flops import peak_rate
from trainer.components.meter import Meter
from trainer.components.optimizer import build_optimizer
from trainer.components.parallel import unwrap, wrap_model
from trainer.components.resume import data_fingerprint, run_fingerprint
from trainer.components.state import TrainState
from trainer.loop import train_update, update_size
from trainer.trainer_utils import (
    Logger,
    epoch_loader,
    init_distributed_mode,
    init_model,
    is_main_process,
    leave_process_group,
    load_tokenizer,
    model_config,
    next_token_loss,
    setup_seed,
)

STAGES = {"pretrain": (PretrainDataset, train_pretrain.Args), "sft": (SFTDataset, train_full_sft.Args)}
PRESETS: dict[str, dict[str, Any]] = {
    "30m": {"hidden_size": 512, "num_hidden_layers": 8},
    "64m": {"hidden_size": 768, "num_hidden_layers": 8},
    "moe": {"hidden_size": 512, "num_hidden_layers": 8, "use_moe": True},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28},
}
SHAPES: dict[str, dict[str, int]] = {  # settings without a flag
    "0.6b": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072}
}


@dataclass(kw_only=True)
class BenchmarkArgs(StageArgs):
    """What to measure, beside the settings of the stage."""

    section: ClassVar[str] = "benchmark"
    stage: Literal["pretrain", "sft"] = setting("sft", "stage whose data and defaults to use")
    preset: Literal["30m", "64m", "moe", "0.6b"] = setting(
        "30m", "shape of the model; --hidden_size and the like override it"
    )
    warmup: int = setting(3, "warm-up before the clock starts", "updates", ge=1)
    updates: int = setting(10, "length of a block, which is timed as a whole", "updates", ge=1)
    repeat: int = setting(3, "timed blocks; with --peer pairs of blocks, ours and the peer's", ge=1)
    peer: Literal["minimind", "trl", "none"] = setting("none", "another trainer to compare with")
    peer_path: str | None = setting(None, "folder of a checkout of jingyaogong/minimind")
    peer_python: str | None = setting(None, "Python that has the peer's packages (default: this one)")
    json: str | None = setting(None, "JSON file to write the figures to")


def read_args() -> BenchmarkArgs:
    """The command line; its defaults are those of --stage and --preset."""
    first = Parser(add_help=False)
    add_flags(first, (settings_of(BenchmarkArgs)[name] for name in ("stage", "preset")))
    known = first.parse_known_args()[0]
    stage_args = STAGES[known.stage][1]
    args_class = make_dataclass("Args", [], bases=(BenchmarkArgs, stage_args), kw_only=True)
    own = {name: getattr(stage_args, name) for name in settings_of(stage_args)}
    return parse_args(args_class, __doc__, None, **own | PRESETS[known.preset])


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
        self.train_set, _ = open_datasets(STAGES[args.stage][0], args, self.tokenizer)
        init_distributed_mode(args.rank_timeout, device)
        prepare_device(device)
        setup_seed(args.seed)
        config = model_config(self.tokenizer, args, **SHAPES.get(args.preset, {}))
        model, _ = init_model(config, "none", args.tokenizer_path, args.save_dir)
        self.initial = snapshot(model.state_dict()) if args.peer != "none" else {}
        data = data_fingerprint(self.train_set.cache)
        run = run_fingerprint(args, config.own_fields(), data, len(self.train_set))
        compiled = compiles(args, self.train_set)
        wrapped = wrap_model(model, device, args.parallel, compiled, args.activation_checkpointing, autocast)
        self.state = TrainState(
            args=args,
            lm_config=config,
            model=wrapped,
            optimizer=self.new_optimizer(wrapped),
            scaler=scaler,
            autocast=autocast,
            device=device,
            loss_fn=next_token_loss,
            schedule=lambda update, total, args: args.learning_rate,
            run=run,
        )
        loaders = (
            epoch_loader(self.train_set, args.batch_size, args.seed, epoch, 0, args.num_workers) for epoch in range(100)
        )
        self.batches: Iterator[dict] = chain.from_iterable(loaders)

    def new_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """A fresh optimizer."""
        return build_optimizer(model, self.args.learning_rate, self.args.weight_decay, self.args.optimizer)

    def restart(self) -> None:
        """Restore the initial weights."""
        unwrap(self.state.model).load_state_dict(self.initial)
        self.state.optimizer = self.new_optimizer(self.state.model)

    def update(self, window: list[dict], meter: Meter | None = None) -> Tensor:
        """One update on these micro-batches, counted by the meter; returns the loss per target, on the device."""
        sizes = [self.state.size(batch) for batch in window]
        targets, tokens, _ = update_size(self.state, sizes)
        losses, _ = train_update(self.state, window, targets, tokens)
        if meter is not None:
            meter.count(sizes, self.state.device)
        return losses[0]

    def train(self, updates: int) -> Block:
        """Time the next updates with their data loading. As in training, only the end waits for the device.

        Raises:
            UserError: there are too few data.
        """
        meter, loss = Meter(), torch.zeros(())
        for _ in range(updates):
            window = meter.fetch(self.batches, self.args.accumulation_steps)
            if len(window) < self.args.accumulation_steps:
                raise UserError("--data_path holds too few samples; use fewer --updates or a smaller --batch_size")
            loss = self.update(window, meter)
        float(loss)  # waits for the device
        seconds, counts = time.perf_counter() - meter.begin, meter.counts
        return Block(seconds, counts["wait"], counts["tokens"], counts["flops"], counts["samples"])


def figures_of(ours: Ours, blocks: list[Block]) -> dict[str, float]:
    """Rates and shares of the timed blocks over all ranks, as multiples of rank 0's."""
    total, ranks = Block(*np.sum(blocks, axis=0).tolist()), world_size()
    memory = peak_memory_mb(ours.state.device)  # before measurements that training does not do
    peak = peak_rate(ours.state.autocast, ours.state.device)
    return {
        "tokens_per_second": total.rate * ranks,
        "tokens_per_second_median": statistics.median(block.rate for block in blocks) * ranks,
        "mfu": total.flops / total.seconds / peak * ranks,
        "matmul_peak_tflops": peak / 1e12,
        "padded_share": 1 - total.tokens / (total.samples * ours.args.max_seq_len),
        "data_wait": total.wait / total.seconds,
        "peak_memory_mb": memory,
        "tokens_per_update": total.tokens / (len(blocks) * ours.args.updates),
    }


def measure_pairs(ours: Ours, peer: Peer) -> tuple[list[Block], dict[str, Any]]:
    """Alternate blocks of updates, in changing order: our blocks, and the peer's figures with its `micro_batches`."""
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
        Logger(f"pair {pair + 1}: {mine:,.0f} and {theirs:,.0f} real tokens/s, ratio {mine / theirs:.2f}")
    tokens = sum(len(row["input_ids"]) for batch in seen for row in batch["rows"])
    return blocks, {
        "peer": args.peer,
        "pairs": pairs,
        "ratio_median": statistics.median(pair["ratio"] for pair in pairs),
        "peer_tokens_per_second": statistics.median(pair["peer"] for pair in pairs),
        "peer_padded_share": 1 - tokens / sum(batch["padded"] for batch in seen),
        "micro_batches": seen,
    }


def print_figures(figures: dict[str, Any]) -> None:
    """Print the figures as a table, and whether the losses agree with the peer's."""
    for name, value in figures.items():
        if isinstance(value, float):
            Logger(f"{name:26} {value:,.3f}")
    if "losses" in figures:
        losses = figures["losses"]
        verdict = "agree" if losses["agree"] else "DISAGREE, so the speeds are not comparable"
        count, largest = len(losses["ours"]), losses["largest_difference"]
        Logger(f"losses of {count} updates on the same targets {verdict}; largest difference {largest:.4%}")


def device_name(device: torch.device) -> str:
    """A description of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def measure(ours: Ours) -> dict[str, Any]:
    """All figures: of ours alone, or of ours and the peer."""
    args = ours.args
    ours.train(args.warmup)
    comparison: dict[str, Any] = {}
    if args.peer != "none":
        with Peer(args, ours.train_set, ours.tokenizer, ours.initial, ours.state) as peer:
            blocks, comparison = measure_pairs(ours, peer)
    else:
        blocks = [ours.train(args.updates) for _ in range(args.repeat)]
    figures = figures_of(ours, blocks)
    if comparison:
        seen = comparison.pop("micro_batches")
        comparison["losses"] = compare_losses(ours, seen, args.accumulation_steps)
    return figures | comparison


def main() -> None:
    """Set up, measure, print the figures and write them to --json."""
    args = read_args()
    if args.peer != "none":
        check_peer(args.peer, args.stage, args.peer_path, args.peer_python)
    if args.json and not (folder := Path(args.json).parent).is_dir():
        raise UserError(f"--json {args.json}: there is no folder {folder}; create it first")
    ours = Ours(args)
    figures = measure(ours)
    print_figures(figures)
    if args.json and is_main_process():
        about = {"command": shlex.join(sys.argv), "date": str(date.today()), "machine": device_name(ours.state.device)}
        about |= {"torch": torch.__version__, "device": str(ours.state.device), "run": ours.state.run}
        Path(args.json).write_text(json.dumps(figures | about, indent=1), encoding="utf-8")
    ours.state.model = unwrap(ours.state.model)
    leave_process_group()


if __name__ == "__main__":
    with one_line_errors():
        main()
