"""Kernel launches of an update and the bytes that they read and write, counted on fake CUDA tensors.

Run with fake_cuda.cpp's library preloaded, it prints a JSON object: for the operators one by one ("eager"),
and with the kernels of model/fused.py, the launches for each layer and micro-batch, and the gigabytes of an
update of 8 micro-batches. Each operator is taken to read its arguments and to write its results once. An
update is one of the default shape (512 x 8) in bfloat16, of 32 samples of 340 tokens.
"""

import json
import math
import os
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.settings import StageArgs
from dataset.lm_dataset import collate_flat
from model import fused
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.fake_cuda.updates import CUDA, HOPPER, pretend
from trainer.devices.device import mixed_precision
from trainer.devices.wrapping import backward_on_gpu
from trainer.objectives.next_token import next_token_loss

SAMPLES, LENGTH, LAYERS, MICRO_BATCHES = 32, 340, 8, 8
CASES: dict[str, tuple[bool, dict[str, Any]]] = {  # with kernels or not, fields of the config
    "eager": (False, {}),
    "kernels": (True, {}),
    "one expert of four": (True, {"use_moe": True}),
    "two experts of four": (True, {"use_moe": True, "num_experts_per_tok": 2}),
}
# allocations; and what the attention's stand-in does to its random state, which no GPU does
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "zeros"}
FREE |= {"detach", "lift_fresh", "device"}
GATHERS = {"embedding", "index_select"}  # read as many rows as they write
# launches, and how often the tensors are read, where it is not once; from the code that torch 2.13 generates
KERNELS = {"norm_and_rotate_backward": (6, 3), "cross_entropy_forward": (1, 2)}


def size(tree: Any) -> int:
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def launches_of_lists(tensors: list[Tensor]) -> int:
    """Of an operator of two lists: a kernel has room for 64 tensors, and for 320 blocks of 65,536 elements."""
    blocks = sum(math.ceil(tensor.numel() / 65536) for tensor in tensors)
    return math.ceil(max(len(tensors) / 64, blocks / 320))


class Traffic(TorchDispatchMode):
    """Counts launches and bytes."""

    def __init__(self):
        super().__init__()
        self.launches, self.bytes, self.is_within_kernel = 0, 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        if not is_fake and not kwargs.get("device"):
            with unset_fake_temporarily():  # the host's own
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        name = func._opname
        if func.is_view or name in FREE:
            return out
        if name == "_foreach_add_":  # of lists, in place
            self.count(args, args[0], launches_of_lists(args[0]))
        else:
            self.count((args, kwargs) if name not in GATHERS else out, out)
        return out

    def count(self, read: Any, written: Any, launches: int = 1) -> None:
        if self.is_within_kernel:
            return
        self.launches += launches
        self.bytes += size(read) + size(written)

    def in_one_kernel(self, function: Callable[..., Any], *tensors: Any) -> Any:
        """Stands in for `fused.in_one_kernel`."""
        self.is_within_kernel = True
        out = function(*tensors)
        self.is_within_kernel = False
        launches, reads = KERNELS.get(function.__name__, (1, 1))
        self.count([tensors] * reads, out, launches)
        return out


def one_kernel_each_way(traffic: Traffic) -> Callable[..., Tensor]:
    """What takes the place of an operator that is one kernel on CUDA, but has parts on fake tensors."""

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            out = torch.empty_like(tensors[0])
            traffic.count(tensors, out)
            return out

        @staticmethod
        def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:
            found = tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)
            traffic.count((grads, ctx.saved_tensors), found)
            return found

    return cast(Callable[..., Tensor], Operator.apply)


def micro_batch(kernels: bool, layers: int, **shape: Any) -> Traffic:
    """Forward and backward pass of one, gradients added to those of the one before."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 6400, LENGTH).astype(np.uint16) for _ in range(SAMPLES)]
    parts = {"loss_mask": np.ones(LENGTH, bool), "sample_id": 0, "target_bytes": 1}
    batch = collate_flat([[{"input_ids": x} | parts for x in ids]])
    config = MiniMindConfig(hidden_size=512, num_hidden_layers=layers, **shape)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with CUDA:
            model = MiniMindForCausalLM(config).train()
            batch = {k: v.to(CUDA) if isinstance(v, Tensor) else v for k, v in batch.items()}
        autocast, _ = mixed_precision("bfloat16", CUDA)
        traffic = Traffic()
        operator = one_kernel_each_way(traffic)
        functional.silu = operator
        torch.ops.aten._fused_rms_norm = lambda x, shape, weight, eps: (operator(x), x[..., :1])
        functional.rms_norm = lambda x, shape, weight, eps: operator(x, weight)
        fused.KERNELS = kernels
        if kernels:
            fused.in_one_kernel = traffic.in_one_kernel
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with traffic, autocast:
            loss, aux_loss, _ = next_token_loss(model, batch, StageArgs())
            backward_on_gpu(loss + aux_loss, model)
    return traffic


def main() -> None:
    pretend()
    torch.cuda.get_device_capability = lambda *_: HOPPER
    found = {}
    for name, (kernels, shape) in CASES.items():
        traffic, more = (micro_batch(kernels, layers, **shape) for layers in (LAYERS, 2 * LAYERS))
        found[name] = {
            "launches for each layer": (more.launches - traffic.launches) / LAYERS,
            "GB of an update": MICRO_BATCHES * traffic.bytes / 1e9,
        }
    print(json.dumps(found), flush=True)
    os._exit(0)  # the threads of a backward pass on a device that is not there do not end


if __name__ == "__main__":
    main()
