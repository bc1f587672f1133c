"""The helpers that MiniMind users know, under MiniMind's names; most are implemented in components/."""

import math
import random
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from common.settings import ROOT, StageArgs
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.components.checkpoint import lm_checkpoint, load_weights
from trainer.components.distributed import Logger, init_distributed_mode, is_main_process, leave_process_group
from trainer.components.language_model import (
    check_vocabulary,
    describe_size,
    model_config,
    next_token_loss,
    target_logits,
)
from trainer.components.run_files import weight_path
from trainer.components.sampler import SkipBatchSampler, epoch_loader, eval_loader, steps_per_epoch

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
    "steps_per_epoch",
    "target_logits",
    "warmup_cosine",
]


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


def init_model(
    lm_config: MiniMindConfig,
    from_weight: str = "pretrain",
    tokenizer_path: str | Path = ROOT / "model",
    save_dir: str | Path = ROOT / "out",
    device: str | torch.device = "cpu",
) -> tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]:
    """Build the model in float32 and load its tokenizer; `from_weight` names the weights in `save_dir` to start from,
    `none` random ones.

    Raises:
        UserError: the weights are missing or of another shape, or the tokenizer does not fit the vocabulary.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    check_vocabulary(tokenizer, tokenizer_path, lm_config)
    model = MiniMindForCausalLM(lm_config)
    if from_weight != "none":
        load_weights(model, weight_path(save_dir, from_weight, lm_config))
    Logger(f"{describe_size(model)}, weights: {from_weight}")
    cast(nn.Module, model).to(device)  # in place
    return model, tokenizer
