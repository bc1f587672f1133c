"""Shows what is a target and what is masked, and the report of lengths, cuts and drops.

    python -m dataset.show_samples --kind sft --data_path data/sft.jsonl --samples 2
    python -m dataset.show_samples --kind sft --data_path data/sft.jsonl --samples 1 --packing 1 --table 1

Samples are shown as running text, in which targets are green, or without colours stand between ⟦ and ⟧; with --table 1
token by token.
"""

import itertools
import os
import signal
import sys
from collections.abc import Iterator

from common.command_line import Parser, one_line_errors
from common.errors import UserError, say
from dataset.data_files import describe_files
from dataset.lm_dataset import TokenDataset
from dataset.report import format_report
from dataset.token_cache import add_arguments, cache_of_arguments, load_tokenizer
from dataset.token_text import printable, token_texts

GREEN, GREY, PLAIN = "\033[32m", "\033[90m", "\033[0m"


def table(tokenizer, sample: dict, colour: bool) -> Iterator[str]:
    """One line per token: position, id, target or not, text."""
    token_ids = sample["input_ids"].tolist()
    texts = token_texts(tokenizer, token_ids)
    for position, (token_id, is_target, text) in enumerate(zip(token_ids, sample["loss_mask"], texts, strict=True)):
        line = f"{position:6d} {token_id:7d}  {'target' if is_target else '  .   '}  {text}"
        yield f"{GREEN if is_target else GREY}{line}{PLAIN}" if colour else line


def running_text(tokenizer, sample: dict, colour: bool) -> Iterator[str]:
    """The lines of a sample's text, with its targets marked. What a terminal would obey is escaped."""
    shown = ""
    tokens = zip(sample["input_ids"].tolist(), sample["loss_mask"].tolist(), strict=True)
    for is_target, group in itertools.groupby(tokens, key=lambda token: token[1]):
        token_ids = [token_id for token_id, _ in group]
        text = printable(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
        if colour:  # line by line, so that a pager shows it as well
            mark = GREEN if is_target else GREY
            text = "\n".join(f"{mark}{line}{PLAIN}" if line else "" for line in text.split("\n"))
        shown += f"⟦{text}⟧" if is_target and not colour else text
    yield from shown.split("\n")


def show(dataset: TokenDataset, tokenizer, count: int, colour: bool, as_table: bool = False) -> None:
    """Print the first `count` items of the dataset, then its report."""
    view = table if as_table else running_text
    for index in range(min(count, len(dataset))):
        row = dataset[index]
        if dataset.packing:
            say(f"row {index}: {len(row)} samples, {sum(len(sample['input_ids']) for sample in row)} tokens")
        for sample in row:
            targets, target_bytes = int(sample["loss_mask"].sum()), sample["target_bytes"]
            size = f"{len(sample['input_ids'])} tokens, {targets} targets of {target_bytes} bytes"
            say(f"sample {sample['sample_id']} from {dataset.cache.source(sample['sample_id'])}: {size}")
            for line in view(tokenizer, sample, colour):
                say(line)
            say("")
    say(describe_files(dataset.cache.files))
    say(format_report(dataset.cache.report))
    if dataset.packing:
        say(f"  {dataset.describe()}")


def main() -> None:
    """Read the options, build or open the cache, print."""
    parser = Parser(prog="python -m dataset.show_samples", description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=2, help="samples (or packed rows) to show")
    parser.add_argument("--packing", type=int, choices=(0, 1), default=0, help="show packed rows")
    parser.add_argument("--table", type=int, choices=(0, 1), default=0, help="show a table of the tokens")
    args = parser.parse_args()
    if args.samples < 0:
        raise UserError(f"--samples {args.samples} is negative; use 0 for the report alone")
    tokenizer = load_tokenizer(args.tokenizer_path)
    dataset = TokenDataset(cache_of_arguments(args, tokenizer), packing=bool(args.packing))
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    show(dataset, tokenizer, args.samples, colour, bool(args.table))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when `head` closes the pipe
    with one_line_errors():
        main()
