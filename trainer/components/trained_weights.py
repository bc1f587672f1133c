"""Trained weights for use: which file they are, the shape of their model, and the model itself.

Of the shape, the tensors tell all but the number of experts per token, which stands in the file's name (run_files.py).
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from common.errors import UserError, reason
from common.settings import ROOT, StageArgs, add_flags, settings_of
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.components.checkpoint import fill, missing_weights, read_weights
from trainer.components.distributed import Logger
from trainer.components.language_model import SHAPE, check_vocabulary, config_of_weights, describe_size, special_tokens
from trainer.components.run_files import NAMED_SHAPE, shape_in_name, weight_files


def add_trained_model_flags(parser: argparse._ActionsContainer) -> None:
    """The flags of tools that use trained weights: which weights, where to run, and the shape if it must be told."""
    rows = settings_of(StageArgs)
    parser.add_argument("--weight", default="full_sft", help="name of the weights in --save_dir")
    add_flags(parser, (rows[name] for name in ("save_dir", "tokenizer_path", "device")))
    shape = parser.add_argument_group("shape", "to choose between several weights of a name; else they tell it")
    add_flags(shape, (replace(rows[name], default=None) for name in SHAPE))


def given_shape(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of the shape that were given."""
    return {name: getattr(args, name) for name in SHAPE if getattr(args, name) is not None}


def load_trained(
    weight: str,
    save_dir: str | Path = ROOT / "out",
    tokenizer_path: str | Path = ROOT / "model",
    device: str | torch.device = "cpu",
    **asked: Any,
) -> tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]:
    """The model with these weights, in float32 and ready for use, and its tokenizer.

    asked: settings of the shape (`given_shape`); only needed where there are several files, or where neither the file
    nor its name tells.

    Raises:
        UserError: the weights are not found or not clear, contradict `asked`, or have another vocabulary.
    """
    path = find_weights(save_dir, weight, **asked)
    weights, tokenizer = read_weights(path), load_tokenizer(tokenizer_path)
    config = trained_config(path, weights, asked, **special_tokens(tokenizer))
    check_vocabulary(tokenizer, tokenizer_path, config, exactly=True)
    model = MiniMindForCausalLM(config)
    fill(model, weights, path)
    Logger(f"{describe_size(model)}, weights: {path.name}")
    cast(nn.Module, model).to(device)  # in place
    return model.eval(), tokenizer


def find_weights(save_dir: str | Path, weight: str, **asked: Any) -> Path:
    """The one file of these weights in `save_dir`, of whatever shape. asked: settings that it must have.

    Raises:
        UserError: there is none, none of this shape, or there are several.
    """
    files = weight_files(save_dir, weight)
    if not files:
        raise missing_weights(Path(save_dir) / f"{weight}_*.pth")
    wanted = {name: asked[name] for name in NAMED_SHAPE if name in asked}
    found = [path for path, shape in files.items() if wanted.items() <= shape.items()]
    if not found:  # a plain `_moe` may come from elsewhere and have any experts: its tensors tell
        wanted = {name: value for name, value in wanted.items() if name in ("hidden_size", "use_moe")}
        plain = (path for path in files if path.stem.endswith("_moe"))
        found = [path for path in plain if wanted.items() <= files[path].items()]
    names = ", ".join(path.name for path in found or files)
    if not found:
        raise UserError(f"{_flags(asked)}: {save_dir} holds no such weights, only {names}; leave out what is wrong")
    if len(found) > 1:
        differing = [name for name in NAMED_SHAPE if len({files[path][name] for path in found}) > 1]
        choice = differing[: differing.index("use_moe") + 1] if "use_moe" in differing else differing
        flags = " or ".join(f"--{name}" for name in choice)
        raise UserError(f"{save_dir} holds several weights {weight}: {names}; choose one with {flags}")
    return found[0]


def trained_config(path: Path, weights: dict[str, Tensor], asked: dict[str, Any], **fields: Any) -> MiniMindConfig:
    """The config of weights that were read from `path`. asked: settings that it must have. fields: further ones, such
    as the special tokens.

    Raises:
        UserError: they are of no such model, contradict `asked` or the file's name, or the number of experts per token
            must be asked for.
    """
    try:
        config = config_of_weights(weights, **fields)
        if config.use_moe:
            per_token = _experts_per_token(path, config.num_experts, asked)
            config = config_of_weights(weights, num_experts_per_tok=per_token, **fields)
    except ValueError as error:
        raise UserError(f"weights {path}: {reason(error)}") from error
    wrong = {name: value for name, value in asked.items() if getattr(config, name) != value}
    if wrong:
        true = _flags({name: getattr(config, name) for name in wrong})
        raise UserError(f"{_flags(wrong)} contradicts the weights {path}, which are of {true}; leave it out")
    return config


def _experts_per_token(path: Path, num_experts: int, asked: dict[str, Any]) -> int:
    named = shape_in_name(path)
    if named and named["num_experts"] == num_experts:
        return named["num_experts_per_tok"]
    if named and named["use_moe"] and not path.stem.endswith("_moe"):
        raise UserError(f"weights {path} have {num_experts} experts per layer, but their name says others; rename them")
    if "num_experts_per_tok" not in asked:
        raise UserError(
            f"weights {path} have {num_experts} experts per layer, and nothing tells how many of them each token goes "
            f"through: give --num_experts_per_tok, or name the file ..._moe_{num_experts}xN.pth with that number as N"
        )
    return asked["num_experts_per_tok"]


def _flags(shape: dict[str, Any]) -> str:
    return " ".join(f"--{name} {int(value)}" for name, value in shape.items())
