"""Answers of the shape of PPO's rollouts, decoded on fake tensors: 16 prompts of 20 to 90 tokens, one answer
each.

It prints, for each of MODES, the devices of the tensors that met in operators, and how long the answers are.
"""

import json
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from tests.fake_cuda.updates import SHAPE, Recorder, pretend
from trainer.devices.wrapping import decoding_model

PROMPTS = [[3] * n for n in range(20, 95, 5)] + [[4] * 90]
NEW, SLOTS, STOP = 6, 5, 2
MODES = {  # device, experts, dtype of the matrices, how tokens are drawn
    "cuda:0": ("cuda:0", False, torch.bfloat16, Sampling()),
    "cuda:1": ("cuda:1", False, torch.float32, Sampling(0.7, top_k=20, top_p=0.9)),
    "cuda:1 greedy": ("cuda:1", True, torch.bfloat16, Sampling(0.0)),
    "mps": ("mps:0", True, torch.bfloat16, Sampling()),  # rows are padded there
}


class Meetings(Recorder):
    """Notes which devices the tensors of an operator are on, copies between devices left out."""

    def __init__(self):
        super().__init__()
        self.devices: set[str] = set()
        self.numbers = count()

    def read(self, tensor: Tensor) -> list[float]:
        """Tokens, of which every seventh ends its answer, or their log-probabilities."""
        is_token = not tensor.is_floating_point()
        return [STOP if is_token and next(self.numbers) % 7 == 6 else 3 for _ in range(len(tensor))]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if is_host and not any(isinstance(each, FakeTensor) for each in tensors):
            with unset_fake_temporarily():  # the host's own tensors have numbers
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return True  # all is finite
        out = func(*args, **kwargs)
        if func._opname not in ("_to_copy", "copy_"):
            tensors += [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.devices.add(" and ".join(sorted({str(each.device) for each in tensors})))
        return out


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """`F.scaled_dot_product_attention`, of which the stand-in has no kernel for a Mac's GPU."""
    return torch.empty_like(q * (k.sum() + v.sum() + mask.sum()), dtype=v.dtype)


def decoded(device: str, use_moe: bool, dtype: torch.dtype, sampling: Sampling) -> dict:
    """What there is to know of a rollout."""
    from model.generation import generate

    meetings = Meetings()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        model = MiniMindForCausalLM(MiniMindConfig(**SHAPE, vocab_size=300, use_moe=use_moe))
    with FakeTensorMode(allow_non_fake_inputs=True):
        whole: Any = decoding_model(model.eval(), dtype)
        with meetings, torch.autocast(device.partition(":")[0], dtype, enabled=dtype != torch.float32):
            groups = generate(whole, PROMPTS, [[sampling]] * len(PROMPTS), NEW, [STOP], SLOTS)
    answers = [answer for group in groups for answer in group]
    return {"devices": sorted(meetings.devices), "lengths": [len(answer.tokens) for answer in answers]}


if __name__ == "__main__":
    torch.inference_mode = lambda *_: torch.no_grad()  # there operators come one by one
    pretend()
    functional.scaled_dot_product_attention = attention
    # the stand-in knows the first GPU only
    Tensor.new_tensor = lambda like, data: torch.tensor(data, dtype=like.dtype, device=like.device)
    print(json.dumps({name: decoded(*mode) for name, mode in MODES.items()}))
