"""MiniMind: a decoder-only transformer, dense or mixture of experts (MoE; see feed_forward.py).

Parameter names, shapes and arithmetic are those of MiniMind-3 and of Qwen3 / Qwen3-MoE, so the weights load
into a stock `Qwen3ForCausalLM` / `Qwen3MoeForCausalLM` unchanged.

There are two forms of input (shape legend: B batch, T padded length, N tokens of a flat batch, S samples, M
targets, V vocabulary, C hidden size, H query heads, G key/value heads, D head size, E experts, K experts per
token):

    padded  model(input_ids [B, T], attention_mask [B, T])             generation; `generate()` is transformers' own
    flat    model(input_ids [N], position_ids [N], cu_seqlens [S + 1],  training without padding: samples concatenated,
                  max_seqlen, target_index [M], targets [M])            attention stays within each sample
"""

import math
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, GradientCheckpointingLayer, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import slice_logits_to_keep

from common.errors import UserError
from model.attention import Spans, flat_attention, has_varlen_kernel, padded_attention
from model.feed_forward import (
    FeedForward,
    JoinedLinear,
    MOEFeedForward,
    can_join,
    load_balancing_loss,
    product_dtype,
)
from model.flat_batch import head_cross_entropy, pad_rows
from model.linear import is_plain

# the others' frequencies depend on the length of the input
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


class MiniMindConfig(PretrainedConfig):
    """The shape of a MiniMind model; the defaults are MiniMind-3's, at the small hidden size of 512.

    For contexts beyond the training length pass transformers' `rope_scaling`, such as `{"rope_type": "yarn",
    "factor": 4.0, "original_max_position_embeddings": 2048}`, of a type in ROPE_TYPES;
    `inference_rope_scaling` is MiniMind's setting of it; `top_k` is another name of `num_experts_per_tok`.

    Raises:
        UserError: of `rope_scaling`, or of more experts per token than there are."""

    model_type = "minimind"
    default_theta = 1e6  # rope_theta, unless given

    hidden_size: int = 512  # C
    num_hidden_layers: int = 8
    use_moe: bool = False
    vocab_size: int = 6400
    num_attention_heads: int = 8  # H
    num_key_value_heads: int = 4  # G
    head_dim: int = 0  # D; 0: hidden_size / num_attention_heads
    intermediate_size: int = 0  # of SwiGLU; 0: ceil(hidden_size * pi / 64) * 64
    dropout: float = 0.0  # at the embedding and after each attention
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    inference_rope_scaling: bool = False
    num_experts: int = 4  # E, if use_moe
    num_experts_per_tok: int = 1  # K
    moe_intermediate_size: int = 0  # of each expert; 0: intermediate_size
    norm_topk_prob: bool = True  # the K routing weights sum to one
    router_aux_loss_coef: float = 5e-4
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tokenizer_sha256: str | None = None  # `vocabulary_hash` of the tokenizer that the token ids belong to

    def __post_init__(self, **kwargs):
        self.num_experts_per_tok = kwargs.pop("top_k", self.num_experts_per_tok)
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.intermediate_size = self.intermediate_size or math.ceil(self.hidden_size * math.pi / 64) * 64
        self.moe_intermediate_size = self.moe_intermediate_size or self.intermediate_size
        if self.inference_rope_scaling:  # MiniMind's betas are YaRN's defaults
            yarn = {"rope_type": "yarn", "factor": 16.0, "attention_factor": 1.0}
            kwargs["rope_scaling"] = yarn | {"original_max_position_embeddings": 2048}
        super().__post_init__(**kwargs)
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise UserError(
                f"rope_scaling of type {rope_type} is not supported; use one of {', '.join(ROPE_TYPES)}"
            )
        if self.use_moe and self.num_experts_per_tok > self.num_experts:
            raise UserError(
                f"num_experts_per_tok {self.num_experts_per_tok} must be num_experts {self.num_experts} or less"
            )

    def own_fields(self) -> dict[str, Any]:
        """All fields under Hugging Face's names, without what transformers adds for itself: what
        `MiniMindConfig` needs to be made again. Files of weights, checkpoints and the run fingerprint hold
        them."""
        values = self.to_dict()
        return {name: values[name] for name in type(self).__annotations__}


def has_fused_norm(weight: Tensor) -> bool:
    """Whether torch has one kernel for RMSNorm with Qwen3's rounding: on CUDA, where the weight is in
    float32."""
    return weight.is_cuda and weight.dtype == torch.float32


class NormInFewPasses(torch.autograd.Function):
    """RMSNorm in float32 with its derivative written out: the same numbers in two thirds of autograd's time
    on a CPU, and one tensor less kept for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,), (x, weight, scale) = grads, ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        of_weight = product.flatten(0, -2).sum(0)
        mean = product.mul_(weight).mean(-1, keepdim=True)
        return torch.addcmul(grad * weight, normed, mean, value=-1).mul_(scale), of_weight, None


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (arXiv:1910.07467), in float32 as in Qwen3; returns the
    weight's dtype."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        if has_fused_norm(self.weight):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        training = self.weight.dtype == torch.float32 and torch.is_grad_enabled()
        if training and not torch.compiler.is_compiling():  # which saves the passes itself
            return cast(Tensor, NormInFewPasses.apply(x, self.weight, self.eps))
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            self.weight.dtype
        )


class RotaryEmbedding(nn.Module):
    """cos and sin of the rotary angles (RoFormer, arXiv:2104.09864), with transformers' frequencies for
    longer contexts if so configured, such as YaRN's (arXiv:2309.00071)."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.config = config
        inv_freq, self.attention_scaling = self.frequencies()
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)  # [D / 2]

    def frequencies(self) -> tuple[Tensor, float]:
        """Inverse frequencies [D / 2] and the factor on cos and sin (other than 1.0 with YaRN only)."""
        rope, dim = self.config.rope_parameters or {}, self.config.head_dim
        if rope["rope_type"] != "default":
            return ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config)
        return rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq  # [..., D / 2]
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)  # [..., D]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of x [..., heads, D] by the angles, in Llama's layout (dimension i pairs with i + D /
    2).

    cos, sin [..., D]; the first half of `sin` is negated, so a roll does what is usually a split, negation
    and concat.
    """
    return torch.addcmul(x * cos.unsqueeze(-2), x.roll(x.shape[-1] // 2, dims=-1), sin.unsqueeze(-2))


class NormAndRotary(torch.autograd.Function):
    """`RMSNorm` and `apply_rotary` of query and key heads side by side, with the derivative written out.

    From qkv [..., H + 2G, D], the norms' weights [D], and cos, sin [..., 1, D]: q [..., H, D] and k [..., G,
    D] in `dtype`, v [..., G, D] as it is. Kept for the backward pass: qkv, and one number for each head."""

    @staticmethod
    def forward(
        ctx, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps, sizes, dtype
    ):
        weight = torch.cat(
            [weight.expand(n, -1) for weight, n in zip((q_weight, k_weight), sizes, strict=True)]
        )
        normed, v = qkv.split((len(weight), sizes[1]), dim=-2)
        normed, scale = torch._fused_rms_norm(normed.float(), q_weight.shape, None, eps)  # one kernel on CUDA
        ctx.save_for_backward(qkv, weight, cos, sin, scale)
        ctx.sizes = sizes
        normed.mul_(weight)
        out = torch.empty_like(normed, dtype=dtype)
        torch.addcmul(normed * cos, normed.roll(normed.shape[-1] // 2, dims=-1), sin, out=out)
        return *out.split(sizes, dim=-2), v

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (of_q, of_k, of_v), (qkv, weight, cos, sin, scale) = grads, ctx.saved_tensors
        heads, of_qkv = len(weight), torch.empty_like(qkv)
        grad = torch.cat((of_q, of_k), dim=-2)
        rolled = grad.roll(grad.shape[-1] // 2, dims=-1)
        grad = torch.addcmul(grad * cos, rolled, sin, value=-1)  # rotated back
        normed = qkv[..., :heads, :] * scale
        product = grad * normed
        of_weights = [part.sum(list(range(part.ndim - 1))) for part in product.split(ctx.sizes, dim=-2)]
        mean = product.mul_(weight).mean(-1, keepdim=True)
        torch.mul(grad.mul_(weight).addcmul_(normed, mean, value=-1), scale, out=of_qkv[..., :heads, :])
        of_qkv[..., heads:, :] = of_v
        return of_qkv, *of_weights, None, None, None, None, None


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with an RMSNorm on each query and key head, as in Qwen3."""

    def __init__(self, config: MiniMindConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)

    def has_plain_norms(self) -> bool:
        """Whether `NormAndRotary` computes what the norms of query and key heads do."""
        q, k = self.q_norm, self.k_norm
        return (
            is_plain(q, RMSNorm)
            and is_plain(k, RMSNorm)
            and q.eps == k.eps
            and q.weight.dtype == torch.float32
        )

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [..., H, D] and keys, and values [..., G, D] of x [..., C]."""
        layers = self.q_proj, self.k_proj, self.v_proj
        if can_join(x, *layers) and self.has_plain_norms():
            qkv = JoinedLinear.apply(x, *(layer.weight for layer in layers)).unflatten(
                -1, (-1, self.head_dim)
            )
            dtype = qkv.dtype if has_varlen_kernel(qkv) else torch.float32
            sizes = [layer.out_features // self.head_dim for layer in layers[:2]]
            rest = (cos.unsqueeze(-2), sin.unsqueeze(-2), self.q_norm.eps, sizes, dtype)
            return NormAndRotary.apply(qkv, self.q_norm.weight, self.k_norm.weight, *rest)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in layers)
        return apply_rotary(self.q_norm(q), cos, sin), apply_rotary(self.k_norm(k), cos, sin), v

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask=None, cache: Cache | None = None, flat=None
    ):
        q, k, v = self.heads(x.to(product_dtype(x)), *rotary)
        if flat is not None:
            out = flat_attention(q, k, v, flat)
            return self.dropout(self.o_proj(out.flatten(-2)))
        q, k = q.to(v.dtype), k.to(v.dtype)
        if cache is not None:  # transformers' caches hold [B, G, T, D]
            k, v = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        return self.dropout(self.o_proj(padded_attention(q, k, v, mask).flatten(-2)))


class MiniMindBlock(GradientCheckpointingLayer):
    """One pre-norm layer: attention, then SwiGLU or experts, each added to the residual stream.

    Returns the hidden states, and the routing of the experts (None in a dense model)."""

    def __init__(self, config: MiniMindConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = MOEFeedForward(config) if config.use_moe else FeedForward(config, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary, mask=None, cache=None, flat=None):
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask, cache, flat)
        out = self.mlp(self.post_attention_layernorm(x))
        return (x + out[0], out[1]) if isinstance(out, tuple) else (x + out, None)


TransformerBlock = MiniMindBlock  # by its general name


class MiniMindModel(nn.Module):
    """Embeddings -> hidden states, and the routing of each MoE layer."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(MiniMindBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, embeds: Tensor, position_ids: Tensor, mask=None, cache=None, flat=None):
        x, rotary, routings = self.dropout(embeds), self.rotary_emb(position_ids), []
        for layer in self.layers:
            x, routing = layer(x, rotary, mask, cache, flat)
            routings.append(routing)
        return self.norm(x), routings

    @staticmethod
    def visible(positions: Tensor, end: int) -> Tensor:
        """Which of the keys at positions 0 to end - 1 the queries at `positions` [R, T] see -> bool [R, T,
        end]."""
        return torch.arange(end, device=positions.device) <= positions[..., None]


class MiniMindForCausalLM(PreTrainedModel, GenerationMixin):
    """MiniMind with its language-model head."""

    config_class = MiniMindConfig
    base_model_prefix = "model"
    _supports_sdpa = supports_gradient_checkpointing = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' own form)

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.model = MiniMindModel(config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.post_init()  # initialises the weights and ties lm_head to the embedding

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # from_pretrained builds on the meta device and leaves buffers empty
        if isinstance(module, RotaryEmbedding):
            module.inv_freq.copy_(module.frequencies()[0])
        elif isinstance(module, MOEFeedForward):
            module.tokens_per_expert.zero_()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        target_index: Tensor | None = None,
        targets: Tensor | None = None,
        host_cu_seqlens: np.ndarray | None = None,
        seen_keys: tuple[Tensor, Tensor, int, np.ndarray | None] | None = None,
        reduction: str = "sum",
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Run the padded or (with `cu_seqlens`) the flat form; see the module docstring for shapes.

        Flat: `target_index` [M] are the positions whose next token is a target, `targets` [M] those tokens;
        the head runs at these positions only. Loss and aux_loss are SUMS over targets and over tokens: the
        caller divides by the counts of the whole update; with `reduction` "none" the loss is [M], minus the
        log-probability of each target. Without `targets`: logits [M, V] instead of a loss; without
        `target_index`, [N, V]. `host_cu_seqlens` [S + 1] are the `cu_seqlens` for the host to read; without
        them it may wait for the device. `seen_keys`: where samples begin alike, `key_index` [R], and of these
        `cu_seqlens`, `max_seqlen` and `host_cu_seqlens`; see `collate_shared` in dataset/lm_dataset.py.
        Padded: `labels` [B, T] as in transformers (-100 is ignored); loss and aux_loss are means, to be
            added. The
        aux_loss is 0 in a dense model, and in a call with a cache but no labels: generation does not compute
            it.
        """
        embeds = self.model.embed_tokens(input_ids)
        if cu_seqlens is not None:
            spans = self._spans(cu_seqlens, cast(int, max_seqlen), host_cu_seqlens)
            if seen_keys is not None:
                spans = spans._replace(keys=(seen_keys[0], self._spans(*seen_keys[1:])))
            return self._forward_flat(embeds, position_ids, spans, target_index, targets, reduction)
        cache = DynamicCache(config=self.config) if use_cache and past_key_values is None else past_key_values
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(embeds.shape[1], device=embeds.device) + seen)[None]
        from transformers.masking_utils import create_causal_mask  # brings in the compiler

        mask = create_causal_mask(self.config, embeds, attention_mask, cache, position_ids)
        hidden, routings = self.model(embeds, position_ids, mask, cache)
        logits = self.lm_head(slice_logits_to_keep(hidden, logits_to_keep))
        loss, aux_loss = None, logits.new_zeros((), dtype=torch.float32)
        if self.config.use_moe and (labels is not None or cache is None):
            ones = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
            # [B, T]
            real = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else ones
            sample = torch.where(real > 0, torch.arange(len(real), device=real.device)[:, None], len(real))
            aux_loss = self._aux_loss(routings, sample.flatten(), len(real)) / real.sum()
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, logits=logits, past_key_values=cache)

    @staticmethod
    def _spans(cu_seqlens: Tensor, max_seqlen: int, host_cu_seqlens: np.ndarray | None) -> Spans:
        is_there = cu_seqlens.device.type == "cpu" or host_cu_seqlens is None
        return Spans(cu_seqlens, max_seqlen, cu_seqlens if is_there else torch.from_numpy(host_cu_seqlens))

    def _forward_flat(self, embeds, position_ids, spans, target_index, targets, reduction):
        cu_seqlens, tokens, extra = spans.cu_seqlens, len(embeds), pad_rows(embeds)
        embeds, position_ids = F.pad(embeds, (0, 0, 0, extra)), F.pad(position_ids, (0, extra))
        if spans.keys is not None:  # padding rows see any
            spans = spans._replace(keys=(F.pad(spans.keys[0], (0, extra)), spans.keys[1]))
        hidden, routings = self.model(embeds, position_ids, flat=spans)  # [N, C]
        if target_index is None:
            return MoeCausalLMOutputWithPast(logits=self.lm_head(hidden[:tokens]))
        rows, extra = len(target_index), pad_rows(target_index)
        hidden = hidden.index_select(0, F.pad(target_index, (0, extra)))  # [M, C]
        aux_loss, positions = (
            hidden.new_zeros((), dtype=torch.float32),
            torch.arange(len(embeds), device=embeds.device),
        )
        if self.config.use_moe:
            # [N], padding rows get S
            sample = torch.bucketize(positions, cu_seqlens[1:].to(positions), right=True)
            aux_loss = self._aux_loss(routings, sample, len(cu_seqlens) - 1)
        if targets is None:
            return MoeCausalLMOutputWithPast(logits=self.lm_head(hidden)[:rows], aux_loss=aux_loss)
        targets = F.pad(targets, (0, extra), value=-100)  # -100: ignored, 0 each
        loss = head_cross_entropy(self.lm_head, hidden, targets, reduction)
        return MoeCausalLMOutputWithPast(loss=loss[:rows] if reduction == "none" else loss, aux_loss=aux_loss)

    def _aux_loss(self, routings: list[tuple[Tensor, Tensor]], sample: Tensor, num_samples: int) -> Tensor:
        losses = [
            load_balancing_loss(
                probs, chosen, sample, num_samples, layer.mlp.tokens_per_expert if self.training else None
            )
            for layer, (probs, chosen) in zip(self.model.layers, routings, strict=True)
        ]
        return self.config.router_aux_loss_coef * torch.stack(losses).sum()
