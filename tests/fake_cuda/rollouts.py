"""Answers decoded on fake CUDA tensors: as updates.py, for `generate` of model/generation.py.

It prints, for each of MODES, what made the host wait for the device, and how often each operator ran in one
decode of eight tokens.
"""

import json
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from model import decoding, graphs
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from tests.fake_cuda.updates import CUDA, HOPPER, SHAPE, Recorder, pretend
from trainer.devices.wrapping import whole_model

PROMPTS, GROUP, NEW = [[3, 4, 5]] * 4 + [[6] * 9] * 2, 3, 17
MODES = {  # experts, dtype of the matrices, how tokens are drawn
    "sampled": (False, torch.bfloat16, Sampling(1.0)),
    "MoE": (True, torch.bfloat16, Sampling(1.0)),
    "greedy": (False, torch.bfloat16, Sampling(0.0)),
    "deterministic": (False, torch.bfloat16, Sampling(0.7, top_k=20)),
}


class Counting(Recorder):
    """Counts the operators, too."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += not func.is_view and func.namespace == "aten"
        return super().__torch_dispatch__(func, types, args, kwargs)


def decoded(use_moe: bool, dtype: torch.dtype, sampling: Sampling) -> dict:
    """The waits of a rollout, and the operators of one decode."""
    # there operators come one by one, as a GPU would launch them
    torch.inference_mode = lambda *_: torch.no_grad()
    from model.generation import Decoder, generate

    torch.cuda.get_device_capability = lambda *_: HOPPER
    recorder, counting = Counting(), Counting()

    def ones(shape: list[int]) -> Any:
        return [ones(shape[1:]) for _ in range(shape[0])] if shape else 1

    def read(tensor: torch.Tensor) -> Any:  # fake tensors cannot be read
        recorder.wait("read")
        return ones(list(tensor.shape))

    with FakeTensorMode(allow_non_fake_inputs=True), patch.object(FakeTensor, "tolist", read):
        with CUDA:
            trained = MiniMindForCausalLM(MiniMindConfig(**SHAPE, vocab_size=300, use_moe=use_moe))
        autocast = torch.autocast("cuda", dtype, enabled=dtype != torch.float32)
        model = whole_model(trained, dtype).eval()
        with recorder, autocast:
            generate(
                model, PROMPTS, [[sampling] * GROUP] * len(PROMPTS), NEW, [2], 6 * GROUP, with_logprobs=True
            )
            waits = len(recorder.waits)
            decoder = Decoder(model, 8, 64, [2], with_logprobs=True)
            decoder.add(PROMPTS[0], [sampling] * 8, NEW)
            decoder.step()
            decoder.step()
        with counting, autocast:
            decoder.decode(count=8)
    return {"waits": recorder.waits[:waits], "operators": counting.counts}


if __name__ == "__main__":
    decoding.is_usual_arithmetic = lambda *_: True  # an example needs numbers
    graphs.ENABLED = False  # there is nothing that records
    pretend()
    found = {}
    for name, mode in MODES.items():
        torch.use_deterministic_algorithms(name == "deterministic")
        found[name] = decoded(*mode)
    print(json.dumps(found))
