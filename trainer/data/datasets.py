"""The data of a stage: its datasets, opened before the process group exists; which items an epoch takes and
in which order, a pure function of the seed and the epoch for any number of ranks; and the micro-batches."""

import math
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from common.errors import UserError, reason, say, warn
from common.files import is_file, is_there
from common.launcher import launch
from common.settings import ROOT, StageArgs
from dataset.files import expand_paths, is_plain_text
from dataset.held_out import Split
from dataset.lm_dataset import PretrainDataset, StageDataset, collate_flat
from dataset.mixing import MixedDataset, split_weights
from dataset.report import EmptySplit
from dataset.rollout_prompts import PromptDataset
from trainer.devices.errors import LoaderFailure, ignore_stop_signals
from trainer.devices.process_group import this_rank, world_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

StageData = StageDataset | PromptDataset


class SizedDataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


# --- datasets


def check_data_paths(args: StageArgs) -> None:
    """Raise UserError where the data are missing: called before anything that takes time."""
    if not args.data_path:
        raise UserError("--data_path is missing: give a file, a folder or a pattern")
    if args.is_default("data_path") and not is_there(args.data_path):
        demo = f"python {ROOT / 'scripts/demo/corpus.py'} writes {ROOT / 'dataset/demo'} to try"
        raise UserError(f"{args.data_path}: no such file; put your data there, or give --data_path ({demo})")
    check_needs_held_out(args, bool(args.eval_data_path or args.eval_share))
    if args.sample_prompts not in ("auto", "none"):
        sample_lines(args.sample_prompts)
    paths = [args.data_path]
    if ":" in args.data_path:
        paths, _ = split_weights(args.data_path)
    if args.eval_data_path:
        paths.append(args.eval_data_path)
    for path in paths:
        expand_paths(path)


def check_needs_held_out(args: StageArgs, is_there: bool) -> None:
    """Raise UserError for a setting that needs held-out data, unless there are some."""
    if is_there:
        return
    if args.patience:
        raise UserError(f"--patience {args.patience}: early stopping needs held-out data; there are none")
    if args.sample_prompts not in ("auto", "none"):
        raise UserError(
            f"--sample_prompts {args.sample_prompts} needs held-out data: they are answered at each "
            "evaluation; give --eval_share 0.02, or leave it out"
        )


def sample_lines(path: str) -> list[str]:
    """The prompts in the file of --sample_prompts, one per line. Raises UserError if there are none."""
    if not is_file(path):
        raise UserError(f"--sample_prompts {path}: no such file; give auto, none, or a text file")
    try:
        lines = [line for line in Path(path).read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, ValueError) as error:  # ValueError: no UTF-8
        raise UserError(f"--sample_prompts {path}: {reason(error)}") from error
    if not lines:
        raise UserError(f"--sample_prompts {path}: the file holds no prompt; write one per line")
    return lines


def held_out_source(args: StageArgs) -> tuple[str, Split | None]:
    """The path of the held-out data, and the split that selects its records (None: all of them)."""
    if args.eval_data_path:
        return args.eval_data_path, None
    paths, _ = split_weights(cast(str, args.data_path))
    return ",".join(paths), Split(args.eval_share, held_out=True)


def cache_options(args: StageArgs) -> dict[str, Any]:
    """The settings of the token caches of a run."""
    names = ("cache_dir", "on_bad_data", "max_bad_share", "max_lost_text", "text_separator")
    return {name: getattr(args, name) for name in names}


def open_datasets(
    dataset_class: type[StageDataset], args: StageArgs, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[StageDataset, StageDataset | None]:
    """The training and held-out (or None) data of a stage, tokenised first where no cache is there.

    No process group may exist yet: tokenising a large corpus takes longer than a collective waits. Raises
    UserError if data are missing or bad, or there are fewer samples than ranks."""
    check_data_paths(args)
    options = cache_options(args)

    def open_split(data_path: str, split: Split | None, packing: bool = False) -> StageDataset:
        return dataset_class(data_path, tokenizer, args.max_seq_len, packing, split=split, **options)

    paths, weights = [cast(str, args.data_path)], []
    if ":" in paths[0]:  # perhaps a.jsonl:0.7,b.jsonl:0.3
        paths, weights = split_weights(paths[0])
    split = Split(args.eval_share) if args.eval_share else None
    held_out = None  # opened first: it is smaller, so that a mistake in it shows at once
    if args.eval_share or args.eval_data_path:
        try:
            held_out = open_split(*held_out_source(args))
        except EmptySplit:
            for path in paths:  # bad records are training data, and may be the cause
                open_split(path, split)
            raise
    sources = [open_split(path, split, args.packing) for path in paths]
    train = sources[0]
    if weights:
        train = MixedDataset(list(zip(paths, sources, strict=True)), weights, args.max_tokens)
    ranks = launch().world_size
    items = epoch_items(train, args)
    if ranks > items:
        raise UserError(f"{ranks} processes, but an epoch has only {items} samples; start fewer processes")
    if launch().rank == 0:
        if args.packing:
            for source in sources:
                say(source.describe_packing())
        if isinstance(train, MixedDataset):
            train.report(args.epochs)
    text = f"data: {train.records:,} records, {train.num_tokens:,} tokens"
    if 0 < args.max_tokens < train.num_tokens:
        text += f", of which an epoch takes {epoch_tokens(train, args):,.0f} (--max_tokens)"
    if held_out is not None:
        text += f"; held out: {held_out.records:,} records, {held_out.num_tokens:,} tokens"
    if launch().rank == 0:
        say(text)
    if held_out is not None and not any(map(is_plain_text, held_out.cache.files)):
        warn_of_share(args.eval_share, train.records, held_out.records)
    return train, held_out


def add_replay(
    conversations: StageDataset, args: StageArgs, tokenizer: "PreTrainedTokenizerBase"
) -> MixedDataset:
    """The conversations of an epoch and, as --replay_share of its tokens, documents of --replay_data_path:
    each epoch takes the next ones, at most all. Those that pretraining holds out with the same --eval_share
    stay out."""
    path, share = cast(Any, args).replay_data_path, cast(Any, args).replay_share
    split = Split(args.eval_share) if args.eval_share else None
    documents = PretrainDataset(path, tokenizer, args.max_seq_len, split=split, **cache_options(args))
    tokens = epoch_tokens(conversations, args)
    share = min(share, documents.num_tokens / (documents.num_tokens + tokens))
    sources, shares = [(cast(str, args.data_path), conversations)], [1.0]
    if isinstance(conversations, MixedDataset):
        sources = list(zip(conversations.names, conversations.datasets, strict=True))
        shares = conversations.shares
    shares = [*(part * (1 - share) for part in shares), share]
    mixed = MixedDataset([*sources, (path, documents)], shares, round(tokens / (1 - share)))
    if launch().rank == 0:
        say(f"replay: {mixed.counts[-1]:,} of {len(documents):,} samples of {path} in each epoch")
    return mixed


def warn_of_share(share: float, trained: int, held_out: int) -> None:
    """Warn where the records that are held out are far from the share of all of them (0: there is none): more
    than a factor of two, and than five standard deviations of a random choice."""
    records = trained + held_out
    is_far = abs(held_out - share * records) > 5 * math.sqrt(share * records)
    if share and is_far and not records * share / 2 <= held_out <= records * share * 2:
        warn(
            f"--eval_share {share:g} holds out {held_out:,} of {records:,} records "
            f"({held_out / records:.1%}): those with the same first question or text are held out together, "
            "and many have the same; --eval_data_path takes held-out data of your choice"
        )


def open_prompts(
    args: Any, tokenizer: "PreTrainedTokenizerBase", tools: list[dict] | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """The training and held-out (or None) prompts. Raises UserError."""
    check_data_paths(args)
    if split_weights(args.data_path)[1]:
        raise UserError(
            f"--data_path {args.data_path}: prompts are not mixed by weight; leave the weights out"
        )
    options: dict[str, Any] = {name: getattr(args, name) for name in ("on_bad_data", "max_bad_share")}
    thinking_ratio = 1.0 if args.open_thinking else args.thinking_ratio
    options |= {"tools": tools, "thinking_ratio": thinking_ratio}
    options["check"] = args.check_of_prompts()

    def open_split(data_path: str, split: Split | None) -> PromptDataset:
        return PromptDataset(data_path, tokenizer, args.max_seq_len, split=split, **options)

    train = open_split(args.data_path, Split(args.eval_share) if args.eval_share else None)
    held_out = None
    if args.eval_share or args.eval_data_path:
        held_out = open_split(*held_out_source(args))
        warn_of_share(args.eval_share, train.records, held_out.records)
    return train, held_out


# --- what an epoch takes, in which order


def epoch_items(train_set: StageData, args: Any) -> int:
    """The number of items of an epoch: all, or with --max_tokens as many as have so many tokens on average;
    of prompts those of whole updates. Raises UserError if there are fewer prompts than an update takes."""
    items = len(train_set)
    if isinstance(train_set, MixedDataset):  # its length is that of an epoch
        return items
    if 0 < args.max_tokens < train_set.num_tokens:
        items = max(1, round(items * args.max_tokens / train_set.num_tokens))
    if isinstance(train_set, StageDataset):
        return items
    per_update = prompts_per_update(args)
    if items < per_update:
        raise UserError(
            f"an epoch has {items} prompts, and an update takes {per_update} (batch_size x "
            "accumulation_steps x processes); lower --batch_size"
        )
    return items // per_update * per_update


def epoch_tokens(train_set: StageDataset, args: Any) -> float:
    """Tokens of an epoch; with --max_tokens about."""
    return epoch_items(train_set, args) * train_set.mean_tokens


def prompts_per_update(args: Any) -> int:
    """Prompts that an update takes, over all ranks."""
    return args.batch_size * args.accumulation_steps * world_size()


def epoch_samples(train_set: StageData, args: Any) -> int:
    """The items that an epoch trains, over all ranks: prompts come --num_iterations times. Raises UserError
    if there are fewer prompts than an update takes."""
    items = epoch_items(train_set, args)
    return items if isinstance(train_set, StageDataset) else items * args.num_iterations


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Micro-batches of each rank in one epoch."""
    return math.ceil(num_samples / (batch_size * world_size()))


def items_of_epoch(train_set: StageData, args: Any, epoch: int) -> np.ndarray:
    """Which items an epoch takes, integers [epoch_items]. If they are not all, an epoch goes on in a random
    order where the one before ended: what one leaves out comes next."""
    if isinstance(train_set, MixedDataset):
        return train_set.items_of_epoch(args.seed, epoch)
    total, count = len(train_set), epoch_items(train_set, args)
    if count == total:
        return np.arange(total, dtype=np.min_scalar_type(total))
    order = epoch_order(total, args.seed, 0)
    return order[np.arange(epoch * count, (epoch + 1) * count) % total]


def in_order(dataset: SizedDataset, items: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """The items of an epoch in the order in which all ranks together train them: a random one.

    For another order change this function, for all kinds of data; it must depend on its arguments alone, and
    lose no item. Short ones first:

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
            raise LoaderFailure(reason(error)) from error


def train_loader(train_set: StageData, args: Any, epoch: int, skip_batches: int = 0) -> DataLoader:
    """The micro-batches of one epoch on this rank, from micro-batch `skip_batches` on; those of prompts come
    --num_iterations times, update by update. For another order of the samples change `in_order`."""
    order = in_order(train_set, items_of_epoch(train_set, args, epoch), args.seed, epoch)
    if not isinstance(train_set, StageDataset):  # prompts
        updates = order.reshape(-1, prompts_per_update(args))
        order = np.repeat(updates, args.num_iterations, axis=0).reshape(-1)
    return epoch_loader(
        train_set,
        order,
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
    collate_fn: Callable[[list], dict[str, Any]] = collate_flat,
    accumulation_steps: int = 1,
) -> DataLoader:
    """The micro-batches of one epoch on this rank, from micro-batch `skip_batches` on. `order`: of the
    samples of all ranks (`epoch_order`). Data loader processes make the
    `accumulation_steps` micro-batches of an update ahead."""
    mine = order
    if world_size() > 1:
        mine = rank_share(order, batch_size, this_rank(), world_size())
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
