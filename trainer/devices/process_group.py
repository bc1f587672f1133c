"""The process group: joining and leaving it, exchanges between the ranks, and noticing that one of them is
gone."""

import gc
import os
import socket
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError, reason, say
from common.launcher import available_cores, launch

RENDEZVOUS_TIMEOUT = timedelta(days=1)
CLEANUP_PATIENCE = 5.0  # seconds
MEETING_INTERVAL = 0.05  # seconds between two looks at torchrun's store
# in the messages of gloo and NCCL (torch 2.11 to 2.13) when a peer is gone: there is no exception type of its
# own
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
LOST += ("Timed out wait", "Connection timed out", "No route to host", "Network is unreachable")
LOST += (
    "remote process exited",
    "Socket closed",
    "recvValue failed",
    "sendBytes failed",
    "communicator was aborted",
)
ANSWER, NAMED = 5.0, 8  # seconds for ranks to say that they are alive; lost ranks that are named
T = TypeVar("T")
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
    """The error line for a failed collective, with the ranks that do not say within ANSWER seconds that
    theirs failed as well. If the store cannot be reached, they are not known."""
    silent: list[str] = []

    def ask() -> None:
        with suppress(RuntimeError):
            silent.extend(_silent_ranks())

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER + 2)
    names = silent[:NAMED]
    if len(silent) > NAMED:
        names.append(f"{len(silent) - NAMED} more")
    what = "ended while this one waited for it, hangs, or cannot be reached"
    then = "the reason is what that rank or torchrun says; --from_resume 1 goes on from the last checkpoint"
    return f"rank {dist.get_rank()}: {', '.join(names) or 'another rank'} {what} ({reason(error)}); {then}"


def _silent_ranks() -> list[str]:
    """The ranks, with their machines, that have not come here soon after this one."""
    assert _store is not None
    store = _store
    store.set(f"failed/{dist.get_rank()}", "")
    time.sleep(ANSWER)

    def absent(ranks: range) -> list[int]:
        """Halves what is asked for: of 1,000 ranks it takes 20 questions to find one."""
        if store.check([f"failed/{rank}" for rank in ranks]):
            return []
        middle = len(ranks) // 2
        return absent(ranks[:middle]) + absent(ranks[middle:]) if middle else list(ranks)

    return [
        f"rank {rank} ({store.get(f'host/{rank}').decode()})" for rank in absent(range(dist.get_world_size()))
    ]


def init_distributed_mode(rank_timeout: float = 600, device: torch.device | None = None) -> int:
    """Join the process group that the environment describes: gloo for CPU tensors, NCCL for CUDA ones.

    Args:
        device: of this rank; by default a GPU if there is one. Without one CUDA is not touched.
        rank_timeout: seconds that a rank waits in a collective until it takes its peer for lost; a network
            that is cut off gives no other sign. The rendezvous itself waits a day, since one machine may
            still be tokenising what another one has in its cache.

    Returns:
        The local rank; 0 without a process group (a single process).

    Raises:
        UserError: the environment does not say which rank this is, the ranks cannot meet, or two share a GPU.
    """
    global _store
    place = launch()
    if place.problem:
        raise UserError(place.problem)
    if place.world_size == 1:
        return 0
    local_rank = place.local_rank
    on_gpu = device.type == "cuda" if device is not None else torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(min(local_rank, torch.cuda.device_count() - 1) if device is None else device)
    # torchrun's own default
    elif place.local_world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, available_cores() // place.local_world_size))  # share the cores instead
    try:
        timeout = timedelta(seconds=rank_timeout)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        _store = _interruptible(lambda: _meet(place.rank, place.world_size, timeout))
        options = {"rank": place.rank, "world_size": place.world_size, "timeout": timeout}
        _interruptible(lambda: dist.init_process_group(backend, store=_store, **options))
    except RuntimeError as error:  # dist.DistNetworkError and its like
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"the ranks cannot meet at {where} ({reason(error)}); if the port is taken give torchrun another "
            "--master_port, or --standalone on one machine"
        ) from error
    if on_gpu:
        _check_gpus()
    return local_rank


def _check_gpus() -> None:
    """Refuse ranks that share a GPU, as NCCL would in the middle of the first update."""
    gpus = gather(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    for rank, gpu in enumerate(gpus):
        other = gpus.index(gpu)
        if other < rank:
            raise UserError(
                f"ranks {other} and {rank} have the same GPU, {gpu}; start one process per GPU, or have the "
                "launcher show each its own (srun --gpus-per-task=1)"
            )


def _meet(rank: int, ranks: int, timeout: timedelta) -> dist.Store:
    """Wait for all ranks; returns a store in which no earlier processes of the run have left keys. `timeout`:
    of what is waited for there later on.

    torchrun's store outlives the processes that `--max-restarts` replaces, and TORCHELASTIC_RESTART_COUNT can
    differ between machines. So rank 0 counts the attempts, and the others register for the latest one under a
    random name,
    until rank 0 has listed that name: then both are alive, and all have the same attempt.
    """
    store, *_ = next(dist.rendezvous("env://", rank, ranks, timeout=RENDEZVOUS_TIMEOUT))
    if rank == 0:
        attempt = store.add("attempts", 1)
        registered = [f"{attempt}/{other}" for other in range(1, ranks)]
        store.wait(registered, RENDEZVOUS_TIMEOUT)
        store.set(f"{attempt}/names", " ".join(store.get(key).decode() for key in registered))
    else:
        attempt = _listed_attempt(store, rank)
    store.set_timeout(timeout)
    attempt_store = dist.PrefixStore(str(attempt), store)
    attempt_store.set(f"host/{rank}", socket.gethostname())
    return attempt_store


def _listed_attempt(store: dist.Store, rank: int) -> int:
    name, attempt, begin = uuid.uuid4().hex, 0, time.monotonic()
    while not (store.check([f"{attempt}/names"]) and name in store.get(f"{attempt}/names").decode()):
        if time.monotonic() - begin > RENDEZVOUS_TIMEOUT.total_seconds():
            raise dist.DistStoreError("rank 0 is missing")
        time.sleep(MEETING_INTERVAL)
        latest = store.add("attempts", 0)
        if latest > attempt:
            attempt = latest
            store.set(f"{attempt}/{rank}", name)
    return attempt


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


def leave_process_group(error: BaseException | None = None) -> None:
    """Destroy the process group, all ranks together. Call it when no DDP-wrapped model is referenced any
    more.

    error: what ends this rank. Others may be gone then, so it is waited for no longer than CLEANUP_PATIENCE.

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
    thread.join(CLEANUP_PATIENCE if failed else None)
