"""Shows what is a target and what is masked, and the report of lengths, cuts and drops.

    python -m dataset.show_samples --kind sft --data_path data/sft.jsonl --samples 2
    python -m dataset.show_samples --kind sft --data_path data/sft.jsonl --samples 0

The samples' targets stand between ⟦ and ⟧; with --eval_share those of the training data come first, then
those held out. The second command builds the token cache ahead of a run, and shows nothing but the report.
"""

import itertools
import signal

from common.command_line import Parser, one_line_errors
from common.errors import UserError, printable, say
from common.hub import make_local
from common.settings import StageArgs, add_flags, settings_of
from dataset.held_out import Split
from dataset.lm_dataset import DATASETS, StageDataset
from dataset.mixing import split_weights
from dataset.report import format_report
from dataset.token_cache import load_tokenizer

OPTIONS = ("text_separator", "cache_dir", "on_bad_data", "max_bad_share")


def marked_text(tokenizer, sample: dict) -> str:
    """The text of a sample, with its targets marked. What a terminal would obey is escaped."""
    shown = ""
    tokens = zip(sample["input_ids"].tolist(), sample["loss_mask"].tolist(), strict=True)
    for is_target, group in itertools.groupby(tokens, key=lambda token: token[1]):
        token_ids = [token_id for token_id, _ in group]
        text = printable(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
        shown += f"⟦{text}⟧" if is_target else text
    return shown


def show(dataset: StageDataset, tokenizer, count: int) -> None:
    """Print the first `count` items of the dataset, then its report."""
    for index in range(min(count, len(dataset))):
        item = dataset[index]
        if dataset.packing:
            tokens = sum(len(sample["input_ids"]) for sample in item)
            say(f"sequence {index}: {len(item)} samples, {tokens} tokens")
        for sample in item:
            targets, target_bytes = int(sample["loss_mask"].sum()), sample["target_bytes"]
            size = f"{len(sample['input_ids'])} tokens, {targets} targets of {target_bytes} bytes"
            say(f"sample {sample['sample_id']} from {dataset.source(sample['sample_id'])}: {size}")
            say(f"{marked_text(tokenizer, sample)}\n")
    say(format_report(dataset.cache.report, dataset.cache.files))
    if dataset.packing:
        say(f"  {dataset.describe_packing()}")


def main() -> None:
    """Read the options, build or open the cache, print."""
    parser = Parser(prog="python -m dataset.show_samples", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=list(DATASETS), required=True, help="kind of training")
    settings = settings_of(StageArgs)
    shown = ("data_path", "eval_share", "tokenizer_path", "max_seq_len", *OPTIONS)
    add_flags(parser, [settings[name] for name in shown])
    parser.set_defaults(max_seq_len=None)  # that of the stage
    parser.add_argument("--num_proc", type=int, help="processes that tokenise (one per core)")
    parser.add_argument("--samples", type=int, default=2, help="samples (or packed sequences) to show")
    parser.add_argument("--packing", type=int, choices=(0, 1), default=0, help="show packed sequences")
    args = parser.parse_args()
    if args.samples < 0:
        raise UserError(f"--samples {args.samples} is negative; use 0 for the report alone")
    if args.data_path is None:
        raise UserError("--data_path is missing: give files, globs or folders, separated by commas")
    make_local(args)
    tokenizer = load_tokenizer(args.tokenizer_path)
    options = {name: getattr(args, name) for name in ("num_proc", *OPTIONS)}
    paths, _ = split_weights(args.data_path)
    parts: list[tuple[str, Split | None]] = [(path, None) for path in paths]
    if args.eval_share:
        parts = [(path, Split(args.eval_share)) for path in paths]
        parts.append((",".join(paths), Split(args.eval_share, held_out=True)))
    for path, split in parts:
        packing = bool(args.packing) and not (split and split.held_out)
        data = DATASETS[args.kind](path, tokenizer, args.max_seq_len, packing, split=split, **options)
        show(data, tokenizer, args.samples)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when `head` closes the pipe
    with one_line_errors():
        main()
