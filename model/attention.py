"""Causal attention over flat and padded batches; which of torch's kernels computes it.

Shape legend: N tokens of a flat batch, S samples, R keys of them all, B batch, T padded length, H query
heads, G key/value heads, D head size.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor


class Spans(NamedTuple):
    """Where the samples of a flat batch begin and end. With `keys`, the queries of a sample see other keys
    than its own
    as well: rows [R] in their order, and where those of each sample begin and end."""

    cu_seqlens: Tensor  # [S + 1] on the device
    max_seqlen: int
    host_cu_seqlens: Tensor  # [S + 1] on the host
    keys: "tuple[Tensor, Spans] | None" = None


def has_varlen_kernel(values: Tensor) -> bool:
    """Whether torch has a variable-length attention kernel for these values: in half precision, on GPUs from
    Ampere."""
    half, head_dim = values.dtype in (torch.float16, torch.bfloat16), values.shape[-1]
    fits = values.is_cuda and half and head_dim % 8 == 0 and head_dim <= 256
    return fits and torch.cuda.get_device_capability() >= (8, 0)


def flat_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Causal attention within each sample of a flat batch: q [N, H, D], k and v [N, G, D] -> [N, H, D].

    Which tokens see which is said in three places, one for each form of input: here for training, in
    `MiniMindForCausalLM.forward` for padded batches, and in `MiniMindModel.visible` for the answers that are
    decoded.

    One variable-length FlashAttention kernel (torch.nn.attention.varlen) where there is one; else one call
    per sample, which computes no masked blocks (on a CPU in float32: the bfloat16 kernel is compiled for
    every new length)."""
    if not len(q):
        # empty micro-batch: a zero gradient, not None, for DDP
        return (q + 0 * (k.sum() + v.sum())).to(v.dtype)
    seen = spans
    if spans.keys is not None:
        rows, seen = spans.keys
        k, v = (take_rows(x, rows) for x in (k, v))
    if has_varlen_kernel(v):
        from torch.nn.attention.varlen import (
            varlen_attn,  # brings in the compiler, which other devices do not need
        )

        ends = (spans.cu_seqlens, seen.cu_seqlens, spans.max_seqlen, seen.max_seqlen)
        # causal
        out = varlen_attn(q.to(v.dtype), k.to(v.dtype), v, *ends, window_size=(-1, 0), enable_gqa=True)
        return cast(Tensor, out)
    return attention_by_sample(q, k, v, spans.host_cu_seqlens, seen.host_cu_seqlens)


@torch.compiler.disable
def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows [R] of x [N, ...], some of them several times."""
    # The gradients of a row must be summed in the same order each time. On CUDA indexing does so, but not
    # index_select, which uses atomic additions; nor do the compiler's kernels, so this stays outside its
    # graphs.
    return x.index_select(0, rows) if x.device.type == "cpu" else x[rows]


@torch.compiler.disable
def attention_by_sample(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """`flat_attention` with one call per sample, whose queries are the last of its keys. It reads
    `cu_seqlens` and `cu_seqlens_k`, so a compiled graph breaks here, and on the host: ones on the device make
    the host wait."""
    lengths, lengths_k = cu_seqlens.diff().tolist(), cu_seqlens_k.diff().tolist()
    lengths += [len(q) - sum(lengths)]  # the padding rows
    lengths_k += [len(k) - sum(lengths_k)]
    dtype = torch.float32 if q.device.type == "cpu" else v.dtype
    if q.device.type != "cpu":  # there grouped queries would be computed without a kernel
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
    pieces = zip(q.to(dtype).split(lengths), *(x.to(dtype).split(lengths_k) for x in (k, v)), strict=True)
    with torch.autocast(q.device.type, enabled=False):
        out = torch.cat([sample_attention(*piece) for piece in pieces])
    return out.to(v.dtype)


def sample_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sample, whose queries q [T, H, D] are the last of its keys [T', G, D] -> [T, H,
    D]."""
    before, mask = len(k) - len(q), None
    if 1 < len(q) <= before:
        mask = q.new_ones(len(q), len(k), dtype=torch.bool).tril(before)
    # pad the queries: the causal kernel skips the future, with a mask it computes all
    elif before and len(q) > 1:
        q = F.pad(q, (0, 0, 0, 0, before, 0))
        return padded_attention(q[None], k[None], v[None], mask=None)[0, before:]
    return padded_attention(q[None], k[None], v[None], mask)[0]


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key or value heads [N, G, D], each as often as query heads share it -> [N, H, D]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of q [B, T, H, D] over k, v [B, T', G, D]; `mask` [B, 1, T, T'] replaces the causal
    one."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    # decoding: the heads that share a key take the place of queries, so no key is repeated
    if q.shape[1] == 1:
        shape = (len(q), k.shape[1], q.shape[2] // k.shape[1], q.shape[-1])
        grouped = q.reshape(shape)
        if q.device.type == "cpu" and len(q) > 1 and mask is not None and mask.is_floating_point():
            # three operators: the kernel is made for longer queries
            scores = torch.matmul(grouped * q.shape[-1] ** -0.5, k.transpose(-1, -2)) + mask
            return torch.matmul(scores.softmax(dim=-1), v).reshape(q.shape)
        return F.scaled_dot_product_attention(grouped, k, v, mask).reshape(q.shape)
    q = q.transpose(1, 2)
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True).transpose(1, 2)
