"""The datasets of a stage, opened before the process group exists."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from common.errors import UserError
from common.launcher import launch
from common.settings import ROOT, StageArgs
from dataset.lm_dataset import StageDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

D = TypeVar("D", bound=StageDataset)


def open_datasets(dataset_class: type[D], args: StageArgs, tokenizer: "PreTrainedTokenizerBase") -> tuple[D, D | None]:
    """The training and held-out (or None) data of a stage, tokenised first where no cache is there.

    No process group may exist yet: tokenising a large corpus takes longer than a collective waits.

    Raises:
        UserError: data are missing or bad, or there are fewer samples than ranks.
    """
    if not args.data_path:
        raise UserError("--data_path is missing: give a file, a folder or a pattern")
    if args.data_path == type(args).data_path and not Path(args.data_path).exists():
        demo = f"python -m dataset.demo_corpus writes {ROOT / 'dataset/demo'} to try"
        raise UserError(f"{args.data_path}: no such file; put your data there, or give --data_path ({demo})")
    options = {name: getattr(args, name) for name in ("cache_dir", "on_bad_data", "max_bad_share", "text_separator")}
    train = dataset_class(args.data_path, tokenizer, args.max_seq_len, args.packing, **options)
    ranks = launch().world_size
    if ranks > len(train):
        raise UserError(f"{ranks} processes, but --data_path holds only {len(train)} samples; start fewer processes")
    if not args.eval_data_path:
        return train, None
    return train, dataset_class(args.eval_data_path, tokenizer, args.max_seq_len, **options)
