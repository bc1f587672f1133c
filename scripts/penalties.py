"""The flags of chat.py and evaluate.py that make a model repeat itself less."""

import argparse
from dataclasses import replace

from common.errors import UserError
from model.sampling import Sampling

# name -> least, most, whether the least itself is allowed; those of the server's requests, too
RANGES = {
    "repetition_penalty": (0.0, 10.0, False),
    "frequency_penalty": (-2.0, 2.0, True),
    "presence_penalty": (-2.0, 2.0, True),
}
HELP = {
    "repetition_penalty": "divide the logits of all tokens so far by it; above 1 a model repeats itself less "
    "(default: the model's generation_config.json, else 1)",
    "frequency_penalty": "subtract it from a token's logit as often as the token stands in the answer "
    "(default: 0)",
    "presence_penalty": "subtract it once from the logits of the tokens in the answer (default: 0)",
}


def add_penalty_flags(parser: argparse._ActionsContainer) -> None:
    """The flags."""
    for name in RANGES:
        parser.add_argument(f"--{name}", type=float, help=HELP[name])


def check_penalties(args: argparse.Namespace) -> None:
    """Raise UserError if a flag's value is out of range."""
    for name, (least, most, has_least) in RANGES.items():
        value = getattr(args, name)
        if value is None:
            continue
        if not least <= value <= most or (value == least and not has_least):
            begin = f"{least:g}" if has_least else f"above {least:g}"
            raise UserError(f"--{name} must be {begin} to {most:g}, not {value}")


def with_penalties(sampling: Sampling, args: argparse.Namespace) -> Sampling:
    """The sampling with those penalties that the flags give."""
    values = {name: getattr(args, name) for name in RANGES if getattr(args, name) is not None}
    return replace(sampling, **values)
