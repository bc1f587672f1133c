"""The process group: joining and leaving it, exchanges between the ranks, and noticing that one of them is
gone."""

import gc
import socket
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError, reason, say

RENDEZVOUS_TIMEOUT = timedelta(days=1)
CLEANUP_TIMEOUT = 5.0  # seconds
MEETING_INTERVAL = 0.05  # seconds between two looks at torchrun's store
# in the messages of gloo and NCCL (torch 2.11 to 2.13) when a peer is gone: there is no exception type of its
# own
LOST_PEER_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out wait",
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
    "remote process exited",
    "Socket closed",
    "recvValue failed",
    "sendBytes failed",
    "communicator was aborted",
)
ANSWER_TIMEOUT = 5.0  # seconds for ranks to say that they are alive
MAX_NAMED_RANKS = 8  # lost ranks that a message names
_store: dist.Store | None = None  # where the ranks have met


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
    """Print one line, on rank 0 only, escaping what a terminal would obey."""
    if is_main_process():
        say(text)


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


def meet() -> None:
    """Wait for all ranks, over gloo: NCCL's barrier would wait for the GPUs."""
    reduce_sum(torch.zeros(()))


def lost_rank_message(error: Exception) -> str:
    """The error line for a failed collective, with the ranks that do not say within ANSWER_TIMEOUT seconds
    that theirs failed as well. If the store cannot be reached, they are not known."""
    silent: list[str] = []

    def ask() -> None:
        with suppress(RuntimeError):
            silent.extend(_silent_ranks())

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT + 2)
    names = silent[:MAX_NAMED_RANKS]
    if len(silent) > MAX_NAMED_RANKS:
        names.append(f"{len(silent) - MAX_NAMED_RANKS} more")
    what = "ended while this one waited for it, hangs, or cannot be reached"
    then = "the reason is what that rank or torchrun says; --from_resume 1 goes on from the last checkpoint"
    return f"rank {dist.get_rank()}: {', '.join(names) or 'another rank'} {what} ({reason(error)}); {then}"


def _silent_ranks() -> list[str]:
    """The ranks, with their machines, that have not come here soon after this one."""
    assert _store is not None
    store = _store
    store.set(f"failed/{dist.get_rank()}", "")
    time.sleep(ANSWER_TIMEOUT)

    def absent(ranks: range) -> list[int]:
        """Halves what is asked for: of 1,000 ranks it takes 20 questions to find one."""
        if store.check([f"failed/{rank}" for rank in ranks]):
            return []
        middle = len(ranks) // 2
        return absent(ranks[:middle]) + absent(ranks[middle:]) if middle else list(ranks)

    return [
        f"rank {rank} ({store.get(f'host/{rank}').decode()})" for rank in absent(range(dist.get_world_size()))
    ]


def join_process_group(rank: int, ranks: int, backend: str, timeout: timedelta) -> None:
    """Wait for all ranks, for a day: one machine may still be tokenising what another one has in its cache.
    Then make the process group, whose collectives wait for `timeout`.

    torchrun's store outlives the processes that `--max-restarts` replaces, so the keys of each attempt have
    its number as prefix. TORCHELASTIC_RESTART_COUNT cannot be that number: it differs between machines."""
    global _store
    torch_store, *_ = next(dist.rendezvous("env://", rank, ranks, timeout=RENDEZVOUS_TIMEOUT))
    attempt = new_attempt(torch_store, ranks) if rank == 0 else attempt_of_first_rank(torch_store, rank)
    store = dist.PrefixStore(str(attempt), torch_store)
    store.set_timeout(timeout)
    store.set(f"host/{rank}", socket.gethostname())
    _store = store
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def new_attempt(store: dist.Store, ranks: int) -> int:
    """On rank 0: the number of this attempt. It waits until the other ranks have registered for it, each
    under a name of its own, and then lists their names."""
    attempt = store.add("attempts", 1)
    registered = [f"{attempt}/{other}" for other in range(1, ranks)]
    store.wait(registered, RENDEZVOUS_TIMEOUT)
    store.set(f"{attempt}/names", " ".join(store.get(key).decode() for key in registered))
    return attempt


def attempt_of_first_rank(store: dist.Store, rank: int) -> int:
    """On the other ranks: the number of rank 0's attempt. They register for the latest one under a random
    name, until rank 0 has listed that name: then it is not one of a rank 0 that was replaced."""
    name, attempt, deadline = uuid.uuid4().hex, 0, time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        latest = store.add("attempts", 0)
        if latest > attempt:
            attempt = latest
            store.set(f"{attempt}/{rank}", name)
        names_key = f"{attempt}/names"
        if store.check([names_key]) and name in store.get(names_key).decode():
            return attempt
        time.sleep(MEETING_INTERVAL)
    raise dist.DistStoreError("rank 0 is missing")


def check_gpus_differ() -> None:
    """Refuse ranks that share a GPU, as NCCL would in the middle of the first update."""
    gpus = gather(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    for rank, gpu in enumerate(gpus):
        other = gpus.index(gpu)
        if other < rank:
            raise UserError(
                f"ranks {other} and {rank} have the same GPU, {gpu}; start one process per GPU, or have the "
                "launcher show each its own (srun --gpus-per-task=1)"
            )


def interruptible(work: Callable[[], None]) -> None:
    """Call `work` in a thread: a signal does not interrupt torch's waiting, but it does the main thread's."""
    future: Future[None] = Future()

    def call() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    thread = Thread(target=call, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    future.result()


def leave_process_group(error: BaseException | None = None) -> None:
    """Destroy the process group, all ranks together. Call it when no DDP-wrapped model is referenced any
    more.

    error: what ends this rank. Others may be gone then, so it is waited for no longer than CLEANUP_TIMEOUT.

    DDP's reducer must be freed before the group: freed after it, it joins gloo's threads while it holds the
    interpreter lock that they need to release their last tensors (a deadlock seen once in some dozen runs).
    """
    if not dist.is_initialized():
        return
    failed = error is not None
    if not failed:
        meet()
    while error is not None:  # what failed holds the DDP-wrapped model in its local variables
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.unfreeze()
    gc.collect()
    thread = Thread(target=dist.destroy_process_group, daemon=True)
    thread.start()
    thread.join(CLEANUP_TIMEOUT if failed else None)
