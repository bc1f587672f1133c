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
from trainer.components.checkpoint import fill, lm_checkpoint, load_weights
from trainer.components.distributed import Logger, init_distributed_mode, is_main_process, leave_process_group
from trainer.components.language_model import (
    SHAPE,
    check_vocabulary,
    describe_size,
    frozen_model,
    model_config,
    next_token_loss,
    target_log_probs,
    target_logits,
)
from trainer.components.resume import Fingerprint, check_start_weights
from trainer.components.run_files import is_path, weight_path
from trainer.components.sampler import SkipBatchSampler, epoch_loader, eval_loader, steps_per_epoch
from trainer.components.trained_weights import read_model, start_config, tokenizer_folder

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
    """The settings with the shape and the tokenizer of a model that --from_weight names by its path; without a path as
    they are.

    Raises:
        UserError: there is no such model, or the shape that was given is another.
    """
    if not is_path(args.from_weight):
        return args
    path = Path(args.from_weight)
    config = start_config(path, args.num_experts_per_tok if args.use_moe else None)
    shape = {name: getattr(config, name) for name in SHAPE}
    for name, value in shape.items():
        if getattr(args, name) not in (value, getattr(type(args), name)):
            raise UserError(f"--{name} {getattr(args, name)}: --from_weight {path} is of {value}; leave the flag out")
    given = args.tokenizer_path != ModelConfig.tokenizer_path
    return replace(args, **shape, tokenizer_path=args.tokenizer_path if given else str(tokenizer_folder(path)))


def start_model_config(tokenizer: "PreTrainedTokenizerBase", args: StageArgs) -> "MiniMindConfig":
    """The config of the model of a stage: that of the settings, or what --from_weight names by its path, with the
    dropout of the settings."""
    if not is_path(args.from_weight):
        return model_config(tokenizer, args)
    config = start_config(Path(args.from_weight), args.num_experts_per_tok if args.use_moe else None)
    fields = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    fields += ("moe_intermediate_size", "tie_word_embeddings", "max_position_embeddings")
    return model_config(tokenizer, args, **{name: getattr(config, name) for name in fields})


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
    check_vocabulary(tokenizer, tokenizer_path, lm_config)
    model = MiniMindForCausalLM(lm_config)
    if is_path(from_weight):
        fill(model, read_model(Path(from_weight))[0], Path(from_weight))
    elif from_weight != "none":
        load_weights(model, weight_path(save_dir, from_weight, lm_config))
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
