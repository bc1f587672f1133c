"""The file to resume from, in `checkpoints/`: how it is written and read, and what happens if it is damaged.
The previous state is kept in case the newest one is damaged. Rank 0 writes the whole state of a sharded
model, so it fits any number of ranks."""

import os
import re
from pathlib import Path
from typing import Any

from common.errors import ReadError, UserError, reason, warn
from common.files import atomic_write, files_in, is_there
from trainer.devices.process_group import is_main_process
from trainer.weights.files import is_checkpoint
from trainer.weights.tensor_file import DAMAGED, read_file, write_file

Checkpoint = dict[str, Any]  # the content of a file to resume from


def previous_path(path: Path) -> Path:
    """The file of the previous checkpoint of the run whose newest one is at `path`."""
    return path.with_name(f"{path.stem}_previous.pth")


def write_checkpoint(path: Path, checkpoint: Checkpoint, description: dict[str, Any] | None = None) -> None:
    """Write a checkpoint as the newest one, and keep the previous one."""

    def keep_previous(path: Path) -> None:
        if is_there(path):
            os.replace(path, previous_path(path))

    atomic_write(path, lambda file: write_file(checkpoint, file, description), rotate=keep_previous)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a file. Raises one of DAMAGED if it is damaged or not a checkpoint, and ReadError if
    it cannot be read at the moment."""
    content = read_file(path)
    if not is_checkpoint(content):
        raise ValueError("it is not a state to resume from")
    return content | {"loaded_from": str(path)}


def newest_checkpoint(path: Path, resume_from: str | None = None) -> Checkpoint | None:
    """The newest intact checkpoint of a run: the one at `path` or, if it is damaged, the previous one. None
    if the run has none. resume_from: the checkpoint with which a branch begins, as long as there is none at
    `path`.

    If the newest checkpoint is damaged, it is renamed, so that the next save does not overwrite the previous
    one with it. Raises ReadError, before anything is renamed, if a checkpoint cannot be read at the moment,
    and UserError if there are checkpoints, but none can be resumed.
    """
    places = [place for place in (path, previous_path(path)) if is_there(place)]
    if not places and resume_from is not None:
        return begin_branch(Path(resume_from))
    damaged: dict[Path, str] = {}
    for place in places:
        try:
            checkpoint = read_checkpoint(place)
        except DAMAGED as error:
            damaged[place] = reason(error)
            continue
        except ReadError as error:
            if is_main_process() or not isinstance(error.__cause__, FileNotFoundError):
                raise
            continue  # rank 0 found it damaged, and has renamed it
        for other, why in damaged.items():
            warn(f"damaged checkpoint {other} ({why}); it is now {other.name}.damaged")
            if is_main_process():
                other.rename(f"{other}.damaged")
        if resume_from is not None:
            start = Path(resume_from).resolve()
            if str(start) != checkpoint.get("branch_of") and start != place.resolve():
                raise UserError(
                    f"--resume_from {resume_from}: {place} is a state of another run; give the branch "
                    "another --save_weight, or continue that run (--from_resume 1)"
                )
        return checkpoint
    others = other_checkpoints(path)
    if not damaged and not others:
        return None
    what = " and ".join(f"{place} is damaged ({why})" for place, why in damaged.items())
    what = what or f"{path} is missing"
    if others:
        what += f", but there are {', '.join(other.name for other in others)}"
    way = ""
    if others and others[0].suffix == ".pth":
        way = f"--resume_from {others[0]} --save_weight NAME continues from that state under another name; "
    raise UserError(f"--from_resume 1: {what}; {way}--from_resume 0 sets them aside and starts over")


def other_checkpoints(path: Path) -> list[Path]:
    """All other checkpoints of a run, without the newest at `path` and the previous one: the best and the
    numbered ones, then damaged ones that were renamed."""
    name = re.escape(path.stem.removesuffix("_resume"))
    kinds = (
        rf"{name}(_best_resume\.pth|_update_\d+\.pth|_resume\.pth\.damaged|_resume_previous\.pth\.damaged)"
    )
    found = [file for file in files_in(path.parent) if re.fullmatch(kinds, file.name)]
    return sorted(found, key=lambda file: file.suffix != ".pth")


def begin_branch(path: Path) -> Checkpoint:
    """The checkpoint in a file, as the beginning of another run. Raises UserError if it is not a
    checkpoint."""
    try:
        checkpoint = read_checkpoint(path)
    except DAMAGED as error:
        raise UserError(f"--resume_from {path} is not an intact checkpoint ({reason(error)})") from error
    new = {"run_id": "", "branch_of": str(path.resolve()), "wandb_id": None, "finished": False}
    new |= {"extended_to": None}
    return checkpoint | new | {"best_eval": None, "best_update": None}
