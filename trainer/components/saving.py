"""When files are written: checkpoints at the end of an update, the best weights, the last ones, and at a signal."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.durable_files import link, sync_folder
from common.errors import Interrupted
from common.settings import StageArgs
from trainer.components.checkpoint import lm_checkpoint, save_weights
from trainer.components.distributed import Logger, is_main_process
from trainer.components.metrics import MetricsLog
from trainer.components.parallel import is_sharded, unwrap
from trainer.components.run_files import NamedShape, metrics_path, resume_path, run_name, weight_path
from trainer.components.sharded import saving_group
from trainer.components.signals import end_loader_processes
from trainer.components.state import TrainState
from trainer.components.state_files import state_paths


def open_metrics(state: TrainState, resumed: bool) -> MetricsLog | None:
    """The metrics file, on rank 0; a resumed run keeps the records up to its checkpoint, a new one sets the files of an
    earlier run of its name aside."""
    if not is_main_process():
        return None
    if not resumed:
        set_earlier_run_aside(state.args, state.lm_config)
    path = metrics_path(state.args.save_dir, run_name(state.args.save_weight, state.lm_config))
    if resumed:
        return MetricsLog(path, state.total_updates, state.reported_update, state.records)
    return MetricsLog(path, state.total_updates)


def set_earlier_run_aside(args: StageArgs, lm_config: NamedShape) -> None:
    """Move the checkpoints and metrics of an earlier run of this name into a folder `earlier_<n>` beside them, and keep
    its weights there: a forgotten --from_resume 1 loses nothing, and a new run never continues an old one's files."""
    run, best = (run_name(name, lm_config) for name in (args.save_weight, f"{args.save_weight}_best"))
    states, out = Path(args.checkpoint_dir), Path(args.save_dir)
    old_states = [path for kind in ("resume", "update", "best_resume") for path in states.glob(f"{run}_{kind}*")]
    metrics = metrics_path(out, run)
    if not old_states:
        return
    taken = [re.fullmatch(r"earlier_(\d+)", path.name) for folder in (states, out) for path in folder.glob("earlier_*")]
    name = f"earlier_{1 + max((int(match[1]) for match in taken if match), default=0)}"
    for folder, paths in ((states, old_states), (out, [path for path in [metrics] if path.exists()])):
        for path in paths:  # the checkpoints first: without them nothing continues
            (folder / name).mkdir(exist_ok=True)
            os.replace(path, folder / name / path.name)
    for weights in (out / f"{run}.pth", out / f"{best}.pth"):
        if weights.exists():  # they may be the start weights of this run, which other ranks still read
            (out / name).mkdir(exist_ok=True)
            link(weights, out / name / weights.name)
    for folder in {states, out, states / name, out / name}:
        if folder.exists():
            sync_folder(folder)
    places = " and ".join(dict.fromkeys(str(folder / name) for folder in (states, out)))
    Logger(f"a run named {run} was here; its files are kept in {places} (--from_resume 1 would have continued it)")


def save_checkpoint(state: TrainState, wandb=None) -> None:
    """Write the resume state, then the weights for use, in the background; called on all ranks. The pending record is
    saved too: a run killed while it evaluates completes that report when it is resumed."""
    args = state.args
    with state.meter.timing("save"):
        state.save_due = False
        state.writer.wait()  # at most one copy of the state waits in memory
        if state.metrics is not None:
            state.metrics.sync()
        where = {"epoch": state.epoch, "step": state.step, "wandb": wandb, "save_dir": args.checkpoint_dir}
        parts: dict[str, Any] = where | {"writer": state.writer} | state.progress()
        lm_checkpoint(state.lm_config, args.save_weight, state.model, state.optimizer, **parts)
        save_weights(state.model, weight_path(args.save_dir, args.save_weight, state.lm_config), state.writer)
        path = resume_path(args.checkpoint_dir, args.save_weight, state.lm_config)
        state.hooks.checkpoint_saved(state, state_paths(path)[is_sharded(state.model)])


def save_best_weights(state: TrainState) -> None:
    """Write the weights of this update as `<save_weight>_best`, in the background."""
    best = weight_path(state.args.save_dir, f"{state.args.save_weight}_best", state.lm_config)
    save_weights(state.model, best, state.writer)


def save_final_weights(state: TrainState) -> None:
    """Write the weights at the end of training, and wait for the disk."""
    path = weight_path(state.args.save_dir, state.args.save_weight, state.lm_config)
    if state.save_due:
        save_checkpoint(state)
    save_weights(state.model, path, state.writer)
    state.writer.wait()
    Logger(f"done: {state.update} updates in {state.seconds:.0f} s; weights in {path}")


def save_and_stop(state: TrainState, wandb=None) -> None:
    """Grant a stop request at the end of an update: save, and raise Interrupted."""
    state.expert_load.read(unwrap(state.model))
    state.bad_updates.read()
    save_checkpoint(state, wandb)
    raise interrupted(state)


def interrupted(state: TrainState) -> Interrupted:
    """The exception that ends a run at a signal, which another rank may have received.

    Called on all ranks, which wait until the state is on the disk: torchrun ends all ranks when the first one exits.
    """
    state.writer.wait()
    if dist.is_initialized():
        dist.barrier()
    number = state.stop.signal or signal.SIGTERM
    name, done = signal.Signals(number).name, f"update {state.update} of {state.total_updates}"
    return Interrupted(number, f"by {name} after {done}, which is saved; --from_resume 1 goes on from there")


@contextmanager
def complete_files(state: TrainState, wandb=None) -> Iterator[None]:
    """Wrap training: a signal waits for the end of an update, and however training ends, the files being written are
    completed: a checkpoint in the background, the metrics file, the tracker's curves."""
    tracker_timeout: float | None = 10.0  # seconds; after an interruption somebody is waiting
    if is_sharded(state.model):
        saving_group()
    try:
        state.stop.defer = True
        yield
        tracker_timeout = None
    finally:
        state.stop.defer = False
        end_loader_processes()
        if wandb is not None:
            wandb.finish(tracker_timeout)
        if state.metrics is not None:
            state.metrics.close()
        state.writer.wait()
