"""The rows of a flat batch: few different numbers of them on a CPU, and the cross entropies of those with a
target."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PIECE = 2**27  # logits of a head at once: 0.5 GB in float32


def pad_rows(rows: Tensor) -> int:
    """Rows to pad a flat batch with, up to a multiple of 64 on a CPU: oneDNN compiles and caches a kernel for
    each new number of rows (docs/dev/LOG.md, "Few kernel shapes on the CPU")."""
    return -len(rows) % 64 if rows.device.type == "cpu" else 0


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    """Cross entropies of logits [M, V] in float32, their sum or (`none`) each [M]; on a CPU in chunks whose
    float32 copies fit its cache."""
    rows = 512 if logits.device.type == "cpu" else len(logits)
    return _in_pieces(
        lambda x, y: F.cross_entropy(x.float(), y, reduction=reduction), logits, targets, rows, reduction
    )


def _in_pieces(
    loss_of: Callable[..., Tensor], inputs: Tensor, targets: Tensor, rows: int, reduction: str
) -> Tensor:
    """The losses of so many rows at a time, as one."""
    losses = [loss_of(*piece) for piece in zip(inputs.split(rows), targets.split(rows), strict=True)]
    return torch.stack(losses).sum() if reduction == "sum" else torch.cat(losses)


def head_cross_entropy(head: nn.Linear, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """`cross_entropy` of the logits head(hidden [M, C]); if they are more than PIECE, in pieces that the
    backward pass computes again, so that memory does not grow with the vocabulary times the targets."""

    def of_piece(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(head(x), y, reduction)

    rows = max(1, PIECE // head.out_features)
    if len(hidden) <= rows:
        return of_piece(hidden, targets)
    again = partial(checkpoint, of_piece, use_reentrant=False, preserve_rng_state=False)
    return _in_pieces(again, hidden, targets, rows, reduction)
