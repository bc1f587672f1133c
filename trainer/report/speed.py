"""The work of a rank, its time, and the MFU (arXiv:2204.02311): how much arithmetic a batch needs, and how
much the device can do. Nothing here is saved, and nothing changes training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dataset.batch import Size
from trainer.devices.device import peak_memory_mb
from trainer.devices.process_group import reduce_sum, world_size

COUNTS = ("samples", "tokens", "flops", "wait", "comm")


class Meter:
    """Counts and times of this process. `wait` and `comm` are the seconds spent waiting for data and for
    other ranks. peak: floating-point operations per second that the device is known to reach."""

    def __init__(self, peak: float = 0.0):
        self.peak = peak
        self.updates = 0
        self.restart()

    def restart(self) -> None:
        """Begin a new interval; the time since the last record (saving, evaluating) does not count as
        training."""
        self.counts, self.begin = dict.fromkeys(COUNTS, 0.0), time.perf_counter()

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Add the time of the block to `wait` or `comm`."""
        begin = time.perf_counter()
        yield
        self.counts[kind] += time.perf_counter() - begin

    def count(self, sizes: list[Size]) -> None:
        """Note an update: the sizes of its micro-batches."""
        if self.updates == 0:
            self.first_update_at = time.perf_counter()
        self.updates += 1
        for name in ("samples", "tokens", "flops"):
            self.counts[name] += sum(getattr(size, name) for size in sizes)

    def speed_metrics(self, updates_left: int, device: torch.device) -> dict[str, Any]:
        """Speed and memory of all ranks since the last record. All ranks must call it (a collective)."""
        now = time.perf_counter()
        seconds = now - self.begin
        host = torch.tensor([*self.counts.values()], dtype=torch.float64)
        total = dict(zip(COUNTS, reduce_sum(host).tolist(), strict=True))
        self.restart()
        rate = total["flops"] / seconds / world_size()
        self.peak = max(self.peak, rate)
        of_update = (now - self.first_update_at) / (self.updates - 1) if self.updates > 1 else seconds
        metrics = {
            "tokens_per_second": total["tokens"] / seconds,
            "mfu": rate / self.peak if rate else None,  # unknown of a task of one's own
            "data_wait": total["wait"] / seconds / world_size(),
            "comm_wait": total["comm"] / seconds / world_size(),
            "seconds_left": of_update * updates_left,
            "memory_mb": peak_memory_mb(device),
        }
        if device.type == "cuda":
            metrics["reserved_mb"] = torch.cuda.max_memory_reserved(device) / 2**20  # also what is kept free
        return metrics
