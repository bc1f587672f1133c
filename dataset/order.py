"""Decides which items an epoch takes and in which order, as a pure function of seed and epoch for any number
of ranks. Makes the micro-batches."""

import math
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from common.command_line import STOP_SIGNALS
from common.errors import LoaderFailure, reason
from common.launcher import launch
from dataset.batch import collate_flat


class SizedDataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class StageData(Dataset):
    """The data of a stage: its items, and which of them an epoch takes, in which order."""

    kind: str  # of its samples
    fingerprint: dict[str, Any]  # what identifies it
    collate: Callable[[list], Any]  # makes a batch of items

    def __len__(self) -> int:
        raise NotImplementedError

    def epoch_items(self, args: Any) -> int:
        """The number of items of an epoch: all items, or with --max_tokens as many as have that many tokens
        on average."""
        tokens = cast(Any, self).num_tokens
        if 0 < args.max_tokens < tokens:
            return max(1, round(len(self) * args.max_tokens / tokens))
        return len(self)

    def items_of_epoch(self, args: Any, epoch: int) -> np.ndarray:
        """The items that an epoch takes, integers [epoch_items]. If an epoch does not take all, the next one
        continues in the same random order where this one ended."""
        total, count = len(self), self.epoch_items(args)
        if count == total:
            return np.arange(total, dtype=np.min_scalar_type(total))
        order = epoch_order(total, args.seed, 0)
        return order[np.arange(epoch * count, (epoch + 1) * count) % total]

    def epoch_samples(self, args: Any) -> int:
        """The items that an epoch trains, over all ranks, those that come several times counted each time."""
        return self.epoch_items(args)

    def order_of_epoch(self, args: Any, epoch: int) -> np.ndarray:
        """These items in the order in which all ranks together train them, integers [epoch_samples]."""
        return in_order(self, self.items_of_epoch(args, epoch), args.seed, epoch)


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Micro-batches of each rank in one epoch."""
    return math.ceil(num_samples / (batch_size * launch().world_size))


def in_order(dataset: SizedDataset, items: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """The items of an epoch in the (random) order in which all ranks together train them.

    To change the order for all kinds of data, change this function. It must depend only on its arguments and
    keep every item. For example, short items first:

        return items[np.argsort(np.asarray(dataset.item_tokens)[items], kind="stable")]
    """
    return items[epoch_order(len(items), seed, epoch)]


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of the samples [num_samples] in an epoch: a function of (seed, epoch), the same on
    every rank."""
    # narrow: there may be 10^8 of them
    samples = np.arange(num_samples, dtype=np.min_scalar_type(num_samples))
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)


def rank_share(order: np.ndarray, batch_size: int, rank: int, ranks: int) -> np.ndarray:
    """The samples of one rank: the rank-th part of each global micro-batch (`batch_size * ranks` samples of
    `order`).

    The shares of all ranks together are exactly `order`, without duplicates. At the end a rank may have fewer
    samples, or none.
    """
    turns = np.arange(math.ceil(len(order) / batch_size)) % ranks == rank
    return order[np.repeat(turns, batch_size)[: len(order)]]


class SkipBatchSampler(Sampler):
    """Batches of `sampler`'s indices without the first `skip_batches` (those trained before a resume).

    Args:
        sampler: the indices in order. A torch sampler is read anew for each pass, so that a `set_epoch` in
            between has its effect; of an array or list the skipped indices are not read at all.
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


# --- micro-batches


class ProcessLoader(DataLoader):
    """A DataLoader with processes that reports a killed process at the next micro-batch.

    torch's own SIGCHLD handler raises at once, wherever the training process is, even while it saves.
    """

    def __iter__(self) -> Any:
        batches = super().__iter__()
        if threading.current_thread() is threading.main_thread():
            # torch sets its handler with the first iterator only
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield from batches
        except (EOFError, ConnectionError) as error:  # killed while it handed a micro-batch over
            raise LoaderFailure(reason(error)) from error


def train_loader(train_set: Any, args: Any, epoch: int, skip_batches: int = 0) -> DataLoader:
    """The micro-batches of one epoch on this rank, from micro-batch `skip_batches` on. For another order of
    the samples change `in_order`."""
    return epoch_loader(
        train_set,
        train_set.order_of_epoch(args, epoch),
        args.batch_size,
        skip_batches,
        args.num_workers,
        train_set.collate,
        accumulation_steps=args.accumulation_steps,
    )


def epoch_loader(
    dataset: SizedDataset,
    order: np.ndarray,
    batch_size: int,
    skip_batches: int = 0,
    num_workers: int = 0,
    collate_fn: Callable[[list], Any] = collate_flat,
    accumulation_steps: int = 1,
) -> DataLoader:
    """The micro-batches of one epoch on this rank, from micro-batch `skip_batches` on. `order`: of the
    samples of all ranks (`epoch_order`). Data loader processes make the
    `accumulation_steps` micro-batches of an update ahead."""
    mine = order
    if launch().world_size > 1:
        mine = rank_share(order, batch_size, launch().rank, launch().world_size)
    num_batches = steps_per_epoch(len(order), batch_size)
    options: dict[str, Any] = {
        "batch_sampler": SkipBatchSampler(mine, batch_size, skip_batches, num_batches),
        "collate_fn": collate_fn,
        "pin_memory": torch.cuda.is_initialized(),  # if this process computes on a GPU
        "generator": torch.Generator(),  # the loader draws a base seed: keep it off the global stream
    }
    if not num_workers:
        return DataLoader(cast(Dataset, dataset), **options)
    return ProcessLoader(
        cast(Dataset, dataset),
        num_workers=num_workers,
        prefetch_factor=max(2, math.ceil(accumulation_steps / num_workers)),  # of each process
        worker_init_fn=ignore_stop_signals,
        **options,
    )


def eval_loader(
    dataset: SizedDataset, batch_size: int, collate_fn: Callable[[list], Any] = collate_flat
) -> DataLoader:
    """This rank's share of the held-out data. Micro-batch k is samples k * batch_size onwards for any world
    size; each rank has equally many micro-batches, the last of which may be empty."""
    mine = rank_share(np.arange(len(dataset)), batch_size, launch().rank, launch().world_size)
    batches = SkipBatchSampler(mine, batch_size, 0, steps_per_epoch(len(dataset), batch_size))
    pin_memory = torch.cuda.is_initialized()
    return DataLoader(
        cast(Dataset, dataset), batch_sampler=batches, collate_fn=collate_fn, pin_memory=pin_memory
    )


def ignore_stop_signals(_: int = 0) -> None:
    """Worker initialiser of a data loader: ignore signals; the parent handles them and then ends the
    worker."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
