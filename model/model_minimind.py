"""MiniMind: a decoder-only transformer, dense or mixture of experts (MoE).

Parameter names, shapes and arithmetic are those of MiniMind-3 and of Qwen3 / Qwen3-MoE, so the weights load
into a stock `Qwen3ForCausalLM` / `Qwen3MoeForCausalLM` unchanged. Training and decoding both call every layer
in this file, so a change here takes effect everywhere. attention.py computes attention by the rules of
`Attention`, and losses.py has the losses; kernels.py and cpu.py have faster forms of the same arithmetic.

There are two forms of input (shape legend: B batch, T padded length, N tokens of a flat batch, S samples, M
targets, V vocabulary, C hidden size, H query heads, G key/value heads, D head size, E experts, K experts per
token):

    padded  model(input_ids [B, T], attention_mask [B, T])
            for generation; `generate()` is transformers' own
    flat    model(input_ids [N], position_ids [N], cu_seqlens [S + 1], max_seqlen, target_index [M],
                  targets [M])
            for training without padding: samples concatenated, attention stays within each sample
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

from common.errors import UserError
from model import cpu
from model.attention import attention
from model.layout import Layout, flat_layout, layout_with_padding, padded_layout, samples_of_rows
from model.losses import head_cross_entropy, load_balancing_loss

# the supported types; the frequencies of other types depend on the length of the input
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
# with these fields the cache of transformers' generate() drops keys that `visible` may need
CACHE_FIELDS = ("sliding_window", "attention_chunk_size", "layer_types")
# further arguments that transformers passes: `num_items_in_batch` divides the loss, the others have no effect
# on the logits
FORWARD_NAMES = {"num_items_in_batch", "return_dict", "cache_position"}
# on a CPU, the rows of an expert and of a flat batch are padded to multiples of these
EXPERT_ROWS, FLAT_ROWS = 16, 64


class MiniMindConfig(PretrainedConfig):
    """The shape of a MiniMind model; the defaults are MiniMind-3's, at the small hidden size of 512.

    For contexts beyond the training length pass transformers' `rope_scaling`, such as `{"rope_type": "yarn",
    "factor": 4.0, "original_max_position_embeddings": 2048}`, of a type in ROPE_TYPES;
    `inference_rope_scaling` is MiniMind's setting for this; `top_k` is another name for
    `num_experts_per_tok`.

    Raises:
        UserError: if the type of `rope_scaling` is not supported, if there are fewer experts than experts per
            token, or if a field in CACHE_FIELDS is set."""

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
            theta = (self.rope_parameters or kwargs).get("rope_theta", self.default_theta)
            yarn = {"rope_type": "yarn", "factor": 16.0, "attention_factor": 1.0, "rope_theta": theta}
            self.rope_parameters = yarn | {"original_max_position_embeddings": 2048}
        super().__post_init__(**kwargs)
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise UserError(
                f"rope_scaling of type {rope_type} is not supported; use one of {', '.join(ROPE_TYPES)}"
            )
        for name in CACHE_FIELDS:
            if getattr(self, name, None) is not None:
                raise UserError(
                    f"the config field {name} changes the cache of transformers' generate() alone; give a "
                    "field of your own another name, and obey it in `Attention.visible`"
                )
        if self.use_moe and self.num_experts_per_tok > self.num_experts:
            k, experts = self.num_experts_per_tok, self.num_experts
            raise UserError(f"num_experts_per_tok {k} must be num_experts {experts} or less")

    def own_fields(self) -> dict[str, Any]:
        """All fields that `MiniMindConfig` needs to be made again, under Hugging Face's names and without the
        fields that transformers adds. They are saved in weights files, checkpoints and the run
        fingerprint."""
        values = self.to_dict()
        return {name: values[name] for name in type(self).__annotations__}


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# Compiled, it would need two graphs: one for rows that already are a multiple, one for all other numbers.
pad_outside_of_graphs = torch.compiler.disable(cpu.pad_to_multiple)


def pad_flat(x: Tensor, value: int = 0) -> Tensor:
    """Pad x [N] of a flat batch: on a CPU, rows of `value` are added (see `pad_to_multiple`)."""
    return x if x.is_cuda else pad_outside_of_graphs(x, FLAT_ROWS, value)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (arXiv:1910.07467), in float32 as in Qwen3; returns the
    weight's dtype."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return cpu.rms_norm(x.float(), self.weight.float(), self.eps).to(self.weight.dtype)


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
    and concat."""
    return torch.addcmul(x * cos.unsqueeze(-2), x.roll(x.shape[-1] // 2, dims=-1), sin.unsqueeze(-2))


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with an RMSNorm on each query and key head, as in Qwen3.

    Its rules are `visible`, `score` and `sinks`. A change of a rule takes effect in training and in decoding.
    A rule may use the layer's parameters, its number and the config."""

    def __init__(self, config: MiniMindConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.sinks: Tensor | None = None  # [H], a logit of each head that joins those of the keys

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Whether the token at each position of `queries` sees the one at each position of `keys`, in the
        same sample: bool, in the shape to which the two broadcast. None: causal, a token sees itself and the
        tokens before it; kernels compute this faster than with a mask.

        For another rule change this line, such as to `(keys <= queries) & (queries - keys < self.window)`."""
        return None

    def score(self, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """The scores before the softmax, computed from the scaled products `scores` [..., H, T, T'] in
        float32, to which the positions of queries and keys broadcast. Kernels are used as long as it returns
        `scores` unchanged, as here.

        For other scores change this line, such as to `self.cap * (scores / self.cap).tanh()`."""
        return scores

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [..., H, D] and keys, and values [..., G, D] of x [..., C]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return apply_rotary(self.q_norm(q), cos, sin), apply_rotary(self.k_norm(k), cos, sin), v

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], layout: Layout, cache: Cache | None = None
    ) -> Tensor:
        q, k, v = self.heads(x.to(product_dtype(x)), *rotary)  # cast once for three products
        if cache is not None:  # transformers' caches hold [B, G, T, D]
            k, v = cache.update(k.to(v.dtype).transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        return self.dropout(self.o_proj(attention(self, q, k, v, layout).flatten(-2)))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): all of a dense layer, or one expert of a mixture."""

    def __init__(self, config: MiniMindConfig, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., C]."""
        x = x.to(product_dtype(x))  # cast once for two products
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MOEFeedForward(nn.Module):
    """Top-k routed experts (Qwen3-MoE's arithmetic): softmax over the experts, the best K of them, weighted
    sum."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        experts = [FeedForward(config, config.moe_intermediate_size) for _ in range(self.num_experts)]
        self.experts = nn.ModuleList(experts)
        self.tokens_per_expert: Tensor
        counts = torch.zeros(self.num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [..., C] -> the mixed output [..., C], and the routing (probabilities [N, E], chosen experts [N,
        K])."""
        flat = x.reshape(-1, x.shape[-1]).to(product_dtype(x))  # [N, C]
        probs = F.softmax(self.gate(flat), dim=-1, dtype=torch.float32)
        weight, chosen = probs.topk(self.top_k, dim=-1)  # [N, K]
        if self.norm_topk_prob:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        out = self.chosen_experts(flat, chosen)  # [N, K, C]
        out = (out * weight[..., None]).sum(dim=1)  # in float32
        return out.view(x.shape), (probs, chosen)

    @torch.compiler.disable(recursive=False)
    def chosen_experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The outputs [N, K, C] of the chosen experts [N, K] for x [N, C]: rows are sorted by expert, and
        each expert is called once. Sync point: the host reads how many rows each has, between two graphs."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.num_experts).tolist()
        # K copies of each row, so that their gradients are summed in one order
        rows = x[:, None].expand(-1, self.top_k, -1).flatten(0, 1)[order]
        out = []
        for expert, part in zip(self.experts, rows.split(counts), strict=True):
            # An expert without rows is called in training, because DDP needs its zero gradients, and in an
            # empty batch.
            if len(part) or torch.is_grad_enabled() or not len(x):
                out.append(expert(part) if part.is_cuda and len(part) > 1 else self.call_padded(expert, part))
        return torch.cat(out)[order.argsort()].view(*chosen.shape, x.shape[-1])

    @staticmethod
    @torch.compiler.disable
    def call_padded(expert: nn.Module, x: Tensor) -> Tensor:
        """expert(x), never compiled: the compiler would need extra graphs for one row and for none, and would
        round differently on a CPU. On a CPU in half precision, rows of padding are added (see
        `pad_to_multiple`)."""
        if x.dtype == torch.float32:
            return expert(x)
        return expert(cpu.pad_to_multiple(x, EXPERT_ROWS))[: len(x)]


class MiniMindBlock(GradientCheckpointingLayer):
    """One pre-norm layer: attention, then SwiGLU or experts, each added to the residual stream. Returns the
    hidden states and the routing of the experts (None in a dense model)."""

    def __init__(self, config: MiniMindConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = MOEFeedForward(config) if config.use_moe else FeedForward(config, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary, layout: Layout, cache: Cache | None = None):
        x = x + self.self_attn(self.input_layernorm(x), rotary, layout, cache)
        out, routing = self.mlp(self.post_attention_layernorm(x)), None
        if isinstance(out, tuple):
            out, routing = out
        return x + out, routing


TransformerBlock = MiniMindBlock  # by its general name


class MiniMindModel(nn.Module):
    """Embeddings -> hidden states, and the routing of each MoE layer.

    layout: where the tokens stand; None: a padded batch without padding and cache."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(MiniMindBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(
        self, embeds: Tensor, position_ids: Tensor, layout: Layout | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor] | None]]:
        if layout is None:
            layout = padded_layout(position_ids)
        x, rotary, routings = self.dropout(embeds), self.rotary_emb(position_ids), []
        for layer in self.layers:
            x, routing = layer(x, rotary, layout, cache)
            routings.append(routing)
        return self.norm(x), routings


class Head(nn.Linear):
    """The language-model head, without a bias."""

    def __init__(self, config: MiniMindConfig):
        super().__init__(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Hidden states [..., C] -> logits [..., V]."""
        return cpu.head_product(input, self.weight)


class MiniMindForCausalLM(PreTrainedModel, GenerationMixin):
    """MiniMind with its language-model head."""

    config_class = MiniMindConfig
    base_model_prefix = "model"
    _supports_sdpa = supports_gradient_checkpointing = True
    # transformers' form
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.model = MiniMindModel(config)
        self.lm_head = Head(config)
        self.post_init()  # initialises the weights and ties lm_head to the embedding

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # from_pretrained builds the model on the meta device and leaves buffers empty
        if isinstance(module, RotaryEmbedding):
            module.inv_freq.copy_(module.frequencies()[0])
        elif isinstance(module, MOEFeedForward):
            module.tokens_per_expert.zero_()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """The padded form, as transformers calls it; with `cu_seqlens` it is `forward_flat`.

        `attention_mask` [B, up to T'] is 1 for tokens and 0 for padding; a mask of four dimensions is bool
        [B, 1, T, T'] and used unchanged. `logits_to_keep`: for how many of the last positions to compute
        logits (0: all), or for which positions. `labels` [B, T] are as in transformers (-100 is ignored).
        Loss and aux_loss are means; add them. The aux_loss is 0 in a dense model, and in calls with a cache
        and without labels, as in generation. The cache is called `past_key_values` before transformers 5.24
        and `cache` since then. Raises TypeError for an unknown argument."""
        if "cu_seqlens" in kwargs:
            return self.forward_flat(input_ids, cast(Tensor, position_ids), **kwargs)
        if unknown := kwargs.keys() - FORWARD_NAMES:
            raise TypeError(f"forward() knows no {', '.join(sorted(unknown))}")
        rows, length = input_ids.shape
        embeds = self.model.embed_tokens(input_ids)
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache()
        before = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = (torch.arange(length, device=embeds.device) + before)[None]
        real = attention_mask
        if real is not None and real.ndim == 4:
            keys = torch.arange(real.shape[-1], device=embeds.device)[None]
            layout, real = padded_layout(position_ids, keys, (real, real)), None
        else:
            end = length if cache is None else cache.get_mask_sizes(length, 0)[0]
            layout = layout_with_padding(real, rows, length, before, end, embeds.device)
        hidden, routings = self.model(embeds, position_ids, layout, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss, aux_loss = None, logits.new_zeros((), dtype=torch.float32)
        if self.config.use_moe and (labels is not None or cache is None):
            real = torch.ones_like(input_ids) if real is None else real[:, -length:]  # [B, T]
            sample = torch.where(real > 0, torch.arange(rows, device=real.device)[:, None], rows)
            aux_loss = self._aux_loss(routings, sample.flatten(), rows) / real.sum()
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, logits=logits, past_key_values=cache)

    def forward_flat(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        target_index: Tensor | None = None,
        targets: Tensor | None = None,
        host_cu_seqlens: np.ndarray | None = None,
        shared_keys: tuple[Tensor, Tensor, int, np.ndarray | None] | None = None,
        reduction: str = "sum",
    ) -> MoeCausalLMOutputWithPast:
        """The flat form; see the module docstring for shapes.

        `target_index` [M] are the positions whose next token is a target, and `targets` [M] are these next
        tokens; the head runs only at these positions. Loss and aux_loss are SUMS over targets and over
        tokens: the caller divides by the counts of the whole update. With `reduction` "none" the loss is [M],
        minus the log-probability of each target. Without `targets` it returns logits [M, V] instead of a
        loss, without `target_index` logits [N, V]. `hidden_states` is a tuple of one tensor, the last hidden
        states [N, C], for another head. `host_cu_seqlens` [S + 1] is a copy of `cu_seqlens` that the host can
        read; without it the host may wait for the device. `shared_keys`: which keys
        are seen if samples begin alike, see `SharedKeys` in dataset/batch.py."""
        tokens = len(input_ids)
        input_ids = pad_flat(input_ids)
        position_ids = pad_flat(position_ids)
        padding = len(input_ids) - tokens
        layout = flat_layout(cu_seqlens, max_seqlen, host_cu_seqlens, shared_keys, padding)
        hidden, routings = self.model(self.model.embed_tokens(input_ids), position_ids, layout)  # [N, C]
        out = MoeCausalLMOutputWithPast(hidden_states=(hidden[:tokens],))
        if target_index is None:
            out.logits = self.lm_head(hidden[:tokens])
            return out
        out.aux_loss = hidden.new_zeros((), dtype=torch.float32)
        if self.config.use_moe:
            sample = samples_of_rows(cu_seqlens, len(hidden))
            out.aux_loss = self._aux_loss(routings, sample, len(cu_seqlens) - 1)
        count = len(target_index)
        target_index = pad_flat(target_index)
        hidden = hidden.index_select(0, target_index)  # [M, C]
        if targets is None:
            out.logits = self.lm_head(hidden)[:count]
            return out
        targets = pad_flat(targets, -100)
        out.loss = head_cross_entropy(self.lm_head, hidden, targets, reduction)
        if reduction == "none":
            out.loss = out.loss[:count]
        return out

    def _aux_loss(self, routings: list[tuple[Tensor, Tensor]], sample: Tensor, num_samples: int) -> Tensor:
        """The weighted load-balancing loss of all layers. In training it also counts the tokens of each
        expert."""
        probs, chosen = (torch.stack(each) for each in zip(*routings, strict=True))  # of all layers
        losses, tokens = load_balancing_loss(probs, chosen, sample, num_samples)
        if self.training:
            counters = [layer.mlp.tokens_per_expert for layer in self.model.layers]
            torch._foreach_add_(counters, tokens.to(torch.int64).unbind())
        return self.config.router_aux_loss_coef * losses.sum()
