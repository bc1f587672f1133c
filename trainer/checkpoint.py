"""Files that survive a kill at any moment: weights for use in `out/`, and the state to resume from in `checkpoints/`.

Every file is written beside its place, flushed to the disk and renamed, so a reader sees the old one or the new one,
never a half. The previous resume file is kept and stands in for a damaged newest one.
"""

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataset.errors import UserError, reason, warn
from model.model_minimind import MiniMindConfig

CHECKPOINT_DIR = Path(__file__).resolve().parents[1] / "checkpoints"
# whatever a damaged or foreign file makes zipfile and torch.load raise
UNREADABLE = (OSError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError)
UNREADABLE += (MemoryError, OverflowError, ImportError, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error)


def run_name(weight: str, lm_config: MiniMindConfig) -> str:
    """The stem of all files of a run, e.g. `full_sft_512_moe`."""
    return f"{weight}_{lm_config.hidden_size}{'_moe' if lm_config.use_moe else ''}"


def weight_path(save_dir: str | Path, weight: str, lm_config: MiniMindConfig) -> Path:
    """Where the fp16 weights for use lie: `<save_dir>/<weight>_<hidden_size>[_moe].pth`."""
    return Path(save_dir) / f"{run_name(weight, lm_config)}.pth"


def resume_path(checkpoint_dir: str | Path, weight: str, lm_config: MiniMindConfig) -> Path:
    """Where the state to resume from lies: `<checkpoint_dir>/<weight>_<hidden_size>[_moe]_resume.pth`."""
    return Path(checkpoint_dir) / f"{run_name(weight, lm_config)}_resume.pth"


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without DistributedDataParallel or torch.compile around it."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return getattr(model, "_orig_mod", model)


# --- writing -------------------------------------------------------------------------------------------------------


def atomic_write(path: Path, write: Callable[[BinaryIO], Any], keep: Path | None = None) -> None:
    """Replace `path` by what `write(file)` writes; on failure nothing has changed. The old file is kept as `keep`.

    Raises:
        UserError: the disk is full, the folder cannot be written ...
    """
    temp = path.with_name(f".{path.name}.tmp")  # one name: what a kill leaves behind is written over
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temp, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if keep is not None and path.exists():
                os.replace(path, keep)
            os.replace(temp, path)
            _sync_folder(path.parent)  # the rename itself must survive a power cut
        except (OSError, RuntimeError) as error:  # torch.save wraps the OSError that stopped it
            raise _cannot_write(path, error) from error
    except BaseException:
        _remove(temp)
        raise


def _cannot_write(path: Path, error: BaseException) -> BaseException:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return error
    return UserError(
        f"{path} cannot be written ({cause.strerror or cause}); the file that was there is untouched. Make room or "
        "give another folder, then go on with --from_resume 1"
    )


def _remove(path: Path) -> None:
    with suppress(OSError):  # a read-only folder: nothing was written
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Writer:
    """Writes files in the background, one after another in the order given, so that training need not wait for a disk.

    What is handed over must not change any more. After a failure nothing further is written, and the next call of any
    method raises it: the files on the disk stay those of the last save that was complete.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._jobs: list[Future] = []
        self._failed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Write soon. Raises what an earlier job failed with."""
        self.check()
        self._jobs.append(self._thread.submit(self._run, job))

    def check(self) -> None:
        """Raise what a job failed with; does not wait."""
        done = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if job not in done]
        for job in done:
            job.result()

    def wait(self) -> None:
        """Return when everything is on the disk, or raise what went wrong."""
        while self._jobs:
            self._jobs.pop(0).result()

    def _run(self, job: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            job()
        except BaseException:
            self._failed = True
            raise


def snapshot(value: Any, copies: dict | None = None) -> Any:
    """A copy on the host of nested dicts, lists and tensors; tensors that share memory (tied weights) still do."""
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        key = (value.data_ptr(), value.dtype, value.shape)
        if value.numel() == 0 or key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, dict):
        return {key: snapshot(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(item, copies) for item in value)
    return value


def half_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights for use, MiniMind's own names in fp16 on the CPU; tied tensors stay one tensor."""
    copies: dict[int, Tensor] = {}
    state = unwrap(model).state_dict()
    return {key: copies.setdefault(value.data_ptr(), value.half().cpu()) for key, value in state.items()}


def save_weights(model: nn.Module, path: Path, writer: Writer | None = None) -> None:
    """Write the fp16 weights for use. With a writer this only takes the copy."""
    _write(path, half_state_dict(model), writer)


def _write(path: Path, state: dict[str, Any], writer: Writer | None, keep: Path | None = None) -> None:
    def job() -> None:
        atomic_write(path, lambda file: torch.save(state, file), keep)

    writer.submit(job) if writer is not None else job()


# --- reading -------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> Any:
    """What `torch.save` wrote: every byte is checked, and nothing in the file is executed.

    Raises:
        one of UNREADABLE: the file is damaged, of another kind, or holds code.
    """
    with zipfile.ZipFile(path) as archive:  # torch.load itself leaves the checksums out
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    return torch.load(path, map_location="cpu", weights_only=True)


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
        weights = read_file(path)
        given = {key: tuple(value.shape) for key, value in weights.items()}
    except UNREADABLE as error:
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
    writer: Writer | None = None,
    **kwargs: Any,
) -> dict[str, Any] | None:
    """Save the resume state when given a model, else return the saved one (None if there is none).

    Saved: fp32 weights, optimizer, epoch, step (micro-batches of this epoch done), world size, tracker id, and
    whatever `kwargs` holds (objects with a `state_dict` by that). With a `writer` the call only takes a copy in memory,
    and the file is written in the background. Loading falls back to the previous file, with a warning, when the newest
    is damaged, and never runs code from a file (`weights_only=True`).
    """
    path = resume_path(save_dir, weight, lm_config)
    previous = path.with_name(f"{path.stem}_previous.pth")
    if model is None:
        return _load_newest(path, previous)
    state = {
        "model": unwrap(model).state_dict(),
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        "epoch": epoch,
        "step": step,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "wandb_id": getattr(wandb, "id", None),
    }
    state |= {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in kwargs.items()}
    _write(path, snapshot(state) if writer is not None else state, writer, keep=previous)
    return None


def _load_newest(*paths: Path) -> dict[str, Any] | None:
    """The first readable file, newest first."""
    damaged = []
    for path in filter(Path.is_file, paths):
        try:
            state = read_file(path)
            if not (isinstance(state, dict) and {"model", "optimizer", "epoch", "step", "world_size"} <= set(state)):
                raise ValueError("it is not a state to resume from")
        except UNREADABLE as error:
            damaged.append(f"{path} ({reason(error)})")
            continue
        if damaged:
            warn(f"damaged checkpoint {damaged[0]}; going back to {path}")
        return state
    if damaged:
        raise UserError(f"--from_resume 1: no readable checkpoint, {damaged[0]}; delete it to start afresh")
    return None
