"""How much arithmetic a batch is and how much the device can do: the two sides of the MFU (arXiv:2204.02311)."""

import sys
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import psutil
import torch
from torch import Tensor

from model.model_minimind import MiniMindConfig
from trainer.trainer_utils import reduce_sum, world_size

try:
    import resource
except ImportError:  # Windows
    resource = None


def training_flops(config: MiniMindConfig, tokens: int, targets: int, cu_seqlens: Tensor) -> float:
    """Floating point operations of one forward and backward pass over a flat batch, real work only.

    Six per weight and token for the layers (two forward, four backward), six per weight and target for the head, and
    causal attention at half of the square. The embedding is a look-up and counts nothing.
    """
    c, d = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = c * d * (2 * heads + 2 * kv_heads)
    mlp = 3 * c * config.intermediate_size
    if config.use_moe:
        mlp = 3 * c * config.moe_intermediate_size * config.num_experts_per_tok + c * config.num_experts
    squares = float(cu_seqlens.diff().double().square().sum())  # cu_seqlens lies on the host
    products = 6.0 * config.num_hidden_layers * (tokens * (attention + mlp) + squares * heads * d)
    return products + 6.0 * targets * c * config.vocab_size


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int = 2048, rounds: int = 3) -> float:
    """Floating point operations per second that the device reaches in a square matrix product (best of `rounds`)."""
    size = size if device.type == "cpu" else 4 * size
    a = torch.ones(size, size, device=device, dtype=dtype)  # no random stream is touched
    best = 0.0
    for _ in range(rounds + 1):  # the first one warms up
        start = time.perf_counter()
        total = (a @ a).sum()
        total.item()  # wait for the device
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    if device.type == "cuda":  # leave no trace in the run's memory figures
        del a, total
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


class Meter:
    """Time, tokens and arithmetic since the last log point, counted on the host without waiting for the device."""

    def __init__(self):
        self.start = time.perf_counter()
        self.wait = self.flops = self.tokens = 0.0

    def fetch(self, batches: Iterable[dict], count: int) -> list[dict]:
        """The next `count` micro-batches; how long they kept us waiting is noted."""
        begin = time.perf_counter()
        window = list(islice(batches, count))
        self.wait += time.perf_counter() - begin
        return window

    def count(self, sizes: Iterable[Any]) -> None:
        """Note the sizes of the micro-batches that are about to be trained on."""
        for size in sizes:
            self.tokens += size.tokens
            self.flops += size.flops

    def read(self, state: Any) -> dict[str, float]:
        """Speed figures of all ranks since the last reading, and a new start. Waits for the device."""
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        seconds = time.perf_counter() - self.start
        host = torch.tensor([self.wait, self.flops, self.tokens], dtype=torch.float64)
        wait, flops, tokens = reduce_sum(host).tolist()
        state.seconds, state.clock = state.seconds + time.perf_counter() - state.clock, time.perf_counter()
        state.tokens += int(tokens)
        self.__init__()
        return {
            "tokens": state.tokens,
            "tokens_per_second": tokens / seconds,
            "mfu": flops / seconds / state.peak_flops,
            "data_wait": wait / seconds / world_size(),
            "seconds": state.seconds,
            "memory_mb": peak_memory_mb(state.device),
        }


def peak_memory_mb(device: torch.device) -> float:
    """Largest memory so far: of the GPU where there is one, else resident memory of this process, in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if resource is None:
        return psutil.Process().memory_info().peak_wset / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
