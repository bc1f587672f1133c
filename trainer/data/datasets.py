"""The datasets of a stage, opened before the process group exists, and the micro-batches made of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch.utils.data import DataLoader

from common.errors import UserError, say
from common.launcher import launch
from common.settings import ROOT, StageArgs
from dataset.files import expand_paths
from dataset.held_out import Split
from dataset.lm_dataset import StageDataset, TokenDataset
from dataset.mixing import MixedDataset, split_weights
from dataset.rollout_prompts import PromptDataset
from trainer.data.order import epoch_loader, epoch_order
from trainer.devices.process_group import world_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

StageData = StageDataset | PromptDataset


def check_data_paths(args: StageArgs) -> None:
    """Raise UserError where the data are missing: called before anything that takes time."""
    if not args.data_path:
        raise UserError("--data_path is missing: give a file, a folder or a pattern")
    if args.data_path == type(args).data_path and not Path(args.data_path).exists():
        demo = f"python -m scripts.demo.corpus writes {ROOT / 'dataset/demo'} to try"
        raise UserError(f"{args.data_path}: no such file; put your data there, or give --data_path ({demo})")
    if args.sample_prompts not in ("auto", "none") and not Path(args.sample_prompts).is_file():
        raise UserError(
            f"--sample_prompts {args.sample_prompts}: no such file; give auto, none, or a text file"
        )
    paths = [args.data_path]
    if ":" in args.data_path:
        paths, _ = split_weights(args.data_path)
    if args.eval_data_path:
        paths.append(args.eval_data_path)
    for path in paths:
        expand_paths(path)


def epoch_items(train_set: TokenDataset | PromptDataset, args: Any) -> int:
    """Items of an epoch: all, or with --max_tokens as many as have so many tokens on average."""
    if not args.max_tokens or args.max_tokens >= train_set.num_tokens:
        return len(train_set)
    return max(1, round(len(train_set) * args.max_tokens / train_set.num_tokens))


def epoch_tokens(train_set: TokenDataset | PromptDataset, args: Any) -> float:
    """Tokens of an epoch; with --max_tokens about."""
    if not args.max_tokens:
        return train_set.num_tokens
    return train_set.num_tokens * epoch_items(train_set, args) / len(train_set)


def held_out_source(args: StageArgs) -> tuple[str, Split | None]:
    """The data path of the held-out data that the settings name, and which of its records these are (None:
    all)."""
    if args.eval_data_path:
        return args.eval_data_path, None
    paths, _ = split_weights(cast(str, args.data_path))
    return ",".join(paths), Split(args.eval_share, held_out=True)


def open_datasets(
    dataset_class: type[StageDataset], args: StageArgs, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[StageDataset, StageDataset | None]:
    """The training and held-out (or None) data of a stage, tokenised first where no cache is there.

    No process group may exist yet: tokenising a large corpus takes longer than a collective waits. Raises
    UserError if data are missing or bad, or there are fewer samples than ranks."""
    check_data_paths(args)
    options = {
        name: getattr(args, name) for name in ("cache_dir", "on_bad_data", "max_bad_share", "text_separator")
    }

    def open_split(data_path: str, split: Split | None, packing: bool = False) -> StageDataset:
        return dataset_class(data_path, tokenizer, args.max_seq_len, packing, split=split, **options)

    paths, weights = [cast(str, args.data_path)], []
    if ":" in paths[0]:  # perhaps a.jsonl:0.7,b.jsonl:0.3
        paths, weights = split_weights(paths[0])
    split = Split(args.eval_share) if args.eval_share else None
    sources = [open_split(path, split, args.packing) for path in paths]
    train = sources[0]
    if weights:
        train = MixedDataset(list(zip(paths, sources, strict=True)), weights)
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
    held_out = None
    if args.eval_share or args.eval_data_path:
        held_out = open_split(*held_out_source(args))
    text = f"data: {train.records:,} records, {train.num_tokens:,} tokens"
    if items < len(train):
        text += f", of which an epoch takes {epoch_tokens(train, args):,.0f} (--max_tokens)"
    if held_out is not None:
        text += f"; held out: {held_out.records:,} records, {held_out.num_tokens:,} tokens"
    if launch().rank == 0:
        say(text)
    return train, held_out


def train_loader(train_set: StageData, args: Any, epoch: int, skip_batches: int = 0) -> DataLoader:
    """The micro-batches of one epoch on this rank, from micro-batch `skip_batches` on; those of prompts come
    --num_iterations times, update by update. For another order of the samples change `order`; a second source
    of them is another `epoch_loader` (order.py)."""
    order = epoch_order(len(train_set), args.seed, epoch)[: epoch_items(train_set, args)]
    if isinstance(train_set, MixedDataset):
        order = train_set.items_of_epoch(args.seed, epoch)[order]
    elif not isinstance(train_set, StageDataset):  # prompts
        per_update = prompts_per_update(args)
        updates = order[: len(order) // per_update * per_update].reshape(-1, per_update)
        order = np.repeat(updates, args.num_iterations, axis=0).reshape(-1)
    return epoch_loader(
        train_set,
        args.batch_size,
        args.seed,
        epoch,
        skip_batches,
        args.num_workers,
        train_set.collate,
        order=order,
        window=args.accumulation_steps,
    )


def prompts_per_update(args: Any) -> int:
    """Prompts that an update takes, over all ranks."""
    return args.batch_size * args.accumulation_steps * world_size()


def epoch_samples(train_set: StageData, args: Any) -> int:
    """The samples that an epoch trains, over all ranks. Of prompts only whole updates are made,
    --num_iterations times; the prompts left over are others in the next epoch. Raises UserError if there are
    fewer than an update takes."""
    items = epoch_items(train_set, args)
    if isinstance(train_set, StageDataset):
        return items
    per_update = prompts_per_update(args)
    if items < per_update:
        raise UserError(
            f"an epoch has {items} prompts, and an update takes {per_update} (batch_size x "
            "accumulation_steps x processes); lower --batch_size"
        )
    return items // per_update * per_update * args.num_iterations


def open_prompts(
    args: Any, tokenizer: "PreTrainedTokenizerBase", tools: list[dict] | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """The training and held-out (or None) prompts. Raises UserError."""
    check_data_paths(args)
    if split_weights(args.data_path)[1]:
        raise UserError(
            f"--data_path {args.data_path}: prompts are not mixed by weight; leave the weights out"
        )
    options: dict[str, Any] = {
        name: getattr(args, name) for name in ("cache_dir", "on_bad_data", "max_bad_share")
    }
    thinking_ratio = 1.0 if args.open_thinking else args.thinking_ratio
    options |= {"tools": tools, "thinking_ratio": thinking_ratio}

    def open_split(data_path: str, split: Split | None) -> PromptDataset:
        return PromptDataset(data_path, tokenizer, args.max_seq_len, split=split, **options)

    train = open_split(args.data_path, Split(args.eval_share) if args.eval_share else None)
    held_out = None
    if args.eval_share or args.eval_data_path:
        held_out = open_split(*held_out_source(args))
    return train, held_out
