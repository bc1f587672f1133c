"""The process group: joining and leaving it, and what the ranks tell each other."""

import gc
import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError, reason
from common.launcher import launch
from common.machine import available_cores

RENDEZVOUS_TIMEOUT = timedelta(days=1)
T = TypeVar("T")


def this_rank() -> int:
    """Number of this process among the ranks; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main_process() -> bool:
    """True on rank 0, and without a process group."""
    return this_rank() == 0


def Logger(text: str) -> None:
    """Print one line, on rank 0 only."""
    if is_main_process():
        print(text, flush=True)


def reduce_sum(values: Tensor) -> Tensor:
    """Sum over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gather(value: Any) -> list[Any]:
    """The value of each rank, by rank; plain Python objects, over gloo."""
    everyone = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(everyone, value)
    return everyone


def init_distributed_mode(rank_timeout: float = 600) -> int:
    """Join the process group that the environment describes: gloo for CPU tensors, NCCL for CUDA ones.

    Args:
        rank_timeout: seconds that a rank waits in a collective until it takes its peer for lost; a network that is cut
            off gives no other sign. The rendezvous itself waits a day, since one machine may still be tokenising what
            another one has in its cache.

    Returns:
        The local rank; 0 without a process group (a single process).

    Raises:
        UserError: the environment does not tell the ranks, or they cannot meet.
    """
    place = launch()
    if place.problem:
        raise UserError(place.problem)
    if place.world_size == 1:
        return 0
    local_rank = place.local_rank
    if torch.cuda.is_available():
        torch.cuda.set_device(min(local_rank, torch.cuda.device_count() - 1))  # select_device refuses too many ranks
    elif place.local_world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun's own default
        torch.set_num_threads(max(1, available_cores() // place.local_world_size))  # share the cores instead
    try:
        store = _interruptible(lambda: _meet(place.rank, place.world_size))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        timeout = timedelta(seconds=rank_timeout)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    except RuntimeError as error:  # dist.DistNetworkError and its like
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"the ranks cannot meet at {where} ({reason(error)}); if the port is taken give torchrun another "
            "--master_port, or --standalone on one machine"
        ) from error
    return local_rank


def _meet(rank: int, ranks: int) -> dist.Store:
    """Wait for all ranks; returns the store over which they found each other."""
    store, *_ = next(dist.rendezvous("env://", rank, ranks, timeout=RENDEZVOUS_TIMEOUT))
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(ranks)], RENDEZVOUS_TIMEOUT)
    return store


def _interruptible(work: Callable[[], T]) -> T:
    """Call `work` in a thread: a signal does not interrupt torch's waiting, but it does the main thread's."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    thread = Thread(target=call, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    return future.result()


def leave_process_group() -> None:
    """Destroy the process group, all ranks together. Call it when no DDP-wrapped model is referenced any more.

    DDP's reducer must be freed before the group: freed after it, it joins gloo's threads while it holds the interpreter
    lock that they need to release their last tensors (a deadlock seen once in some dozen runs).
    """
    if dist.is_initialized():
        dist.barrier()
        gc.collect()
        dist.destroy_process_group()
