"""What every stage script shares: processes and seeds, the learning rate, the model, the order of samples.

`lm_checkpoint` lives in trainer/checkpoint.py and is offered here under the name that MiniMind users know.
"""

import ctypes
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from dataset.errors import UserError, reason
from dataset.lm_dataset import collate_flat
from dataset.token_cache import available_cores, load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.checkpoint import lm_checkpoint, load_weights, weight_path
from trainer.interrupt import ignore_stop_signals
from trainer.parallel import is_main_process, this_rank, world_size

__all__ = [
    "Logger",
    "SkipBatchSampler",
    "get_lr",
    "init_distributed_mode",
    "init_model",
    "is_main_process",
    "lm_checkpoint",
    "setup_seed",
]

MEETING = timedelta(days=1)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
ROOT = Path(__file__).resolve().parents[1]  # the repository; default paths start here, not in the current folder


def reduce_sum(values: Tensor) -> Tensor:
    """Sum over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gather(value: Any) -> list[Any]:
    """What each rank has, by rank; plain Python objects, over gloo."""
    everyone = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(everyone, value)
    return everyone


def Logger(text: str) -> None:
    """Print one line, on rank 0 only."""
    if is_main_process():
        print(text, flush=True)


def init_distributed_mode(rank_timeout: float = 600) -> int:
    """Join the process group that torchrun describes in the environment; gloo for CPU tensors, NCCL for CUDA ones.

    Args:
        rank_timeout: seconds that a rank waits for another one in a collective until it takes it for lost. A network
            that is cut off is silent: nothing else tells of it. The ranks wait for each other a day to meet, though,
            since one machine may still tokenise what another one has in its cache.

    Returns:
        The local rank. A run of one process, with or without torchrun, is rank 0 and makes no group.

    Raises:
        UserError: the ranks cannot meet.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(min(local_rank, torch.cuda.device_count() - 1))  # pick_device refuses too many ranks
    elif os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun's own setting; share the cores instead
        torch.set_num_threads(max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        store, rank, ranks = next(dist.rendezvous("env://"))
        store.set(f"here/{rank}", b"")
        store.wait([f"here/{other}" for other in range(ranks)], MEETING)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        timeout = timedelta(seconds=rank_timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    except RuntimeError as error:  # dist.DistNetworkError and its like
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"the ranks cannot meet at {where} ({reason(error)}); if the port is taken give torchrun another "
            "--master_port, or --standalone on one machine"
        ) from error
    return local_rank


def setup_seed(seed: int) -> None:
    """Seed Python, numpy and torch alike on every rank, and make cuDNN deterministic."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def pick_device(device: str, local_rank: int) -> torch.device:
    """The device of this rank: `auto` takes CUDA, then Apple MPS (one process only), then the CPU.

    Raises:
        UserError: there is no such device, or several ranks would share one.
    """
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1  # asked before the ranks meet
    if device == "auto":
        mps = alone and torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if device == "cuda":
        device = f"cuda:{local_rank}"
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        hint = f"start at most {torch.cuda.device_count()} processes here, or use another device"
        raise UserError(f"--device {device} cannot be used ({reason(error)}); {hint}") from error
    if not alone and (found.type == "mps" or (found.type == "cuda" and found.index != local_rank)):
        raise UserError(f"--device {device} cannot be shared by several processes; leave it at auto")
    if found.type == "cuda":
        torch.cuda.set_device(found)
    elif found.type == "cpu":
        keep_freed_memory()
    return found


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: on a CPU each update needs as much again, and new pages of the system can take
    longer than the arithmetic on them. The limits are the largest that mallopt(3) takes. No glibc: nothing happens.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices faster than float32 ones."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        flags = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, flag, lambda: False)() for flag in flags)
    return False


def native_float16(device: torch.device) -> bool:
    """Whether the device has arithmetic for float16; emulated it is hundreds of times slower than float32."""
    return device.type != "cpu" or getattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)()


def mixed_precision(dtype: str, device: torch.device) -> tuple[AbstractContextManager, torch.amp.GradScaler]:
    """Autocast context and gradient scaler for `--dtype`; weights and optimizer state stay float32.

    `auto` is bfloat16 where the device is good at it, else float32. Only float16 needs its loss scaled.
    """
    if dtype == "auto":
        dtype = "bfloat16" if native_bfloat16(device) else "float32"
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")
    if dtype == "float32":
        return nullcontext(), scaler
    return torch.autocast(device.type, dtype=getattr(torch, dtype)), scaler


def get_lr(current_step: int, total_steps: int, lr: float) -> float:
    """Cosine from `lr` down to a tenth of it; steps are optimizer updates, the first is 1 (MiniMind's schedule)."""
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * current_step / total_steps)))


def warmup_cosine(update: int, total_updates: int, lr: float, warmup_updates: int) -> float:
    """Learning rate of an update, from 1: linear warm-up times the cosine of `get_lr`."""
    return min(1.0, update / max(1, warmup_updates)) * get_lr(update, total_updates, lr)


def init_model(
    lm_config: MiniMindConfig,
    from_weight: str = "pretrain",
    tokenizer_path: str | Path = ROOT / "model",
    save_dir: str | Path = ROOT / "out",
    device: str | torch.device = "cpu",
) -> tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]:
    """Build the model in float32 and its tokenizer; `from_weight` names the stage to start from, `none` random weights.

    Raises:
        UserError: the weights are missing or of another shape, or the tokenizer does not fit the vocabulary.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    if len(tokenizer) > lm_config.vocab_size:
        raise UserError(
            f"--tokenizer_path {tokenizer_path}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary "
            f"{lm_config.vocab_size}; take the tokenizer that the weights were trained with"
        )
    model = MiniMindForCausalLM(lm_config)
    if from_weight != "none":
        load_weights(model, weight_path(save_dir, from_weight, lm_config))
    params = sum(p.numel() for p in model.parameters())
    idle = (lm_config.num_experts - lm_config.num_experts_per_tok) / lm_config.num_experts if lm_config.use_moe else 0
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    active = f" (active per token: {(params - idle * experts) / 1e6:.2f} M)" if lm_config.use_moe else ""
    Logger(f"model: {params / 1e6:.2f} M parameters{active}, weights: {from_weight}")
    return model.to(device), tokenizer


def rank_share(order: np.ndarray, batch_size: int, rank: int, ranks: int) -> np.ndarray:
    """What one rank takes of an order: of each slice of `batch_size * ranks` (a global micro-batch) the rank-th part.

    The ranks' shares together are the order, nothing twice; at its end a rank may have fewer samples, or none.
    """
    turns = np.arange(math.ceil(len(order) / batch_size)) % ranks == rank
    return order if ranks == 1 else order[np.repeat(turns, batch_size)[: len(order)]]


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The samples of one epoch in order: a pure function of (seed, epoch), the same on every rank."""
    samples = np.arange(num_samples, dtype=np.min_scalar_type(num_samples))  # narrow: there may be 10^8 of them
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)


class SkipBatchSampler(Sampler):
    """Batches of `sampler`'s indices, without the first `skip_batches` (those done before a resume).

    Args:
        sampler: the indices in order, best as an array or list: then skipping reads nothing.
        batch_size: samples per micro-batch of this rank.
        skip_batches: how many micro-batches to leave out, exactly.
        num_batches: micro-batches of the epoch before skipping, the same on every rank; a rank that runs out of
            samples yields empty ones. Derived from the sampler if not given.
    """

    def __init__(self, sampler: Sequence[int], batch_size: int, skip_batches: int = 0, num_batches: int | None = None):
        self.indices = sampler if hasattr(sampler, "__getitem__") else list(sampler)
        self.batch_size = batch_size
        self.skip_batches = skip_batches
        self.num_batches = math.ceil(len(self.indices) / batch_size) if num_batches is None else num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.skip_batches, self.num_batches):
            yield [int(i) for i in self.indices[batch * self.batch_size : (batch + 1) * self.batch_size]]

    def __len__(self) -> int:
        return max(0, self.num_batches - self.skip_batches)


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Micro-batches of each rank in one epoch."""
    return math.ceil(num_samples / (batch_size * world_size()))


def epoch_loader(
    dataset: Dataset,
    batch_size: int,
    seed: int,
    epoch: int,
    skip_batches: int = 0,
    num_workers: int = 0,
    collate_fn: Callable[[list], dict] = collate_flat,
) -> DataLoader:
    """The micro-batches of one epoch on this rank, from micro-batch `skip_batches` on."""
    order = rank_share(epoch_order(len(dataset), seed, epoch), batch_size, this_rank(), world_size())
    batches = SkipBatchSampler(order, batch_size, skip_batches, steps_per_epoch(len(dataset), batch_size))
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # the loader draws a base seed: keep it off the global stream
        worker_init_fn=ignore_stop_signals,
    )


def eval_loader(dataset: Dataset, batch_size: int, collate_fn: Callable[[list], dict] = collate_flat) -> DataLoader:
    """This rank's share of held-out data. Micro-batch k is samples k * batch_size onwards, whatever the world size;
    each rank has as many of them as the others, the last may be empty."""
    mine = rank_share(np.arange(len(dataset)), batch_size, this_rank(), world_size())
    batches = SkipBatchSampler(mine, batch_size, 0, steps_per_epoch(len(dataset), batch_size))
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn)
