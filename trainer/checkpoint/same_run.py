"""Decides whether a checkpoint belongs to this run, and whether that run has finished. It has the run
fingerprint, and the settings that change with the number of ranks."""

import math
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch

from common.errors import UserError, check_utf8, warn
from common.files import is_file, is_there
from common.settings import ROOT, USUAL_DECAY, FrozenModelArgs, StageArgs
from dataset.token_cache import file_hash
from trainer.callbacks.base import plain
from trainer.callbacks.train_state import Fingerprint, total_updates
from trainer.devices.device import autocast_dtype, processor_name
from trainer.devices.process_group import Logger, all_gather, world_size
from trainer.optim.build import MUON_LR_SCALE, optimizer_settings
from trainer.optim.muon import decay_of
from trainer.weights import paths
from trainer.weights.files import weights_hash

SOURCE_ROOMS = ("common", "model", "dataset", "trainer", "llm")
INSTALLED = ("site-packages", "dist-packages")
PYTHON_FOLDERS = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
A = TypeVar("A", bound=StageArgs)


def run_fingerprint(args: StageArgs, model: Fingerprint, data: Fingerprint, samples: int) -> Fingerprint:
    """Everything that must be the same when a run is resumed.

    model: the fields of its config. data: the fingerprint of its dataset. samples: items of an epoch.
    """
    fingerprint = args.compared()
    fingerprint |= plain(model, "the fingerprint of the model")
    fingerprint["global_batch"] = args.batch_size * args.accumulation_steps * world_size()
    fingerprint |= plain({"samples": samples} | data, "the fingerprint of the data")
    fingerprint["from_weight_sha256"] = None
    if args.from_weight != "none":
        start = paths.start_path(args.save_dir, args.from_weight, args)
        fingerprint["from_weight_sha256"] = weights_hash(start)
    if isinstance(args, FrozenModelArgs):
        fingerprint |= args.frozen_model_hashes()
    return fingerprint


def check_settings_utf8(args: StageArgs) -> None:
    """Raise UserError for a path that is not UTF-8, because a checkpoint cannot hold it."""
    for name, value in args:
        check_utf8(f"--{name}", str(value))


def with_enough_epochs(args: A, samples: int) -> A:
    """The settings; with --max_steps, as many epochs as these updates take. samples: items of an epoch."""
    if not args.max_steps:
        return args
    updates = math.ceil(samples / (args.batch_size * args.accumulation_steps * world_size()))
    return args.model_copy(update={"epochs": math.ceil(args.max_steps / updates)})


def with_weight_decay(args: A, checkpoint: dict[str, Any] | None, train_set: Any) -> A:
    """The settings with a number for the weight decay `auto`. A resumed run gets the number that it began
    with. A new run that pretrains random weights with Muon gets one that follows from its rate and the
    updates of a pass over all of its data."""
    if args.weight_decay is not None:
        return args
    decay = USUAL_DECAY
    if checkpoint is not None:
        decay = checkpoint["fingerprint"]["weight_decay"]
    elif args.decays_by_pass and args.optimizer == "muon" and args.from_weight == "none":
        global_batch = args.batch_size * args.accumulation_steps * world_size()
        items = len(getattr(train_set, "item_tokens", train_set))  # a user's own data have no tokens
        updates = items / global_batch
        decay = float(f"{decay_of(args.learning_rate * MUON_LR_SCALE, updates):.3g}")
        Logger(f"--weight_decay auto: {decay}, for a pass of {updates:,.0f} updates")
    return args.model_copy(update={"weight_decay": decay})


def keep_global_batch(args: A, checkpoint: dict[str, Any]) -> A:
    """The settings of a run that is resumed with another number of ranks: `accumulation_steps` is set so that
    an update has as many samples as before. If that is impossible, `check_same_run` refuses."""
    if "fingerprint" not in checkpoint:
        raise UserError(f"--from_resume 1: {checkpoint['loaded_from']} is not a checkpoint of a stage script")
    wanted, micro_batch = checkpoint["fingerprint"]["global_batch"], args.batch_size * world_size()
    if world_size() == checkpoint["world_size"] or wanted % micro_batch:
        return args
    steps = wanted // micro_batch
    if steps != args.accumulation_steps:
        text = f"{world_size()} ranks instead of {checkpoint['world_size']}"
        Logger(f"{text}: --accumulation_steps is now {steps}, so that an update stays {wanted} samples")
    return args.model_copy(update={"accumulation_steps": steps})


def check_same_run(args: StageArgs, fingerprint: Fingerprint, checkpoint: dict[str, Any] | None) -> None:
    """Raise UserError if the checkpoint (None: a new run) belongs to another run, or if not all ranks see the
    same files."""
    position = {key: checkpoint[key] for key in ("run_id", "update")} if checkpoint else {}
    if world_size() > 1:
        check_ranks_agree(fingerprint | position)
    if checkpoint is None:
        if args.from_resume:
            run_name = paths.run_name(args.save_weight, args)
            Logger(f"new run: no checkpoint of {run_name} in {args.checkpoint_dir}")
        return
    # A flag that the script did not have at that time counts as having had its default. A flag that older
    # code compared may be another now.
    saved = type(args)().compared() | checkpoint["fingerprint"]
    saved = {
        name: value
        for name, value in saved.items()
        if name in fingerprint or name not in type(args).model_fields
    }
    if new := fingerprint.keys() - saved.keys():  # the same holds for a field of the model
        from model.model_minimind import MiniMindConfig

        saved |= {name: getattr(MiniMindConfig, name) for name in new if hasattr(MiniMindConfig, name)}
    if args.extend_epochs and fingerprint["epochs"] > saved["epochs"]:
        saved["epochs"] = fingerprint["epochs"]
    if args.extend_epochs and fingerprint["max_steps"] > saved["max_steps"] > 0:
        saved |= {"epochs": fingerprint["epochs"], "max_steps": fingerprint["max_steps"]}
    # a checkpoint replaces the start weights, so they may be gone and are then not compared
    if fingerprint["from_weight_sha256"] is None:
        saved["from_weight_sha256"] = None
    if changed := changes(saved, fingerprint):
        hint = ""
        if "global_batch" in changed:
            hint = f" (batch_size x accumulation_steps x processes must be {saved['global_batch']})"
        if fingerprint["epochs"] > saved["epochs"] or fingerprint["max_steps"] > saved["max_steps"] > 0:
            hint = " (--extend_epochs 1 continues for more epochs or updates)"
        if fingerprint.get("data") != saved.get("data"):
            hint = (
                ": the data differ from those it began with. Either give the old data, or train on the new "
                f"data in a new run that starts from these weights: --from_weight {args.save_weight} "
                "--save_weight NEW --from_resume 0"
            )
        raise UserError(
            f"--from_resume 1: the checkpoint belongs to another run: {changed}{hint}; use its settings, or "
            "another --save_weight, or --from_resume 0"
        )


def check_reference(args: StageArgs, fingerprint: Fingerprint, checkpoint: dict[str, Any]) -> None:
    """Raise UserError if the start weights, which are the frozen reference of a run, have changed since the
    run began."""
    if fingerprint["from_weight_sha256"] != checkpoint["fingerprint"]["from_weight_sha256"]:
        raise UserError(
            f"--from_weight {args.from_weight} is not what this run began with. Those weights are its frozen "
            "reference; give the same ones"
        )


def check_ranks_agree(values: dict[str, Any]) -> None:
    """Raise UserError if the ranks have different data, settings or checkpoints, or if `auto` gives them
    different devices or dtypes: their weights would diverge."""
    everyone = all_gather(values)
    for rank, other in enumerate(everyone):
        if changed := changes(everyone[0], other):
            raise UserError(
                f"the ranks do not agree (rank 0 -> rank {rank}: {changed}); all machines need the same "
                "files, and the same --device and --dtype if `auto` chooses different ones"
            )


def check_code_agrees(sources: dict[str, str]) -> None:
    """Raise UserError if the ranks run different code. A file that only some ranks have loaded does not
    count, such as one for the figures that rank 0 draws."""
    loaded_by_all = set.intersection(*map(set, all_gather(list(sources))))
    check_ranks_agree({name: sources[name] for name in sorted(loaded_by_all)})


def changes(before: Fingerprint, now: Fingerprint) -> str:
    """The differences, as `name: old -> new`; empty if there are none."""
    differing = [key for key in before | now if before.get(key) != now.get(key)]
    return "; ".join(f"{key}: {before.get(key)} -> {now.get(key)}" for key in differing)


def is_new(saved: dict[str, Any] | None) -> bool:
    """Whether a run begins: without a checkpoint, or as a branch of another run with that run's
    checkpoint."""
    return saved is None or not saved["run_id"]


def has_ended_early(args: StageArgs, updates: int, saved: dict[str, Any]) -> bool:
    """Whether early stopping or a callback has ended the run of a checkpoint, which has this number of
    updates in all. --extend_epochs 1 continues such a run once for each number of updates; the same command
    again does nothing."""
    return saved["finished"] and not (args.extend_epochs and saved.get("extended_to") != updates)


def is_finished(args: StageArgs, fingerprint: Fingerprint, saved: dict[str, Any] | None) -> bool:
    """Whether the run of a checkpoint is finished, so that nothing is left to do. If it is, a line says
    so."""
    if saved is None or is_new(saved):
        return False
    updates = total_updates(fingerprint)
    if saved["update"] < updates and not has_ended_early(args, updates, saved):
        return False
    path = paths.weight_path(args.save_dir, args.save_weight, args)
    has_weights = is_there(path) or is_there(path.with_suffix(""))  # of an adapter, a folder
    if not all_gather(has_weights)[0]:  # they are written once more
        return False
    Logger(f"{path.stem} is finished, after {saved['update']} updates: nothing to do; its weights: {path}")
    return True


# --- what bitwise equal results need besides


def environment(args: StageArgs, device: torch.device, autocast: AbstractContextManager) -> dict[str, Any]:
    """Torch, device, processor, dtype, ranks and threads of this process."""
    return {
        "torch": str(torch.__version__),
        "device": device.type,
        "processor": processor_name(device),
        "dtype": str(autocast_dtype(autocast, device)).removeprefix("torch."),
        "ranks": world_size(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "parallel": args.parallel,
        "use_compile": args.use_compile,
        "deterministic": args.deterministic,
    }


def code_of_run(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The part of a run that the code determines: the hashes of its files, the settings that it gives the
    optimizer, and the git revision."""
    sources = {name: file_hash(file) for name, file in source_files().items()}
    return {"revision": code_version(), "sources": sources, "optimizer": optimizer_settings(optimizer)}


def source_files(modules: Mapping[str, Any] = sys.modules) -> dict[str, Path]:
    """The Python files of the folders that a run executes, of its script, and of all other loaded `modules`
    that are not installed: the user's own, in any folder. Each file has a name that does not change when the
    folders are moved: its path in the repository, or the name of the module."""
    loaded = {}
    for name, module in list(modules.items()):
        path = str(getattr(module, "__file__", None) or "")
        if not path.endswith(".py") or is_installed(path):
            continue
        file = Path(path)
        if name == "__main__":
            name, file = file.stem, file.resolve()
        loaded[module_path(name, file)] = file
    # the other stages' scripts are not executed; the engine's tasks import those of theirs
    stages = {f"trainer/{file.name}" for file in (ROOT / "trainer").glob("train_*.py")}
    files = files_of_rooms()
    return {name: file for name, file in files.items() if name not in stages - loaded.keys()} | loaded


def files_of_rooms() -> dict[str, Path]:
    """The Python files of the folders that a run executes, by their path in the repository."""
    files = (file for room in SOURCE_ROOMS for file in (ROOT / room).rglob("*.py"))
    return {str(file.relative_to(ROOT)): file for file in files}


def module_path(module: str, file: Path) -> str:
    """The path of a module's file, relative to the repository or to the folder that it was imported from."""
    if file.is_relative_to(ROOT):
        return str(file.relative_to(ROOT))
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if file.name == "__init__.py" else f"{path}.py"


def is_installed(path: str) -> bool:
    """Whether a file belongs to Python itself or to an installed package (a run records their versions
    elsewhere), or exists in no file system, such as a module of a notebook. The path is a string because a
    run has thousands of installed modules, and a Path for each of them takes 50 ms."""
    if path.startswith(PYTHON_FOLDERS) or any(f"{os.sep}{folder}{os.sep}" in path for folder in INSTALLED):
        return True
    return not is_file(path)


def code_version() -> str:
    """The git revision of the code, followed by `-dirty` if files have changed since; `unknown` if there is
    none. A repository that only surrounds the code, such as one of the home folder, does not count."""
    own = [f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
    command = ["git", *own, "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def warn_of_changes(saved: dict[str, Any], environment: dict[str, Any], code: dict[str, Any]) -> list[str]:
    """Warn if a run continues under other conditions than those under which the checkpoint `saved` was
    written: on another machine, which changes rounding; with other code, whose effect is unknown; or with
    other settings of the optimizer than in the checkpoint, whose settings are kept. Returns what the results
    equal from here on, for the record of the run; empty if they are bit for bit the same."""
    results = []
    shared = [name for name in environment if name in saved["environment"]]  # older code noted fewer
    was, now = ({name: each[name] for name in shared} for each in (saved["environment"], environment))
    if changed := changes(was, now):
        warn(f"{changed}: from here on, results agree with an uninterrupted run only up to rounding")
        results.append(f"to rounding from update {saved['update']} on ({changed})")
    before = saved.get("code")
    if before is None:  # older code did not say which it was
        warn("the checkpoint was written by other code: from here on the current code is used")
        return [*results, f"by other code from update {saved['update']} on"]
    in_both = before["sources"].keys() & code["sources"].keys()
    edited = sorted(name for name in in_both if before["sources"][name] != code["sources"][name])
    if edited:
        named = ", ".join(edited[:5]) + (" ..." if len(edited) > 5 else "")
        warn(f"the checkpoint was written by other code ({named}): from here on the current code is used")
        results.append(f"by other code from update {saved['update']} on ({named})")
    if changed := changes(before["optimizer"], code["optimizer"]):
        warn(f"the code now gives the optimizer other settings ({changed}); the checkpoint's are kept")
    return results
