"""Files that survive a kill at any moment: weights for use in `out/`, and the state to resume from in `checkpoints/`.

Every file is written beside its place, flushed to the disk and renamed, so a reader sees the old one or the new one,
never a half. The previous resume file is kept and stands in for a damaged newest one.
"""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataset.errors import UserError
from model.model_minimind import MiniMindConfig

CHECKPOINT_DIR = Path(__file__).resolve().parents[1] / "checkpoints"
UNREADABLE = (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile)


def run_name(weight: str, lm_config: MiniMindConfig) -> str:
    """The stem of all files of a run, e.g. `full_sft_512_moe`."""
    return f"{weight}_{lm_config.hidden_size}{'_moe' if lm_config.use_moe else ''}"


def weight_path(save_dir: str | Path, weight: str, lm_config: MiniMindConfig) -> Path:
    """Where the fp16 weights for use lie: `<save_dir>/<weight>_<hidden_size>[_moe].pth`."""
    return Path(save_dir) / f"{run_name(weight, lm_config)}.pth"


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without DistributedDataParallel or torch.compile around it."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return getattr(model, "_orig_mod", model)


def reason(error: BaseException) -> str:
    """The first line of an error, or its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def atomic_write(path: Path, write: Callable[[BinaryIO], Any], keep: Path | None = None) -> None:
    """Replace `path` by what `write(file)` writes; on failure nothing has changed. The old file is kept as `keep`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.tmp")  # one name: what a kill leaves behind is written over
    try:
        with open(temp, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut
    finally:
        os.close(folder)


def half_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights for use, MiniMind's own names in fp16 on the CPU; tied tensors stay one tensor."""
    copies: dict[int, Tensor] = {}
    state = unwrap(model).state_dict()
    return {key: copies.setdefault(value.data_ptr(), value.half().cpu()) for key, value in state.items()}


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the fp16 weights for use."""
    atomic_write(path, lambda file: torch.save(half_state_dict(model), file))


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a weights file strictly, into the model's own dtype.

    Raises:
        UserError: the file is missing, is no weights file, or does not fit the model; the difference is named.
    """
    if not path.is_file():
        there = sorted(p.name for p in path.parent.glob("*.pth")) if path.parent.is_dir() else []
        found = f"found there: {', '.join(there)}" if there else f"{path.parent} holds no weights"
        raise UserError(
            f"weights {path} do not exist ({found}); train that stage first, or name another (--from_weight, --weight)"
        )
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        given = {key: tuple(value.shape) for key, value in weights.items()}
    except (*UNREADABLE, AttributeError) as error:
        raise UserError(f"weights {path}: not a readable weights file ({reason(error)})") from error
    wanted = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if given != wanted:
        keys = sorted(k for k in {**given, **wanted} if given.get(k) != wanted.get(k))
        diff = f"{keys[0]} is {given.get(keys[0], 'missing')}, the model wants {wanted.get(keys[0], 'none')}"
        raise UserError(f"weights {path} do not fit the model: {diff}; {len(keys)} tensors differ in all")
    model.load_state_dict(weights, strict=True)


def lm_checkpoint(
    lm_config: MiniMindConfig,
    weight: str = "full_sft",
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    epoch: int = 0,
    step: int = 0,
    wandb: Any = None,
    save_dir: str | Path = CHECKPOINT_DIR,
    **kwargs: Any,
) -> dict[str, Any] | None:
    """Save the resume state when given a model, else return the saved one (None if there is none).

    Saved: fp32 weights, optimizer, epoch, step (micro-batches of this epoch done), world size, tracker id, and
    whatever `kwargs` holds (objects with a `state_dict` by that). Loading falls back to the previous file, with a
    warning, when the newest is damaged, and never runs code from a file (`weights_only=True`).
    """
    path = Path(save_dir) / f"{run_name(weight, lm_config)}_resume.pth"
    previous = path.with_name(f"{path.stem}_previous.pth")
    if model is None:
        return _load_newest(path, previous)
    state = {
        "model": unwrap(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": epoch,
        "step": step,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "wandb_id": getattr(wandb, "id", None),
    }
    state |= {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in kwargs.items()}
    atomic_write(path, lambda file: torch.save(state, file), keep=previous)
    return None


def _load_newest(*paths: Path) -> dict[str, Any] | None:
    """The first readable file, newest first."""
    damaged = []
    for path in filter(Path.is_file, paths):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            damaged.append(f"{path} ({reason(error)})")
            continue
        if damaged:
            print(f"warning: damaged checkpoint {damaged[0]}; going back to {path}", flush=True)
        return state
    if damaged:
        raise UserError(f"--from_resume 1: no readable checkpoint, {damaged[0]}; delete it to start afresh")
    return None


def check_same_run(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse to continue a run under settings that would make it a different run.

    Raises:
        UserError: with every differing field and both its values.
    """
    differing = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    if differing:
        fields = "; ".join(f"{key}: {saved.get(key)} -> {current.get(key)}" for key in differing)
        raise UserError(
            f"--from_resume 1: the checkpoint belongs to another run ({fields}); "
            "use its settings, or another --save_weight, or --from_resume 0"
        )
