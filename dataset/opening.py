"""Opens the data of a stage, before the process group exists: training and held-out data, texts to replay
beside conversations, and prompts."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from common.errors import UserError, reason, say, warn
from common.files import is_file, is_there
from common.launcher import launch
from common.settings import ROOT, StageArgs
from dataset.files import expand_paths, is_plain_text
from dataset.held_out import Split
from dataset.lm_dataset import PretrainDataset, StageDataset
from dataset.mixing import MixedDataset, split_weights
from dataset.report import EmptySplit
from dataset.rollout_prompts import PromptDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_data_paths(args: StageArgs) -> None:
    """Raise UserError if the data are missing. It is called before anything that takes time."""
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
    """Raise UserError for a setting that needs held-out data, if there are none."""
    if is_there:
        return
    if args.patience:
        raise UserError(f"--patience {args.patience}: early stopping needs held-out data; there are none")
    if args.sample_prompts not in ("auto", "none"):
        raise UserError(
            f"--sample_prompts {args.sample_prompts} needs held-out data, because it is used at each "
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
        raise UserError(f"--sample_prompts {path}: the file contains no prompt; write one per line")
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
    """The training and held-out (or None) data of a stage, tokenised first if there is no cache.

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
    items = train.epoch_items(args)
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
        text += f", of which an epoch takes {train.epoch_tokens(args):,.0f} (--max_tokens)"
    if held_out is not None:
        text += f"; held out: {held_out.records:,} records, {held_out.num_tokens:,} tokens"
    if launch().rank == 0:
        say(text)
    if held_out is not None and not any(map(is_plain_text, held_out.cache.files)):
        warn_of_share(args.eval_share, train.records, held_out.records)
    return train, held_out


def add_replay(data: StageDataset, args: StageArgs, tokenizer: "PreTrainedTokenizerBase") -> MixedDataset:
    """Mixes documents of --replay_data_path into the data, as --replay_share of an epoch's tokens. Each epoch
    takes the next documents, each at most once. Documents that pretraining holds out with the same
    --eval_share are left out."""
    path, share = cast(Any, args).replay_data_path, cast(Any, args).replay_share
    split = Split(args.eval_share) if args.eval_share else None
    options = cache_options(args)
    documents = PretrainDataset(path, tokenizer, args.max_seq_len, args.packing, split=split, **options)
    tokens = data.epoch_tokens(args)
    share = min(share, documents.num_tokens / (documents.num_tokens + tokens))
    sources, shares = [(cast(str, args.data_path), data)], [1.0]
    if isinstance(data, MixedDataset):
        sources = list(zip(data.names, data.datasets, strict=True))
        shares = data.shares
    shares = [*(part * (1 - share) for part in shares), share]
    mixed = MixedDataset([*sources, (path, documents)], shares, round(tokens / (1 - share)))
    if launch().rank == 0:
        say(f"replay: {mixed.counts[-1]:,} of {len(documents):,} samples of {path} in each epoch")
    return mixed


def warn_of_share(share: float, trained: int, held_out: int) -> None:
    """Warn if the number of held-out records is far from the requested share (0: none is requested): by more
    than a factor of two and more than five standard deviations of a random choice."""
    records = trained + held_out
    is_far = abs(held_out - share * records) > 5 * math.sqrt(share * records)
    if share and is_far and not records * share / 2 <= held_out <= records * share * 2:
        warn(
            f"--eval_share {share:g} holds out {held_out:,} of {records:,} records "
            f"({held_out / records:.1%}): records with the same first question or text are "
            "held out together, and many have the same; choose held-out data yourself with --eval_data_path"
        )


def open_prompts(
    args: Any, tokenizer: "PreTrainedTokenizerBase", tools: list[dict] | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """The training and held-out (or None) prompts. Raises UserError."""
    check_data_paths(args)
    if split_weights(args.data_path)[1]:
        raise UserError(
            f"--data_path {args.data_path}: prompts cannot be mixed by weight; leave the weights out"
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
