"""Linear layers: which of them may be computed without being called, several of the same input as one
product, and LoRA (arXiv:2106.09685)."""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError


def is_plain(layer: object, kind: type[nn.Module]) -> bool:
    """Whether calling a layer does what `kind.forward` does and nothing else: no forward method of its own,
    no hooks.

    Only such a layer may be computed from its parameters, without a call. A weight under torch's
    `parametrize` is plain: reading it computes it."""
    if not isinstance(layer, kind) or type(layer).forward is not kind.forward or "forward" in layer.__dict__:
        return False
    has_hooks = (
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )
    return not has_hooks


def is_plain_product(layer: object) -> bool:
    """Whether a layer is x W' and nothing else, with its `weight` W [out, in]."""
    return is_plain(layer, nn.Linear) and layer.bias is None  # type: ignore[attr-defined]


# --- layers of the same input as one product


def whole_of(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """The tensor that lies in memory where these do, of which they are the parts along `dim` in this order;
    None if there is none. It has no derivative."""
    first = parts[0]
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != storage or part.storage_offset() != end:
            return None
        if part.stride() != first.stride():
            return None
        end += part.shape[dim] * part.stride(dim)
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return first.detach().as_strided(shape, first.stride())


def join(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices [out, in] below each other in another dtype: one cast of them all."""
    rows = [len(weight) for weight in weights]
    joined = weights[0].new_empty(sum(rows), weights[0].shape[1], dtype=dtype)
    torch._foreach_copy_(joined.split(rows), list(weights))
    return joined


class JoinedLinear(torch.autograd.Function):
    """Linear layers side by side: x [..., in] -> [..., sum of out].

    One product, one cast of all weights and one of their gradients. The weights are joined again for the
    backward pass, so no copy of them is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return F.linear(x, join(weights, x.dtype))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        grad = grads[0]
        grad_weights = (grad.flatten(0, -2).T @ x.flatten(0, -2)).to(weights[0].dtype)
        rows = [len(weight) for weight in weights]
        return grad @ join(weights, x.dtype), *grad_weights.split(rows)


class Split(torch.autograd.Function):
    """`x.split(sizes, dim=-1)`. The gradients of the parts are not copied where they are the parts of one
    tensor already, as `SiluProduct` leaves them."""

    @staticmethod
    def forward(ctx, x: Tensor, sizes: list[int]):
        return x.split(sizes, dim=-1)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        whole = whole_of(grads, dim=-1)
        return torch.cat(grads, dim=-1) if whole is None else whole, None


# --- adapters


class LoRALinear(nn.Module):
    """base(x) + scale x A' B': a linear layer of any class, which stays as it is, and the adapter beside it,
    A [rank, in] and B [out, rank], which is trained; B starts at zero.

    Raises UserError if the layer does not say its shape (`in_features`, `out_features`)."""

    def __init__(self, base: nn.Module, rank: int, scale: float, dropout: float = 0.0):
        super().__init__()
        if not (hasattr(base, "in_features") and hasattr(base, "out_features")):
            raise UserError(
                f"no adapter fits a {type(base).__name__}: it has no in_features and out_features, "
                "which tell the adapter's shape"
            )
        self.in_features, self.out_features = cast(int, base.in_features), cast(int, base.out_features)
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(self.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.scale, self.dropout = scale, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        low = self.lora_A(self.dropout(x)) * self.scale  # [..., rank]: the scale is cheapest here
        out = self.base(x)
        if not is_plain_product(self.lora_B):
            return out + self.lora_B(low)
        return torch.addmm(out.flatten(0, -2), low.flatten(0, -2), self.lora_B.weight.t()).view_as(out)
