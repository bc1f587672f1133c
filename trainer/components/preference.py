"""Preferences (DPO): log-probabilities of answers under the trained model and the reference, and the losses of pairs.

The samples of a batch are chosen, rejected, chosen, rejected ... (`collate_pairs` in dataset/lm_dataset.py). Shape
legend: P pairs, 2 P answers, M targets.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from common.durable_files import atomic_write
from common.errors import UserError
from common.launcher import launch
from common.locks import locked
from dataset.lm_dataset import DPODataset, collate_pairs
from trainer.components.checkpoint import UNREADABLE
from trainer.components.device import autocast_dtype
from trainer.components.distributed import Logger, gather, reduce_sum
from trainer.components.language_model import Batch, flat_size, frozen_model, target_log_probs
from trainer.components.loaders import eval_loader
from trainer.components.meter import Size
from trainer.components.resume import Fingerprint, check_start_weights
from trainer.components.state import TrainState

if TYPE_CHECKING:
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

METRICS = ("accuracy", "reward_margin", "reward_chosen", "reward_rejected", "log_prob_chosen", "log_prob_rejected")


def answer_log_probs(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The log-probability of each answer [2 P], summed over its tokens, and the load-balancing loss []."""
    log_probs, aux_loss = target_log_probs(model, batch)
    answers = [part.sum(dtype=batch["reference"].dtype) for part in log_probs.split(batch["target_counts"])]
    return torch.stack(answers) if answers else log_probs, aux_loss


def preference_loss(log_probs: Tensor, batch: Batch, beta: float, loss_type: str) -> Tensor:
    """The loss of each pair [P]; log_probs [2 P]: of the answers under the model that is trained.

    `sigmoid` is DPO (arXiv:2305.18290), eq. 7; `hinge` SLiC's margin on the same rewards (arXiv:2305.10425); `ipo`
    (arXiv:2310.12036), eq. 17, on means over the tokens, with beta as its tau.
    """
    ratios = log_probs - batch["reference"]
    if loss_type == "ipo":
        ratios = per_token(ratios, batch)
        return (ratios[::2] - ratios[1::2] - 1 / (2 * beta)).square()
    margins = beta * (ratios[::2] - ratios[1::2])
    return F.relu(1 - margins) if loss_type == "hinge" else -F.logsigmoid(margins)


def chosen_loss(log_probs: Tensor, batch: Batch) -> Tensor:
    """The cross entropy of each pair's chosen answer [P], a mean over its tokens: the term of SFT in RPO's loss
    (arXiv:2404.19733, eq. 1)."""
    return -per_token(log_probs, batch)[::2]


def per_token(sums: Tensor, batch: Batch) -> Tensor:
    """Sums over the tokens of each answer [2 P] as means over them; the counts are on the host."""
    means = [total / count for total, count in zip(sums.unbind(), batch["target_counts"], strict=True)]
    return torch.stack(means) if means else sums


@torch.no_grad()
def preference_figures(log_probs: Tensor, batch: Batch, beta: float) -> dict[str, Tensor]:
    """Sums over the pairs of the METRICS. A reward is beta times the log-ratio of model and reference; accuracy
    is the share of the pairs whose chosen answer has the higher one."""
    rewards = beta * (log_probs - batch["reference"])
    chosen, rejected = rewards[::2], rewards[1::2]
    figures = ((chosen > rejected).float(), chosen - rejected, chosen, rejected, log_probs[::2], log_probs[1::2])
    return {name: figure.sum() for name, figure in zip(METRICS, figures, strict=True)}


def pair_size(batch: Batch, lm_config: "MiniMindConfig") -> Size:
    """The size of a batch of pairs: its loss is a mean over pairs, and no bits per byte are defined for it."""
    return flat_size(batch, lm_config)._replace(targets=len(batch["target_counts"]) // 2, text_bytes=0)


def add_reference(data: DPODataset, state: TrainState, build: Callable[[], "MiniMindForCausalLM"]) -> None:
    """Attach the log-probabilities of the reference, the model that the run starts from, to a dataset.

    build: makes the reference, where they are not stored yet.

    Raises:
        UserError: the start weights are needed, and no longer those that the run began with.
    """
    args = state.args

    def checked() -> "MiniMindForCausalLM":
        try:
            check_start_weights(args, state.run)
        except UserError as error:
            raise UserError(
                f"{error}; or put back reference_*.npz in {args.cache_dir}, which holds the reference log-probabilities"
            ) from error
        return build()

    data.reference = reference_log_probs(data, state.run, checked, args.batch_size, state.device, state.autocast)


def reference_log_probs(
    data: DPODataset,
    run: Fingerprint,
    build: Callable[[], "MiniMindForCausalLM"],
    batch_size: int,
    device: torch.device,
    autocast: AbstractContextManager,
) -> np.ndarray:
    """The log-probability of each answer under the reference model, float64 [samples], from the token cache; the first
    run computes them, all ranks together, and stores them there.

    run: the fingerprint, whose start weights are the reference. build: makes the model, where it is needed.

    Raises:
        UserError: (from `build`) the weights are missing; the folder cannot be written.
    """
    dtype = str(autocast_dtype(autocast, device)).removeprefix("torch.")
    experts = f"_top{run['num_experts_per_tok']}" if run["use_moe"] else ""
    path = data.cache.path / f"reference_{str(run['from_weight_sha256'])[:16]}_{dtype}{experts}.npz"
    stored = _stored(path, len(data.cache))
    if any(gather(stored is None)):
        Logger(f"computing the reference's log-probabilities of {len(data):,} pairs")
        loader = eval_loader(data, batch_size, collate_pairs)  # micro-batches that do not depend on the ranks
        values = _computed(loader, len(data.cache), frozen_model(build(), device), device, autocast)
        if launch().local_rank == 0:  # machines may have caches of their own
            _store(path, values)
        gather(None)  # the others wait for the file
        stored = _stored(path, len(data.cache))
        stored = values if stored is None else stored
    return cast(np.ndarray, stored)


def _stored(path: Path, samples: int) -> np.ndarray | None:
    """The values in the file; None if it is missing or damaged (its format has a checksum)."""
    with suppress(*UNREADABLE):
        values = np.load(path)["log_probs"]
        return values if values.shape == (samples,) else None
    return None


def _store(path: Path, values: np.ndarray) -> None:
    """Write the file, unless another run was faster: its values stay, whatever they are rounded to."""
    with locked(path.parent.with_suffix(".lock"), f"waiting for another run that writes {path}"):
        if _stored(path, len(values)) is None:
            atomic_write(path, lambda file: np.savez(file, log_probs=values))


@torch.no_grad()
def _computed(loader: DataLoader, samples: int, model: nn.Module, device: torch.device, autocast) -> np.ndarray:
    values = torch.zeros(samples, dtype=torch.float64)
    for batch in loader:
        on_device = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        with autocast:
            log_probs, _ = answer_log_probs(model, on_device)
        values[batch["sample_ids"]] = log_probs.cpu().double()
    return reduce_sum(values).numpy()  # of each sample one rank has the value, the others zero
