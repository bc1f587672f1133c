"""LoRA (arXiv:2106.09685): a linear layer whose weight stays as it is, beside two small matrices that are trained."""

import math

import torch
from torch import Tensor, nn


class LoRALinear(nn.Linear):
    """x W' + scale x A' B', where A [rank, in] and B [out, rank] are the adapter; B starts at zero. The parameters are
    `weight`, under the name of the layer that it replaces, `lora_A.weight` and `lora_B.weight`."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float, dropout: float = 0.0):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.scale, self.dropout = scale, nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        low = self.lora_A(self.dropout(input)) * self.scale  # [..., rank]: the scale is cheapest here
        out = super().forward(input)
        return torch.addmm(out.flatten(0, -2), low.flatten(0, -2), self.lora_B.weight.t()).view_as(out)
