"""Kernels that a decoded token launches, counted on fake CUDA tensors: as rollouts.py, for models of width 512
with 8 layers.

Norms and attention are one kernel each there, which fake tensors take apart; so operators that do nothing take
their place. It prints, for each of MODES, the launches of a token kernel by kernel and recorded.
"""

import json
from collections import Counter
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from model import decoding, graphs
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from tests.fake_cuda.updates import CUDA, HOPPER, Recorder, pretend
from trainer.devices.wrapping import whole_model

ROWS, STEPS = 8, 8
MODES = {  # experts, dtype of the matrices, how tokens are drawn
    "bfloat16": (False, torch.bfloat16, Sampling(1.0)),
    "float32, as chats draw": (False, torch.float32, Sampling(0.7, top_k=50, top_p=0.9)),
    "MoE, bfloat16": (True, torch.bfloat16, Sampling(1.0)),
}
# no kernels: views, memory without values
FREE = {"detach", "split", "unbind", "chunk", "empty", "empty_like", "new_empty"}
FREE |= {"_unsafe_view", "lift_fresh"}


@torch.library.custom_op("launches::rms_norm", mutates_args={})
def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """`F.rms_norm`, which is one kernel on CUDA."""
    raise NotImplementedError


@rms_norm.register_fake
def _(x, weight):
    return torch.empty_like(x)


@torch.library.custom_op("launches::attention", mutates_args={})
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`F.scaled_dot_product_attention`."""
    raise NotImplementedError


@attention.register_fake
def _(q, k, v, mask):
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


class Counting(Recorder):
    """Counts the kernels."""

    def __init__(self):
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        leaves = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        is_kernel = not func.is_view and func.namespace != "prim" and func._opname not in FREE
        self.kernels[func._opname] += is_kernel and any(x.device.type == "cuda" for x in leaves)
        return out


class Replayed:
    """Takes the place of a recorded step: one launch."""

    count = 0

    def __init__(self, step, pool):
        self.result = step()

    def replay(self):
        Replayed.count += 1
        return self.result


def launches(use_moe: bool, dtype: torch.dtype, sampling: Sampling, is_recorded: bool) -> float:
    """Of one token, where eight are written between two looks of the host."""
    from model.generation import Decoder

    graphs.ENABLED = is_recorded
    with FakeTensorMode(allow_non_fake_inputs=True), patch.object(FakeTensor, "tolist", read):
        with CUDA:
            config = MiniMindConfig(hidden_size=512, num_hidden_layers=8, use_moe=use_moe)
            trained = MiniMindForCausalLM(config)
        autocast = torch.autocast("cuda", dtype, enabled=dtype != torch.float32)
        model = whole_model(trained, dtype).eval()
        with Recorder(), autocast:
            decoder = Decoder(model, ROWS, 512, [2], with_logprobs=True)
            decoder.add([3, 4, 5], [sampling] * ROWS, 64)
            for _ in range(4):
                decoder.step(STEPS)
        before, counting = Replayed.count, Counting()
        with counting, autocast:
            decoder.decode(count=STEPS)
    return (sum(counting.kernels.values()) + Replayed.count - before) / STEPS


def read(tensor: Tensor) -> list:
    """Fake tensors cannot be read; tokens and their log-probabilities are [steps, rows]."""
    return [[1] * tensor.shape[1] for _ in range(tensor.shape[0])]


if __name__ == "__main__":
    # there operators come one by one, as a GPU would launch them
    torch.inference_mode = lambda *_: torch.no_grad()
    pretend()
    torch.cuda.get_device_capability = lambda *_: HOPPER
    torch.cuda.graph_pool_handle = lambda: None
    decoding.is_usual_arithmetic = lambda *_: True  # also of these stand-ins
    F.rms_norm = lambda x, shape, weight=None, eps=None: rms_norm(x, weight)
    F.scaled_dot_product_attention = lambda q, k, v, mask, **_: attention(q, k, v, mask)
    graphs.Recorded = Replayed
    found = {}
    for name, mode in MODES.items():
        found[name] = [launches(*mode, is_recorded) for is_recorded in (False, True)]
    print(json.dumps(found))
