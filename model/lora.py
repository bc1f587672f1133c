"""LoRA (arXiv:2106.09685): a frozen linear layer with a trained adapter beside it."""

import math
from typing import cast

from torch import Tensor, nn

from common.errors import UserError


class LoRALinear(nn.Module):
    """base(x) + scale x A' B': a frozen linear layer of any class, and a trained adapter beside it with A
    [rank, in] and B [out, rank]. B starts at zero.

    Raises UserError if the layer has no `in_features` or `out_features`."""

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
        return self.base(x) + self.lora_B(low)
