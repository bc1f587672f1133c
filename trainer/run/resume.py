"""Whether a checkpoint belongs to this run: the run fingerprint, and what changes with another number of
ranks."""

import hashlib
import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from common.errors import UserError, warn
from common.settings import ROOT, StageArgs, mark
from dataset.token_cache import file_hash
from trainer.devices.device import autocast_dtype, native_bfloat16
from trainer.devices.process_group import Logger, gather, world_size
from trainer.run import paths
from trainer.run.checkpoint import stored_digest

Fingerprint = dict[str, Any]
A = TypeVar("A", bound=StageArgs)


class FrozenModelArgs(StageArgs):
    """Settings of a stage with frozen weights beside the trained ones, which a resumed run reads again."""

    @property
    def reference_is_start_weights(self) -> bool:
        """Whether the weights of --from_weight are the reference, which the run must not write over."""
        return False

    @property
    def resume_needs_start_weights(self) -> bool:
        """Whether a checkpoint does not replace the weights of --from_weight."""
        return False

    def frozen_weights(self) -> dict[str, Path]:
        """Flag -> path of the weights of another frozen model, such as a teacher."""
        return {}

    def frozen_hashes(self) -> dict[str, str]:
        """The part of the run fingerprint that identifies other frozen models."""
        return {}


def held_out_fingerprint(loader: Any) -> str | None:
    """Identifies the held-out data of a loader; None where there are none, or nothing is known of them."""
    described = getattr(getattr(loader, "dataset", None), "fingerprint", None)
    return described.get("data") if isinstance(described, dict) else None


def weights_fingerprint(name: str, path: Path) -> Fingerprint:
    """The part of the run fingerprint that describes the weights of a frozen model, such as a teacher: a
    file, or config and tensors of a Hugging Face folder."""
    files = paths.model_files(path) if path.is_dir() else [path]
    return files_fingerprint(name, files)


def files_fingerprint(name: str, files: Sequence[Path]) -> Fingerprint:
    """The part of the run fingerprint that describes the contents of files."""
    hashes = [file_hash(each) for each in files]
    whole = hashes[0] if len(hashes) == 1 else hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
    return {f"{name}_sha256": whole}


def run_fingerprint(args: StageArgs, model: Fingerprint, data: Fingerprint, samples: int) -> Fingerprint:
    """Everything that must stay the same for a resumed run to be the same run.

    model: the fields of its config. data: the fingerprint of its dataset. samples: items of an epoch.
    """
    run = args.compared() | model
    run["global_batch"] = args.batch_size * args.accumulation_steps * world_size()
    run |= {"samples": samples} | data
    if isinstance(args, FrozenModelArgs):
        run |= args.frozen_hashes()
    run |= {"from_weight": args.from_weight, "from_weight_sha256": None}
    if args.from_weight != "none":
        run |= start_fingerprint(args)
    return run


def start_fingerprint(args: StageArgs) -> Fingerprint:
    """The part of the run fingerprint that describes the weights in --from_weight, where there are any."""
    start = paths.start_path(args.save_dir, args.from_weight, args)
    if not start.exists():
        return {"from_weight_sha256": None}
    return weights_fingerprint("from_weight", start)


def check_start_weights(args: StageArgs, run: Fingerprint) -> None:
    """Refuse weights under the name of --from_weight that are not those which the run began with: for a model
    that is read again when the run is resumed.

    run: the fingerprint that `check_resume` returned.
    """
    now = start_fingerprint(args)["from_weight_sha256"]
    if now not in (None, run["from_weight_sha256"]):
        path = paths.start_path(args.save_dir, args.from_weight, args)
        raise UserError(
            f"weights {path} are no longer those that the run began with, and it needs them again; "
            "put them back, or start anew from other weights with another --save_weight"
        )


def check_not_overwritten(args: StageArgs) -> None:
    """Refuse a new run that would write over weights which it reads again when it is resumed, or that starts
    from a checkpoint of its own name, which it sets aside. Raises UserError with the flag and the path."""
    start: dict[str, Path] = {}
    if args.from_weight != "none":
        start["from_weight"] = paths.start_path(args.save_dir, args.from_weight, args)
    read_again: dict[str, Path] = {}
    if isinstance(args, FrozenModelArgs):
        read_again |= args.frozen_weights()
        if args.reference_is_start_weights:
            read_again |= start
    for flag, path in (start | read_again).items():
        if _is_own_state(args, path):
            raise UserError(
                f"--{flag} {path} is a checkpoint of a run named --save_weight {args.save_weight}, which a "
                "new run of this name sets aside; give another --save_weight, or go on with that run "
                "(--from_resume 1)"
            )
        if flag in read_again and _is_own_weights(args, path):
            raise UserError(
                f"--{flag} {path}: the run writes over these weights, and needs them again when it is "
                "resumed; give another --save_weight"
            )


def _is_own_weights(args: StageArgs, path: Path) -> bool:
    """Whether a run with these settings writes over this file."""
    names = (args.save_weight, f"{args.save_weight}_best")
    return any(paths.same_file(path, paths.weight_path(args.save_dir, name, args)) for name in names)


def _is_own_state(args: StageArgs, path: Path) -> bool:
    """Whether this is the place of a checkpoint that a run with these settings writes or sets aside."""
    path, folder = path.resolve(), Path(args.checkpoint_dir).resolve()
    return path.parent == folder and paths.is_state(paths.run_name(args.save_weight, args), path.name)


def total_updates(run: Fingerprint) -> int:
    """Optimizer updates of the whole run; each epoch ends with an update of its own, however small."""
    return math.ceil(run["samples"] / run["global_batch"]) * run["epochs"]


def keep_global_batch(args: A, checkpoint: dict[str, Any]) -> A:
    """The settings of a run resumed with another number of ranks: `accumulation_steps` such that an update
    has as many samples as before, where that is possible."""
    wanted = (checkpoint.get("run") or {}).get("global_batch")
    ranks, micro_batch = world_size(), args.batch_size * world_size()
    if not isinstance(wanted, int) or wanted == micro_batch * args.accumulation_steps:
        return args
    if ranks == checkpoint["world_size"] or wanted % micro_batch:
        return args  # check_resume refuses it
    steps = wanted // micro_batch
    Logger(
        f"{ranks} ranks instead of {checkpoint['world_size']}: --accumulation_steps is now {steps}, "
        f"so that an update stays {wanted} samples"
    )
    return args.model_copy(update={"accumulation_steps": steps})


def batch_flags(batch_size: int, wanted: int) -> str:
    """What to give so that an update has `wanted` samples: micro-batches of `batch_size` at most, on the
    present ranks; where that cannot be, another number of ranks."""
    of_rank, rest = divmod(wanted, world_size())
    if rest:
        return f"{world_size()} processes do not divide it, start as many as do"
    size = largest_divisor(of_rank, batch_size)
    return f"--batch_size {size} --accumulation_steps {of_rank // size}"


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number that is at most `limit`, which is at least 1."""
    return next(size for size in range(min(limit, number), 0, -1) if number % size == 0)


def check_resume(args: StageArgs, run: Fingerprint, checkpoint: dict[str, Any] | None) -> Fingerprint:
    """The fingerprint of the run, once it is clear that the checkpoint (None: a new run) belongs to it.

    run: of the present settings. Raises UserError if the checkpoint belongs to another run, or the ranks do
    not all see the same."""
    if world_size() > 1:
        _check_ranks_agree(run, checkpoint)
    is_new = checkpoint is None or checkpoint.get("is_new_branch")
    if is_new and (args.from_weight != "none" or isinstance(args, FrozenModelArgs)):
        check_not_overwritten(args)
    if checkpoint is None:
        if args.from_resume:
            name = paths.run_name(args.save_weight, args)
            Logger(f"new run: {args.checkpoint_dir} holds no checkpoint of {name}")
        return run
    saved = checkpoint.get("run")
    if not isinstance(saved, dict):
        raise UserError(
            f"--from_resume 1: the checkpoint in {args.checkpoint_dir} is not one of a stage script"
        )
    run, saved = normalised(args, run, saved)
    hint = ""
    if run["global_batch"] != saved["global_batch"]:
        hint = f". batch_size x accumulation_steps x processes must be {saved['global_batch']}: "
        hint += batch_flags(args.batch_size, saved["global_batch"])
    has_other_weights = run["from_weight_sha256"] != saved["from_weight_sha256"]
    if has_other_weights and run["from_weight"] == saved["from_weight"]:
        start = paths.start_path(args.save_dir, args.from_weight, args)
        hint += f". {start} is not the file that the run started from: put that one back"
        if not paths.is_path(args.from_weight):
            hint += ", or move this away"
    check_same_run(saved, run, args.extend_epochs, hint)
    return run


def normalised(args: StageArgs, run: Fingerprint, saved: Fingerprint) -> tuple[Fingerprint, Fingerprint]:
    """The fingerprints of the present settings and of a checkpoint, made comparable: fields that differ
    although they mean the same are set equal, so that what still differs makes it another run."""
    from model.model_minimind import MiniMindConfig

    # flags and fields of the model that were added since: the run did what their defaults do
    defaults = type(args)().compared()
    defaults |= {
        name: getattr(MiniMindConfig, name) for name in MiniMindConfig.__annotations__ if name in run
    }
    saved = defaults | saved
    run = dict(run)

    # start weights that are gone, or that the run has written over (a second round of SFT from `full_sft`):
    # what they were when it began is what counts
    if run["from_weight"] != "none":
        start = paths.start_path(args.save_dir, str(run["from_weight"]), args)
        before = paths.start_path(args.save_dir, str(saved["from_weight"]), args)
        is_gone = run["from_weight_sha256"] is None
        is_own = _is_own_weights(args, start) or _is_own_state(args, start)
        if paths.same_file(start, before) and (is_gone or is_own):
            run["from_weight_sha256"] = saved["from_weight_sha256"]

    # the same weights in another place: their hash, whose field `hashed_as` names, is equal
    for name, field in type(args).model_fields.items():
        hashed_as = mark(field, "hashed_as")
        digest = run.get(hashed_as)
        if digest is not None and digest == saved.get(hashed_as) and name in saved:
            run[name] = saved[name]
    return run, saved


def _check_ranks_agree(run: Fingerprint, checkpoint: dict[str, Any] | None) -> None:
    """Raise UserError if ranks (on several machines) see other files: then none of them starts."""
    seen = dict(run)
    if checkpoint is not None:
        for key in ("epoch", "step", "update", "run_id", "is_new_branch"):
            seen[f"checkpoint's {key}"] = checkpoint.get(key)
        seen["checkpoint's sha256"] = stored_digest(Path(checkpoint["loaded_from"]))
    everyone = gather(seen)
    for rank, other in enumerate(everyone):
        if differing := _differing(everyone[0], other):
            fields = (
                f"{key}: {everyone[0].get(key)} on rank 0, {other.get(key)} on rank {rank}"
                for key in differing
            )
            raise UserError(
                f"the ranks do not see the same data, settings or checkpoint ({'; '.join(fields)}); all "
                "machines need the same files: a file system that they share, or copies"
            )


def _differing(one: Fingerprint, other: Fingerprint) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def check_same_run(
    saved: Fingerprint, current: Fingerprint, extend_epochs: bool = False, hint: str = ""
) -> None:
    """Refuse to continue a run under settings that would make it a different run. Raises UserError with every
    differing field and both its values, and `hint`."""
    differing = _differing(saved, current)
    if "epochs" in differing:
        if extend_epochs and current["epochs"] > saved["epochs"]:
            differing.remove("epochs")
        elif current["epochs"] > saved["epochs"] and differing == ["epochs"]:
            hint += ". --extend_epochs 1 would go on for more epochs"
    if differing:
        fields = "; ".join(f"{key}: {saved.get(key)} -> {current.get(key)}" for key in differing)
        raise UserError(
            f"--from_resume 1: the checkpoint belongs to another run ({fields}); "
            f"use its settings, or another --save_weight, or --from_resume 0{hint}"
        )


# --- the code of a run


def code_hashes(stage_files: Sequence[str | Path]) -> dict[str, str]:
    """SHA-256 of the stage's own files and of all files of the repository that this process has imported, by
    file name, relative to the repository if in it. Installed packages, which may lie in a virtual environment
    below it, are left out."""
    imported: set[Path] = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        # torch has modules without files; to resolve the paths of all installed packages takes long
        if not file or not os.path.isabs(file) or "site-packages" in file:
            continue
        path = Path(file).resolve()
        is_own = path.is_relative_to(ROOT) and "site-packages" not in path.parts
        if is_own and path.suffix == ".py" and path.is_file():
            imported.add(path)

    contents: dict[str, bytes] = {}
    for path in dict.fromkeys([*(Path(path).resolve() for path in stage_files), *sorted(imported)]):
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        contents[name] = contents.get(name, b"") + path.read_bytes()  # files of one name in several folders
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def computing(
    args: StageArgs, model: nn.Module, device: torch.device, autocast: AbstractContextManager
) -> dict[str, Any]:
    """Device, dtype, kernels, torch version, threads and instruction set: what bitwise identical results need
    besides code and the other settings. On a CPU the number of threads decides how sums are cut, and the
    instruction set which kernels run."""
    environment: dict[str, Any] = {
        "device": device.type,
        "dtype": str(autocast_dtype(autocast, device)),
        "torch": str(torch.__version__),
        "--deterministic": int(args.deterministic),
        "--use_compile": int(any(module._compiled_call_impl is not None for module in model.modules())),
    }
    if world_size() > 1:
        environment["--parallel"] = args.parallel
    if device.type == "cpu":
        instructions = torch.backends.cpu.get_cpu_capability()
        if native_bfloat16(device):
            instructions += " bfloat16"
            if torch.cpu._is_amx_tile_supported():  # a unit for matrix products
                instructions += " AMX"
        environment |= {"threads": torch.get_num_threads(), "instructions": instructions}
    return environment


def check_ranks_compute_alike(environment: dict[str, Any]) -> None:
    """Refuse ranks of different devices or dtypes, such as `auto` gives on different machines: one with loss
    scaling and one without would skip different updates, and their weights would part. A collective.

    environment: what `computing` returns on this rank.
    """
    kinds = gather(f"{environment['dtype'].removeprefix('torch.')} on {environment['device']}")
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise UserError(
                f"the ranks compute differently: rank 0 in {kinds[0]}, rank {rank} in {kind}; give a --dtype "
                "(and --device) that all machines have, such as float32"
            )


def warn_of_changes(checkpoint: dict[str, Any], code: dict[str, str], now: dict[str, Any]) -> None:
    """Warn if the run goes on with other code, or with other kernels: then it is the same run, but no longer
    bit for bit that of one that was not stopped. With another number of ranks it is not, whatever else
    changed.

    code: what `code_hashes` returns. now: what `computing` returns.
    """
    saved = checkpoint["code"]
    if changed := [name for name in sorted(saved) if name in code and saved[name] != code[name]]:
        warn(
            f"{', '.join(changed)} changed since the checkpoint was written; the resumed run uses the "
            "present code"
        )
    before = checkpoint["computing"] if checkpoint["world_size"] == world_size() else {}
    changed = [
        f"{key} was {before[key]} and is {now[key]}"
        for key in before
        if before[key] != now.get(key, before[key])
    ]
    if changed:
        text = "from here on the results equal those of an uninterrupted run up to rounding, not bit for bit"
        warn(f"{', '.join(changed)}: {text}")
