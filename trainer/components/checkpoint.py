"""The state to resume from, in `checkpoints/`: what it holds, how it is written, and how it is read back.

The previous state is kept, as a fallback for a damaged newest one. A run whose model is sharded writes its state as a
folder (sharded.py); either form is read by either kind of run.

Every byte that is read is checked, and nothing in a file is executed. The SHA-256 of a file is its zip comment, which
torch.load and zipfile pass over: the checksums inside a zip file cover its records, but not its directory.
"""

import hashlib
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.durable_files import atomic_write, remove, sync_folder, write_error
from common.errors import UserError, reason, warn
from common.settings import ROOT
from trainer.components.distributed import is_main_process, world_size
from trainer.components.parallel import is_sharded, unwrap
from trainer.components.run_files import NamedShape, resume_path

STATE_KEYS = {"model", "optimizer", "epoch", "step", "world_size"}  # keys that identify a resume checkpoint

# what zipfile and torch.load raise on a damaged or foreign file
UNREADABLE: tuple[type[Exception], ...] = (
    *(OSError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError),
    *(MemoryError, OverflowError, ImportError, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
)

DIGEST_MARK, DIGEST_SIZE = b"sha256:", 64  # the comment of a zip file: the mark and 64 hexadecimal digits
COMMENT_LENGTH = struct.Struct("<H")  # the last field of a zip file before its comment
FORMAT = "state_format"  # key in a resume state, from version 2 on: its file has a digest


# --- files that are checked


def write_file(value: Any, file: BinaryIO, comment: bytes = b"") -> str:
    """`torch.save` into a file open for reading and writing; returns the SHA-256 of the whole file. Its zip comment is
    `comment`, followed by the digest of all before it.

    comment: at most 65,000 bytes.
    """
    torch.save(value, file)
    file.seek(-COMMENT_LENGTH.size, os.SEEK_END)
    length = len(comment) + len(DIGEST_MARK) + DIGEST_SIZE
    file.write(COMMENT_LENGTH.pack(length) + comment)  # part of what is digested
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    digest = _digest(file, end)
    last = DIGEST_MARK + digest.hexdigest().encode()
    file.write(last)  # reading it has ended at the end
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
    """The content of a file of `torch.save`, checked against its digest; no code in it is executed.

    A file of another program, or of an early version of this one, has no digest: of such a file each record is checked
    against its checksum.

    Raises:
        one of UNREADABLE: the file is damaged, of another kind, or holds code.
        UserError: it is whole, but there is not enough memory for it.
    """
    with open(path, "rb") as file:
        length = max(0, file.seek(0, os.SEEK_END) - len(DIGEST_MARK) - DIGEST_SIZE)
        file.seek(length)
        comment = file.read()
    if comment.startswith(DIGEST_MARK):
        if file_digest(path, length).encode() != comment.removeprefix(DIGEST_MARK):
            raise zipfile.BadZipFile("its digest is wrong")
    else:
        with zipfile.ZipFile(path) as archive:  # torch.load itself leaves the checksums out
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    content = _load(path, is_whole=comment.startswith(DIGEST_MARK))
    if isinstance(content, dict) and FORMAT in content and not comment.startswith(DIGEST_MARK):
        raise zipfile.BadZipFile("its digest is missing")
    return content


def _load(path: Path, is_whole: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, RuntimeError) as error:
        if is_whole and (isinstance(error, MemoryError) or "allocate memory" in str(error)):
            raise UserError(f"out of memory while {path} is read ({reason(error)}); the file is whole") from error
        raise


def file_digest(path: Path, length: int | None = None) -> str:
    """SHA-256 of a file, or of its first `length` bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return _digest(file, path.stat().st_size if length is None else length).hexdigest()


def _digest(file: BinaryIO, length: int) -> "hashlib._Hash":
    digest = hashlib.sha256()
    while length and (part := file.read(min(length, 1 << 20))):
        digest.update(part)
        length -= len(part)
    return digest


# --- writing in the background


class Writer:
    """A thread that writes files one after another in the order given, so that training does not wait for a disk.

    What a job writes must not change any more. After a failure nothing further is written, and the next call of any
    method raises it: the files on the disk stay those of the last complete save.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._jobs: list[Future] = []
        self._failed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; raises the failure of an earlier one."""
        self.check()
        self._jobs.append(self._thread.submit(self._run, job))

    def check(self) -> None:
        """Raise the failure of a job; does not wait."""
        done = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if job not in done]
        for job in done:
            job.result()

    def wait(self) -> None:
        """Wait until everything is on the disk; raises the failure of a job."""
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


# --- the places of a state


def state_paths(path: Path) -> tuple[Path, Path]:
    """The two forms of a state: the file `<name>.pth`, or the folder `<name>` of a sharded run."""
    return path, path.with_suffix("")


def previous(path: Path) -> Path:
    """The file of the state before that of the file `path`."""
    return path.with_name(f"{path.stem}_previous.pth")


def newest_first(path: Path) -> tuple[Path, ...]:
    """All places of a resume state: the newest in either form, then the previous one."""
    return *state_paths(path), *state_paths(previous(path))


_damaged: set[Path] = set()  # states that this process found to be unreadable


def mark_damaged(path: Path) -> None:
    """Note that a state is unreadable: it never takes the place of the previous one."""
    _damaged.add(path.absolute())


def rotate(path: Path) -> None:
    """Make the state at `path`, in whichever form, the previous one, and delete what was that before."""
    for current, spare in zip(state_paths(path), state_paths(previous(path)), strict=True):
        if current.absolute() in _damaged:
            _damaged.remove(current.absolute())
            if current.is_dir():  # a file is replaced in one step, but not a folder
                remove(current)
        elif current.exists():
            for old in state_paths(previous(path)):
                remove(old)
            os.replace(current, spare)


# --- saving and loading


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
    resume_from: str | None = None,
    **kwargs: Any,
) -> dict[str, Any] | None:
    """Save the resume state when given a model, else return the saved one (None if there is none).

    Saved: fp32 weights, the config of the model, optimizer, epoch, step (micro-batches of this epoch done), world size,
    id of the tracker (`wandb`: its run, or its module), and whatever `kwargs` holds (of objects with a `state_dict`
    that). With a `writer` the call only copies the state, which is then written in the background. Rank 0 writes; of a
    sharded model all ranks do, and must all call. Loading falls back to the previous state, with a warning, when the
    newest is damaged, and never runs code from a file (`weights_only=True`). A sharded run's state is returned without
    its tensors; `with_tensors` reads them. `resume_from` is a path to load instead of the newest state.
    """
    path = resume_path(save_dir, weight, lm_config)
    if model is None:
        return _load_newest(path) if resume_from is None else load_state(Path(resume_from))
    if not (is_sharded(model) or is_main_process()):
        return None
    state = {
        FORMAT: 2,
        "model": unwrap(model).state_dict(keep_vars=is_sharded(model)),  # keep_vars: tied weights stay recognisable
        "config": cast(Any, lm_config).own_fields() if hasattr(lm_config, "to_dict") else None,
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        "epoch": epoch,
        "step": step,
        "world_size": world_size(),
        "wandb_id": getattr(wandb.get_run() if hasattr(wandb, "get_run") else wandb, "id", None),
    }
    state |= {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in kwargs.items()}
    if is_sharded(model):
        save_sharded(path, state, writer)
    else:
        copy = snapshot(state) if writer is not None else state

        def write() -> None:
            atomic_write(path, lambda file: write_file(copy, file), rotate=rotate)

        writer.submit(write) if writer is not None else write()
    return None


def read_state(path: Path) -> dict[str, Any]:
    """A resume state in either form; that of a folder comes without its tensors.

    Raises:
        one of UNREADABLE: it is missing, damaged or something else.
    """
    state = read_rest(path) if path.is_dir() else read_file(path)
    if not (isinstance(state, dict) and set(state) >= STATE_KEYS):
        raise ValueError("it is not a state to resume from")
    return state


def load_state(path: Path) -> dict[str, Any]:
    """The state that --resume_from names.

    Raises:
        UserError: there is none, or it is damaged or something else.
    """
    try:
        return read_state(path)
    except UNREADABLE as error:
        why = reason(error) if path.exists() else "there is no such file"
        raise UserError(f"--resume_from {path} is no checkpoint that can be read ({why}); give another") from error


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


# --- the state of a sharded run: each rank writes its shards, and any number of ranks reads them back
#
# torch.distributed.checkpoint writes the tensors; everything else, with a name in place of each tensor, is in
# `state.pth`. scripts/convert_model.py makes one file of a folder.

REST = "state.pth"  # everything but the tensors
PARTS = ("model", "optimizer", "hooks")  # whose tensors may be sharded; hooks: a moving average of the weights ...
DIGESTS = "digests"  # key for the SHA-256 of each other file of the folder
SHARDS = "shards"  # key for the folder from which a state's tensors are still to be read
SAFE = {"torch.distributed.checkpoint.filesystem": {"_StorageInfo"}, "torch.serialization": {"_get_layout"}}
SAFE |= {
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
}
SAFE |= {"pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}}
SAFE["torch.distributed.checkpoint.metadata"] = {
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "ChunkStorageMetadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
}


@cache
def saving_group() -> dist.ProcessGroup:
    """A process group for saving: its collectives run in the background and must not mix with those of training. Made
    while all ranks and their launcher are alive."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo"))


def take_tensors(value: Any, taken: dict[int, tuple[str, Tensor]], name: str) -> Any:
    """A copy of nested dicts and lists with a name in place of each tensor; `taken` maps the tensor's `id` to both, so
    that one that occurs twice (tied weights) is taken once."""
    if isinstance(value, Tensor):
        return taken.setdefault(id(value), (name, value))[0]
    if isinstance(value, dict):
        return {key: take_tensors(item, taken, f"{name}/{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(take_tensors(item, taken, f"{name}/{i}") for i, item in enumerate(value))
    return value


def put_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `take_tensors`."""
    if isinstance(value, dict):
        return {key: put_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(put_tensors(item, tensors) for item in value)
    return tensors.get(value, value) if isinstance(value, str) else value


def save_sharded(path: Path, state: dict[str, Any], writer: Writer | None = None) -> None:
    """Write a state as the folder form of `path`; called on all ranks. It appears complete, when all ranks have written
    and flushed their shards; the state that was there becomes the previous one. With a writer this only copies.

    Raises:
        UserError: (from the writer) the disk is full, the folder cannot be written ...
    """
    import torch.distributed.checkpoint as dcp  # as in other functions: it takes a second to load
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    folder = state_paths(path)[1]
    temp = folder.with_name(f".{folder.name}.tmp")
    taken: dict[int, tuple[str, Tensor]] = {}
    rest = snapshot(state | {part: take_tensors(state.get(part), taken, part) for part in PARTS})
    leads = is_main_process()
    if leads and temp.exists():  # of a run that was killed
        remove(temp)
    tensors = {name: tensor.detach() for name, tensor in taken.values()}
    # nothing to copy ahead, the tensors are on the host: torch's thread for that would start a CUDA context on GPU 0
    files = dcp.FileSystemWriter(temp, per_thread_copy_ahead=0)
    stager = DefaultStager(StagingOptions(False, False, False, False))  # copies at once, pageable, in this process
    pending = dcp.async_save(tensors, storage_writer=files, async_stager=stager, process_group=saving_group())
    saving = cast(Future, pending)
    saving.add_done_callback(lambda _: stager.close())

    def job() -> None:
        try:
            saving.result()
            digests = _gather_digests(temp)
            if leads:
                _commit(path, temp, rest | {DIGESTS: digests})
        except (dcp.CheckpointException, OSError) as error:
            if leads:
                remove(temp)
            failed = error if isinstance(error, OSError) else next(iter(error.failures.values()))[0]
            translated = write_error(folder, failed)
            if not isinstance(translated, UserError):  # the OSError behind it stayed on the rank that met it
                translated = UserError(f"{folder} cannot be written ({reason(failed)})")
            raise translated from error

    writer.submit(job) if writer is not None else job()


def _gather_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file that the ranks wrote: each rank reads its own, while they are in its memory."""
    own = folder.glob(f"__{dist.get_rank()}_*")
    digests: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, {path.name: file_digest(path) for path in own}, group=saving_group())
    metadata = {".metadata": file_digest(folder / ".metadata")} if is_main_process() else {}
    return metadata | {name: digest for each in digests for name, digest in (each or {}).items()}


def _commit(path: Path, temp: Path, rest: dict[str, Any]) -> None:
    missing = sorted(set(rest[DIGESTS]) - set(os.listdir(temp)))
    if missing:
        raise UserError(
            f"--checkpoint_dir {temp.parent} is not the same folder on all machines ({missing[0]} is not in it); "
            "--parallel fsdp needs one on a file system that they share"
        )
    atomic_write(temp / REST, lambda file: write_file(rest, file))
    rotate(path)
    os.replace(temp, state_paths(path)[1])
    sync_folder(path.parent)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in SAFE.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")
        return super().find_class(module, name)


def _reader(folder: Path) -> Any:
    """torch's reader unpickles anything in `.metadata`; this one only the classes that belong there."""
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(Path(self.path) / ".metadata", "rb") as file:
                return _Unpickler(file).load()

    return Reader(folder)


def read_rest(folder: Path) -> dict[str, Any]:
    """The state in a folder without its tensors, of which every byte is checked.

    Raises:
        one of UNREADABLE: something is damaged or missing.
    """
    rest = read_file(folder / REST)
    for name, digest in rest.pop(DIGESTS).items():
        if file_digest(folder / name) != digest:
            raise ValueError(f"the digest of {name} is wrong")
    return rest | {SHARDS: folder}


def with_tensors(saved: dict[str, Any], model: nn.Module | None = None) -> dict[str, Any]:
    """A state of `lm_checkpoint` with weights and optimizer state as the model takes them: sharded as the model is, or
    full tensors. A state of either form fits either model, and any number of ranks.

    Args:
        saved: from the file of a plain run (with its tensors), or the folder of a sharded one (without).
        model: unwrapped; None: one that is not sharded.
    """
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    own = model.state_dict() if model is not None else {}
    mesh = next((value.device_mesh for value in own.values() if isinstance(value, DTensor)), None)

    def split(name: str, size: torch.Size) -> bool:
        part, _, key = name.partition("/")
        if mesh is None or not len(size):
            return False
        if part == "optimizer":  # its tensors are numbers, or shaped like a parameter
            return True
        like = own.get(key.rpartition("/")[2])  # hooks: what has the name and the shape of a parameter
        return isinstance(like, DTensor) and like.shape == size

    if SHARDS in saved:
        rest, tensors = saved, _read_tensors(saved[SHARDS], mesh, split)
    elif mesh is not None:
        full: dict[int, tuple[str, Tensor]] = {}
        rest = saved | {part: take_tensors(saved.get(part), full, part) for part in PARTS}
        cut = {"device_mesh": mesh, "placements": [Shard(0)], "src_data_rank": None}  # each rank has read the file
        tensors = {name: distribute_tensor(t, **cut) if split(name, t.shape) else t for name, t in full.values()}
    else:
        return saved
    parts = {part: put_tensors(rest[part], tensors) for part in PARTS}
    return {key: value for key, value in rest.items() if key != SHARDS} | parts


def _read_tensors(folder: Path, mesh: Any, split: Callable[[str, torch.Size], bool]) -> dict[str, Tensor]:
    """mesh: the ranks over which the tensors that `split(name, size)` chooses are sharded."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, zeros

    reader, tensors = _reader(folder), {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        like = {"dtype": stored.properties.dtype}
        if split(name, stored.size):
            tensors[name] = zeros(*stored.size, device_mesh=mesh, placements=[Shard(0)], **like)
        else:
            tensors[name] = torch.zeros(stored.size, **like)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that each rank reads for itself
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
