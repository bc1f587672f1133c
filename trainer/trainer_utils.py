"""The helpers that MiniMind users know, under MiniMind's names; most are implemented in components/."""

import copy
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from common.errors import UserError
from common.settings import ROOT, ModelConfig, StageArgs
from dataset.token_cache import load_tokenizer
from trainer.components.checkpoint import lm_checkpoint
from trainer.components.distributed import Logger, init_distributed_mode, is_main_process, leave_process_group
from trainer.components.language_model import (
    SHAPE,
    check_tokenizer,
    describe_size,
    frozen_model,
    model_config,
    next_token_loss,
    target_log_probs,
    target_logits,
)
from trainer.components.loaders import SkipBatchSampler, epoch_loader, eval_loader, steps_per_epoch
from trainer.components.model_files import described_config, load_weights, read_model
from trainer.components.resume import Fingerprint, check_start_weights
from trainer.components.run_files import is_path, start_path, tokenizer_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

__all__ = [
    "Logger",
    "SkipBatchSampler",
    "epoch_loader",
    "eval_loader",
    "get_lr",
    "init_distributed_mode",
    "init_model",
    "is_main_process",
    "leave_process_group",
    "lm_checkpoint",
    "load_tokenizer",
    "model_config",
    "next_token_loss",
    "setup_seed",
    "start_model_config",
    "start_shape",
    "steps_per_epoch",
    "target_log_probs",
    "target_logits",
    "warmup_cosine",
]


A = TypeVar("A", bound=StageArgs)


def setup_seed(seed: int) -> None:
    """Seed Python, numpy and torch, alike on every rank, and make cuDNN deterministic."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def get_lr(current_step: int, total_steps: int, lr: float) -> float:
    """Cosine from `lr` down to a tenth of it; steps are optimizer updates, the first is 1 (MiniMind's schedule)."""
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * current_step / total_steps)))


def warmup_cosine(update: int, total_updates: int, args: StageArgs) -> float:
    """The schedule of a stage: learning rate of an update, from 1; linear warm-up times the cosine of `get_lr`."""
    return min(1.0, update / max(1, args.warmup_updates)) * get_lr(update, total_updates, args.learning_rate)


def start_shape(args: A) -> A:
    """The settings with the shape of the model in --from_weight, as far as these weights say it, and the tokenizer
    beside them if they are named by a path.

    Raises:
        UserError: there is no such model, or the shape that was given is another.
    """
    config = start_config(args)
    if config is None:
        return args
    shape = {name: getattr(config, name) for name in SHAPE}
    for name, value in shape.items():
        if getattr(args, name) not in (value, getattr(type(args), name)):
            path = start_path(args.save_dir, args.from_weight, args)
            raise UserError(f"--{name} {getattr(args, name)}: --from_weight {path} is of {value}; leave the flag out")
    given = not is_path(args.from_weight) or args.tokenizer_path != ModelConfig.tokenizer_path
    beside = args.tokenizer_path if given else str(tokenizer_folder(Path(args.from_weight)))
    return replace(args, **shape, tokenizer_path=beside)


def start_config(args: StageArgs) -> "MiniMindConfig | None":
    """The config of the weights that a stage starts from; None if there are none, or if a name in --save_dir is that of
    a file from elsewhere: then the flags say the shape.

    Raises:
        UserError: --from_weight is a path, and there is no model.
    """
    path = start_path(args.save_dir, args.from_weight, args)
    config = described_config(path) if args.from_weight != "none" else None
    if config is not None or not is_path(args.from_weight):
        return config
    if not path.exists():
        raise UserError(f"--from_weight {path}: no such file or folder")
    return read_model(path, args.num_experts_per_tok if args.use_moe else None)[1]


def start_model_config(tokenizer: "PreTrainedTokenizerBase", args: StageArgs) -> "MiniMindConfig":
    """The config of the model of a stage: that of the weights in --from_weight, with the dropout of the settings, or
    what the settings say.

    Raises:
        UserError: the weights were trained with another tokenizer.
    """
    config = start_config(args)
    if config is None:
        return model_config(tokenizer, args)
    check_tokenizer(tokenizer, args.tokenizer_path, config)
    return model_config(tokenizer, args, **config.own_fields())


def init_model(
    lm_config: "MiniMindConfig",
    from_weight: str = "pretrain",
    tokenizer_path: str | Path = ROOT / "model",
    save_dir: str | Path = ROOT / "out",
    device: str | torch.device = "cpu",
) -> "tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]":
    """Build the model in float32 and load its tokenizer; `from_weight`: the weights to start from, their name in
    `save_dir` or their path, or `none` for random ones.

    Raises:
        UserError: the weights are missing or of another shape, or the tokenizer does not fit the vocabulary.
    """
    from model.model_minimind import MiniMindForCausalLM

    tokenizer = load_tokenizer(tokenizer_path)
    check_tokenizer(tokenizer, tokenizer_path, lm_config)
    model = MiniMindForCausalLM(lm_config)
    if from_weight != "none":
        stored = load_weights(model, start_path(save_dir, from_weight, lm_config))
        check_tokenizer(tokenizer, tokenizer_path, stored)
    Logger(f"{describe_size(model)}, weights: {from_weight}")
    cast(nn.Module, model).to(device)  # in place
    return model, tokenizer


def policy_and_reference(
    args: Any, lm_config: "MiniMindConfig", device: torch.device, run: Fingerprint, resumed: bool
) -> "tuple[MiniMindForCausalLM, nn.Module | None]":
    """The model, from its weights unless a checkpoint replaces them, and with --beta the start weights, frozen.

    Raises:
        UserError: the start weights are needed, and no longer those that the run began with.
    """
    if args.beta:
        check_start_weights(args, run)
    start = args.from_weight if args.beta or not resumed else "none"
    model, _ = init_model(lm_config, start, args.tokenizer_path, args.save_dir)
    return model, frozen_model(copy.deepcopy(model), device) if args.beta else None
