"""When files are written: checkpoints at the end of an update, the best weights, the last ones, and at a signal."""

import glob
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from common.durable_files import atomic_write, link, sync_folder, write_error
from common.errors import Interrupted
from common.settings import StageArgs
from trainer.components import run_files
from trainer.components.checkpoint import lm_checkpoint
from trainer.components.distributed import Logger, is_main_process, meet, world_size
from trainer.components.metrics import MetricsLog
from trainer.components.model_files import Description, save_weights
from trainer.components.parallel import unwrap
from trainer.components.signals import end_loader_processes
from trainer.components.state import TrainState

KEPT_STARTS = 19  # of a run that was resumed more often than that, beside the first one


def set_earlier_run_aside(args: StageArgs, lm_config: Any) -> None:
    """Move the checkpoints, metrics, settings and weights of an earlier run of this name into a folder `earlier_<n>`
    beside them: a forgotten --from_resume 1 loses nothing, and a new run never continues an old one's files. Weights
    that the new run starts from stay where they are, too. Raises UserError if the disk is full ..."""
    states, out = Path(args.checkpoint_dir), Path(args.save_dir)
    run, best = (run_files.run_name(name, lm_config) for name in (args.save_weight, f"{args.save_weight}_best"))
    old_states = [path for path in sorted(states.glob(f"{glob.escape(run)}_*")) if run_files.is_state(run, path.name)]
    weights = [path for name in (run, best) for path in (out / f"{name}.pth", out / f"{name}.json")]
    weights += [path for name in (run, best) for path in (out / name).glob("adapter_*")]
    weights = [path for path in weights if path.is_file()]
    metrics = run_files.metrics_path(out, run)
    logs = [path for path in (metrics, run_files.settings_path(metrics)) if path.is_file()]
    start = run_files.start_path(out, args.from_weight, lm_config)
    if not (old_states or weights):  # it ended before it saved anything
        return
    # states last: a run killed before that finds the rest and sets it aside again
    files = [(out, path) for path in logs + weights]
    files += [(states, path) for path in old_states]
    taken = [re.fullmatch(r"earlier_(\d+)", path.name) for folder in (states, out) for path in folder.glob("earlier_*")]
    name = f"earlier_{1 + max((int(match[1]) for match in taken if match), default=0)}"
    try:
        for folder, path in files:
            kept = folder / name / path.relative_to(folder)
            kept.parent.mkdir(parents=True, exist_ok=True)
            link(path, kept) if run_files.same_file(start, path) else os.replace(path, kept)
            for changed in {kept.parent, folder / name, path.parent, folder}:
                sync_folder(changed)
    except OSError as error:
        raise write_error(out / name, error) from error
    places = dict.fromkeys(str(folder / name) for folder, _ in files)
    text = f"a run named {run} was here; its files are kept in {' and '.join(places)}"
    Logger(text + " (--from_resume 1 would have continued it)" * bool(old_states))


def save_checkpoint(state: TrainState, wandb=None) -> None:
    """Write the resume state, then the weights for use, in the background; called on all ranks. The pending record is
    saved too: a run killed while it evaluates completes that report when it is resumed."""
    args = state.args
    state.save_due = False
    state.writer.wait()  # at most one copy of the state waits in memory
    if state.metrics is not None:
        state.metrics.sync()
    where = {"epoch": state.epoch, "step": state.step, "wandb": wandb, "save_dir": args.checkpoint_dir}
    parts: dict[str, Any] = where | {"writer": state.writer} | state.progress()
    lm_checkpoint(state.lm_config, args.save_weight, state.model, state.optimizer, **parts)
    write_weights(state, args.save_weight)
    path = run_files.resume_path(args.checkpoint_dir, args.save_weight, state.lm_config)
    for hook in state.hooks:
        hook.checkpoint_saved(state, path)


def write_weights(state: TrainState, weight: str) -> Path:
    """Write what is used of the model under this name, in the background; returns where."""
    write = state.save_fn or save_weights
    path = run_files.weight_path(state.args.save_dir, weight, state.lm_config)
    return write(state.model, path, state.writer, description(state))


def description(state: TrainState) -> Description:
    """What a file of weights says of itself: stage, parent weights, position in the run, data and code."""
    run = state.run
    parent = {"name": run.get("from_weight"), "sha256": run.get("from_weight_sha256")}
    data = {key: run.get(key) for key in ("data", "tokenizer", "samples")}
    position = {"epoch": state.epoch, "update": state.update, "tokens": state.tokens}
    stage = next(iter(state.code), None)  # the first of its files
    return {"stage": stage, "from_weight": parent} | position | {"data": data, "code": state.code}


def write_settings(state: TrainState, path: Path) -> None:
    """Write what this run is: its settings, command lines, environment, data and code; of the process's environment
    variables nothing. A resumed run replaces the file and keeps the list of starts. Raises UserError if the disk is
    full ..."""
    starts: list[Any] = []
    if state.resumed_update is not None:
        with suppress(OSError, ValueError, LookupError, TypeError):  # an earlier version wrote none
            starts = list(json.loads(path.read_bytes())["starts"])
    now = datetime.now(UTC).isoformat(timespec="seconds")
    starts.append({"time": now, "update": state.update, "command": sys.argv})
    environment = {"python": platform.python_version(), "platform": platform.platform(), "ranks": world_size()}
    environment |= {"GPU": torch.cuda.get_device_name(state.device)} if state.device.type == "cuda" else {}
    stage = next(iter(state.code), None)  # the first of its files
    content: dict[str, Any] = {"stage": stage, "settings": asdict(state.args)}
    content |= {"environment": state.computing() | environment, "run": state.run, "code": state.code}
    content["starts"] = starts[:1] + starts[1:][-KEPT_STARTS:]
    text = json.dumps(content, indent=1, default=str)  # ASCII: file names may hold bytes that are not UTF-8
    atomic_write(path, lambda file: file.write(text.encode()))


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
    meet()
    number = state.stop.signal or signal.SIGTERM
    name, done = signal.Signals(number).name, f"update {state.update} of {state.total_updates}"
    text = f"by {name} after {done}, which is saved; --from_resume 1 goes on from there"
    return Interrupted(number, text)


@contextmanager
def training_files(state: TrainState, wandb=None) -> Iterator[None]:
    """Wrap training: the files of an earlier run of this name are set aside, unless it is resumed, the settings of this
    one written, and its metrics file opened. A signal waits for the end of an update. However training ends, the files
    being written are completed: a checkpoint in the background, the metrics file, the tracker's curves; at its normal
    end the weights are written."""
    tracker_timeout: float | None = 10.0  # seconds; after an interruption somebody is waiting
    if state.resumed_update is None and is_main_process():
        set_earlier_run_aside(state.args, state.lm_config)
    if is_main_process():
        path = run_files.metrics_path(state.args.save_dir, run_files.run_name(state.args.save_weight, state.args))
        write_settings(state, run_files.settings_path(path))
        shown = tuple(name for hook in state.hooks for name in hook.shown) + state.metric_names
        state.metrics = MetricsLog(path, state.total_updates, state.resumed_update, shown)
    try:
        state.stop.defer = True
        yield
        if state.save_due:
            save_checkpoint(state)
        path = write_weights(state, state.args.save_weight)
        state.writer.wait()
        Logger(f"done: {state.update} updates in {state.seconds:.0f} s; weights in {path}")
        for line in filter(None, [hook.verdict(state) for hook in state.hooks]):
            Logger(line)
        tracker_timeout = None
    finally:
        state.stop.defer = False
        end_loader_processes()
        if wandb is not None:
            wandb.finish(tracker_timeout)
        if state.metrics is not None:
            state.metrics.close()
        state.writer.wait()
