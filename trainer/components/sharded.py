"""The resume state of a sharded run as a folder: each rank writes its shards, and any number of ranks reads it back.

torch.distributed.checkpoint writes the tensors; everything else, with a name in place of each tensor, is in
`state.pth`. Nothing in a folder is executed when it is read. scripts/convert_model.py makes one file of a folder.
"""

import os
import pickle
import warnings
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import zeros as sharded_zeros

from common.durable_files import atomic_write, remove, sync_folder, write_error
from common.errors import UserError, reason
from trainer.components.checkpoint import Writer, file_digest, read_file, rotate, snapshot, state_paths, write_file
from trainer.components.distributed import is_main_process

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


# --- writing


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


def save(path: Path, state: dict[str, Any], writer: Writer | None = None) -> None:
    """Write a state as the folder form of `path`; called on all ranks. It appears complete, when all ranks have written
    and flushed their shards; the state that was there becomes the previous one. With a writer this only copies.

    Raises:
        UserError: (from the writer) the disk is full, the folder cannot be written ...
    """
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
        except (CheckpointException, OSError) as error:
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


# --- reading


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in SAFE.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """torch's reader unpickles anything in `.metadata`; this one only the classes that belong there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.metadata.Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            return _Unpickler(file).load()


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


def _read_tensors(folder: Path, mesh: DeviceMesh | None, split) -> dict[str, Tensor]:
    reader, tensors = _Reader(folder), {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)  # only tensors are written
        like = {"dtype": stored.properties.dtype}
        if split(name, stored.size):
            tensors[name] = sharded_zeros(*stored.size, device_mesh=mesh, placements=[Shard(0)], **like)
        else:
            tensors[name] = torch.zeros(stored.size, **like)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that each rank reads for itself
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
