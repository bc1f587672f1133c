"""Decoding on a GPU in few kernels: one token of each row goes through the model, and most of the time is
launching kernels.

`join_layers` joins weights of layers with the same input, once. `OneToken` computes then what the model's
own forward does, with one product for queries, keys and values and one for SwiGLU's gate and up, one
rotation of queries and keys, and sums in place. All of it is in the dtype of the matrices, also the sums and
the norms, which autocast leaves in float32: nothing is cast, and each sum is part of a product. It is the
fast form of `MiniMindModel.forward`, for a model of the layers that stand there; tests/model/test_decoding.py
compares the two.

Shape legend: R rows, C hidden size, H query heads, G key/value heads, D head size, L layers.
"""

import json
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import attention, fused, graphs, model_minimind
from model.experts import can_group
from model.fused import product_dtype
from model.linear import LoRALinear, is_plain, is_plain_product, whole_of
from model.model_minimind import (
    Attention,
    FeedForward,
    MiniMindBlock,
    MiniMindConfig,
    MiniMindModel,
    MOEFeedForward,
    RMSNorm,
    RotaryEmbedding,
)


class Cache(Protocol):
    """What `OneToken` needs of a `KeyValueCache`."""

    def write(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [R, 2, G, D]; returns those that the rows see, [R, G, end, D] each."""
        ...


# --- weights of layers with the same input, below each other


@torch.no_grad()
def join_layers(model: nn.Module) -> None:
    """Move the weights of query, key and value, and those of SwiGLU's gate and up, into one matrix each, of
    which the layers' weights are parts. For a model that is not trained."""
    for block in model.modules():
        if not isinstance(block, MiniMindBlock):
            continue
        groups: list[tuple[Any, ...]] = []
        if isinstance(block.self_attn, Attention):
            groups.append((block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj))
        if isinstance(block.mlp, FeedForward):
            groups.append((block.mlp.gate_proj, block.mlp.up_proj))
        for layers in groups:
            if not all(is_plain_product(layer) for layer in layers) or joint_weight(*layers) is not None:
                continue
            joint = torch.cat([layer.weight.data for layer in layers])
            parts = joint.split([len(layer.weight) for layer in layers])
            for layer, part in zip(layers, parts, strict=True):
                layer.weight.data = part


def joint_weight(*layers: Any) -> Tensor | None:
    """The matrix of which the layers' weights are the parts, in this order; None if there is none."""
    if not all(is_plain_product(layer) for layer in layers):
        return None
    return whole_of([layer.weight for layer in layers])


# --- a forward of one token for each row


def can_step(model: Any) -> bool:
    """Whether `OneToken` computes what the forward of a `MiniMindModel` does, and pays."""
    weight = model.embed_tokens.weight
    if not fused.ENABLED or weight.device.type == fused.HOST:
        return False
    if weight.device.type == "mps":  # torch's norm there needs a weight
        return False
    if product_dtype(weight) != weight.dtype:  # autocast would cast the matrices for each token
        return False
    return has_usual_layers(model) and is_usual_arithmetic(usual_forwards(), config_fields(model))


EXAMPLE_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tokenizer_sha256": None,
}  # fmt: skip
LAYERS = (
    MiniMindModel, MiniMindBlock, Attention, FeedForward, RMSNorm, RotaryEmbedding,
    nn.Embedding, nn.Linear, nn.Dropout, nn.ModuleList,
)  # fmt: skip


def can_record(model: Any) -> bool:
    """Whether a step can be recorded as a CUDA graph: no layer is one that may read from the device."""
    weight = model.embed_tokens.weight
    if not (fused.ENABLED and graphs.ENABLED and weight.is_cuda):
        return False
    return waits_for_nothing(model)


def waits_for_nothing(model: nn.Module) -> bool:
    """Whether all layers are known not to read from the device: those that stand here, experts only where
    they are computed together."""
    for layer in model.modules():
        if layer._compiled_call_impl is not None:
            return False
        if not any(is_plain(layer, kind) for kind in (*LAYERS, LoRALinear, MOEFeedForward)):
            return False
        if isinstance(layer, MOEFeedForward):
            x = layer.gate.weight.to(product_dtype(layer.gate.weight))
            if not (fused.has_grouped_mm(x) and can_group(layer.experts, x)):
                return False
    return True


def has_usual_layers(model: nn.Module) -> bool:
    """Whether all layers but experts, which are called, are those that stand here, joined, and without hooks
    or adapters."""
    within_experts = set()
    for layer in model.modules():
        if isinstance(layer, MOEFeedForward):
            within_experts.update(layer.modules())
    for layer in model.modules():
        if layer in within_experts:
            continue
        if layer.training or not any(is_plain(layer, kind) for kind in LAYERS):
            return False
        if isinstance(layer, nn.Linear) and not is_plain_product(layer):
            return False
        if isinstance(layer, RMSNorm) and layer.weight.dtype != torch.float32:
            return False
        if isinstance(layer, Attention):
            if joint_weight(layer.q_proj, layer.k_proj, layer.v_proj) is None:
                return False
            if layer.q_norm.eps != layer.k_norm.eps:
                return False
        if isinstance(layer, FeedForward) and joint_weight(layer.gate_proj, layer.up_proj) is None:
            return False
    return True


def usual_forwards() -> tuple[Any, ...]:
    """The functions whose arithmetic `OneToken` repeats."""
    layers = (MiniMindModel, MiniMindBlock, Attention, FeedForward, RMSNorm)
    forwards = [layer.forward for layer in layers]
    return (*forwards, Attention.heads, model_minimind.apply_rotary, attention.padded_attention)


def config_fields(model: MiniMindModel) -> str:
    """The fields of a model's config as JSON, with the sizes of an example in place of its own."""
    return json.dumps(model.rotary_emb.config.own_fields() | EXAMPLE_SIZES, sort_keys=True)


@lru_cache(maxsize=8)
def is_usual_arithmetic(forwards: tuple[Any, ...], fields: str) -> bool:
    """Whether these functions compute what `OneToken` does, in a model of these `config_fields`. Any of them
    may have been edited, or obey a field that was added, so one example is computed, on the host, the first
    time."""
    config = MiniMindConfig(**json.loads(fields))
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MiniMindModel(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        embeds, positions = torch.randn(3, config.hidden_size), torch.tensor([3, 0, 5])
        mask = torch.zeros(3, 1, 1, 8).masked_fill(~model.visible(positions[:, None], 8)[:, None], -torch.inf)
        outputs = []
        join_layers(model)
        for forward in (model, OneToken(model, 8)):
            cache = ExampleCache(config)
            with torch.no_grad():
                if forward is model:
                    outputs.append(
                        model(embeds[:, None], positions[:, None], mask, cast(Any, cache))[0][:, 0]
                    )
                else:
                    outputs.append(forward(embeds.clone(), positions, mask, cache))
    return torch.allclose(*outputs, atol=1e-4)


class ExampleCache:
    """Eight keys and values for each of three rows; those of the new token take the first place."""

    def __init__(self, config: MiniMindConfig):
        self.tensor = torch.randn(
            2, 3, config.num_key_value_heads, 8, config.head_dim, generator=torch.Generator().manual_seed(1)
        )

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """As a cache of transformers; k, v [R, G, 1, D]."""
        return self.write(layer, torch.stack((k[:, :, 0], v[:, :, 0]), dim=1))

    def write(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        """As `Cache`."""
        self.tensor[:, :, :, 0] = kv.transpose(0, 1) + layer
        return self.tensor[0], self.tensor[1]


class OneToken:
    """The forward of a `MiniMindModel` for one token of each row, at positions before `length`. It is made
    anew when weights of norms have changed."""

    def __init__(self, model: Any, length: int):
        self.layers = [OneTokenLayer(layer) for layer in model.layers]
        self.norm = Norm(model.norm, model.embed_tokens.weight.dtype)
        norms = torch.stack([layer.norms for layer in self.layers])[:, None]  # [L, 1, H + G, D]
        # on the second half of a head acts the weight of the first, and the other way round
        self.norms, self.rolled_norms = norms, norms.roll(norms.shape[-1] // 2, dims=-1)
        with torch.no_grad():
            positions = torch.arange(length, device=norms.device)
            self.angles = torch.stack(model.rotary_emb(positions), dim=1)[:, :, None]  # [length, 2, 1, D]

    def __call__(self, x: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """Hidden states [R, C] of embeddings x [R, C], which are overwritten, at positions [R]; the mask
        [R, 1, 1, end] is added to the scores."""
        cos, sin = self.angles.index_select(0, positions).unbind(1)  # [R, 1, D]
        cos, sin = self.norms * cos, self.rolled_norms * sin  # [L, R, H + G, D]
        for number, layer in enumerate(self.layers):
            layer.add_attention(x, cos[number], sin[number], mask, cache)
            layer.add_feed_forward(x)
        return self.norm(x)


class Norm:
    """An `RMSNorm` whose input and output have this dtype."""

    def __init__(self, layer: RMSNorm, dtype: torch.dtype):
        self.weight, self.eps = layer.weight.detach().to(dtype), layer.eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class OneTokenLayer:
    """The two halves of a `MiniMindBlock`, for `OneToken`; each is added to x [R, C] in place."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim, self.number = attention.head_dim, attention.layer_idx
        self.qkv = cast(Tensor, joint_weight(attention.q_proj, attention.k_proj, attention.v_proj))
        self.out = attention.o_proj.weight
        self.experts = mlp if isinstance(mlp, MOEFeedForward) else None
        if self.experts is None:
            self.gate_up = cast(Tensor, joint_weight(mlp.gate_proj, mlp.up_proj))
            self.down = mlp.down_proj.weight
        self.norm_before_attention = Norm(layer.input_layernorm, self.qkv.dtype)
        self.norm_before_feed_forward = Norm(layer.post_attention_layernorm, self.qkv.dtype)
        self.q_heads, self.kv_heads = (
            len(projection.weight) // self.head_dim for projection in (attention.q_proj, attention.k_proj)
        )
        q_norm, k_norm = attention.q_norm, attention.k_norm
        heads = self.q_heads, self.kv_heads
        self.norms = fused.weights_of_heads(q_norm.weight, k_norm.weight, heads).detach()  # [H + G, D]
        self.eps = q_norm.eps

    def add_attention(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: Cache) -> None:
        """cos, sin [R, H + G, D] hold the norms' weights of queries and keys, too."""
        heads = F.linear(self.norm_before_attention(x), self.qkv).unflatten(-1, (-1, self.head_dim))
        qk, kv = heads[:, : cos.shape[1]], heads[:, self.q_heads :]
        normed = F.rms_norm(qk, (self.head_dim,), None, self.eps)
        rolled = normed.roll(self.head_dim // 2, dims=-1)
        torch.addcmul(normed * cos, rolled, sin, out=qk)
        keys, values = cache.write(self.number, kv.unflatten(1, (2, self.kv_heads)))
        # the heads that share a key take the place of queries
        grouped = heads[:, : self.q_heads].unflatten(1, (self.kv_heads, -1))  # [R, G, H / G, D]
        out = F.scaled_dot_product_attention(grouped, keys, values, mask)
        x.addmm_(out.reshape(len(x), -1), self.out.t())

    def add_feed_forward(self, x: Tensor) -> None:
        """SwiGLU, or experts, which are called."""
        normed = self.norm_before_feed_forward(x)
        if self.experts is not None:
            x.add_(self.experts(normed)[0])
            return
        gate, up = F.linear(normed, self.gate_up).chunk(2, dim=-1)
        x.addmm_(F.silu(gate).mul_(up), self.down.t())
