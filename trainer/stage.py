"""The nine steps of a training stage, written once: a stage script brings its defaults, its dataset and its loss."""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dataset.errors import UserError, run_main
from dataset.lm_dataset import PretrainDataset, SFTDataset
from model.model_minimind import MiniMindConfig
from trainer.arguments import check_args, model_config, stage_parser
from trainer.bad_updates import BadUpdates
from trainer.checkpoint import metrics_path, run_name, save_weights, weight_path
from trainer.console import MetricsLog
from trainer.interrupt import StopRequest, end_loader_processes, explained
from trainer.loop import finish_update, leave_group, save_checkpoint, train_epoch
from trainer.optim import make_optimizer
from trainer.parallel import wrap_model
from trainer.resume import data_of, describe_run, find_checkpoint, lm_shape, sole_writer, total_updates
from trainer.speed import autocast_dtype, matrix_rate
from trainer.state import LossFn, TrainState
from trainer.tracker import Tracker
from trainer.trainer_utils import (
    Logger,
    epoch_loader,
    eval_loader,
    init_distributed_mode,
    init_model,
    is_main_process,
    load_tokenizer,
    mixed_precision,
    pick_device,
    setup_seed,
    steps_per_epoch,
    world_size,
)


def run_stage(description: str, defaults: dict[str, Any], dataset_class: type, loss_fn: LossFn) -> None:
    """What a stage script does: parse the command line, train; a user's mistake ends in one line, exit status 2."""

    def main() -> None:
        args = stage_parser(description, **defaults).parse_args()
        check_args(args)
        with StopRequest() as stop, sole_writer(args), explained():
            train_stage(args, dataset_class, loss_fn, stop)

    run_main(main)


def train_stage(args: Namespace, dataset_class: type, loss_fn: LossFn, stop: StopRequest) -> None:
    """Run a training stage from its command line to its weights.

    Args:
        args: of `stage_parser`, checked.
        dataset_class: `PretrainDataset` or `SFTDataset`, or one with the same interface.
        loss_fn: maps (model, flat batch) to (sum of the cross entropies, sum of the auxiliary losses).
        stop: tells whether a signal came.

    Raises:
        UserError: a setting, a file or a record that the user can mend.
        Interrupted: a signal came; what was trained is saved.
    """
    # 1. Environment and seed. The data are tokenised first, while no other process waits in a collective.
    data = load_data(dataset_class, args)
    local_rank = init_distributed_mode(args.rank_timeout)
    setup_seed(args.seed)
    if args.packing:
        Logger(data.train.describe())

    # 2. Model shape, the run's contract, and the checkpoint to go on from.
    lm_config = model_config(args, data.tokenizer)
    run = describe_run(args, lm_shape(lm_config), data_of(data.train.cache), len(data.train))
    saved = find_checkpoint(args, lm_config, run)

    # 3. Mixed precision.
    device = pick_device(args.device, local_rank)
    autocast, scaler = mixed_precision(args.dtype, device)

    # 4. SwanLab.
    wandb = start_tracker(args, run, saved)

    # 5. Model, compiled, on the device: DDP or FSDP where there are ranks.
    from_weight = "none" if saved else args.from_weight  # a checkpoint replaces them
    model, _ = init_model(lm_config, from_weight, args.tokenizer_path, args.save_dir)
    wrapped = wrap_model(model, device, args)

    # 6. Optimizer, of the parameters as they now are.
    optimizer = make_optimizer(model, args.learning_rate, args.weight_decay, args.optimizer)

    # 7. The state of the run, restored from the checkpoint.
    parts = {"model": wrapped, "optimizer": optimizer, "scaler": scaler, "autocast": autocast, "device": device}
    state = make_state(args, lm_config, data, run, saved, loss_fn=loss_fn, stop=stop, **parts)

    # 8. Train.
    with finished_files(state, wandb):
        if state.record is not None:
            finish_update(state, wandb)  # the run was stopped between saving and reporting
        iters = steps_per_epoch(len(data.train), args.batch_size)
        for epoch in range(state.epoch, args.epochs):
            start = state.step if epoch == state.epoch else 0
            loader = epoch_loader(data.train, args.batch_size, args.seed, epoch, start, args.num_workers)
            train_epoch(state, epoch, loader, iters, start, wandb)
        save_last_weights(state)

    # 9. Clean up.
    leave_group(state)


@dataclass
class StageData:
    """The data of a stage: training samples, held-out samples or None, and the tokenizer they went through."""

    train: PretrainDataset | SFTDataset
    held_out: PretrainDataset | SFTDataset | None
    tokenizer: PreTrainedTokenizerBase


def load_data(dataset_class: type, args: Namespace) -> StageData:
    """Open the token caches of a stage, building them first where needed. No process group may exist yet: tokenising
    a large corpus takes longer than a collective waits."""
    tokenizer = load_tokenizer(args.tokenizer_path)
    shape = {"max_length": args.max_seq_len, "cache_dir": args.cache_dir}
    bad_data = {"on_bad_data": args.on_bad_data, "max_bad_share": args.max_bad_share}
    build = partial(dataset_class, tokenizer=tokenizer, **shape, **bad_data)
    train = build(args.data_path, packing=bool(args.packing))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > len(train):
        raise UserError(f"{ranks} processes, but --data_path holds only {len(train)} samples; start fewer processes")
    held_out = build(args.eval_data_path) if args.eval_data_path else None
    return StageData(train, held_out, tokenizer)


def start_tracker(args: Namespace, run: dict[str, Any], saved: dict[str, Any] | None) -> Tracker | None:
    """SwanLab on rank 0, if asked for; a resumed run goes on in the curves of its first part."""
    if not (args.use_wandb and is_main_process()):
        return None
    name = f"{args.save_weight}-epochs-{args.epochs}-batch-{run['global_batch']}-lr-{args.learning_rate}"
    run_id, last = None, 0
    if saved:  # the point of a record that is still to be reported has not been drawn
        run_id, last = saved["wandb_id"], saved["update"] - (saved["record"] is not None)
    return Tracker(args.wandb_project, name, args.swanlab_mode, run, run_id, last)


def measured_peak(autocast, device: torch.device) -> float:
    """Matrix rate of all ranks together, in the dtype that the run multiplies in."""
    return matrix_rate(device, autocast_dtype(autocast, device)) * world_size()


def make_state(args: Namespace, lm_config: MiniMindConfig, data: StageData, run, saved, **parts) -> TrainState:
    """The run's state, restored from a checkpoint when there is one, with its metrics file and held-out loader."""
    updates = total_updates(run)
    bad_updates = BadUpdates(args.max_bad_updates, data.train.cache.source)
    state = TrainState(args, lm_config, total_updates=updates, run=run, bad_updates=bad_updates, **parts)
    state.peak_flops = measured_peak(state.autocast, state.device)
    if data.held_out is not None:
        state.eval_loader = eval_loader(data.held_out, args.batch_size)
    if saved is not None:
        state.restore(saved)
        Logger(f"resuming {args.save_weight} at epoch {state.epoch + 1}, update {state.update} of {updates}")
    if is_main_process():
        path = metrics_path(args.save_dir, run_name(args.save_weight, lm_config))
        state.metrics = MetricsLog(path, updates, state.reported_update if saved else None)
    return state


@contextmanager
def finished_files(state: TrainState, wandb: Tracker | None) -> Iterator[None]:
    """From here on a signal waits for the end of an update. However training ends, what is being written is finished:
    a checkpoint in the background, the metrics file, the tracker's curves."""
    patience: float | None = 10.0  # seconds for the tracker: a run that was stopped is waited for
    try:
        state.stop.patient = True
        yield
        patience = None
    finally:
        state.stop.patient = False
        end_loader_processes()
        if wandb is not None:
            wandb.finish(patience)
        if state.metrics is not None:
            state.metrics.close()
        state.writer.wait()


def save_last_weights(state: TrainState) -> None:
    """Write what the run was for, and say where it lies."""
    path = weight_path(state.args.save_dir, state.args.save_weight, state.lm_config)
    if state.save_due:
        save_checkpoint(state)
    save_weights(state.model, path, state.writer)
    state.writer.wait()
    Logger(f"done: {state.update} updates in {state.seconds:.0f} s; weights in {path}")
