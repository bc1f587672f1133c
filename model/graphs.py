"""CUDA graphs: a step that is made again and again is recorded once, with all its kernels, and then launched
as one. A recorded step reads and writes the same memory each time, so it must be a function of tensors that
stay where they are; whatever else it used, such as the number of rows, is fixed.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from common.errors import reason, warn

ENABLED = True  # False: every step is launched kernel by kernel
CALLS_BEFORE_RECORDING = 16  # of a kind of step: to record it takes as long as so many replays save
MAX_RECORDINGS = 256  # that a decoder keeps

Step = Callable[[], Tensor]


class Recorded:
    """A step, recorded in a pool of memory. Raises RuntimeError if it cannot be, as when it would wait for
    the device."""

    def __init__(self, step: Step, pool: Any):
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # another thread may allocate memory meanwhile, as a server does that loads a model
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.result = step()
        finally:
            torch.cuda.set_stream(stream)  # where it fails, torch leaves the one on which it recorded

    def replay(self) -> Tensor:
        """Make the step; returns its result, which the next call overwrites."""
        self.graph.replay()
        return self.result


class Graphs:
    """The recorded steps of a decoder, in one pool of memory, which is freed with them.

    A kind of step is recorded after CALLS_BEFORE_RECORDING calls, so whether a step is replayed follows from
    the calls alone. If one cannot be recorded, that is said, once in a process, and from then on all steps
    of the decoder are launched kernel by kernel."""

    has_warned = False

    def __init__(self) -> None:
        self.recorded: dict[Hashable, Recorded] = {}
        self.calls: Counter[Hashable] = Counter()
        self.pool: Any = None
        self.failed = False

    def run(self, kind: Hashable, step: Step) -> Tensor:
        """The result of a step; steps of one kind work on the same tensors."""
        if kind in self.recorded:
            return self.recorded[kind].replay()
        self.calls[kind] += 1
        if self.failed or self.calls[kind] <= CALLS_BEFORE_RECORDING:
            return step()
        if not self._record(kind, step):
            return step()
        return self.recorded[kind].replay()

    def _record(self, kind: Hashable, step: Step) -> bool:
        try:
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            self.recorded[kind] = Recorded(step, self.pool)
        except Exception as error:
            self.failed = True
            if not Graphs.has_warned:
                Graphs.has_warned = True
                warn(f"decoding launches its kernels one by one: no CUDA graph can be made: {reason(error)}")
        return not self.failed

    def clear(self) -> None:
        """Forget all steps."""
        self.recorded.clear()
        self.calls.clear()


def rows_class(rows: int, most: int) -> int:
    """With how many rows a step of so many is recorded: few numbers, so that few steps are."""
    padded = rows + -rows % 8
    for small in (1, 2, 4):
        if rows <= small:
            padded = small
            break
    return min(padded, most)


def length_class(length: int, most: int) -> int:
    """Up to where a step of so many tokens is recorded to look back."""
    block = 256 if length <= 2048 else 2048
    return min(length + -length % block, most)
