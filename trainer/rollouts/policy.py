"""Losses of reinforcement learning on sampled completions, and the advantages that they use.

Every loss is a SUM over the tokens of a flat batch; TOKEN_LEVEL decides its denominator.

    grpo   arXiv:2402.03300: clipped ratio, mean over the tokens of a completion, then over completions
    dapo   arXiv:2503.14476: the same, mean over all sampled tokens of the update
    cispo  arXiv:2506.13585: log-probability times the clipped ratio, a constant; mean as in dapo
"""

from typing import Any

import torch
from torch import Tensor, nn

from dataset.batch import Batch
from trainer.objectives.next_token import target_log_probs

# these losses are divided by the sampled tokens of an update, the others by its completions
TOKEN_LEVEL = ("dapo", "cispo")


def group_advantages(rewards: Tensor, scale: bool = True) -> Tensor:
    """Advantages [P, G] of the completions of P prompts: reward [P, G] minus its mean over the group; with
    `scale` also divided by its standard deviation (plus 1e-4, as in TRL). Groups whose rewards are all equal
    get zeros."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    centred[(rewards == rewards[:, :1]).all(dim=1)] = 0.0
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-4) if scale else centred


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    loss_type: str,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    ref_logp: Tensor | None = None,
    beta: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums over M sampled tokens, each []: the loss, and by name the KL divergence from the reference and the
    number of tokens whose ratio was clipped.

    Args:
        logp, old_logp, ref_logp: log-probabilities [M] under the current weights, the weights that sampled,
            and the reference.
        advantages, lengths: [M], the advantage and the length of the completion that each token belongs to.
        epsilon, epsilon_high: the ratio is clipped to 1 - epsilon .. 1 + epsilon_high; cispo clips it only
            from above.
        beta: weight of the KL divergence, by the k3 estimator (http://joschu.net/blog/kl-approx.html) times
            the ratio, which makes its gradient unbiased (arXiv:2512.02556).
    """
    ratio = (logp - old_logp).exp()
    if loss_type == "cispo":
        bounded = ratio.detach().clamp(max=1 + epsilon_high)
        per_token = -bounded * advantages * logp
        clipped = (ratio > 1 + epsilon_high) & (advantages > 0)
    else:
        bounded = ratio.clamp(1 - epsilon, 1 + epsilon_high)
        per_token = -torch.minimum(ratio * advantages, bounded * advantages)
        clipped = ((ratio < 1 - epsilon) & (advantages < 0)) | ((ratio > 1 + epsilon_high) & (advantages > 0))
    kl = torch.zeros_like(logp)
    if beta and ref_logp is not None:
        difference = ref_logp - logp
        kl = ratio * (difference.exp() - difference - 1)
        per_token = per_token + beta * kl
    weight = 1.0 if loss_type in TOKEN_LEVEL else 1.0 / lengths
    loss = (weight * per_token).sum()
    return loss, {"kl": (weight * kl).sum().detach(), "clip_ratio": (weight * clipped.to(logp.dtype)).sum()}


def sampling_difference(log_probs: Tensor, batch: Batch) -> dict[str, Any]:
    """The difference between the trainer's log-probabilities [M] of the sampled tokens and the sampler's,
    under the weights that sampled them, with TRL's name. It is rounding, unless decoding and training do not
    compute the same."""
    gaps = (log_probs.detach() - batch["sampling_log_probs"]).abs()
    return {"sampling_logp_difference": (gaps.sum(), gaps.new_full((), len(gaps)))}


def sampled_tokens_loss(model: nn.Module, batch: Batch, args: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The loss of a stage for batches of rollouts/batches.py: the sum of the policy loss over the sampled
    tokens, the sum of the auxiliary losses over all tokens, and the metrics of `policy_loss`, each []. args:
    the settings of the stage."""
    log_probs, aux_loss = target_log_probs(model, batch, args.temperature)  # [M]
    old = batch.get("old_log_probs", log_probs.detach())  # the first update of a rollout: the ratio is 1
    loss, metrics = policy_loss(
        log_probs, old, batch["advantages"], batch["lengths"], args.loss_type, args.epsilon,
        args.epsilon_high, batch.get("ref_log_probs"), args.beta,
    )  # fmt: skip
    return loss, aux_loss, metrics | sampling_difference(old, batch)
