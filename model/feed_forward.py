"""The feed-forward half of a layer: SwiGLU, or a mixture of experts (MoE): a router and several SwiGLUs.

Shape legend: N all tokens, C hidden size, E experts, K experts per token, R rows of all experts.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

GROUP = 16  # each expert's rows are padded to a multiple: CUDA's grouped_mm needs 8, and oneDNN caches few shapes


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: PretrainedConfig, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(product_dtype(x))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class StackWeights(torch.autograd.Function):
    """The weights [out, in] of E experts stacked as [E, out, in] in another dtype: cast and copied in one pass."""

    @staticmethod
    def forward(ctx, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.dtype = weights[0].dtype
        stack = torch.empty(len(weights), *weights[0].shape, dtype=dtype, device=weights[0].device)
        torch._foreach_copy_(list(stack.unbind()), list(weights))
        return stack

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, *(part.to(ctx.dtype) for part in grads[0].unbind())


def grouped_linear(x: Tensor, layers: list[nn.Linear], ends: Tensor) -> Tensor:
    """Apply linear layer i to rows [ends[i-1], ends[i]) of x [R, in] -> [R, out], as one grouped matrix product.

    `ends` [E] stays on the device (no host sync); a layer without rows gets a zero gradient."""
    dtype = product_dtype(x)
    weights = StackWeights.apply(dtype, *(layer.weight for layer in layers)).transpose(1, 2)  # [E, in, out]
    eager_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if hasattr(F, "grouped_mm") and (eager_cpu or (x.device.type in ("cpu", "cuda") and dtype == torch.bfloat16)):
        return F.grouped_mm(x.to(dtype), weights, offs=ends)
    return linear_by_expert(x.to(dtype), weights, ends)


@torch.compiler.disable
def linear_by_expert(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` where torch has no kernel for it (float32 on a GPU, or compiled). Sync point."""
    bounds = [0, *ends.tolist()]
    pieces = [x[a:b] @ weight for a, b, weight in zip(bounds[:-1], bounds[1:], weights, strict=True)]
    return torch.cat(
        [*pieces, x.new_zeros(len(x) - bounds[-1], weights.shape[-1])]
    )  # rows after the last expert's are unused


class MOEFeedForward(nn.Module):
    """Top-k routed experts (Qwen3-MoE's arithmetic): softmax over the experts, the best K of them, weighted sum."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.num_experts, self.top_k, self.norm = config.num_experts, config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        experts = [FeedForward(config, config.moe_intermediate_size) for _ in range(config.num_experts)]
        self.experts = nn.ModuleList(experts)
        self.tokens_per_expert: Tensor
        self.register_buffer("tokens_per_expert", torch.zeros(self.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [..., C] -> the mixed output [..., C], and the routing (probabilities [N, E], chosen experts [N, K])."""
        flat = x.reshape(-1, x.shape[-1]).to(product_dtype(x))  # [N, C]
        probs = F.softmax(self.gate(flat), dim=-1, dtype=torch.float32)
        weight, chosen = probs.topk(self.top_k, dim=-1)  # [N, K]
        weight = weight / weight.sum(dim=-1, keepdim=True) if self.norm else weight
        # sort the rows by expert; each expert's block is padded to a multiple of GROUP rows
        picked = F.one_hot(chosen.flatten(), self.num_experts)  # [N * K, E]
        ends = ((picked.sum(dim=0) + GROUP - 1) // GROUP * GROUP).cumsum(0)  # [E]
        begin = F.pad(ends[:-1], (1, 0))
        place = ((picked.cumsum(0) - 1 + begin) * picked).sum(dim=-1)  # [N * K]
        rows = flat.new_zeros(
            len(place) + GROUP * self.num_experts, flat.shape[-1]
        )  # [R, C], the largest size possible: no host sync
        rows = rows.index_copy(0, place, flat.repeat_interleave(self.top_k, dim=0))
        ends = ends.to(torch.int32)
        experts = cast(list[FeedForward], list(self.experts))
        gate = grouped_linear(rows, [e.gate_proj for e in experts], ends)
        up = grouped_linear(rows, [e.up_proj for e in experts], ends)
        out = grouped_linear(F.silu(gate) * up, [e.down_proj for e in experts], ends)
        out = out[place].view(*weight.shape, flat.shape[-1]) * weight[..., None].to(out.dtype)  # [N, K, C]
        return out.sum(dim=1).view(x.shape), (probs, chosen)


def load_balancing_loss(
    probs: Tensor, chosen: Tensor, sample: Tensor, num_samples: int, tokens_per_expert: Tensor | None = None
) -> Tensor:
    """Sum over samples of (tokens of the sample) * E * sum_e f_e * P_e, for one layer.

    f_e is the share of a sample's tokens routed to expert e, P_e its mean probability (Switch Transformer,
    arXiv:2101.03961, eq. 4). Taken per sample (DeepSeek-V3, arXiv:2412.19437, eq. 17) it is a sum that does not depend
    on how samples are cut into micro-batches and ranks. `probs` [N, E], `chosen` [N, K], `sample` [N]; sample number
    `num_samples` marks padding.
    `tokens_per_expert` [E] grows by the tokens that each expert got."""
    picked = F.one_hot(chosen, probs.shape[-1]).sum(dim=1).to(probs.dtype)  # [N, E]
    totals = probs.new_zeros(num_samples + 1, probs.shape[-1])
    counts = totals.index_add(0, sample, picked)[:num_samples]
    masses = totals.index_add(0, sample, probs)[:num_samples]
    if tokens_per_expert is not None:
        tokens_per_expert += counts.sum(dim=0).to(tokens_per_expert.dtype)
    lengths = (counts.sum(dim=-1) / chosen.shape[-1]).clamp(min=1)
    return probs.shape[-1] * ((counts * masses).sum(dim=-1) / lengths).sum()
