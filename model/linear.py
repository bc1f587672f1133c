"""Linear layers: their dtype, which of them may be computed without being called, and LoRA
(arXiv:2106.09685)."""

import math
from typing import cast

import torch
from torch import Tensor, nn

from common.errors import UserError


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def is_plain(layer: object, kind: type[nn.Module]) -> bool:
    """Whether calling a layer does what `kind.forward` does and nothing else: no forward method of its own,
    no hooks.

    Only such a layer may be computed from its parameters, without a call. A weight under torch's
    `parametrize`
    is plain: reading it computes it."""
    if not isinstance(layer, kind) or type(layer).forward is not kind.forward or "forward" in layer.__dict__:
        return False
    has_hooks = (
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )
    return not has_hooks


def is_plain_product(layer: object) -> bool:
    """Whether a layer is x W' and nothing else, with its `weight` W [out, in]."""
    return is_plain(layer, nn.Linear) and layer.bias is None  # type: ignore[attr-defined]


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
        return torch.addmm(out.flatten(0, -2), low.flatten(0, -2), self.lora_B.weight.t()).view_as(out)
