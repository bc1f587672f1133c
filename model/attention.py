"""Attention, by device: within each sample of a flat batch, and of padded batches.

Shape legend: N tokens of a flat batch, S samples, B batch, T padded length, H query heads, G key/value heads,
D head size, R rows.
"""

from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused


class Spans(NamedTuple):
    """Where the samples of a flat batch begin and end.

    shared_prefix: where samples begin alike, each also sees keys of that beginning. It holds the rows [R]
    of the keys that each sample sees, one sample behind the other, and where those of each begin and end."""

    cu_seqlens: Tensor  # [S + 1] on the device
    max_seqlen: int
    host_cu_seqlens: Tensor  # [S + 1] on the host
    shared_prefix: "tuple[Tensor, Spans] | None" = None


def spans_of(
    cu_seqlens: Tensor,
    max_seqlen: int,
    host_cu_seqlens: np.ndarray | None,
    seen_keys: tuple[Tensor, Tensor, int, np.ndarray | None] | None = None,
) -> Spans:
    """From the arguments of these names of `MiniMindForCausalLM.forward`."""
    on_host = cu_seqlens if host_cu_seqlens is None else torch.from_numpy(host_cu_seqlens)
    shared_prefix = None
    if seen_keys is not None:
        rows, cu_seqlens_k, max_seqlen_k, host_cu_seqlens_k = seen_keys
        shared_prefix = rows, spans_of(cu_seqlens_k, max_seqlen_k, host_cu_seqlens_k)
    return Spans(cu_seqlens, max_seqlen, on_host, shared_prefix)


def spans_with_padding(spans: Spans, extra: int) -> Spans:
    """Spans with a shared prefix, and so many rows of padding behind them, which may see any keys."""
    rows, keys = cast(tuple[Tensor, Spans], spans.shared_prefix)
    return spans._replace(shared_prefix=(F.pad(rows, (0, extra)), keys))


def samples_of_rows(spans: Spans, rows: int) -> Tensor:
    """The number of the sample of each row [N]; rows of padding have that behind the last sample's."""
    ends = spans.cu_seqlens[1:].to(torch.int64)
    return torch.bucketize(torch.arange(rows, device=ends.device), ends, right=True)


def flat_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Causal attention within each sample of a flat batch: q [N, H, D], k and v [N, G, D] -> [N, H, D].

    One variable-length FlashAttention kernel where torch has one, else one call for each sample. Which
    tokens see which is said in three places, one for each form of input: here for training, in
    `MiniMindForCausalLM.forward` for padded batches, and in `MiniMindModel.visible` for decoding."""
    if not len(q):  # an empty micro-batch: DDP wants zero gradients, not None
        return (q + 0 * (k.sum() + v.sum())).to(v.dtype)
    seen = spans
    if spans.shared_prefix is not None:
        rows, seen = spans.shared_prefix
        k, v = take_rows(k, rows), take_rows(v, rows)
    if v.device.type == fused.HOST or not fused.has_varlen_kernel(v):
        return attention_by_sample(q, k, v, spans.host_cu_seqlens, seen.host_cu_seqlens)
    from torch.nn.attention.varlen import varlen_attn  # takes long, and no other device needs it

    borders = (spans.cu_seqlens, seen.cu_seqlens, spans.max_seqlen, seen.max_seqlen)
    q, k = q.to(v.dtype), k.to(v.dtype)
    return cast(Tensor, varlen_attn(q, k, v, *borders, window_size=(-1, 0), enable_gqa=True))  # causal


@torch.compiler.disable
def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows [R] of x [N, ...], some of them several times.

    The gradients of a row must be summed in the same order each time. On CUDA indexing does so, but not
    index_select, which uses atomic additions; nor do the compiler's kernels."""
    if x.device.type != "cpu":
        return x[rows]
    return x.index_select(0, rows)


@torch.compiler.disable
def attention_by_sample(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """The plain form of `flat_attention`: one call for each sample, whose queries are the last of its keys.

    It reads `cu_seqlens` and `cu_seqlens_k` on the host. On a CPU it computes in float32: the bfloat16
    kernel would be compiled for every new length."""
    lengths, lengths_k = cu_seqlens.diff().tolist(), cu_seqlens_k.diff().tolist()
    lengths.append(len(q) - sum(lengths))  # the padding rows
    lengths_k.append(len(k) - sum(lengths_k))
    out_dtype = v.dtype
    if q.device.type != "cpu":  # there grouped queries would be computed without a kernel
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        q, k = q.to(v.dtype), k.to(v.dtype)
    else:
        q, k, v = q.float(), k.float(), v.float()
    samples, out = zip(q.split(lengths), k.split(lengths_k), v.split(lengths_k), strict=True), []
    with torch.autocast(q.device.type, enabled=False):
        for queries, keys, values in samples:
            if len(keys) == len(queries):
                out.append(padded_attention(queries[None], keys[None], values[None], None)[0])
            else:
                out.append(attention_behind_prefix(queries, keys, values))
    return torch.cat(out).to(out_dtype)


def attention_behind_prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the queries q [T, H, D] of a sample, the last of its keys [T', G, D]: those before
    are of a shared prefix."""
    before, mask = len(k) - len(q), None
    if len(q) > 1 and before < len(q):
        # pad the queries: the causal kernel skips the future, with a mask it computes all
        q = F.pad(q, (0, 0, 0, 0, before, 0))
        return padded_attention(q[None], k[None], v[None], None)[0, before:]
    if len(q) > 1:
        mask = q.new_ones(len(q), len(k), dtype=torch.bool).tril(before)
    return padded_attention(q[None], k[None], v[None], mask)[0]


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key or value heads [N, G, D], each as often as query heads share it -> [N, H, D]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of q [B, T, H, D] over k, v [B, T', G, D]; a mask [B, 1, T, T'] replaces the causal
    one."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if q.shape[1] == 1 and fused.ENABLED:
        return attention_of_one_query(q, k, v, mask)
    q = q.transpose(1, 2)
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True).transpose(1, 2)


def attention_of_one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention in decoding: q [B, 1, H, D] over k, v [B, G, T', D] -> [B, 1, H, D].

    The heads that share a key take the place of queries, so no key is repeated."""
    grouped = q.reshape(len(q), k.shape[1], q.shape[2] // k.shape[1], q.shape[-1])  # [B, G, H / G, D]
    if q.device.type == "cpu" and len(q) > 1 and mask is not None and mask.is_floating_point():
        # three operators: the kernel is made for longer queries
        scores = torch.matmul(grouped * q.shape[-1] ** -0.5, k.transpose(-1, -2)) + mask
        return torch.matmul(scores.softmax(dim=-1), v).reshape(q.shape)
    return F.scaled_dot_product_attention(grouped, k, v, mask).reshape(q.shape)
