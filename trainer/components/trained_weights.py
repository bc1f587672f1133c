"""Trained models for use: which one a command line names, the shape of its model, and the model itself.

A model is a weights file of `out/`, a checkpoint of `checkpoints/` (a file, or the folder of a sharded run), or a
Hugging Face folder. Of the shape, the tensors tell all but the number of experts per token, which stands in the file's
name (run_files.py), in the checkpoint or in the folder's config. Nothing in a file is executed.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from common.errors import UserError, reason
from common.settings import ROOT, StageArgs, add_flags, settings_of
from dataset.token_cache import load_tokenizer
from trainer.components.checkpoint import STATE_KEYS, fill, missing_weights, read_state, read_weights
from trainer.components.device import prepare_device, select_device
from trainer.components.distributed import Logger
from trainer.components.hugging_face import TOKENIZER_FILE, read_folder, read_sampling
from trainer.components.language_model import SHAPE, check_vocabulary, config_of_weights, describe_size, special_tokens
from trainer.components.lora import merge_adapter
from trainer.components.run_files import CONFIG_FILE, NAMED_SHAPE, is_hugging_face, shape_in_name, weight_files
from trainer.components.state_files import UNREADABLE, read_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

WEIGHT = "full_sft"  # the weights that tools use unless told otherwise


def add_trained_model_flags(parser: argparse._ActionsContainer, device: bool = True) -> None:
    """The flags of tools that use a trained model: which one, where to run, and the shape if it must be told.

    device: whether to add `--device`.
    """
    rows = settings_of(StageArgs)
    parser.add_argument(
        "--model", metavar="PATH", help="the model: a weights file, a checkpoint or a Hugging Face folder; or --weight"
    )
    parser.add_argument("--weight", help=f"name of the weights in --save_dir (default: {WEIGHT})")
    parser.add_argument("--lora", metavar="PATH", help="folder of an adapter (LoRA) to merge into the model")
    add_flags(parser, (rows[name] for name in ("save_dir", "device")[: 1 + device]))
    beside = replace(rows["tokenizer_path"], default=None)
    beside = replace(beside, help=f"{beside.help} (default: that of --model, or {ROOT / 'model'})")
    add_flags(parser, [beside])
    shape = parser.add_argument_group("shape", "to choose between several weights of a name; else they tell it")
    add_flags(shape, (replace(rows[name], default=None) for name in SHAPE))


def given_shape(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of the shape that were given."""
    return {name: getattr(args, name) for name in SHAPE if getattr(args, name) is not None}


def model_path(args: argparse.Namespace) -> Path:
    """The file or folder of the model that the flags of `add_trained_model_flags` name.

    Raises:
        UserError: it is not there, or not clear.
    """
    if args.model is None:
        return find_weights(args.save_dir, args.weight or WEIGHT, **given_shape(args))
    if args.weight is not None:
        raise UserError(f"--model {args.model} and --weight {args.weight} both name a model; leave one of them out")
    if not Path(args.model).exists():
        raise UserError(f"--model {args.model}: no such file or folder")
    return Path(args.model)


def load_model(
    args: argparse.Namespace, device: str | torch.device | None = None
) -> "tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]":
    """The model that the flags of `add_trained_model_flags` name, in float32 and ready for use, and its tokenizer.

    device: where to put the model; None: where `--device` says.

    Raises:
        UserError: as `model_path`, `load_path` and `merge_adapter`, or there is no such device.
    """
    path = model_path(args)
    if device is None:
        device = select_device(args.device)
        prepare_device(device)
    model, tokenizer = load_path(path, args.tokenizer_path, device, **given_shape(args))
    return merge_adapter(model, Path(args.lora)) if args.lora else model, tokenizer


def load_path(
    path: Path, tokenizer_path: str | Path | None = None, device: str | torch.device = "cpu", **asked: Any
) -> "tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]":
    """The model in a file or folder, in float32 and ready for use, and its tokenizer.

    tokenizer_path: None: the folder of the model if it holds a tokenizer, else that of this repository.
    asked: settings of the shape (`given_shape`); only needed where the file and its name do not tell.

    Raises:
        UserError: it is no model, contradicts `asked`, or has another vocabulary than the tokenizer.
    """
    from model.model_minimind import MiniMindForCausalLM

    weights, told = read_model(path)
    tokenizer_path = tokenizer_path or tokenizer_folder(path)
    tokenizer = load_tokenizer(tokenizer_path)
    config = trained_config(path, weights, asked, **told | special_tokens(tokenizer))
    check_vocabulary(tokenizer, tokenizer_path, config, exactly=not is_hugging_face(path))
    model = MiniMindForCausalLM(config)
    cast(Any, model).sampling = read_sampling(path if path.is_dir() else path.parent)
    fill(model, weights, path)
    Logger(f"{describe_size(model)}, weights: {path.name}, tokenizer: {tokenizer_path}")
    cast(nn.Module, model).to(device)  # in place
    return model.eval(), tokenizer


def load_trained(
    weight: str,
    save_dir: str | Path = ROOT / "out",
    tokenizer_path: str | Path | None = None,
    device: str | torch.device = "cpu",
    **asked: Any,
) -> "tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]":
    """`load_path` of the weights of this name in `save_dir`."""
    return load_path(find_weights(save_dir, weight, **asked), tokenizer_path, device, **asked)


def tokenizer_folder(path: Path) -> Path:
    """The folder of the tokenizer that belongs to a model: beside its weights, else that of this repository."""
    folder = path if path.is_dir() else path.parent
    return folder if is_hugging_face(path) or (folder / TOKENIZER_FILE).is_file() else ROOT / "model"


def read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a model under MiniMind's names, and the fields of its config that they do not tell, as far as the
    file or folder does.

    Raises:
        UserError: it is not there, damaged, or holds no such model.
    """
    from trainer.components.sharded import REST, with_tensors

    if is_hugging_face(path):
        return read_folder(path)
    try:
        state = None
        if path.is_dir() and not (path / REST).is_file():
            raise UserError(f"{path}: neither a Hugging Face folder ({CONFIG_FILE}) nor a checkpoint ({REST})")
        if path.is_dir():
            state = with_tensors(read_state(path))
        elif path.is_file() and isinstance(content := read_file(path), dict) and set(content) >= STATE_KEYS:
            state = content
    except UNREADABLE as error:
        raise UserError(f"{path}: not a readable model ({reason(error)})") from error
    if state is None:
        return read_weights(path), {}
    run = state.get("run") or {}
    return state["model"], {name: run[name] for name in ("num_experts_per_tok",) if name in run}


def start_config(path: Path, experts_per_token: int | None = None) -> "MiniMindConfig":
    """The config of a model that a run starts from, named by its path.

    experts_per_token: of a mixture of experts whose file does not tell.

    Raises:
        UserError: it is not there, is no model, or one that a weights file cannot describe.
    """
    if not path.exists():
        raise UserError(f"--from_weight {path}: no such file or folder")
    weights, told = read_model(path)
    asked = {"num_experts_per_tok": experts_per_token} if experts_per_token else {}
    config = trained_config(path, weights, {}, **asked | told)
    usual = type(config)(hidden_size=config.hidden_size)
    for name in ("rms_norm_eps", "rope_parameters") + (("norm_topk_prob",) if config.use_moe else ()):
        if getattr(config, name) != getattr(usual, name):
            raise UserError(
                f"--from_weight {path}: the weights files of a run cannot say that {name} is {getattr(config, name)}"
            )
    return config


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


def trained_config(path: Path, weights: dict[str, Tensor], asked: dict[str, Any], **fields: Any) -> "MiniMindConfig":
    """The config of weights that were read from `path`. asked: settings that it must have. fields: further ones, such
    as the special tokens.

    Raises:
        UserError: they are of no such model, contradict `asked` or the file's name, or the number of experts per token
            must be asked for.
    """
    try:
        config = config_of_weights(weights, **fields)
        if config.use_moe and "num_experts_per_tok" not in fields:
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
