"""What a rank has done and where its time went. The meter only measures: nothing in it is saved or changes training."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch

from trainer.components.distributed import reduce_sum

COUNTS = ("updates", "micro_batches", "samples", "tokens", "pad_rows", "flops", "wait", "comm", "save", "evaluate")


class Size(NamedTuple):
    """The size of a micro-batch: its loss is a mean over targets, its auxiliary loss one over tokens."""

    targets: int
    tokens: int
    text_bytes: int = 0  # UTF-8 bytes that the targets spell; 0: bits per byte are not defined
    flops: float = 0.0
    samples: int = 0
    pad_rows: int = 0  # rows that the model adds on a CPU


class Meter:
    """Counts and times of this process, noted on the host without waiting for the device.

    `wait`, `comm`, `save` and `evaluate` are seconds: waiting for data, for other ranks, copying the state to be saved,
    evaluating. On a GPU, which runs behind the host, only waits count at whose end it was idle.
    """

    def __init__(self):
        self.wait = self.comm = self.save = self.evaluate = self.flops = 0.0
        self.updates = self.micro_batches = self.samples = self.tokens = self.pad_rows = 0
        self.times: Counter[str] = Counter()  # how often each kind was timed
        self.launched: torch.cuda.Event | None = None  # recorded behind the last update
        self.pace: deque[tuple[int, float]] = deque(maxlen=128)  # (updates, training clock) at log points
        self.restart()
        self.warm = self.mark

    def warmed(self) -> None:
        """Compilers and caches are warm: the pace is measured from here on."""
        self.warm = self.now()
        self.pace.clear()
        self.pace.append((self.updates, self.training_clock()))

    def restart(self) -> None:
        """Begin a new interval; what passed since the last reading (saving, evaluating) was not training."""
        self.mark = self.now()
        if not self.updates:
            self.pace.clear()
            self.pace.append((0, self.training_clock()))

    def now(self) -> dict[str, float]:
        """All counts, and the clock."""
        return {name: getattr(self, name) for name in COUNTS} | {"clock": time.perf_counter()}

    def training_clock(self) -> float:
        """A clock that stands still while the run saves or evaluates."""
        return time.perf_counter() - self.save - self.evaluate

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Add the time of the block to `wait`, `comm`, `save` or `evaluate`."""
        begin = time.perf_counter()
        yield
        busy = kind in ("wait", "comm") and self.launched is not None and not self.launched.query()
        seconds = 0.0 if busy else time.perf_counter() - begin
        setattr(self, kind, getattr(self, kind) + seconds)
        self.times[kind] += 1

    def fetch(self, batches: Iterable[dict], count: int) -> list[dict]:
        """The next `count` micro-batches, timed as `wait`."""
        with self.timing("wait"):
            return list(islice(batches, count))

    def count(self, sizes: list[Size], device: torch.device) -> None:
        """Note an update that was launched: the sizes of its micro-batches."""
        self.updates += 1
        self.micro_batches += len(sizes)
        for name in ("samples", "tokens", "pad_rows", "flops"):
            setattr(self, name, getattr(self, name) + sum(getattr(size, name) for size in sizes))
        if device.type == "cuda":
            self.launched = torch.cuda.Event()
            self.launched.record()

    def totals(self, device: torch.device, mark: dict[str, float]) -> dict[str, float]:
        """Counts since a mark, summed over all ranks; `clock` is the seconds passed on this rank. Sync point."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = self.now()
        host = torch.tensor([now[name] - mark[name] for name in COUNTS], dtype=torch.float64)
        return dict(zip(COUNTS, reduce_sum(host).tolist(), strict=True)) | {"clock": now["clock"] - mark["clock"]}

    def read(self, device: torch.device) -> dict[str, float]:
        """`totals` since the last reading; a new interval begins."""
        total = self.totals(device, self.mark)
        self.pace.append((self.updates, self.training_clock()))
        self.restart()
        return total


def seconds_left(state: Any) -> float:
    """Estimate of the seconds that the rest of the run takes (`state`: a TrainState).

    The updates left at the pace of the last 128 log points (without the first updates, once there are others), the
    evaluations left at what one has cost, and likewise the saves. The cost of a first evaluation is guessed: a third of
    the time in which as many samples are trained.
    """
    args, meter = state.args, state.meter
    done, since = meter.pace[0]
    pace = (meter.training_clock() - since) / max(1, meter.updates - done)
    seconds = pace * (state.total_updates - state.update)
    costs = {kind: getattr(meter, kind) / (meter.times[kind] or 1) for kind in ("save", "evaluate")}
    if not meter.times["evaluate"] and meter.samples and hasattr(state.eval_loader, "__len__"):
        held_out = len(state.eval_loader) * args.batch_size
        costs["evaluate"] = held_out * pace * meter.updates / meter.samples / 3
    intervals = {"save": args.save_interval}
    if state.eval_loader is not None:
        intervals["evaluate"] = args.eval_interval
    for kind, interval in intervals.items():
        per_epoch, done_here = (
            events(interval, step, state.iters, args.accumulation_steps) for step in (state.iters, state.step)
        )
        seconds += costs[kind] * (per_epoch * (args.epochs - state.epoch) - done_here)
    return seconds


def events(interval: int, step: int, iters: int, accumulation_steps: int) -> int:
    """Saves or evaluations of an epoch up to a micro-batch: one per `interval` (0: none), and one at its end."""
    every = max(interval, accumulation_steps) if interval else iters
    return math.ceil(step / every) if step >= iters else step // every
