"""Preferences (DPO): log-probabilities of answers, and losses of pairs.

The samples of a batch are chosen, rejected, chosen, rejected ... (`collate_shared` in dataset/batch.py).
Shape legend: P pairs, 2 P answers, M targets.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataset.batch import Batch
from trainer.objectives.next_token import target_log_probs


def answer_log_probs(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The log-probability of each answer [2 P], summed over its tokens in float64 (float32 on MPS), and the
    load-balancing loss []."""
    log_probs, aux_loss = target_log_probs(model, batch)
    exact = torch.float32 if log_probs.device.type == "mps" else torch.float64
    answers = [part.sum(dtype=exact) for part in log_probs.split(batch.target_counts)]
    return torch.stack(answers) if answers else log_probs, aux_loss


def preference_loss(log_probs: Tensor, reference: Tensor, beta: float) -> Tensor:
    """The loss of each pair [P] (arXiv:2305.18290, eq. 7), from the log-probabilities of the answers [2 P]
    under the trained model and under the reference."""
    ratios = log_probs - reference
    return -F.logsigmoid(beta * (ratios[::2] - ratios[1::2]))


def chosen_loss(log_probs: Tensor, batch: Batch) -> Tensor:
    """The cross entropy of each pair's chosen answer [P], a mean over its tokens: the term of SFT in RPO's
    loss (arXiv:2404.19733, eq. 1)."""
    return -log_probs[::2] / log_probs.new_tensor(batch.target_counts[::2])


@torch.no_grad()
def preference_metrics(log_probs: Tensor, reference: Tensor, beta: float) -> dict[str, Tensor]:
    """Sums over the pairs, by name. A reward is beta times the log-ratio of model and reference;
    accuracy is the share of the pairs whose chosen answer has the higher one."""
    rewards = beta * (log_probs - reference)
    chosen, rejected = rewards[::2], rewards[1::2]
    metrics = {
        "accuracy": (chosen > rejected).float(),
        "reward_margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "log_prob_chosen": log_probs[::2],
        "log_prob_rejected": log_probs[1::2],
    }
    return {name: value.sum() for name, value in metrics.items()}
