"""Data loaders, and the order of samples: a pure function of the seed and the epoch, for any number of
ranks."""

import math
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dataset.lm_dataset import collate_flat
from trainer.devices.process_group import this_rank, world_size
from trainer.run.errors import check_shared_memory, ignore_stop_signals, loader_error


class ProcessLoader(DataLoader):
    """A DataLoader with processes, which reports a killed one with the next micro-batch.

    torch's own handler of SIGCHLD raises at once, wherever the training process is: also while it saves.
    """

    def __iter__(self) -> Any:
        batches = super().__iter__()
        if threading.current_thread() is threading.main_thread():
            # torch sets its handler with the first iterator only
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield from batches
        except (EOFError, ConnectionError) as error:  # killed while it handed a micro-batch over
            raise loader_error(error) from error


class SizedDataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of the samples [num_samples] in an epoch: a function of (seed, epoch), the same on
    every rank."""
    # narrow: there may be 10^8 of them
    samples = np.arange(num_samples, dtype=np.min_scalar_type(num_samples))
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)


def rank_share(order: np.ndarray, batch_size: int, rank: int, ranks: int) -> np.ndarray:
    """The samples of one rank: of each global micro-batch (`batch_size * ranks` samples of `order`) the
    rank-th part.

    The shares of all ranks together are the order, nothing twice; at the end a rank may have fewer samples,
    or none.
    """
    turns = np.arange(math.ceil(len(order) / batch_size)) % ranks == rank
    return order[np.repeat(turns, batch_size)[: len(order)]]


class SkipBatchSampler(Sampler):
    """Batches of `sampler`'s indices without the first `skip_batches` (those trained before a resume).

    Args:
        sampler: the indices in order, asked again for each pass, so that a later `set_epoch` counts; of an
            array or list the skipped ones are not even read.
        batch_size: samples per micro-batch of this rank.
        skip_batches: how many micro-batches to leave out, exactly.
        num_batches: micro-batches of the epoch before skipping, the same on every rank; a rank that runs out
            of samples yields empty ones. Derived from the sampler if not given.
    """

    def __init__(self, sampler: Any, batch_size: int, skip_batches: int = 0, num_batches: int | None = None):
        self.sampler = list(sampler) if isinstance(sampler, Iterator) else sampler
        self.batch_size = batch_size
        self.skip_batches = skip_batches
        self.num_batches = math.ceil(len(self.sampler) / batch_size) if num_batches is None else num_batches

    def __iter__(self) -> Iterator[list[int]]:
        indices = self.sampler if hasattr(self.sampler, "__getitem__") else list(self.sampler)
        for batch in range(self.skip_batches, self.num_batches):
            yield [int(i) for i in indices[batch * self.batch_size : (batch + 1) * self.batch_size]]

    def __len__(self) -> int:
        return max(0, self.num_batches - self.skip_batches)


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Micro-batches of each rank in one epoch."""
    return math.ceil(num_samples / (batch_size * world_size()))


def epoch_loader(
    dataset: SizedDataset,
    batch_size: int,
    seed: int,
    epoch: int,
    skip_batches: int = 0,
    num_workers: int = 0,
    collate_fn: Callable[[list], dict[str, Any]] = collate_flat,
    order: np.ndarray | None = None,
    window: int = 1,
) -> DataLoader:
    """The micro-batches of one epoch on this rank, from micro-batch `skip_batches` on. `order`: of the
    samples of all ranks, if not that of `epoch_order`. `window`: micro-batches of an update; processes make
    so many ahead."""
    if order is None:
        order = epoch_order(len(dataset), seed, epoch)
    mine = order
    if world_size() > 1:
        mine = rank_share(order, batch_size, this_rank(), world_size())
    options: dict[str, Any] = {
        "batch_sampler": SkipBatchSampler(
            mine, batch_size, skip_batches, steps_per_epoch(len(order), batch_size)
        ),
        "collate_fn": collate_fn,
        "pin_memory": torch.cuda.is_initialized(),  # if this process computes on a GPU
        "generator": torch.Generator(),  # the loader draws a base seed: keep it off the global stream
    }
    if not num_workers:
        return DataLoader(cast(Dataset, dataset), **options)
    check_shared_memory(num_workers)
    return ProcessLoader(
        cast(Dataset, dataset),
        num_workers=num_workers,
        prefetch_factor=max(2, math.ceil(window / num_workers)),  # of each process
        worker_init_fn=ignore_stop_signals,
        **options,
    )


def eval_loader(
    dataset: SizedDataset, batch_size: int, collate_fn: Callable[[list], dict[str, Any]] = collate_flat
) -> DataLoader:
    """This rank's share of the held-out data. Micro-batch k is samples k * batch_size onwards for any world
    size; each rank has equally many micro-batches, the last of which may be empty."""
    mine = rank_share(np.arange(len(dataset)), batch_size, this_rank(), world_size())
    batches = SkipBatchSampler(mine, batch_size, 0, steps_per_epoch(len(dataset), batch_size))
    pin_memory = torch.cuda.is_initialized()
    return DataLoader(
        cast(Dataset, dataset), batch_sampler=batches, collate_fn=collate_fn, pin_memory=pin_memory
    )
