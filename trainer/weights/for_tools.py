"""Trained models for the tools: finds the model that a command line names, and loads it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from common.arguments import add_flag
from common.errors import UserError
from common.files import files_in, is_folder, is_there
from common.hub import make_local
from common.settings import ROOT, StageArgs
from dataset.token_cache import load_tokenizer
from trainer.devices.device import prepare_device, select_device
from trainer.devices.process_group import Logger
from trainer.weights.config import SHAPE, check_tokenizer, describe_size, tokenizer_fields
from trainer.weights.files import fill, find_weights, read_model, tokenizer_folder
from trainer.weights.import_hf import read_sampling
from trainer.weights.lora import merge_adapter
from trainer.weights.paths import is_hugging_face

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.model_minimind import MiniMindForCausalLM

WEIGHT = "full_sft"  # the weights that tools use by default
# settings of the shape that tools ask for; files of one name never differ only in their heads
NAMED_BY_TOOLS = [name for name in SHAPE if not name.endswith("_heads")]


def add_trained_model_flags(parser: argparse._ActionsContainer, device: bool = True) -> None:
    """The flags of tools that use a trained model: the model, the device (`device`: whether to have this
    flag), and the shape in case nothing else gives it."""
    text = "the model: a weights file, a checkpoint, a Hugging Face folder, or a folder that holds --weight"
    parser.add_argument("--model", metavar="PATH", help=text)
    text = f"name of the weights in --save_dir, or in the folder that is --model (default: {WEIGHT})"
    parser.add_argument("--weight", help=text)
    text = "adapter (LoRA) to merge into the model: its folder, or a file of MiniMind"
    parser.add_argument("--lora", metavar="PATH", help=text)
    add_flag(parser, StageArgs, "save_dir")
    if device:
        add_flag(parser, StageArgs, "device")
    text = f"folder of a Hugging Face tokenizer (default: that of --model, or {ROOT / 'model'})"
    add_flag(parser, StageArgs, "tokenizer_path", default=None, help=text)
    text = "1: YaRN, as in MiniMind, for texts longer than those of the training"
    parser.add_argument(
        "--inference_rope_scaling", type=int, choices=(0, 1), nargs="?", const=1, default=0, help=text
    )
    shape = parser.add_argument_group(
        "shape", "to choose between several weights of a name; else they tell it"
    )
    for name in NAMED_BY_TOOLS:
        add_flag(shape, StageArgs, name, default=None)


def given_shape(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of the shape that were given."""
    return {name: getattr(args, name) for name in NAMED_BY_TOOLS if getattr(args, name) is not None}


def model_path(args: argparse.Namespace) -> Path:
    """The file or folder of the model that the flags of `add_trained_model_flags` name; paths on a hub become
    those of local copies, also in `args`. Raises UserError if the model is missing or ambiguous."""
    make_local(args)
    folder = args.save_dir if args.model is None else args.model
    if args.model is None or holds_weights(Path(folder)):
        return find_weights(folder, args.weight or WEIGHT, **given_shape(args))
    if args.weight is not None:
        raise UserError(
            f"--model {args.model} and --weight {args.weight} both name a model; leave one of them out"
        )
    if not is_there(args.model):
        raise UserError(f"--model {args.model}: no such file or folder")
    return Path(args.model)


def holds_weights(path: Path) -> bool:
    """Whether it is a folder of weights files, such as `out/`, and not a Hugging Face folder."""
    return is_folder(path) and not is_hugging_face(path) and bool(files_in(path, "*.pth"))


def load_model(
    args: argparse.Namespace, device: str | torch.device | None = None
) -> "tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]":
    """The model that the flags of `add_trained_model_flags` name, in float32 and ready for use, and its
    tokenizer. device: None: the one of `--device`. Raises UserError if there is no such model or device."""
    path = model_path(args)
    if device is None:
        device = select_device(args.device)
        prepare_device(device)
    scaling = bool(args.inference_rope_scaling)
    model, tokenizer = load_path(path, args.tokenizer_path, device, scaling, **given_shape(args))
    if args.lora:
        merge_adapter(model, Path(args.lora))
    return model, tokenizer


def load_path(
    path: Path,
    tokenizer_path: str | Path | None = None,
    device: str | torch.device = "cpu",
    rope_scaling: bool = False,
    **required_shape: Any,
) -> "tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]":
    """The model in a file or folder, in float32 and ready for use, and its tokenizer.

    tokenizer_path: None: the model's tokenizer. rope_scaling: use MiniMind's YaRN. required_shape: settings
    of the shape. Raises UserError if it is not a model, contradicts `required_shape`, or has another
    vocabulary than the tokenizer."""
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

    weights, config = read_model(path, **required_shape)
    if rope_scaling:
        config = MiniMindConfig(**config.own_fields() | {"inference_rope_scaling": True})
    tokenizer_path = tokenizer_path or tokenizer_folder(path)
    tokenizer = load_tokenizer(tokenizer_path)
    from_elsewhere = not is_hugging_face(path) and config.tokenizer_sha256 is None
    check_tokenizer(tokenizer, tokenizer_path, config, exactly=from_elsewhere)
    for name, value in tokenizer_fields(tokenizer).items():
        setattr(config, name, value)
    model = MiniMindForCausalLM(config)
    cast(Any, model).sampling = read_sampling(path if is_folder(path) else path.parent)
    fill(model, weights, path, config)
    Logger(f"{describe_size(model)}, weights: {path.name}, tokenizer: {tokenizer_path}")
    cast(nn.Module, model).to(device)  # in place
    return model.eval(), tokenizer
