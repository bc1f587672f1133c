"""A kernel on the CPU for torch's variable-length attention, which has one for CUDA only; registered by the
import.

By the documented arithmetic, in float32, one sample after another: numbers for the branch of the model that
CUDA takes.
"""

import torch
from torch import Tensor
from torch.nn.attention import varlen


def samples(cu_q: Tensor, cu_k: Tensor, *tensors: Tensor):
    """The parts [heads, length, D] of each sample, in float32; the last two tensors are of keys."""
    lengths = [cu_q.diff().tolist()] * (len(tensors) - 2) + [cu_k.diff().tolist()] * 2
    for parts in zip(*(x.split(each) for x, each in zip(tensors, lengths, strict=True)), strict=True):
        yield [part.transpose(0, 1).float() for part in parts]


def probabilities(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Of each query [H, T, D], the last of the keys [G, T', D], over those up to its own position: [H, T,
    T']."""
    scores = q @ k.repeat_interleave(len(q) // len(k), dim=0).transpose(1, 2) * scale
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
    return scores.masked_fill(future, -torch.inf).softmax(dim=-1)


def joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.transpose(0, 1) for part in parts]).to(like.dtype)


@varlen._varlen_attn.register_kernel("cpu")
def forward(
    q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window_size=None, enable_gqa=False,
    seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert is_causal and window_size == [-1, 0] and (enable_gqa or q.shape[1] == k.shape[1])
    assert q.dtype == k.dtype == v.dtype and all(x.stride(-1) == 1 for x in (q, k, v))
    assert cu_q.dtype == cu_k.dtype == torch.int32 and bool((cu_q.diff() <= cu_k.diff()).all())
    assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k)) and len(k) == len(v)
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    out = []
    for q_part, k_part, v_part in samples(cu_q, cu_k, q, k, v):
        weights = probabilities(q_part, k_part, scale or q.shape[-1] ** -0.5)
        out.append(weights @ v_part.repeat_interleave(len(q_part) // len(k_part), dim=0))
    lse = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    return joined(out, q), lse, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng, scale=None, window_size=None):
    scale = scale or q.shape[-1] ** -0.5
    grads: tuple[list[Tensor], ...] = ([], [], [])
    for g_part, q_part, k_part, v_part in samples(cu_q, cu_k, grad, q, k, v):
        shared = len(q_part) // len(k_part)
        weights = probabilities(q_part, k_part, scale)
        of_weights = g_part @ v_part.repeat_interleave(shared, dim=0).transpose(1, 2)
        of_scores = weights * (of_weights - (weights * of_weights).sum(dim=-1, keepdim=True)) * scale
        grads[0].append(of_scores @ k_part.repeat_interleave(shared, dim=0))
        of_k, of_v = of_scores.transpose(1, 2) @ q_part, weights.mT @ g_part
        for kept, of_heads in ((grads[1], of_k), (grads[2], of_v)):
            kept.append(of_heads.unflatten(0, (-1, shared)).sum(dim=1))
    return tuple(joined(parts, like) for parts, like in zip(grads, (q, k, v), strict=True))
