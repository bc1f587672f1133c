"""Measure the steady training speed: real tokens per second, and the share of the machine's own matrix rate (MFU).

    python scripts/benchmark.py --stage sft --data_path data/sft.jsonl --batch_size 8
    python scripts/benchmark.py --stage pretrain --data_path data/pretrain.jsonl --hidden_size 768 --packing 1

It runs the loop's own updates on random weights with the stage's own data and settings, without saving anything. Real
tokens are those of the samples; a batch padded to --max_seq_len would carry the padded share besides.
"""

import json
import statistics
import time
from itertools import chain
from typing import Any

import torch

from dataset.errors import Parser, UserError, run_main
from dataset.lm_dataset import PretrainDataset, SFTDataset
from trainer import stage, train_full_sft, train_pretrain
from trainer import trainer_utils as utils
from trainer.arguments import check_args, model_config, stage_parser
from trainer.loop import leave_group, train_update, update_size
from trainer.resume import data_of, describe_run, lm_shape
from trainer.speed import Meter, peak_memory_mb
from trainer.state import TrainState, next_token_loss

STAGES = {"pretrain": (PretrainDataset, train_pretrain.PRETRAIN), "sft": (SFTDataset, train_full_sft.FULL_SFT)}


def parse_args():
    """The stage's own flags, and how long to measure."""
    chosen = Parser(add_help=False)
    chosen.add_argument("--stage", choices=sorted(STAGES), default="sft")
    stage_name = chosen.parse_known_args()[0].stage
    parser = stage_parser(__doc__, **STAGES[stage_name][1])
    flag = parser.add_argument_group("benchmark").add_argument
    flag("--stage", choices=sorted(STAGES), default="sft", help="whose data and defaults")
    flag("--warmup", type=int, default=3, help="updates before the clock starts")
    flag("--updates", type=int, default=10, help="updates that are timed, one by one")
    flag("--json", help="also write the figures to this file")
    return parser.parse_args()


def measure(state: TrainState, loader, args) -> dict[str, Any]:
    """Time the updates and sum up.

    Raises:
        UserError: the data end before the measurement does.
    """
    batches, rates, flops = iter(loader), [], 0.0
    tokens = samples = wait = elapsed = 0.0
    ranks = utils.world_size()  # tokens and flops are counted on rank 0 and taken for all
    for update in range(args.warmup + args.updates):
        meter = Meter()
        window = meter.fetch(batches, args.accumulation_steps)
        if len(window) < args.accumulation_steps:
            raise UserError(f"--data_path holds only {update} updates; take fewer --updates or a smaller --batch_size")
        meter.count(map(state.size, window))
        targets, all_tokens, _ = update_size(state, window)
        train_update(state, window, args.learning_rate, targets, all_tokens)[1].item()  # waits for the device
        seconds = time.perf_counter() - meter.start
        if update < args.warmup:
            continue
        rates.append(meter.tokens / seconds)
        tokens, flops, wait, elapsed = tokens + meter.tokens, flops + meter.flops, wait + meter.wait, elapsed + seconds
        samples += sum(len(batch["cu_seqlens"]) - 1 for batch in window)
    return {
        "tokens_per_second": tokens / elapsed * ranks,
        "tokens_per_second_median": statistics.median(rates) * ranks,
        "mfu": flops / elapsed / state.peak_flops * ranks,
        "matrix_rate_tflops": state.peak_flops / 1e12,
        "padded_share": 1 - tokens / (samples * args.max_seq_len),
        "data_wait": wait / elapsed,
        "peak_memory_mb": peak_memory_mb(state.device),
        "tokens_per_update": tokens / args.updates,
    }


def main() -> None:
    """Build the stage, time it, print the figures."""
    args = parse_args()
    check_args(args)
    data = stage.load_data(STAGES[args.stage][0], args)
    local_rank = utils.init_distributed_mode()
    utils.setup_seed(args.seed)
    lm_config = model_config(args, data.tokenizer)
    device = utils.pick_device(args.device, local_rank)
    autocast, scaler = utils.mixed_precision(args.dtype, device)
    model, _ = utils.init_model(lm_config, "none", args.tokenizer_path, args.save_dir, device)
    optimizer = utils.make_optimizer(model, args.learning_rate, args.weight_decay)
    run = describe_run(args, lm_shape(lm_config), data_of(data.train.cache), len(data.train))
    state = TrainState(args, lm_config, model, optimizer, scaler, autocast, device, next_token_loss, 1, run)
    state.peak_flops = stage.measured_peak(autocast, device)
    state.model = utils.wrap_model(model, bool(args.use_compile))
    loaders = (
        utils.epoch_loader(data.train, args.batch_size, args.seed, epoch, 0, args.num_workers) for epoch in range(100)
    )
    figures = measure(state, chain.from_iterable(loaders), args)
    for name, value in figures.items():
        utils.Logger(f"{name:26} {value:,.3f}")
    if args.json and utils.is_main_process():
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures | {"torch": torch.__version__, "device": str(device), "run": run}, file, indent=1)
    leave_group(state)


if __name__ == "__main__":
    run_main(main)
