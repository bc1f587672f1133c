"""The files of a run: checkpoints and weights, its metrics and settings, and those of an earlier run of its
name."""

import gc
import json
import os
import platform
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.errors import Interrupted, ReadError, UserError, reason, warn
from common.files import files_in, is_there, link, read_errors, remove, sync, write_errors, write_json
from common.launcher import launch
from common.session import STOPPED
from common.settings import StageArgs
from trainer.callbacks.train_state import Progress, TrainState
from trainer.checkpoint.earlier import set_earlier_run_aside
from trainer.checkpoint.file import previous_path, read_checkpoint, write_checkpoint
from trainer.checkpoint.state import copy_to_host, first_difference, host_copy, load_into
from trainer.devices.errors import end_loader_processes, translated_failures
from trainer.devices.process_group import Logger, all_gather, is_main_process, meet, world_size
from trainer.devices.wrapping import is_sharded, unwrap
from trainer.report.metrics import MetricsLog, readable_records
from trainer.report.warnings import verdict
from trainer.weights import paths
from trainer.weights.tensor_file import DAMAGED

# --- checkpoints and weights


def save_checkpoint(state: TrainState) -> None:
    """Write the inference weights, then the state to resume from, in the background. Called on all ranks. The
    state comes last: as long as the old state is in place, a resumed run writes all other files again. The
    first state of a run is restored into the run at once."""
    args, progress = state.args, state.progress
    is_first = not state.saved_update
    if state.checkpoint_write is not None:
        state.checkpoint_write.result()  # at most one copy of the state waits in memory
    if world_size() > 1 and not is_sharded(state.model):
        check_replicas(state)
    if state.log is not None:
        state.log.sync()
    state.weights, state.saved_update = write_weights(state, args.save_weight), progress.update
    if is_main_process():
        progress.wandb_id = getattr(state.wandb, "id", progress.wandb_id)
    saved = collect(state)
    path = paths.resume_path(args.checkpoint_dir, args.save_weight, state.lm_config)
    if is_main_process():
        description = None  # of the model, for `described_config`
        if hasattr(state.lm_config, "own_fields"):
            tokenizer = state.fingerprint.get("tokenizer")
            description = {"model": state.lm_config.own_fields(), "tokenizer": tokenizer}
        state.writer.submit(partial(write_and_keep, args, path, saved, description))
        state.checkpoint_write = state.writer.last
    del saved  # the writer's now, which frees it
    if is_first:
        state.writer.wait()
        meet()  # no other rank looks for the file before rank 0 has written it
        restore_first(state, path)


def collect(state: TrainState) -> dict[str, Any]:
    """The state of a run for a checkpoint: a copy on the host, on rank 0. All ranks must call it (a
    collective)."""
    model, optimizer = copy_to_host(state.model, state.optimizer, state.objective.saves_trained_only)
    return asdict(state.progress) | {
        "model": model,
        "optimizer": optimizer,
        "scaler": state.scaler.state_dict(),
        "callbacks": host_copy(state.callbacks.state_dict()),
        "fingerprint": state.fingerprint,
        "environment": state.environment,
        "code": state.code,
        "world_size": world_size(),
    }


def restore(state: TrainState, saved: dict[str, Any]) -> None:
    """Restore the result of `collect` into a run: weights, optimizer, scaler, callbacks and progress. A field
    of Progress that the code did not have at that time keeps its default."""
    load_into(state.model, state.optimizer, saved)
    if saved["scaler"]:  # empty unless that part of the run was in float16
        state.scaler.load_state_dict(saved["scaler"])
    state.callbacks.load_state_dict(saved["callbacks"])
    for row in fields(Progress):
        if row.name in saved:
            setattr(state.progress, row.name, saved[row.name])


def restore_first(state: TrainState, path: Path) -> None:
    """Restore the first checkpoint of a run into the run itself, like a resume. So a state that cannot be
    restored ends the run now, and not after a night. Afterwards everything must be as before. Callbacks whose
    state changes by itself, such as the time, are not compared. All ranks must call it (a collective).

    Raises UserError if the file cannot be read again, or something is not what was saved."""
    sees_it = all_gather(is_there(path))
    if not all(sees_it):
        Logger(
            f"rank {sees_it.index(False)} does not see {path}: a run can only be resumed where all ranks do"
        )
        return
    try:
        saved = read_checkpoint(path)
    except DAMAGED as error:
        raise UserError(f"{path}, just written, cannot be read again: {reason(error)}") from error
    before = host_copy(state.callbacks.state_dict())
    restore(state, saved)
    now = collect(state)
    other = [
        name
        for name, value in before.items()
        if first_difference(saved["callbacks"].get(name), value) is not None
    ]
    other_by_rank = all_gather(other)
    if not is_main_process():
        state.callbacks.load_state_dict({name: before[name] for name in other})
        return
    warn_of_lost_states(other_by_rank)
    expected = {key: saved[key] for key in now}
    expected["callbacks"] |= {name: now["callbacks"][name] for name in other}
    difference = first_difference(expected, now)
    if difference is not None:
        raise UserError(
            f"{path} was written, but the run cannot be restored from it: {difference}; a resumed run would "
            "not be this run"
        )


def warn_of_lost_states(other_by_rank: list[list[str]]) -> None:
    """Warn of callbacks, or an Objective, whose state on some rank differs from rank 0's. Only rank 0's state
    is saved.

    other_by_rank: for each rank the names of those whose state is not what was saved. On rank 0 these are
    states that change by themselves."""
    ranks = {name: rank for rank, names in enumerate(other_by_rank) for name in names}
    for name in sorted(ranks.keys() - set(other_by_rank[0])):
        warn(
            f"the state of {name} on rank {ranks[name]} differs from that on rank 0, which a resumed run "
            "gives to all ranks; let its `state_dict` return the states of all ranks (all_gather)"
        )


def write_and_keep(
    args: StageArgs, path: Path, saved: dict[str, Any], description: dict[str, Any] | None
) -> None:
    """Write a state as the newest at `path`. If it is to be kept, also write it under its number or as the
    best."""
    run_name, update = path.stem.removesuffix("_resume"), saved["update"]
    write_checkpoint(path, saved, description)
    if args.keep_every and update % args.keep_every == 0:
        keep(path, path.with_name(f"{run_name}_update_{update:08d}.pth"))
        delete_old_checkpoints(path.parent, run_name, args.keep_last, saved)
    if saved["best_update"] == update:
        keep(path, path.with_name(f"{run_name}_best_resume.pth"))


def check_replicas(state: TrainState) -> None:
    """Raise UserError if not all ranks have the same weights. All ranks must call it (a collective)."""
    weights = {name: value for name, value in unwrap(state.model).named_parameters() if value.numel()}
    hashes = [torch.hash_tensor(value.detach()) for value in weights.values()]
    everyone = all_gather(torch.stack(hashes).tolist())
    for rank, others in enumerate(everyone):
        if others != everyone[0]:
            differing = [name for name, a, b in zip(weights, everyone[0], others, strict=True) if a != b]
            raise UserError(
                f"after update {state.progress.update} rank {rank} has other weights than rank 0 "
                f"({differing[0]} and {len(differing) - 1} more): something makes the ranks train "
                f"differently{where_to_go_on(state)}"
            )


def keep(path: Path, name: Path) -> None:
    """Give a checkpoint a second name, under which it stays when a newer one is written."""
    with write_errors(name):
        temp = name.with_name(f".{name.name}.tmp")
        remove(temp)
        link(path, temp)
        os.replace(temp, name)
        sync(name.parent)


def delete_old_checkpoints(folder: Path, run_name: str, keep_last: int, saved: dict[str, Any]) -> None:
    """Delete the numbered checkpoints up to the current update, except for the last --keep_last (at least
    one) and the best."""
    numbered = {}
    for path in files_in(folder, "*.pth"):
        if name := re.fullmatch(re.escape(run_name) + r"_update_(\d+)\.pth", path.name):
            numbered[int(name[1])] = path
    past = sorted(update for update in numbered if update <= saved["update"])
    for update in past[: -max(1, keep_last)]:
        if update != saved["best_update"]:
            remove(numbered[update])


def write_weights(state: TrainState, weight: str) -> Path:
    """Write the inference weights, or an adapter, under this name in the background. Returns the path. A file
    beside the weights says where they come from."""
    fingerprint, progress = state.fingerprint, state.progress
    description = {
        "tokenizer": fingerprint.get("tokenizer"),
        "stage": state.objective.stage,
        "from_weight": {"name": state.args.from_weight, "sha256": fingerprint["from_weight_sha256"]},
        "epoch": progress.epoch,
        "update": progress.update,
        "tokens": progress.tokens,
        "data": {name: fingerprint.get(name) for name in ("data", "kind", "samples")},
        "code": state.code["revision"],
    }
    path = paths.weight_path(state.args.save_dir, weight, state.lm_config)
    return state.objective.save(state.model, path, state.writer, description)


# --- settings


def write_settings(state: TrainState, path: Path) -> None:
    """Write the settings, command lines, environment and data of this run, and whether it is bit for bit a
    run without interruption. A resumed run adds its command line and its machine."""
    starts: list[Any] = []
    with read_errors(path):
        if state.resumed_update is not None and is_there(path):
            with suppress(ValueError, LookupError, TypeError):  # damaged
                starts = list(json.loads(path.read_bytes())["starts"])
    now = datetime.now(UTC).isoformat(timespec="seconds")
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    start: dict[str, Any] = {
        "time": now,
        "update": state.progress.update,
        "command": sys.argv,
        "machine": platform.node(),
    }
    start |= {"environment": state.environment | versions}
    content: dict[str, Any] = {
        "run_id": state.progress.run_id,
        "branch_of": state.progress.branch_of,
        "stage": state.objective.stage,
        "parameters": sum(parameter.numel() for parameter in unwrap(state.model).parameters()),
        "settings": dict(state.args),
        "environment": {"code": state.code["revision"]} | state.environment | versions,
        "fingerprint": state.fingerprint,
        "sources": state.code["sources"],
        "facts": state.facts,
        "results": results(state),
        "starts": [*starts, start],
    }
    write_json(path, content)


def results(state: TrainState) -> str:
    """What the results of a run equal: bit for bit those of a run without interruption, or from which update
    on only up to rounding."""
    told = list(state.progress.changes)
    if state.device.type != "cpu" and not state.args.deterministic:
        told.insert(0, f"to rounding ({state.device.type} without --deterministic 1)")
    return "; ".join(told) or "bit for bit"


# --- a run from its first file to its last


def interrupted(state: TrainState) -> Interrupted:
    """The exception that ends a run after a signal, which may have reached another rank. It is called on all
    ranks, which wait until the state is on the disk, because torchrun ends all ranks when the first one
    exits."""
    state.writer.wait()
    meet()
    number = state.stop_request.signal or signal.SIGTERM
    done = f"after update {state.progress.update} of {state.total_updates}"
    text = f"by {signal.Signals(number).name} {done}, which is saved; --from_resume 1 continues from there"
    return Interrupted(number, text)


def end_session(state: TrainState) -> None:
    """Print where --stop_after has stopped the run and the command to continue. If a script runs several
    stages, create its file instead: the script prints its own command."""
    done = f"after update {state.progress.update} of {state.total_updates}"
    text = f"stopped: by --stop_after {state.args.stop_after} {done}, which is saved"
    script_file = os.environ.get(STOPPED)
    if script_file is None:
        text += f"; to continue: {command_to_continue(state.args)}"
    elif is_main_process():
        with write_errors(Path(script_file)):
            Path(script_file).touch()
    Logger(text)


def command_to_continue(args: StageArgs) -> str:
    """The command that continues this run on one machine, or words for it if there are several."""
    place = launch()
    words = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ and place.world_size > 1:
        words = ["torchrun", "--standalone", "--nproc_per_node", str(place.local_world_size)]
    words += sys.argv if args.from_resume else [*sys.argv, "--from_resume", "1"]
    if place.world_size > place.local_world_size:
        return "the same commands on all machines, with --from_resume 1"
    return shlex.join(words)


def where_to_go_on(state: TrainState) -> str:
    """The end of an error line, which says how to resume; empty if there is no checkpoint yet."""
    path = paths.resume_path(state.args.checkpoint_dir, state.args.save_weight, state.lm_config)
    with suppress(ReadError):
        if is_there(path) or is_there(previous_path(path)):
            return "; --from_resume 1 continues from the last checkpoint"
    return ""


@contextmanager
def training_files(state: TrainState, wandb=None) -> Iterator[None]:
    """Wrap training: its files (`open_files`); failures of the machine become one line."""
    with translated_failures(partial(where_to_go_on, state)), open_files(state, wandb):
        yield


@contextmanager
def open_files(state: TrainState, wandb: Any) -> Iterator[None]:
    """Wrap training. It sets aside the files of an earlier run of this name, unless this run continues them,
    opens the metrics file and writes the settings. A signal takes effect at the end of an update. However
    training ends, files that are being written are completed."""
    args, tracker_timeout = state.args, 10.0  # seconds; after an interruption somebody is waiting
    state.wandb = wandb
    state.callbacks.check()
    path = paths.metrics_path(args.save_dir, paths.run_name(args.save_weight, args))
    if is_main_process():
        if state.resumed_update is None:
            set_earlier_run_aside(args)
        state.log = MetricsLog(
            path, state.total_updates, state.resumed_update, state.objective.console_metrics
        )
        write_settings(state, paths.settings_path(path))
    try:
        state.callbacks.call("on_train_start")
        gc.freeze()  # the objects from start-up live as long as the run, so garbage collections can skip them
        with state.stop_request:
            yield
        progress = state.progress
        if progress.update and state.weights is None:  # a finished run was resumed, and its weights were gone
            save_checkpoint(state)
        state.writer.wait()
        state.callbacks.call("on_train_end")
        if state.is_out_of_time:
            end_session(state)
            return
        Logger(f"done: {progress.update} updates in {progress.seconds:.0f} s; weights in {state.weights}")
        if state.log is not None:
            with read_errors(path):
                records = readable_records(path)  # all of them, as the report page reads them
            Logger(f"verdict: {verdict(records, state.facts)}")
        tracker_timeout = None
    except BaseException as error:
        state.callbacks.call("on_exception", error)
        raise
    finally:
        if args.num_workers:
            end_loader_processes()
        if wandb is not None:
            wandb.finish(tracker_timeout)
        if state.log is not None:
            state.log.close()
        state.writer.wait()
