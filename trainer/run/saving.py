"""When files are written: checkpoints at the end of an update, the best weights, the last ones, and at a
signal."""

import glob
import hashlib
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch

from common.errors import Interrupted, warn
from common.files import link, sync_folder, write_errors, write_json
from common.settings import StageArgs
from trainer.devices.process_group import Logger, gather, is_main_process, meet, world_size
from trainer.report.metrics import MetricsLog, complete_lines, readable_records
from trainer.report.speed import read_meter
from trainer.run import checkpoint, paths
from trainer.run.errors import end_loader_processes
from trainer.run.resume import Fingerprint, total_updates
from trainer.run.state import TrainState
from trainer.weights.files import Description, save_weights

KEPT_STARTS = 19  # of a run that was resumed more often than that, beside the first one


def set_earlier_run_aside(args: StageArgs, lm_config: Any, state_file: Path | None = None) -> None:
    """Move the checkpoints, metrics, settings, curves and weights of an earlier run of this name into a
    folder `earlier_<n>` beside them: a forgotten --from_resume 1 loses nothing, and no two runs share a file.

    Weights and a state (`state_file`) that the new run starts from stay where they are, too; so do metrics
    and settings, which the new run replaces: until then they tell what the state that it goes back to comes
    from.
    Raises UserError if the disk is full ...
    """
    states, out = Path(args.checkpoint_dir), Path(args.save_dir)
    run, best = (paths.run_name(name, lm_config) for name in (args.save_weight, f"{args.save_weight}_best"))
    old_states = [
        path for path in sorted(states.glob(f"{glob.escape(run)}_*")) if paths.is_state(run, path.name)
    ]
    weights = [path for name in (run, best) for path in (out / f"{name}.pth", out / f"{name}.json")]
    weights += [path for name in (run, best) for path in (out / name).glob("adapter_*")]
    weights = [path for path in weights if path.is_file()]
    starts = [] if state_file is None else [state_file]
    if args.from_weight != "none":
        starts.append(paths.start_path(out, args.from_weight, lm_config))
    stays = {path for path in old_states + weights if any(paths.same_file(start, path) for start in starts)}
    if len(stays) == len(old_states + weights):  # nothing else was saved
        return
    metrics = paths.metrics_path(out, run)
    logs = [path for path in (metrics, paths.settings_path(metrics)) if path.is_file()]
    # states last: a run killed before that finds the rest and sets it aside again
    files = [(out, path) for path in logs + weights]
    curves = paths.tensorboard_folder(args, lm_config)
    if curves.is_dir():
        files.append((curves.parent, curves))
    files += [(states, path) for path in old_states]
    # what stays first: alone it would no longer be set aside
    files.sort(key=lambda file: file[1] not in stays)
    name = unused_name({folder for folder, _ in files})
    for folder, path in files:
        kept = folder / name / path.relative_to(folder)
        with write_errors(kept):
            kept.parent.mkdir(parents=True, exist_ok=True)
            if path in stays or path in logs:
                link(path, kept)
            else:
                os.replace(path, kept)
            for changed in {kept.parent, folder / name, path.parent, folder}:
                sync_folder(changed)
    places = dict.fromkeys(str(folder / name) for folder, _ in files)
    text = f"a run named {run} was here; its files are kept in {' and '.join(places)}"
    if old_states and state_file is None:
        text += " (--from_resume 1 would have continued it)"
    Logger(text)


def unused_name(folders: set[Path]) -> str:
    """`earlier_<n>`, n above those that are in any of the folders."""
    taken = [0]
    for folder in folders:
        for path in folder.glob("earlier_*"):
            number = path.name.removeprefix("earlier_")
            if number.isdecimal():
                taken.append(int(number))
    return f"earlier_{max(taken) + 1}"


def save_checkpoint(state: TrainState) -> None:
    """Write the resume state, then the inference weights, in the background; called on all ranks. The pending
    record is saved too: a run killed while it evaluates completes that report when it is resumed."""
    args = state.args
    state.save_due = False
    state.writer.wait()  # at most one copy of the state waits in memory
    if state.metrics is not None:
        state.metrics.sync()
    path = paths.resume_path(args.checkpoint_dir, args.save_weight, state.lm_config)
    progress = state.progress()
    checkpoint.save(
        path, state.lm_config, state.model, state.optimizer, progress, state.writer, state.state_dict_fn
    )
    write_weights(state, args.save_weight)
    state.state_file = path
    state.saved_update = state.update
    state.callbacks.call("on_checkpoint_saved", state.state_file)


def write_weights(state: TrainState, weight: str) -> Path:
    """Write what is used of the model under this name, in the background; returns where. Beside the weights
    stands where they come from: stage, parent, position in the run, data, code."""
    run = state.run
    description: Description = {
        "tokenizer": run.get("tokenizer"),
        "stage": next(iter(state.code), None),  # the first of its files
        "from_weight": {"name": run.get("from_weight"), "sha256": run.get("from_weight_sha256")},
        "epoch": state.epoch,
        "update": state.update,
        "tokens": state.tokens,
        "data": {"data": run.get("data"), "samples": run.get("samples")},
        # file by file in `<run>_run.json`
        "code": hashlib.sha256(json.dumps(state.code).encode()).hexdigest(),
    }
    write = state.save_fn or save_weights
    path = paths.weight_path(state.args.save_dir, weight, state.lm_config)
    return write(state.model, path, state.writer, description)


def write_settings(state: TrainState, path: Path) -> dict[str, Any]:
    """Write what this run is, and return it: its settings, command lines, environment, data and code; of the
    process's environment variables nothing. A resumed run replaces the file and keeps the list of starts.
    Raises UserError if the disk is full ..."""
    is_resumed = state.resumed_update is not None and not state.is_new_branch
    starts = list(read_settings_file(path).get("starts", ())) if is_resumed else []
    now = datetime.now(UTC).isoformat(timespec="seconds")
    starts.append({"time": now, "update": state.update, "command": sys.argv})
    environment = dict(state.computing)
    environment |= {"python": platform.python_version(), "platform": platform.platform()}
    environment["ranks"] = world_size()
    if state.device.type == "cuda":
        environment["GPU"] = torch.cuda.get_device_name(state.device)
    content = {
        "run_id": state.run_id,
        "branch_of": state.branch_of,
        "stage": next(iter(state.code), None),  # the first of its files
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "settings": dict(state.args),
        "environment": environment,
        "run": state.run,
        "code": state.code,
        "starts": starts[:1] + starts[1:][-KEPT_STARTS:],
    }
    write_json(path, content)
    return content


def read_settings_file(path: Path) -> dict[str, Any]:
    """The content of `<run>_run.json`; empty if there is none, or it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def records_before(state: TrainState, metrics: Path) -> list[dict[str, Any]]:
    """The records that the metrics file of a resumed run begins with, up to the update that it goes on from.

    A new branch begins with those of the run that it branches off, if that run's files lie where its state
    says: below --save_dir as the state lies below --checkpoint_dir. metrics: of this run.
    """
    if state.is_new_branch and state.branch_of is not None:
        metrics = paths.metrics_of_branched_run(state.args, state.branch_of)
        if read_settings_file(paths.settings_path(metrics)).get("run_id") != state.branch_of["run_id"]:
            return []
    records = readable_records(metrics)
    if damaged := len(complete_lines(metrics)) - len(records):
        warn(f"{metrics}: {damaged} lines are damaged; these records are lost")
    last = cast(int, state.resumed_update)
    return [record for record in records if record["update"] <= last]


def save_and_stop(state: TrainState) -> None:
    """Grant a stop request at the end of an update: save, and raise Interrupted."""
    state.skipped_updates.read_and_warn()
    save_checkpoint(state)
    raise interrupted(state)


def interrupted(state: TrainState) -> Interrupted:
    """The exception that ends a run at a signal, which another rank may have received.

    Called on all ranks, which wait until the state is on the disk: torchrun ends all ranks when the first one
    exits.
    """
    state.writer.wait()
    meet()
    number = state.stop_request.signal or signal.SIGTERM
    name, done = signal.Signals(number).name, f"update {state.update} of {state.total_updates}"
    text = f"by {name} after {done}, which is saved; --from_resume 1 goes on from there"
    return Interrupted(number, text)


@contextmanager
def training_files(state: TrainState, wandb=None) -> Iterator[None]:
    """Wrap training: the files of an earlier run of this name are set aside, unless this run goes on with
    them, the metrics file opened and the settings written. A signal waits for the end of an update. However
    training ends, the files being written are completed: a checkpoint in the background, the metrics file,
    the tracker's curves; at its normal end the weights are written."""
    tracker_timeout: float | None = 10.0  # seconds; after an interruption somebody is waiting
    state.wandb = wandb
    try:
        state.callbacks.call("on_train_start")
        path = paths.metrics_path(state.args.save_dir, paths.run_name(state.args.save_weight, state.args))
        settings_file, settings = paths.settings_path(path), {}
        if is_main_process():
            if state.resumed_update is None or state.is_new_branch:
                set_earlier_run_aside(state.args, state.lm_config, state.state_file)
            shown = state.shown + state.metric_names
            kept = records_before(state, path) if state.resumed_update is not None else []
            state.metrics = MetricsLog(path, state.total_updates, state.resumed_update, kept, shown)
            # last: until then the file tells whose metrics lie here
            settings = write_settings(state, settings_file)
        state.stop_request.defer = True
        if state.is_new_branch:
            save_checkpoint(state)  # from here on a restart goes on with the branch
        yield
        if state.saved_update != state.update:  # a callback ended the run
            read_meter(state)
            state.skipped_updates.read_and_warn()
            save_checkpoint(state)
        weights = write_weights(state, state.args.save_weight)
        state.writer.wait()
        state.callbacks.call("on_train_end")
        if is_main_process() and not state.can_continue:
            # last: everything else is written
            finished = {"last_lines": state.last_lines, "finished": {"update": state.update}}
            write_json(settings_file, settings | finished)
        Logger(f"done: {state.update} updates in {state.seconds:.0f} s; weights in {weights}")
        for line in state.last_lines:
            Logger(line)
        tracker_timeout = None
    except BaseException as error:
        state.callbacks.call("on_exception", error)
        raise
    finally:
        state.stop_request.defer = False
        if state.args.num_workers:
            end_loader_processes()
        if wandb is not None:
            wandb.finish(tracker_timeout)
        if state.metrics is not None:
            state.metrics.close()
        state.writer.wait()


def is_finished(args: StageArgs, run: Fingerprint, saved: dict[str, Any] | None) -> bool:
    """Whether the run of a checkpoint, `saved`, has come to its end, with all files written: then nothing is
    left to do, and no file may change. Says so. Called on all ranks; rank 0 decides.

    run: the fingerprint of this run. One that ended before its last update, by early stopping for instance,
    is finished under the settings with which it ended.
    """
    if saved is None or saved.get("is_new_branch"):
        return False
    path = paths.weight_path(args.save_dir, args.save_weight, args)
    weights = path if path.exists() else path.with_suffix("")  # or the folder of an adapter
    content = read_settings_file(paths.settings_path(paths.metrics_path(args.save_dir, path.stem)))
    is_of_run = content.get("run_id") == saved["run_id"] and weights.exists()
    has_ended = is_of_run and content.get("finished") == {"update": saved["update"]}
    if saved["update"] < total_updates(run):
        has_ended = has_ended and comparable(content["settings"]) == comparable(dict(args))
    if gather(has_ended)[0]:
        Logger(
            f"{path.stem} is finished, after {saved['update']} updates: nothing to do; its weights: {weights}"
        )
        return True
    return False


def comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them, without those that only say how the run was started."""
    return json.loads(json.dumps(settings, default=str)) | {"from_resume": True, "resume_from": None}
