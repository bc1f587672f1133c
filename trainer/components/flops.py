"""How much arithmetic a batch is and how much the device can do: the two sides of the MFU (arXiv:2204.02311)."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.components.device import autocast_dtype, matrix_rate
from trainer.components.distributed import world_size

if TYPE_CHECKING:
    from model.model_minimind import MiniMindConfig


def training_flops(config: "MiniMindConfig", tokens: int, targets: int, cu_seqlens: Tensor) -> float:
    """Floating-point operations of the forward and backward pass over a flat batch, without padding rows.

    Six per weight and token for the layers (two forward, four backward), six per weight and target for the head, and
    causal attention at half of the square. The embedding is a look-up and counts nothing. `cu_seqlens` [S + 1] on the
    host.
    """
    c, d = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = c * d * (2 * heads + 2 * kv_heads)
    mlp = 3 * c * config.intermediate_size
    if config.use_moe:
        mlp = 3 * c * config.moe_intermediate_size * config.num_experts_per_tok + c * config.num_experts
    squares = float(cu_seqlens.diff().double().square().sum())
    products = 6.0 * config.num_hidden_layers * (tokens * (attention + mlp) + squares * heads * d)
    return products + 6.0 * targets * c * config.vocab_size


def layer_weights(layers: int, width: int) -> float:
    """Roughly the weights of so many dense layers, all of which a token meets."""
    return 12.0 * layers * width**2


def peak_rate(autocast: AbstractContextManager, device: torch.device) -> float:
    """Matrix rate of all ranks together, in the dtype of the run's matrix products."""
    return matrix_rate(device, autocast_dtype(autocast, device)) * world_size()
