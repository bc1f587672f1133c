"""The state of a sharded run as a folder: each rank writes its part, and any number of ranks reads it back.

    python -m trainer.sharded checkpoints/full_sft_512_resume --weights out/full_sft_512.pth --state full_sft.pth

turns such a folder into plain files, in one process. The tensors are written by torch.distributed.checkpoint; all else,
with the place of each tensor, lies in `state.pth`. Nothing in a folder is executed when it is read.
"""

import io
import os
import pickle
import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import zeros as sharded_zeros

from dataset.durable import sync_folder
from dataset.errors import Parser, UserError, reason, run_main
from trainer.files import UNREADABLE, Writer, atomic_write, cannot_write, forms, read_file, remove, set_aside, snapshot
from trainer.parallel import half, is_main_process

REST = "state.pth"  # what is no tensor
PARTS = ("model", "optimizer")  # whose tensors are sharded
SHARDS = "shards"  # key of the folder that a state's tensors are still to be read from
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
def _group() -> dist.ProcessGroup:
    """The ranks' meeting place while they save: what they say there must not mix with what training says."""
    return dist.new_group(backend="gloo")


# --- writing


def take_tensors(value: Any, taken: dict[int, tuple[str, Tensor]], name: str) -> Any:
    """A copy of nested dicts and lists with a name in place of each tensor, which is put with it into `taken`, by `id`:
    one that occurs twice (tied weights) is taken once."""
    if isinstance(value, Tensor):
        return taken.setdefault(id(value), (name, value))[0]
    if isinstance(value, dict):
        return {key: take_tensors(item, taken, f"{name}/{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(take_tensors(item, taken, f"{name}/{i}") for i, item in enumerate(value))
    return value


def put_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `take_tensors`."""
    if isinstance(value, dict):
        return {key: put_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(put_tensors(item, tensors) for item in value)
    return tensors.get(value, value) if isinstance(value, str) else value


def save(path: Path, state: dict[str, Any], writer: Writer | None = None) -> None:
    """Write a state as the folder form of `path`; called on all ranks. It appears whole, when all ranks have written
    and flushed their parts; what was there is set aside. With a writer this only takes a copy.

    Raises:
        UserError: (from the writer) the disk is full, the folder cannot be written ...
    """
    folder = forms(path)[1]
    temp = folder.with_name(f".{folder.name}.tmp")
    taken: dict[int, tuple[str, Tensor]] = {}
    rest = snapshot(state | {part: take_tensors(state[part], taken, part) for part in PARTS})
    leads = is_main_process()
    if leads and temp.exists():  # of a run that was killed
        remove(temp)
    tensors = {name: tensor.detach() for name, tensor in taken.values()}
    saving = dcp.async_save(tensors, checkpoint_id=temp, process_group=_group())

    def job() -> None:
        try:
            saving.result()
            if leads:
                _commit(path, temp, rest)
        except (CheckpointException, OSError) as error:
            if leads:
                remove(temp)
            failed = error if isinstance(error, OSError) else next(iter(error.failures.values()))[0]
            explained = cannot_write(folder, failed)
            if not isinstance(explained, UserError):  # the OSError behind it stayed on the rank that met it
                explained = UserError(f"{folder} cannot be written ({reason(failed)})")
            raise explained from error

    writer.submit(job) if writer is not None else job()


def _commit(path: Path, temp: Path, rest: dict[str, Any]) -> None:
    missing = sorted({name for name, _, _ in _pieces(temp)} - set(os.listdir(temp)))
    if missing:
        raise UserError(
            f"--checkpoint_dir {temp.parent} is not the same folder on all machines ({missing[0]} is not in it); "
            "--parallel fsdp needs one on a file system that they share"
        )
    atomic_write(temp / REST, lambda file: torch.save(rest, file))
    set_aside(path)
    os.replace(temp, forms(path)[1])
    sync_folder(path.parent)


# --- reading


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in SAFE.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """torch's reader unpickles whatever the list of tensors holds; this one only what belongs there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.metadata.Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            return _Unpickler(file).load()


def _pieces(folder: Path) -> list[tuple[str, int, int]]:
    """File, offset and length of each piece of a tensor."""
    stored = _Reader(folder).read_metadata().storage_data.values()
    return [(Path(piece.relative_path).name, piece.offset, piece.length) for piece in stored]


def read_rest(folder: Path) -> dict[str, Any]:
    """The state in a folder without its tensors, whose every byte is checked.

    Raises:
        one of UNREADABLE: something is damaged or missing.
    """
    rest = read_file(folder / REST)
    for name, offset, length in _pieces(folder):
        with open(folder / name, "rb") as file:
            file.seek(offset)
            piece = io.BytesIO(file.read(length))
        with zipfile.ZipFile(piece) as archive:
            if archive.testzip() is not None:
                raise zipfile.BadZipFile(f"a checksum in {name} is wrong")
    return rest | {SHARDS: folder}


def with_tensors(saved: dict[str, Any], model: nn.Module | None = None) -> dict[str, Any]:
    """A state of `lm_checkpoint` with its weights and optimizer state as the model takes them: split over the ranks as
    the model is, or whole. A state of either form serves either model, and any number of ranks.

    Args:
        saved: from the file of a plain run (with its tensors), or the folder of a sharded one (without).
        model: unwrapped; None stands for one that is not sharded.
    """
    own = model.state_dict() if model is not None else {}
    mesh = next((value.device_mesh for value in own.values() if isinstance(value, DTensor)), None)

    def split(name: str, size: torch.Size) -> bool:  # the optimizer's tensors are numbers, or shaped like a parameter
        part, _, key = name.partition("/")
        return mesh is not None and len(size) > 0 and (part == "optimizer" or isinstance(own[key], DTensor))

    if SHARDS in saved:
        rest, tensors = saved, _read_tensors(saved[SHARDS], mesh, split)
    elif mesh is not None:
        full: dict[int, tuple[str, Tensor]] = {}
        rest = saved | {part: take_tensors(saved[part], full, part) for part in PARTS}
        cut = {"device_mesh": mesh, "placements": [Shard(0)], "src_data_rank": None}  # each rank has read the file
        tensors = {name: distribute_tensor(t, **cut) if split(name, t.shape) else t for name, t in full.values()}
    else:
        return saved
    parts = {part: put_tensors(rest[part], tensors) for part in PARTS}
    return {key: value for key, value in rest.items() if key != SHARDS} | parts


def _read_tensors(folder: Path, mesh: DeviceMesh | None, split) -> dict[str, Tensor]:
    reader, tensors = _Reader(folder), {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        like = {"dtype": stored.properties.dtype}
        if split(name, stored.size):
            tensors[name] = sharded_zeros(*stored.size, device_mesh=mesh, placements=[Shard(0)], **like)
        else:
            tensors[name] = torch.zeros(stored.size, **like)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that each rank reads for itself
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


# --- converting


def convert(folder: Path, weights: Path | None, state: Path | None) -> None:
    """Write plain files from a folder: the fp16 weights for use, the state to resume from.

    Raises:
        UserError: it is no such folder, or a file cannot be written.
    """
    try:
        whole = with_tensors(read_rest(folder))
    except UNREADABLE as error:
        raise UserError(f"{folder}: not a readable folder of a sharded run ({reason(error)})") from error
    if weights is not None:
        atomic_write(weights, lambda file: torch.save(half(whole["model"]), file))
    if state is not None:
        atomic_write(state, lambda file: torch.save(whole, file))


def main() -> None:
    """Read the command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="folder that a sharded run resumes from")
    parser.add_argument("--weights", type=Path, help="file for the fp16 weights")
    parser.add_argument("--state", type=Path, help="file to resume from, <save_weight>_<hidden_size>[_moe]_resume.pth")
    args = parser.parse_args()
    if args.weights is None and args.state is None:
        raise UserError("nothing to write: give --weights, --state or both")
    convert(args.folder, args.weights, args.state)
    for path in filter(None, (args.weights, args.state)):
        print(f"wrote {path}")


if __name__ == "__main__":
    run_main(main)
