"""How much arithmetic a batch is and how much the device can do: the two sides of the MFU (arXiv:2204.02311)."""

import math
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


def autocast_dtype(autocast: AbstractContextManager, device: torch.device) -> torch.dtype:
    """The dtype that matrices are multiplied in under this context."""
    with autocast:
        return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32


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


COUNTS = ("updates", "micro_batches", "samples", "tokens", "filler", "flops", "wait", "comm", "save", "evaluate")


class Meter:
    """What this process has done so far and what its time went into, noted on the host without waiting for the device.

    `wait`, `comm`, `save` and `evaluate` are seconds: waiting for data, for other ranks, taking the copies that are
    saved, evaluating. On a GPU, which is behind the host, only those waits count at whose end it was idle.
    `read` tells of the time since the mark that `restart` sets.
    """

    def __init__(self):
        self.wait = self.comm = self.save = self.evaluate = self.flops = 0.0
        self.updates = self.micro_batches = self.samples = self.tokens = self.filler = 0
        self.times: Counter[str] = Counter()  # how often something was timed
        self.launched: torch.cuda.Event | None = None  # behind the device's last update
        self.pace: deque[tuple[int, float]] = deque(maxlen=128)  # (updates, clock of training) at log points
        self.restart()
        self.warm = self.mark

    def warmed(self) -> None:
        """From here on the pace is that of the rest."""
        self.warm = self.now()
        self.pace.clear()
        self.pace.append((self.updates, self.training_clock()))

    def restart(self) -> None:
        """Start anew: what passed since the last reading (saving, evaluating) is not training time."""
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
        """Note the time of what is done under it as `kind`, one of the seconds above."""
        begin = time.perf_counter()
        yield
        busy = kind in ("wait", "comm") and self.launched is not None and not self.launched.query()
        seconds = 0.0 if busy else time.perf_counter() - begin
        setattr(self, kind, getattr(self, kind) + seconds)
        self.times[kind] += 1

    def fetch(self, batches: Iterable[dict], count: int) -> list[dict]:
        """The next `count` micro-batches; how long they kept us waiting is noted."""
        with self.timing("wait"):
            return list(islice(batches, count))

    def count(self, sizes: list[Any]) -> None:
        """Note an update: the sizes of its micro-batches."""
        self.updates += 1
        self.micro_batches += len(sizes)
        for name in ("samples", "tokens", "filler", "flops"):
            setattr(self, name, getattr(self, name) + sum(getattr(size, name) for size in sizes))

    def launch(self, device: torch.device) -> None:
        """The device has got all of an update."""
        if device.type == "cuda":
            self.launched = torch.cuda.Event()
            self.launched.record()

    def totals(self, state: Any, mark: dict[str, float]) -> dict[str, float]:
        """Counts since a mark: sums over all ranks, but for `clock`, the seconds passed here. Waits for the device."""
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        now = self.now()
        host = torch.tensor([now[name] - mark[name] for name in COUNTS], dtype=torch.float64)
        return dict(zip(COUNTS, reduce_sum(host).tolist(), strict=True)) | {"clock": now["clock"] - mark["clock"]}

    def read(self, state: Any) -> dict[str, float]:
        """Speed figures of all ranks since the last reading, and a new start. Waits for the device."""
        total = self.totals(state, self.mark)
        seconds = total["clock"]
        state.seconds, state.clock = state.seconds + time.perf_counter() - state.clock, time.perf_counter()
        state.tokens += int(total["tokens"])
        self.pace.append((self.updates, self.training_clock()))
        self.restart()
        return {
            "tokens": state.tokens,
            "tokens_per_second": total["tokens"] / seconds,
            "mfu": total["flops"] / seconds / state.peak_flops,
            "data_wait": total["wait"] / seconds / world_size(),
            "comm_wait": total["comm"] / seconds / world_size(),
            "seconds": state.seconds,
            "seconds_left": seconds_left(state),
            "memory_mb": peak_memory_mb(state.device),
        }


def events(interval: int, step: int, state: Any) -> int:
    """How many saves or evaluations an epoch has up to a micro-batch: each `interval`, and at its end."""
    every = max(interval, state.args.accumulation_steps) if interval else state.iters
    return math.ceil(step / every) if step >= state.iters else step // every


def seconds_left(state: Any) -> float:
    """Seconds that the rest of the run will take.

    The updates left at the pace of the last 128 log points (not of the first updates, once there are others),
    the evaluations left at what one has cost, and likewise the saves. A first evaluation is guessed: a third of the
    time in which as many samples are trained.
    """
    args, meter = state.args, state.meter
    done, since = meter.pace[0]
    pace = (meter.training_clock() - since) / max(1, meter.updates - done)
    seconds = pace * (state.total_updates - state.update)
    costs = {kind: getattr(meter, kind) / (meter.times[kind] or 1) for kind in ("save", "evaluate")}
    if not meter.times["evaluate"] and meter.samples and hasattr(state.eval_loader, "__len__"):
        held_out = len(state.eval_loader) * args.batch_size
        costs["evaluate"] = held_out * pace * meter.updates / meter.samples / 3
    intervals = {"save": args.save_interval} | (
        {"evaluate": args.eval_interval} if state.eval_loader is not None else {}
    )
    for kind, interval in intervals.items():
        whole = events(interval, state.iters, state)
        seconds += costs[kind] * (args.epochs * whole - state.epoch * whole - events(interval, state.step, state))
    return seconds


def peak_memory_mb(device: torch.device) -> float:
    """Largest memory so far: of the GPU where there is one, else resident memory of this process, in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if resource is None:
        return psutil.Process().memory_info().peak_wset / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
