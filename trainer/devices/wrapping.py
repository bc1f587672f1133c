"""One model on several devices: replicated (DistributedDataParallel) or sharded (`fully_shard`, FSDP2).

Both average the gradients over the ranks, once per update. This file hides their other differences from the
loop and the checkpoints."""

import copy
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from trainer.devices.device import autocast_dtype
from trainer.devices.process_group import world_size


def wrap_model(
    model: nn.Module,
    device: torch.device,
    parallel: str = "ddp",
    activation_checkpointing: bool = False,
    autocast: AbstractContextManager | None = None,
) -> nn.Module:
    """Move a model to the device of this rank, and replicate or shard it if there are several ranks.
    Parameter names do not change. Sharded parameters become DTensors, so build the optimizer afterwards.

    autocast: the context in which the model will compute, if any; fsdp gathers the layers' matrices in its
    dtype. Raises UserError for activation checkpointing of a model without transformer layers, and for
    sharding of parameters with several dtypes."""
    if activation_checkpointing:  # keep only each layer's input, and recompute the rest in the backward pass
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise UserError(
                "--activation_checkpointing 1: this task's model has no layers that can be recomputed"
            )
        recompute_layers(model)
    model = model.to(device)
    if not dist.is_initialized():
        return model
    if parallel == "fsdp":
        return shard(model, device, autocast_dtype(autocast or nullcontext(), device))
    ids = [device.index] if device.type == "cuda" else None
    # No buffer is broadcast: the rotary frequencies are constant, and each rank counts its own tokens per
    # expert. Torch 2.13 renamed the flag.
    names = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {"device_ids": ids, "gradient_as_bucket_view": True, sync_buffers: False}
    return DistributedDataParallel(model, **options)


def recompute_layers(model: nn.Module) -> None:
    """Make the layers of a transformers model keep only their input and recompute the rest in the backward
    pass."""
    # transformers renamed it in 5.23
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})


def shard(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Shard a model in place. The matrices of a layer are gathered only while the layer computes; embedding,
    head and norms stay gathered in between.

    Autocast would cast each gathered matrix and keep the copy until the backward pass. So the matrices of the
    layers are gathered in `dtype`, which also halves the traffic; gradients are summed in float32. The shards
    stay float32, and so does everything that autocast leaves in float32 (the norms of the layers). So the
    arithmetic is that of DDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtypes = {str(value.dtype).removeprefix("torch.") for value in model.parameters()}
    if len(dtypes) > 1:
        raise UserError(
            f"--parallel fsdp: the model's parameters are of several dtypes ({', '.join(sorted(dtypes))}); "
            "give all of them one, such as by model.float(), or use --parallel ddp"
        )
    mesh = init_device_mesh(device.type, (world_size(),))
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = transformer_layers(model)
    matrices = {p for layer in layers for p in layer.parameters() if p.ndim > 1}
    fully_shard(model, mesh=mesh, ignored_params=matrices)
    for layer in layers:
        others = set(layer.parameters()) - matrices
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=others)
    return model


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer; none in other models."""
    from transformers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def freeze(model: nn.Module, prefixes: str | Sequence[str]) -> None:
    """Exclude the parameters whose names begin with one of the prefixes from training, e.g.
    `model.layers.0.`.

    Raises:
        UserError: a prefix fits no parameter.
    """
    prefixes = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise UserError(
                f"frozen_parameters: no parameter of the model begins with {prefix!r}; its names are "
                f"like {names[0]}"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))


def unwrap(model: nn.Module) -> nn.Module:
    """The model without the wrapper of DistributedDataParallel, and without that of torch.compile, which a
    task may have added. A sharded model has no wrapper."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return getattr(model, "_orig_mod", model)


def is_sharded(model: nn.Module | None) -> bool:
    """Whether each rank holds only a part of the model. Then all ranks must take part in its forward pass and
    its state dict."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Set whether the ranks exchange gradients after the next micro-batch. They do so only after the last one
    of an update."""
    if is_sharded(model):
        cast(Any, model).set_requires_gradient_sync(enabled)
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled  # as its `no_sync` does


@torch.no_grad()
def decoding_model(
    model: nn.Module, dtype: torch.dtype = torch.float32, earlier: nn.Module | None = None
) -> nn.Module:
    """The model for decoding. In float32 it is the model itself; otherwise a copy with matrices in `dtype`
    and vectors in float32, which shares the buffers. earlier: an earlier copy, which gets the current weights
    and is returned."""
    if dtype == torch.float32:
        return model
    if earlier is not None:
        torch._foreach_copy_(list(earlier.parameters()), list(model.parameters()))
        return earlier
    tensors: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}  # by id in the model
    for value in model.parameters():
        copied = value.to(dtype) if value.ndim > 1 else value.clone()
        tensors[id(value)] = nn.Parameter(copied, requires_grad=False)
    return copy.deepcopy(model, tensors).eval()


def full_tensor(value: Tensor) -> Tensor:
    """A whole tensor, made from the shards of all ranks. If it is sharded, all ranks must call this (a
    collective)."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_like(value: Tensor, like: Any) -> Any:
    """A whole tensor, which every rank has, sharded like the parameter `like`; unchanged if `like` is not
    sharded. Nothing is sent."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
