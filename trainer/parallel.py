"""One model on several devices: a copy on each (DistributedDataParallel), or a shard on each (`fully_shard`, FSDP2).

Both average the gradients over the ranks, once per update. What else differs between them is told here, so that the
loop and the checkpoints need not know.
"""

import inspect
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GradientCheckpointingLayer

from dataset.errors import UserError


def this_rank() -> int:
    """Number of this process among the ranks; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main_process() -> bool:
    """True on rank 0, and where there is only one process."""
    return this_rank() == 0


def wrap_model(model: nn.Module, device: torch.device, args: Namespace) -> nn.Module:
    """Move a model to the device of this rank, compile it in place, and spread it over the ranks where there are some.

    The names of the parameters stay. With fsdp the parameters become DTensors: make the optimizer afterwards.

    Args:
        model: best on the CPU: fsdp then moves only this rank's shards to the device.
        device: of this rank.
        args: `parallel`, `use_compile` and `activation_checkpointing`, as on the command line.

    Raises:
        UserError: the model has no blocks that can be computed again.
    """
    if args.activation_checkpointing:  # keep each block's input only, and compute the rest again in the backward pass
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise UserError("--activation_checkpointing 1: this task's model has no blocks that can be computed again")
        model.activation_checkpointing_enable({"use_reentrant": False})
    if args.parallel == "fsdp" and dist.is_initialized():
        return _shard(model, init_device_mesh(device.type, (world_size(),)))
    model = model.to(device)
    if args.use_compile:
        for block in blocks(model) or [model]:  # all of them share what is compiled for the first
            block.compile(dynamic=True)
    if not dist.is_initialized():
        return model
    ids = [device.index] if device.type == "cuda" else None
    names = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"  # renamed in 2.13
    settings = {sync_buffers: False, "gradient_as_bucket_view": True}  # the only buffer is a constant
    return DistributedDataParallel(model, device_ids=ids, **settings)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each block is gathered when it computes; what lies outside of them (embedding, head) stays whole in between."""
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The equal layers that a transformer is made of; none in other models."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without DistributedDataParallel or torch.compile around it; a sharded one is itself."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return getattr(model, "_orig_mod", model)


def is_sharded(model: nn.Module | None) -> bool:
    """Whether each rank holds only a part: then its forward pass and its state are the work of all ranks together."""
    return isinstance(model, FSDPModule)


def accumulate(model: nn.Module, last: bool) -> AbstractContextManager:
    """Context of a micro-batch's forward and backward pass: the ranks' gradients meet in an update's last one only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()


def whole(value: Tensor) -> Tensor:
    """A tensor with the parts of all ranks; each of them must ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def half(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole fp16 copies on the CPU of a model's tensors; one that stands under two names (tied weights) stays one."""
    copies: dict[int, Tensor] = {}
    for value in state.values():
        if id(value) not in copies:
            copies[id(value)] = whole(value.detach().half()).cpu()
    return {key: copies[id(value)] for key, value in state.items()}
