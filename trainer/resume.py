"""Which run this is, and whether a checkpoint belongs to it: the contract, the lock, and another number of ranks."""

import hashlib
import json
import math
import os
import socket
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dataset.durable import fcntl
from dataset.errors import UserError
from dataset.token_cache import TokenCache, file_hash
from model.model_minimind import MiniMindConfig
from trainer.checkpoint import lm_checkpoint, run_name, weight_path
from trainer.trainer_utils import Logger, gather, get_lr, world_size

Contract = dict[str, Any]


@contextmanager
def sole_writer(args: Namespace) -> Iterator[None]:
    """Keep a second run from writing the same files; also finds folders that cannot be written, before any work.

    A record lock of the operating system, held by rank 0 as long as it lives; it ends with the process however that
    ends, and no child process inherits it.

    Raises:
        UserError: another run holds the name, or a folder cannot be written.
    """
    with ExitStack() as stack:
        folders = {"save_dir": args.save_dir, "checkpoint_dir": args.checkpoint_dir}
        for flag, folder in folders.items() if os.environ.get("RANK", "0") == "0" else ():
            path = Path(folder) / f".{run_name(args.save_weight, args)}_{flag}.lock"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(path, "a+", encoding="utf-8"))
                _claim(file, path)
            except OSError as error:
                why = error.strerror or error
                raise UserError(f"--{flag} {folder} cannot be written ({why}); give another folder") from error
        yield


def _claim(file, path: Path) -> None:
    if fcntl is None:  # Windows: two runs of one name are not kept apart
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        raise UserError(
            f"{file.read().strip() or 'another process'} is training a run of this name and writes to {path.parent}; "
            "wait for it, end it, or choose another --save_weight"
        ) from error
    except OSError:
        return  # a file system without locks
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def lm_shape(lm_config: MiniMindConfig) -> Contract:
    """What the contract tells of a language model."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "use_moe",
        "num_experts",
        "num_experts_per_tok",
        "vocab_size",
        "dropout",
    )
    return {key: getattr(lm_config, key) for key in names}


def data_of(cache: TokenCache) -> Contract:
    """What the contract tells of tokenised data."""
    content = json.dumps([cache.meta[key] for key in ("format", "kind", "data")])
    return {"data": hashlib.sha256(content.encode()).hexdigest()[:16], "tokenizer": cache.meta["tokenizer"][:16]}


def describe_run(args: Namespace, shape: Contract, data: Contract, samples: int) -> Contract:
    """The run's contract: what must stay the same for a resume to be the same run.

    shape: of the model. data: what identifies the data. samples: items of an epoch.
    """
    same = ("epochs", "learning_rate", "warmup_updates", "optimizer", "weight_decay", "grad_clip", "max_seq_len")
    same += ("packing", "seed")
    run = {key: getattr(args, key) for key in same} | shape
    run["global_batch"] = args.batch_size * args.accumulation_steps * world_size()
    run |= {"samples": samples} | data
    start = weight_path(args.save_dir, args.from_weight, args)
    run["from_weight"] = args.from_weight
    run["from_weight_sha256"] = file_hash(str(start), Path(args.cache_dir)) if start.is_file() else None
    return run


def total_updates(run: Contract) -> int:
    """Optimizer updates of the whole run; each epoch ends with an update of its own, however small."""
    return math.ceil(run["samples"] / run["global_batch"]) * run["epochs"]


def find_checkpoint(args: Namespace, lm_config: MiniMindConfig, run: Contract) -> dict[str, Any] | None:
    """The checkpoint that `--from_resume 1` goes on from; says so loudly where there is none.

    With another number of ranks than before, `args.accumulation_steps` is set so that an update stays as large as it
    was (and `run` with it).

    Raises:
        UserError: it belongs to another run, or the ranks do not all see the same.
    """
    saved = lm_checkpoint(lm_config, args.save_weight, save_dir=args.checkpoint_dir) if args.from_resume else None
    _all_ranks_agree(run, saved)
    if not args.from_resume:
        return None
    if saved is None:
        Logger(f"WARNING: --from_resume 1, but {args.checkpoint_dir} holds no checkpoint of this run: starting afresh")
        return None
    before = saved.get("run")
    if not isinstance(before, dict):
        raise UserError(f"--from_resume 1: the checkpoint in {args.checkpoint_dir} is not one of a stage script")
    if run["from_weight_sha256"] is None:  # the weights may be gone: the checkpoint holds what became of them
        run["from_weight_sha256"] = before.get("from_weight_sha256")
    hint = keep_global_batch(args, run, saved)
    check_same_run(before, run, bool(args.extend_epochs), hint)
    if run["epochs"] != before["epochs"]:
        _announce_extension(args, run, saved)
    return saved


def _all_ranks_agree(run: Contract, saved: dict[str, Any] | None) -> None:
    """Ranks on several machines may see other files: then none of them starts."""
    position = {key: saved.get(key) for key in ("epoch", "step", "update")} if saved else {}
    everyone = gather((run, position))
    for rank, views in enumerate(everyone):
        for what, first, other in zip(("data and settings", "checkpoint"), everyone[0], views, strict=True):
            differing = _differing(first, other)
            fields = "; ".join(
                f"{key}: {first.get(key)} on rank 0, {other.get(key)} on rank {rank}" for key in differing
            )
            if differing:
                raise UserError(
                    f"the ranks do not see the same {what} ({fields}); all machines need the same files: a file system "
                    "that they share, or copies"
                )


def _differing(one: Contract, other: Contract) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def keep_global_batch(args: Namespace, run: Contract, saved: dict[str, Any]) -> str:
    """With another number of ranks, adapt the accumulation so that an update is made of as many samples as before.

    Returns what would work where that is impossible, else nothing.
    """
    wanted, ranks, each = saved["run"].get("global_batch"), world_size(), args.batch_size
    if run["global_batch"] == wanted or not isinstance(wanted, int):
        return ""
    if ranks != saved["world_size"] and wanted % (each * ranks) == 0:
        run["global_batch"], args.accumulation_steps = wanted, wanted // (each * ranks)
        Logger(
            f"{ranks} ranks instead of {saved['world_size']}: --accumulation_steps is now {args.accumulation_steps}, "
            f"so that an update stays {wanted} samples"
        )
        return ""
    sizes = [size for size in range(1, wanted // ranks + 1) if wanted % (size * ranks) == 0]
    counts = [count for count in range(1, wanted // each + 1) if wanted % (each * count) == 0]
    with_ranks = f"--batch_size {_listed(sizes)}" if sizes else "no --batch_size"
    with_size = f"{_listed(counts)} processes" if counts else "no number of processes"
    return (
        f". batch_size x accumulation_steps x processes must be {wanted}: with {ranks} processes {with_ranks} would "
        f"work, with --batch_size {each} {with_size}"
    )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + " or " * (len(numbers) > 1) + str(numbers[-1])


def check_same_run(saved: Contract, current: Contract, extend_epochs: bool = False, hint: str = "") -> None:
    """Refuse to continue a run under settings that would make it a different run.

    Raises:
        UserError: with every differing field and both its values, and `hint`.
    """
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


def _announce_extension(args: Namespace, run: Contract, saved: dict[str, Any]) -> None:
    before, after, update = total_updates(saved["run"]), total_updates(run), saved["update"]
    old, new = (get_lr(min(update, total), total, args.learning_rate) for total in (before, after))
    Logger(
        f"--extend_epochs 1: {run['epochs']} epochs instead of {saved['run']['epochs']}, {after} updates instead of "
        f"{before}. The learning rate's cosine now spans all of them: at update {update} it goes from {old:.3e} to "
        f"{new:.3e}, so the result is not that of a run of {run['epochs']} epochs from the start"
    )
