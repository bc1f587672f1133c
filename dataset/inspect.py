"""Shows, token by token, what is a target and what is masked, and the report of lengths, cuts and drops.

    python -m dataset.inspect --kind sft --data_path data/sft.jsonl --samples 2
    python -m dataset.inspect --kind sft --data_path data/sft.jsonl --samples 1 --packing 1

On a terminal the targets are green. Start it with -m as above: run as a file, it would shadow Python's own `inspect`.
"""

import os
import signal
import sys
from collections.abc import Iterator

import numpy as np

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from dataset.lm_dataset import TokenDataset
from dataset.token_cache import add_arguments, cache_of_arguments, format_report, load_tokenizer

GREEN, GREY, PLAIN = "\033[32m", "\033[90m", "\033[0m"


def pieces(tokenizer, token_ids: list[int]) -> list[str]:
    """The printable text of each token; a token that is only part of a character is shown by its vocabulary entry."""
    entries = tokenizer.convert_ids_to_tokens(token_ids)
    texts = [tokenizer.decode([token_id], clean_up_tokenization_spaces=False) for token_id in token_ids]
    return [
        f"<part {entry}>" if "\N{REPLACEMENT CHARACTER}" in text else repr(text)[1:-1]
        for entry, text in zip(entries, texts, strict=True)
    ]


def table(tokenizer, sample: dict, colour: bool) -> Iterator[str]:
    """One line per token: position, id, target or not, text."""
    token_ids = sample["input_ids"].tolist()
    for position, (token_id, is_target, text) in enumerate(
        zip(token_ids, sample["loss_mask"], pieces(tokenizer, token_ids), strict=True)
    ):
        line = f"{position:6d} {token_id:7d}  {'target' if is_target else '  .   '}  {text}"
        yield f"{GREEN if is_target else GREY}{line}{PLAIN}" if colour else line


def show(dataset: TokenDataset, tokenizer, count: int, colour: bool) -> None:
    """Print the first `count` items of the dataset, then its report."""
    for index in range(min(count, len(dataset))):
        row = dataset[index]
        if dataset.packing:
            print(f"row {index}: {len(row)} samples, {sum(len(sample['input_ids']) for sample in row)} tokens")
        for sample in row:
            number = sample["sample_id"]
            targets = int(np.sum(sample["loss_mask"]))
            size = f"{len(sample['input_ids'])} tokens, {targets} targets of {sample['target_bytes']} bytes"
            print(f"sample {number} from {dataset.cache.source(number)}: {size}")
            for line in table(tokenizer, sample, colour):
                print(line)
            print()
    print(format_report(dataset.cache.report))
    if dataset.packing:
        print(f"  {dataset.describe()}")


def main() -> None:
    """Read the options, build or open the cache, print."""
    parser = Parser(prog="python -m dataset.inspect", description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=2, help="samples (or packed rows) to show")
    parser.add_argument("--packing", type=int, choices=(0, 1), default=0, help="show packed rows")
    args = parser.parse_args()
    if args.samples < 0:
        raise UserError(f"--samples {args.samples} is negative; use 0 for the report alone")
    tokenizer = load_tokenizer(args.tokenizer_path)
    dataset = TokenDataset(cache_of_arguments(args, tokenizer), packing=bool(args.packing))
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    show(dataset, tokenizer, args.samples, colour)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when `head` closes the pipe
    with one_line_errors():
        main()
