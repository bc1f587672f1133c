"""What a rank has done and where its time went. The meter only measures: nothing in it is saved or changes
training."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import torch

from trainer.devices.process_group import reduce_sum

COUNTS = ("samples", "tokens", "flops", "wait", "comm")


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
        if not self.updates:  # nor was what came before the first update
            self.pace[0] = (0, self.begin)

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Add the time of the block to `wait` or `comm`."""
        begin = time.perf_counter()
        yield
        is_busy = self.launched is not None and not self.launched.query()
        self.counts[kind] += 0.0 if is_busy else time.perf_counter() - begin

    def fetch(self, batches: Iterable[dict], count: int) -> list[dict]:
        """The next `count` micro-batches, timed as `wait`."""
        with self.timing("wait"):
            return list(islice(batches, count))

    def count(self, sizes: list[Size], device: torch.device) -> None:
        """Note an update that was launched: the sizes of its micro-batches."""
        self.updates += 1
        for name in ("samples", "tokens", "flops"):
            self.counts[name] += sum(getattr(size, name) for size in sizes)
        if device.type == "cuda":
            self.launched = torch.cuda.Event()
            self.launched.record()

    def read(self, device: torch.device) -> dict[str, float]:
        """Counts since the last reading, summed over all ranks; `clock` is the seconds passed on this rank. A
        new interval begins. Sync point."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        host = torch.tensor([*self.counts.values()], dtype=torch.float64)
        seconds = time.perf_counter() - self.begin
        self.pace.append((self.updates, time.perf_counter()))
        self.restart()
        return dict(zip(COUNTS, reduce_sum(host).tolist(), strict=True)) | {"clock": seconds}

    def seconds_left(self, updates_left: int) -> float:
        """Estimate of the seconds that so many updates take, at the pace of the last 128 log points: with the
        saves and evaluations between them."""
        updates, since = self.pace[0]
        return (time.perf_counter() - since) / max(1, self.updates - updates) * updates_left
