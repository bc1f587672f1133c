"""The state to resume from, in `checkpoints/`.

The previous resume state is kept, as a fallback for a damaged newest one. A run whose model is sharded writes its state
as a folder (sharded.py); either form is read by either kind of run.
"""

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from common.durable_files import atomic_write
from common.errors import UserError, reason, warn
from common.settings import ROOT
from trainer.components.distributed import is_main_process, world_size
from trainer.components.language_model import config_fields
from trainer.components.parallel import is_sharded, unwrap
from trainer.components.run_files import NamedShape, resume_path
from trainer.components.state_files import (
    FORMAT,
    UNREADABLE,
    Writer,
    mark_damaged,
    newest_first,
    read_file,
    rotate,
    snapshot,
    write_file,
)

STATE_KEYS = {"model", "optimizer", "epoch", "step", "world_size"}  # keys that identify a resume checkpoint


def _write_state(path: Path, state: dict[str, Any], writer: Writer | None, **options: Any) -> None:
    def job() -> None:
        atomic_write(path, lambda file: write_file(state, file), **options)

    writer.submit(job) if writer is not None else job()


def lm_checkpoint(
    lm_config: NamedShape,
    weight: str = "full_sft",
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    epoch: int = 0,
    step: int = 0,
    wandb: Any = None,
    save_dir: str | Path = ROOT / "checkpoints",
    writer: Writer | None = None,
    **kwargs: Any,
) -> dict[str, Any] | None:
    """Save the resume state when given a model, else return the saved one (None if there is none).

    Saved: fp32 weights, the config of the model, optimizer, epoch, step (micro-batches of this epoch done), world size,
    tracker id, and whatever `kwargs` holds (of objects with a `state_dict` that). With a `writer` the call only copies
    the state, which is then written in the background. Rank 0 writes; of a sharded model all ranks do, and must all
    call. Loading falls back to the previous state, with a warning, when the newest is damaged, and never runs code from
    a file (`weights_only=True`). A sharded run's state is returned without its tensors; `sharded.with_tensors` reads
    them.
    """
    path = resume_path(save_dir, weight, lm_config)
    if model is None:
        return _load_newest(path)
    if not (is_sharded(model) or is_main_process()):
        return None
    state = {
        FORMAT: 2,
        "model": unwrap(model).state_dict(keep_vars=is_sharded(model)),  # keep_vars: tied weights stay recognisable
        "config": config_fields(cast(Any, lm_config)) if hasattr(lm_config, "to_dict") else None,
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        "epoch": epoch,
        "step": step,
        "world_size": world_size(),
        "wandb_id": getattr(wandb, "id", None),
    }
    state |= {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in kwargs.items()}
    if is_sharded(model):
        from trainer.components import sharded

        sharded.save(path, state, writer)
    else:
        _write_state(path, snapshot(state) if writer is not None else state, writer, rotate=rotate)
    return None


def read_state(path: Path) -> dict[str, Any]:
    """A resume state in either form; that of a folder comes without its tensors.

    Raises:
        one of UNREADABLE: it is missing, damaged or something else.
    """
    if path.is_dir():
        from trainer.components import sharded

        state = sharded.read_rest(path)
    else:
        state = read_file(path)
    if not (isinstance(state, dict) and set(state) >= STATE_KEYS):
        raise ValueError("it is not a state to resume from")
    return state


def _load_newest(newest: Path) -> dict[str, Any] | None:
    """The first readable state, newest first."""
    damaged = []
    for path in filter(Path.exists, newest_first(newest)):
        try:
            state = read_state(path)
        except UNREADABLE as error:
            damaged.append(f"{path} ({reason(error)})")
            mark_damaged(path)
            continue
        if damaged:
            warn(f"damaged checkpoint {damaged[0]}; going back to {path}")
        return state
    if damaged:
        raise UserError(f"--from_resume 1: no readable checkpoint, {damaged[0]}; delete it to start afresh")
    return None
