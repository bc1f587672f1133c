"""The losses of the model: the cross entropy of its head, and the load-balancing loss of its experts.

Shape legend: M targets, V vocabulary, C hidden size, L layers, N tokens of a flat batch, S samples, E
experts, K experts per token.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.cpu import is_eager_cpu

ROWS_IN_CACHE = 512  # the float32 logits of so many rows fit into a CPU's cache
MAX_LOGITS = 2**27  # that a head computes at once: 0.5 GB in float32
LARGE_VOCABULARY = 2**15  # from this vocabulary on, the logits of a usual micro-batch take gigabytes


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    """Cross entropies of logits [M, V] in float32: their sum, or (`none`) each of them [M]. On a CPU it takes
    some rows at a time, so that their float32 copies fit into the cache."""
    rows = ROWS_IN_CACHE if is_eager_cpu(logits) else max(1, len(logits))
    losses = []
    for x, y in zip(logits.split(rows), targets.split(rows), strict=True):
        losses.append(F.cross_entropy(x.float(), y, reduction=reduction))
    return torch.stack(losses).sum() if reduction == "sum" else torch.cat(losses)


def head_cross_entropy(head: nn.Module, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """`cross_entropy` of the logits head(hidden [M, C]), in pieces of at most MAX_LOGITS.

    When compiled for a GPU, they are one piece: several pieces would need a graph for each number of pieces,
    and the compiler makes no float32 copies anyway. With a large vocabulary one piece would not fit into
    memory, so the head is not compiled."""
    if not is_compiled_for_gpu(hidden):
        return head_in_pieces(head, hidden, targets, reduction)
    if cast(int, head.out_features) > LARGE_VOCABULARY:
        # not as a decorator, because that would load the compiler with this file
        return torch.compiler.disable(head_in_pieces)(head, hidden, targets, reduction)
    return cross_entropy(head(hidden), targets, reduction)


def is_compiled_for_gpu(hidden: Tensor) -> bool:
    """Whether this call becomes part of a graph for a GPU."""
    return hidden.is_cuda and torch.compiler.is_compiling()


def head_in_pieces(head: nn.Module, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """`head_cross_entropy` in pieces, if there are more than MAX_LOGITS logits. The backward pass computes
    each piece again, so memory does not grow with vocabulary times targets."""
    rows = max(1, MAX_LOGITS // cast(int, head.out_features))
    if len(hidden) <= rows:
        return cross_entropy(head(hidden), targets, reduction)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(head(x), y, reduction)

    losses = []
    for x, y in zip(hidden.split(rows), targets.split(rows), strict=True):
        losses.append(checkpoint(loss_of, x, y, use_reentrant=False, preserve_rng_state=False))
    return torch.stack(losses).sum() if reduction == "sum" else torch.cat(losses)


def load_balancing_loss(
    probs: Tensor, chosen: Tensor, sample: Tensor, num_samples: int
) -> tuple[Tensor, Tensor]:
    """Sum over samples of (tokens of the sample) * E * sum_e f_e * P_e, of each of L layers: [L]; and the
    tokens that each expert got, [L, E].

    f_e is the share of a sample's tokens routed to expert e, P_e its mean probability (Switch Transformer,
    arXiv:2101.03961, eq. 4). Computed per sample (DeepSeek-V3, arXiv:2412.19437, eq. 17), it is a sum that
    does not depend on how samples are split into micro-batches and ranks. `probs` [L, N, E], `chosen` [L, N,
    K], `sample` [N]; sample number `num_samples` marks padding."""
    layers, _, experts = probs.shape
    picked = torch.zeros_like(probs).scatter_(-1, chosen, 1.0)  # [L, N, E]
    totals = probs.new_zeros(layers, num_samples + 1, experts)
    counts = totals.index_add(1, sample, picked)[:, :num_samples]  # [L, S, E]
    masses = totals.index_add(1, sample, probs)[:, :num_samples]
    lengths = (counts.sum(dim=-1) / chosen.shape[-1]).clamp(min=1)  # [L, S]
    losses = experts * ((counts * masses).sum(dim=-1) / lengths).sum(dim=-1)
    return losses, counts.sum(dim=1)
