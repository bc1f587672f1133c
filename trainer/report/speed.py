"""What a rank has done, where its time went, and the two sides of the MFU (arXiv:2204.02311): how much
arithmetic a batch is, and how much the device can do. Nothing here is saved, or changes training."""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from trainer.devices.device import autocast_dtype, matrix_rate, peak_memory_mb, reserved_memory_mb
from trainer.devices.process_group import reduce_sum, world_size

if TYPE_CHECKING:
    from model.model_minimind import MiniMindConfig

COUNTS = ("samples", "tokens", "flops", "wait", "comm")
# by the makers' data sheets: dense products in bfloat16 or float16 with float32 sums, TFLOP/s; memory, GB;
# what torch calls it, behind "NVIDIA "
GPUS = {
    "rtx3090": (71, 24, "GeForce RTX 3090"),
    "rtx4060": (30, 8, "GeForce RTX 4060"),
    "rtx4090": (165, 24, "GeForce RTX 4090"),
    "a100": (312, 80, "A100.*"),
    "l40s": (362, 48, "L40S"),
    "h100": (989, 80, "H100 80GB HBM3"),
    "h200": (989, 141, "H200"),
}
# seconds until the rate is measured again, then at twice the age and so on: less than 1 % of them
REMEASURE_AFTER = 60.0


class Size(NamedTuple):
    """The size of a micro-batch: its loss is a mean over targets, its auxiliary loss one over tokens."""

    targets: int
    tokens: int
    text_bytes: int = 0  # UTF-8 bytes that the targets spell; 0: bits per byte are not defined
    flops: float = 0.0
    samples: int = 0


class Meter:
    """Counts and times of this process, noted on the host without waiting for the device.

    `wait` and `comm` are seconds of waiting for data and for other ranks. On a GPU, which runs behind the
    host, only waits count at whose end it was idle.
    """

    def __init__(self):
        self.updates = 0
        self.launched: torch.cuda.Event | None = None  # recorded behind the last update
        self.pace = deque([(0, time.perf_counter())], maxlen=128)  # (updates, clock) at log points
        self.restart()

    def restart(self) -> None:
        """Begin a new interval; what passed since the last reading (saving, evaluating) was not training."""
        self.counts, self.begin = dict.fromkeys(COUNTS, 0.0), time.perf_counter()
        if not self.updates:  # what came before the first update was no training, either
            self.pace[0] = (0, self.begin)

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Add the time of the block to `wait` or `comm`."""
        begin = time.perf_counter()
        yield
        is_busy = self.launched is not None and not self.launched.query()
        self.counts[kind] += 0.0 if is_busy else time.perf_counter() - begin

    def count(self, sizes: list[Size], device: torch.device) -> None:
        """Note an update that was launched: the sizes of its micro-batches."""
        self.updates += 1
        for name in ("samples", "tokens", "flops"):
            self.counts[name] += sum(getattr(size, name) for size in sizes)
        if device.type == "cuda":
            self.launched = torch.cuda.Event()
            self.launched.record()

    def wait_for_device(self) -> None:
        """Wait until the GPU has made the last update, on all ranks. Sync point, and a collective over gloo.

        Before the host reads from the GPU: where another rank is gone, NCCL's kernel, and so the read, would
        wait for the timeout of the process group; gloo notices at once."""
        if self.launched is None or world_size() == 1:
            return
        pause = 0.001
        while reduce_sum(torch.tensor(0.0 if self.launched.query() else 1.0)):
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def seconds_per_update(self) -> float:
        """At the pace of the last 128 log points, with the saves and evaluations between them."""
        updates, since = self.pace[0]
        return (time.perf_counter() - since) / max(1, self.updates - updates)


def read_meter(state: Any) -> dict[str, Any]:
    """Advance the run's tokens and seconds; returns the speed figures of all ranks since the last reading. A
    new interval begins. Sync point."""
    meter = state.meter
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)
    now = time.perf_counter()
    seconds = now - meter.begin  # on this rank
    host = torch.tensor([*meter.counts.values()], dtype=torch.float64)
    total = dict(zip(COUNTS, reduce_sum(host).tolist(), strict=True))
    meter.pace.append((meter.updates, now))
    meter.restart()
    state.tokens += int(total["tokens"])
    state.seconds, state.clock = state.seconds + now - state.clock, now
    rate = total["flops"] / seconds / world_size()
    figures = {
        "tokens": state.tokens,
        "tokens_per_second": total["tokens"] / seconds,
        "mfu": state.peak.share(rate),
        "data_wait": total["wait"] / seconds / world_size(),
        "comm_wait": total["comm"] / seconds / world_size(),
        "seconds": state.seconds,
        "seconds_left": meter.seconds_per_update() * (state.total_updates - state.update),
        "memory_mb": peak_memory_mb(state.device),
    }
    if state.peak.data_sheet_rate:
        figures["mfu_of_sheet"] = rate / state.peak.data_sheet_rate
    if state.device.type == "cuda":
        figures["reserved_mb"] = reserved_memory_mb(state.device)
    return figures


def training_flops(
    config: "MiniMindConfig",
    tokens: int,
    targets: int,
    cu_seqlens: np.ndarray,
    cu_seqlens_k: np.ndarray | None = None,
) -> float:
    """Floating-point operations of the forward and backward pass over a flat batch, without padding rows.

    Six per weight and token for the layers (two forward, four backward), six per weight and target for the
    head, and causal attention at half of the square. The embedding is a look-up and counts nothing.
    `cu_seqlens` [S + 1] as arrays of the host, and `cu_seqlens_k` if samples see more keys than their own.
    """
    c, d = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = c * d * (2 * heads + 2 * kv_heads)
    mlp = 3 * c * config.intermediate_size
    if config.use_moe:
        mlp = 3 * c * config.moe_intermediate_size * config.num_experts_per_tok + c * config.num_experts
    own = np.diff(cu_seqlens).astype(np.float64)
    seen = own if cu_seqlens_k is None else np.diff(cu_seqlens_k).astype(np.float64)
    squares = float((seen**2 - (seen - own) ** 2).sum())
    products = 6.0 * config.num_hidden_layers * (tokens * (attention + mlp) + squares * heads * d)
    return products + 6.0 * targets * c * config.vocab_size


def layer_weights(layers: int, width: int) -> float:
    """Roughly the weights of so many dense layers, all of which a token meets."""
    return 12.0 * layers * width**2


@dataclass
class PeakRate:
    """The highest rate that this rank has reached, floating-point operations per second: of matrix products,
    measured now and then between updates, or of training itself. One measurement alone is of a moment, in
    which a CPU was busy or a GPU had an idle clock."""

    best: float = math.inf
    measure: Callable[[], float] | None = None
    data_sheet_rate: float | None = None  # of this GPU by its data sheet
    begin: float = field(default_factory=time.perf_counter)
    next_measurement_at: float = REMEASURE_AFTER  # its age then, in seconds

    def remeasure_if_due(self) -> None:
        """Measure once more, if that is due and there is memory for it."""
        age = time.perf_counter() - self.begin
        if self.measure is not None and age >= self.next_measurement_at:
            self.next_measurement_at = 2 * age
            with suppress(torch.OutOfMemoryError):
                self.best = max(self.best, self.measure())

    def share(self, rate: float) -> float:
        """The MFU of training at this rate."""
        self.best = max(self.best, rate)
        return rate / self.best


def peak_rate(autocast: AbstractContextManager, device: torch.device) -> PeakRate:
    """The rate of this rank's device in the dtype of the run's matrix products, measured for the first
    time."""
    dtype = autocast_dtype(autocast, device)
    peak = PeakRate(matrix_rate(device, dtype), lambda: matrix_rate(device, dtype))
    if device.type == "cuda":
        if dtype.itemsize == 2:
            peak.data_sheet_rate = data_sheet_rate(torch.cuda.get_device_name(device))
        # leave no trace in the run's memory figures
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return peak


def data_sheet_rate(name: str) -> float | None:
    """Floating-point operations per second in half precision of the GPU that torch calls so, if its sheet is
    known."""
    for rate, _, pattern in GPUS.values():
        if re.fullmatch(f"NVIDIA {pattern}", name):
            return rate * 1e12
    return None
