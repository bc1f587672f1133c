"""MiniMind's helpers under MiniMind's names, and nothing else. Three of them are only imported here: `Logger`
and `is_main_process` from devices/process_group.py, because everything prints through them, and
`SkipBatchSampler` from dataset/order.py, where the loaders use it."""

import math
import os
import random
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from common.containers import available_cores
from common.errors import UserError, reason
from common.launcher import launch
from common.settings import ROOT
from dataset.order import SkipBatchSampler as SkipBatchSampler
from dataset.token_cache import load_tokenizer
from trainer.checkpoint.file import newest_checkpoint, write_checkpoint
from trainer.checkpoint.state import copy_to_host
from trainer.devices.process_group import (
    Logger,
    check_gpus_differ,
    interruptible,
    is_main_process,
    join_process_group,
    world_size,
)
from trainer.weights.config import check_tokenizer, describe_size
from trainer.weights.files import fill, read_model
from trainer.weights.paths import resume_path, start_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM


def init_distributed_mode(rank_timeout: float = 600, device: torch.device | None = None) -> int:
    """Join the process group that the environment describes: gloo for CPU tensors, NCCL for CUDA ones.

    Args:
        device: the device of this rank; by default a GPU if there is one. Without a GPU, CUDA is not touched.
        rank_timeout: seconds that a rank waits in a collective before it considers its peer lost; a network
            that is cut off gives no other sign. The rendezvous itself waits a day, because one machine may
            still be tokenising data that another machine has in its cache.

    Returns:
        The local rank; 0 without a process group (a single process).

    Raises:
        UserError: the environment does not say which rank this is, the ranks cannot meet, or two share a GPU.
    """
    place = launch()
    if place.problem:
        raise UserError(place.problem)
    if place.world_size == 1:
        return 0
    local_rank = place.local_rank
    on_gpu = device.type == "cuda" if device is not None else torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(min(local_rank, torch.cuda.device_count() - 1) if device is None else device)
    elif place.local_world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        # torchrun gives each process one thread; share all cores instead
        torch.set_num_threads(max(1, available_cores() // place.local_world_size))
    try:
        timeout = timedelta(seconds=rank_timeout)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        interruptible(lambda: join_process_group(place.rank, place.world_size, backend, timeout))
    except RuntimeError as error:  # dist.DistNetworkError and its like
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"the ranks cannot meet at {where} ({reason(error)}); if the port is taken give torchrun another "
            "--master_port, or --standalone on one machine"
        ) from error
    if on_gpu:
        check_gpus_differ()
    return local_rank


def setup_seed(seed: int) -> None:
    """Seed Python, numpy and torch, alike on every rank, and make cuDNN deterministic."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def get_lr(current_step: int, total_steps: int, lr: float) -> float:
    """MiniMind's schedule: a cosine from `lr` down to a tenth of it. Steps are optimizer updates, counted
    from 1."""
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * current_step / total_steps)))


def lm_checkpoint(
    lm_config: Any,
    weight: str = "full_sft",
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    epoch: int = 0,
    step: int = 0,
    wandb: Any = None,
    save_dir: str | Path = ROOT / "checkpoints",
    resume_from: str | None = None,
    **kwargs: Any,
) -> dict[str, Any] | None:
    """With a model, save the state to resume from. Without one, return the saved state (None if there is
    none).

    It saves the fp32 weights, the optimizer, epoch, step (finished micro-batches of this epoch), world size,
    the id of the tracker (`wandb`: its run, or its module), and everything in `kwargs`. All ranks must call
    it. `resume_from`: the state with which a branch begins."""
    path = resume_path(save_dir, weight, lm_config)
    if model is None:
        return newest_checkpoint(path, resume_from)
    tracker_run = wandb.get_run() if hasattr(wandb, "get_run") else wandb
    weights, optimizer_state = copy_to_host(model, optimizer)
    state = {"model": weights, "optimizer": optimizer_state, "epoch": epoch, "step": step}
    state |= {"world_size": world_size(), "wandb_id": getattr(tracker_run, "id", None)}
    description = {"model": lm_config.own_fields()} if hasattr(lm_config, "own_fields") else None
    if is_main_process():
        write_checkpoint(path, state | kwargs, description)
    return None


def init_model(
    lm_config: "MiniMindConfig",
    from_weight: str = "pretrain",
    tokenizer_path: str | Path = ROOT / "model",
    save_dir: str | Path = ROOT / "out",
    device: str | torch.device = "cpu",
) -> "tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]":
    """Build the model in float32 and load its tokenizer; `from_weight`: the weights to start from (their name
    in `save_dir`, or their path), or `none` for random weights. Raises UserError if the weights are missing
    or have another shape, or if the tokenizer does not fit the vocabulary."""
    from model.model_minimind import MiniMindForCausalLM

    tokenizer = load_tokenizer(tokenizer_path)
    check_tokenizer(tokenizer, tokenizer_path, lm_config)
    model = MiniMindForCausalLM(lm_config)
    source = ""
    if from_weight != "none":
        path = start_path(save_dir, from_weight, lm_config)
        weights, weights_config = read_model(path, lm_config.num_experts_per_tok)
        fill(model, weights, path, weights_config)
        check_tokenizer(tokenizer, tokenizer_path, weights_config)
        source = f", weights: {from_weight}"
    Logger(f"{describe_size(model)}{source}")
    cast(nn.Module, model).to(device)  # in place
    return model, tokenizer
