"""Batch, learning rate and warm-up by the size of model and data, and the held-out loss to expect: fits to
runs that were measured (docs/dev/LOG.md, "Which batch, learning rate and loss").

scripts/plan.py uses them, and `--learning_rate auto` and `--batch_size auto`.
"""

import math
from typing import Any, TypeVar

from common.errors import UserError
from common.settings import StageArgs
from dataset.lm_dataset import StageDataset
from trainer.data.datasets import epoch_tokens
from trainer.devices.process_group import Logger, world_size
from trainer.run.resume import largest_divisor

A = TypeVar("A", bound=StageArgs)
OPTIMIZER = "muon"
SPREAD = 0.05  # of the loss to expect
# where runs have shown how good the expected loss is: weights of the layers, tokens of one pass, tokens of
# all passes
MIN_WEIGHTS, MAX_WEIGHTS, MIN_TOKENS, MAX_TRAINED = 49e3, 12.6e6, 0.3e6, 2.5e6


def update_tokens(tokens: float) -> float:
    """Tokens of an update, in a run over so many tokens."""
    return min(max(2048 * (tokens / 1e6) ** 0.5, 2048), 2**19)


def learning_rate(width: int, tokens: float, tokens_per_update: float, optimizer: str) -> float:
    """The peak learning rate of a run over so many tokens."""
    rate = 1e-3 * (width / 128) ** -0.6 * (tokens / 3.5e5) ** -0.4 * (tokens_per_update / 2048) ** 0.5
    return rate * (3 if optimizer == "adamw" else 1)


def warmup(updates: int) -> int:
    """Updates of warm-up."""
    return max(1, min(100, updates // 20))


def vocabulary(text_bytes: float, bytes_per_token: float) -> int | None:
    """Size of a vocabulary of its own for little text that the shipped one spells in short tokens; None: the
    shipped one. Most of its rows would hardly be trained there, and cost as much as the others."""
    return 512 if text_bytes < 2e6 and bytes_per_token < 3 else None


def expected_loss(trigram: float, weights: float, tokens: float, passes: int) -> float:
    """Held-out loss of pretraining, from that of a trigram model of the same data.

    weights: of the layers, 12 x layers x width^2. tokens: of one pass. Beyond 20 M weights and 1,000 M tokens
    a quarter of the fit is believed; where `was_checked` is False it serves to compare models only."""
    size, trained = math.log(weights / 4e5), math.log(passes * tokens / 1e6)
    size, trained = min(size, 3.9 + (size - 3.9) / 4), min(trained, 6.9 + (trained - 6.9) / 4)
    change = -0.004 - 0.035 * math.log(passes) - 0.015 * size - 0.02 * trained - 0.011 * size * trained
    return trigram * math.exp(change)


def was_checked(weights: float, tokens: float, passes: int) -> bool:
    """Whether `expected_loss` of these lies where runs have shown that it is within SPREAD of the loss."""
    return MIN_WEIGHTS <= weights <= MAX_WEIGHTS and tokens >= MIN_TOKENS and passes * tokens <= MAX_TRAINED


def chosen(args: A, data: Any, ranks: int) -> A:
    """The settings with a number in place of each `auto`; data: a StageDataset."""
    of_ranks, item = args.accumulation_steps * ranks, data.mean_tokens
    tokens = epoch_tokens(data, args) * args.epochs
    if args.batch_size is None:
        wanted = update_tokens(tokens) / item / of_ranks
        args = args.model_copy(update={"batch_size": max(1, min(round(wanted), len(data)))})
    if args.learning_rate is None:
        of_update = item * args.batch_size * of_ranks
        rate = learning_rate(args.hidden_size, tokens, of_update, args.optimizer)
        args = args.model_copy(update={"learning_rate": float(f"{rate * args.auto_rate:.1e}")})
    return args


def apply_rules(args: A, checkpoint: dict[str, Any] | None, data: Any) -> A:
    """`chosen` for a run on these data; a resumed run keeps the numbers that it began with. Raises UserError
    if the data do not say how many tokens they have."""
    flags = [f"--{name} auto" for name in ("learning_rate", "batch_size") if getattr(args, name) is None]
    if not flags:
        return args
    # else it is not of this project, which `check_resume` tells
    if checkpoint is not None and "run" in checkpoint:
        run = checkpoint["run"]
        if args.batch_size is None:  # at most as large as it was; `keep_global_batch` adapts the accumulation
            before = run["global_batch"] // (args.accumulation_steps * checkpoint["world_size"])
            of_rank = max(1, run["global_batch"] // world_size())
            args = args.model_copy(update={"batch_size": largest_divisor(of_rank, max(1, before))})
        return args.model_copy(update={"learning_rate": args.learning_rate or run["learning_rate"]})
    if not isinstance(data, StageDataset):
        raise UserError(
            f"{flags[0]}: the rules know text and SFT data, not a {type(data).__name__}; give a number"
        )
    args = chosen(args, data, world_size())
    Logger(f"auto: --batch_size {args.batch_size} --learning_rate {args.learning_rate:g}")
    return args
