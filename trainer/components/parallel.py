"""One model on several devices: replicated (DistributedDataParallel) or sharded (`fully_shard`, FSDP2).

Both average the gradients over the ranks, once per update. Their other differences are hidden here from the loop and
the checkpoints.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GradientCheckpointingLayer, PreTrainedModel

from common.errors import UserError
from trainer.components.distributed import world_size


def wrap_model(
    model: nn.Module,
    device: torch.device,
    parallel: str = "ddp",
    use_compile: bool = False,
    activation_checkpointing: bool = False,
) -> nn.Module:
    """Move a model to the device of this rank, compile it in place, and replicate or shard it where there are ranks.

    Parameter names do not change. With fsdp the parameters become DTensors, so the optimizer must be built afterwards.

    Args:
        model: best on the CPU: fsdp then moves only this rank's shards to the device.

    Raises:
        UserError: activation checkpointing of a model without transformer layers.
    """
    if activation_checkpointing:  # keep only each layer's input, and recompute the rest in the backward pass
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise UserError("--activation_checkpointing 1: this task's model has no layers that can be recomputed")
        cast(PreTrainedModel, model).activation_checkpointing_enable({"use_reentrant": False})
    if parallel == "fsdp" and dist.is_initialized():
        return _shard(model, init_device_mesh(device.type, (world_size(),)))
    model = model.to(device)
    if use_compile:
        for layer in transformer_layers(model) or [model]:  # all layers share what is compiled for the first
            layer.compile(dynamic=True)
    if not dist.is_initialized():
        return model
    ids = [device.index] if device.type == "cuda" else None
    names = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"  # renamed in 2.13
    options: dict[str, Any] = {"device_ids": ids, "gradient_as_bucket_view": True, sync_buffers: False}
    # no buffer is broadcast: the rotary frequencies are constant, and each rank counts its own tokens per expert
    return DistributedDataParallel(model, **options)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each layer is gathered while it computes; embedding, norm and head stay gathered in between."""
    for layer in transformer_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer; none in other models."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def freeze(model: nn.Module, prefixes: tuple[str, ...]) -> None:
    """Exclude the parameters whose names begin with one of the prefixes from training, e.g. `model.layers.0.`.

    Raises:
        UserError: a prefix fits no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise UserError(f"frozen: no parameter of the model begins with {prefix!r}; its names are like {names[0]}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))


def unwrap(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel or torch.compile around it; a sharded one is itself."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return getattr(model, "_orig_mod", model)


def is_sharded(model: nn.Module | None) -> bool:
    """Whether each rank holds only a part: then all ranks must take part in its forward pass and its state dict."""
    return isinstance(model, FSDPModule)


def is_replicated(model: nn.Module) -> bool:
    """Whether DDP exchanges the gradients of this model."""
    return isinstance(model, DistributedDataParallel)


def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager:
    """Context of a micro-batch: whether the ranks exchange gradients after it; only after the last one of an update."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
    return nullcontext() if enabled or not isinstance(model, DistributedDataParallel) else model.no_sync()


def full_tensor(value: Tensor) -> Tensor:
    """A tensor with the shards of all ranks; a collective if it is sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def half_precision(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full fp16 copies on the CPU of a model's tensors; a tensor under two names (tied weights) is copied once."""
    copies: dict[int, Tensor] = {}
    for value in state.values():
        if id(value) not in copies:
            copies[id(value)] = full_tensor(value.detach().half()).cpu()
    return {key: copies[id(value)] for key, value in state.items()}
