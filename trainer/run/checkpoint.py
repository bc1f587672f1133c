"""The state to resume from, in `checkpoints/`: what it holds, how it is written, and how it is read back.

The previous state is kept, as a fallback for a damaged newest one. The state of a sharded model is written
whole, by rank 0, and fits any number of ranks.

Every byte that is read is checked, and nothing in a file is executed. The SHA-256 of a file is its zip
comment, which torch.load and zipfile pass over: the checksums inside a zip file cover its records, but not
its directory.
"""

import hashlib
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn

from common.errors import UserError, reason, warn
from common.files import atomic_write
from trainer.devices.process_group import Logger, is_main_process, world_size
from trainer.devices.wrapping import full_tensor, is_sharded, unwrap
from trainer.run.paths import is_state

STATE_KEYS = {"model", "optimizer", "epoch", "step", "world_size"}  # keys that identify a resume checkpoint

# what zipfile and torch.load raise on a damaged or foreign file
UNREADABLE: tuple[type[Exception], ...] = (
    *(OSError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError),
    *(MemoryError, OverflowError, ImportError, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
)

DIGEST_MARK, DIGEST_SIZE = b"sha256:", 64  # the comment of a zip file: the mark and 64 hexadecimal digits
COMMENT_LENGTH = struct.Struct("<H")  # the last field of a zip file before its comment
FORMAT = "state_format"  # key of the states that are written here: their files have a digest


# --- files that are checked


def write_file(value: Any, file: BinaryIO, described: dict[str, Any] | None = None) -> str:
    """`torch.save` into a file open for reading and writing; returns the SHA-256 of the whole file. Its zip
    comment is `described` as JSON, followed by the digest of all before it.

    described: of a model {"model": fields of its config, "tokenizer": hash}; at most 65,000 bytes.
    """
    comment = json.dumps(described).encode() if described else b""
    torch.save(value, file)
    file.seek(-COMMENT_LENGTH.size, os.SEEK_END)
    length = len(comment) + len(DIGEST_MARK) + DIGEST_SIZE
    file.write(COMMENT_LENGTH.pack(length) + comment)  # part of what is digested
    file.seek(0)
    digest = hashlib.file_digest(cast(Any, file), "sha256")
    last = DIGEST_MARK + digest.hexdigest().encode()
    file.write(last)  # appended: the digest has read the file to its end
    digest.update(last)
    return digest.hexdigest()


def comment_of(path: Path) -> bytes:
    """The comment that `write_file` was given; empty for files of other programs.

    Raises:
        one of UNREADABLE: it is no zip file, or damaged.
    """
    with zipfile.ZipFile(path) as archive:
        comment, _, digest = archive.comment.rpartition(DIGEST_MARK)
    return comment if len(digest) == DIGEST_SIZE else b""


def read_file(path: Path) -> Any:
    """The content of a file of `torch.save`, checked against its digest; no code in it is executed. Its
    tensors are mapped: the ranks of a machine share the pages, and a tensor that is changed gets pages of its
    own.

    A file of another program has no digest: each of its records is checked against its checksum. Raises one
    of UNREADABLE if the file is damaged, of another kind, or holds code, UserError if it is whole, but there
    is not enough memory for it."""
    with open(path, "rb") as file:
        length = max(0, file.seek(0, os.SEEK_END) - len(DIGEST_MARK) - DIGEST_SIZE)
        file.seek(length)
        comment = file.read()
    has_digest = comment.startswith(DIGEST_MARK)
    if has_digest:
        if file_digest(path, length).encode() != comment.removeprefix(DIGEST_MARK):
            raise zipfile.BadZipFile("its digest is wrong")
    else:
        with zipfile.ZipFile(path) as archive:  # torch.load itself leaves the checksums out
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (MemoryError, RuntimeError) as error:
        lacks_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        if has_digest and lacks_memory:
            raise UserError(
                f"out of memory while {path} is read ({reason(error)}); the file is whole"
            ) from error
        raise
    if isinstance(content, dict) and FORMAT in content and not has_digest:
        raise zipfile.BadZipFile("its digest is missing")
    return content


def stored_digest(path: Path) -> str | None:
    """The SHA-256 that a file of `write_file` says it has; None for others, and where there is no file."""
    try:
        with open(path, "rb") as file:
            file.seek(-len(DIGEST_MARK) - DIGEST_SIZE, os.SEEK_END)
            mark, digest = file.read(len(DIGEST_MARK)), file.read()
    except OSError:  # also of a file that is shorter
        return None
    return digest.decode("ascii", "replace") if mark == DIGEST_MARK else None


def file_digest(path: Path, length: int | None = None) -> str:
    """SHA-256 of a file, or of its first `length` bytes, in hexadecimal."""
    digest, left = hashlib.sha256(), path.stat().st_size if length is None else length
    with open(path, "rb") as file:
        while left and (part := file.read(min(left, 1 << 20))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


# --- writing in the background


class Writer:
    """A thread that writes files one after another in the order given, so that training does not wait for a
    disk.

    What a job writes must not change any more. After a failure nothing further is written: the files on the
    disk stay those of the last complete save.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._last: Future = self._thread.submit(lambda: None)

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; it is left out if one before it fails, which `check` and `wait` tell."""
        before = self._last

        def run() -> None:
            before.result()  # raises the failure of the job before
            job()

        self._last = self._thread.submit(run)

    def check(self) -> None:
        """Raise the failure of a job; does not wait."""
        if self._last.done():
            self._last.result()

    def wait(self) -> None:
        """Wait until everything is on the disk; raises the failure of a job."""
        self._last.result()


def snapshot(value: Any, keep: bool = True, copies: dict[int, Tensor | None] | None = None) -> Any:
    """A copy on the host of nested dicts, lists and tensors; a tensor that occurs twice (tied weights) is
    copied once. A sharded one becomes whole, which takes all ranks; ranks with keep=False take part and get
    None."""
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        if id(value) not in copies:
            whole = full_tensor(value.detach())
            copies[id(value)] = whole.to("cpu", copy=True) if keep else None
        return copies[id(value)]
    if isinstance(value, dict):
        return {key: snapshot(item, keep, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(item, keep, copies) for item in value)
    return value


# --- the places of a state


def previous_path(path: Path) -> Path:
    """The file of the state before the newest, which is at `path`."""
    return path.with_name(f"{path.stem}_previous.pth")


# states that this process found to be unreadable: they never become the previous one
_damaged: set[Path] = set()


def rotate(path: Path) -> None:
    """Make the state at `path` the previous one, in place of what was that before."""
    if path.absolute() in _damaged:
        _damaged.remove(path.absolute())
    elif path.exists():
        os.replace(path, previous_path(path))


# --- saving and loading


def save(
    path: Path,
    lm_config: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, Any],
    writer: Writer | None = None,
    state_dict_fn: Callable[[nn.Module], dict[str, Tensor]] | None = None,
) -> None:
    """Save the state to resume from: fp32 weights, optimizer, world size and `progress` (of objects with a
    `state_dict` that); the config of the model stands in the file's comment.
    state_dict_fn: which weights; None: all.

    With a `writer` the call only copies the state, which is then written in the background. Rank 0 writes;
    with a sharded model all ranks must call."""
    if not is_sharded(model) and not is_main_process():
        return
    weights = unwrap(model).state_dict(keep_vars=True)  # tied weights stay recognisable
    if state_dict_fn is not None:
        weights = state_dict_fn(model)
    state = {
        FORMAT: 1,
        "model": weights,
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        "world_size": world_size(),
    }
    for key, value in progress.items():
        state[key] = value.state_dict() if hasattr(value, "state_dict") else value
    copy = snapshot(state, keep=is_main_process())
    if not is_main_process():
        return
    described = None
    if hasattr(lm_config, "own_fields"):  # a MiniMindConfig, not the settings of a user's own task
        described = {"model": lm_config.own_fields(), "tokenizer": progress.get("run", {}).get("tokenizer")}

    def write() -> None:
        atomic_write(path, lambda file: write_file(copy, file, described), rotate=rotate)

    if writer is None:
        write()
    else:
        writer.submit(write)


def load(path: Path, resume_from: str | None = None) -> dict[str, Any] | None:
    """The newest readable state of a run whose states lie at `path`, None if there is none. It says in
    `loaded_from` which file it was.

    Falls back to the previous state, with a warning, when the newest is damaged. `resume_from`: the state
    with which a branch begins; the newest state is loaded if it continues this one, else this one, with
    `is_new_branch` set."""
    if resume_from is not None:
        return _load_branch(path, Path(resume_from))
    damaged = []
    for place in (path, previous_path(path)):
        if not place.exists():
            continue
        try:
            state = read_state(place)
        except UNREADABLE as error:
            damaged.append(f"{place} ({reason(error)})")
            _damaged.add(place.absolute())
            continue
        if damaged:
            warn(f"damaged checkpoint {damaged[0]}; going back to {place}")
        return state | {"loaded_from": str(place)}
    if damaged:
        raise UserError(f"--from_resume 1: no readable checkpoint, {damaged[0]}; delete it to start afresh")
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The resume state in a file.

    Raises:
        one of UNREADABLE: it is missing, damaged or something else.
    """
    state = read_file(path)
    if not (isinstance(state, dict) and set(state) >= STATE_KEYS):
        raise ValueError("it is not a state to resume from")
    return state


def load_state(path: Path) -> dict[str, Any]:
    """The state in a file. Raises UserError if it is missing, damaged or something else."""
    try:
        state = read_state(path)
    except UNREADABLE as error:
        why = reason(error) if path.exists() else "there is no such file"
        raise UserError(
            f"--resume_from {path} is no checkpoint that can be read ({why}); give another"
        ) from error
    return state | {"loaded_from": str(path)}


def _load_branch(newest: Path, start: Path) -> dict[str, Any]:
    """The state in the file `start`, with which a branch begins. If the newest state of this run (in the file
    `newest`) is the same one or continues it, that one: then the run was only interrupted."""
    digest = stored_digest(start)
    if digest is not None and digest == stored_digest(newest):
        state = load_state(start)
        return state | {"went_on_from": _origin(state, start, digest)}
    with suppress(UserError):  # a run without any readable state is set aside like others
        own = load(newest)
        if own is not None and _continues(own, start, digest, newest):
            Logger(f"--resume_from {start}: going on from the newest state, which continues it")
            return own
    state = load_state(start)
    return state | {"branch_of": _origin(state, start, digest), "went_on_from": None, "is_new_branch": True}


def _origin(state: dict[str, Any], path: Path, digest: str | None) -> dict[str, Any]:
    """What identifies the state at `path`, for those that continue it."""
    return {"path": str(path.resolve()), "sha256": digest} | {
        key: state.get(key) for key in ("run_name", "run_id", "update")
    }


def _continues(own: dict[str, Any], start: Path, digest: str | None, newest: Path) -> bool:
    """Whether the state `own` (of the file `newest`) continues the one that was in the file `start` when
    --resume_from named it. digest: of `start` as it is now."""
    # `start` may hold another state by now, if it is a file that the run itself writes, such as its best
    # state; or it is gone
    is_own_file = start.parent.resolve() == newest.parent.resolve()
    is_own_file = is_own_file and is_state(newest.stem.removesuffix("_resume"), start.name)
    may_have_changed = is_own_file or not start.exists()
    for origin in (own.get("branch_of"), own.get("went_on_from")):
        if origin is None:
            continue
        if digest is not None and digest == origin["sha256"]:
            return True
        if origin["path"] == str(start.resolve()) and may_have_changed:
            return True
    return False


# --- sharded models

# whose tensors may be sharded; callbacks: a moving average of the weights ...
SHARDED_PARTS = ("model", "optimizer", "callbacks")


def shard_like(model: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """A state as a sharded model takes it: sharded, too, are its weights, the optimizer's state, and what
    callbacks keep under the names of parameters. The state is of any number of ranks, sharded or not."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    own = model.state_dict()
    sharded = next(value for value in own.values() if isinstance(value, DTensor))
    mesh, placements = sharded.device_mesh, sharded.placements  # the same for all of them

    def shard(value: Any, path: tuple) -> Any:
        if isinstance(value, dict):
            return {key: shard(item, (*path, key)) for key, item in value.items()}
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        like = own.get(path[-1])
        if path[0] == "optimizer" or (isinstance(like, DTensor) and like.shape == value.shape):
            # each rank has read the file
            return distribute_tensor(value, mesh, placements, src_data_rank=None)
        return value

    return saved | {part: shard(saved[part], (part,)) for part in SHARDED_PARTS}
