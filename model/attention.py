"""Attention, and who sees whom in it. `visible` alone decides that, for all forms of input: flat batches in
training, padded batches, and decoding.

Shape legend: N tokens of a flat batch, S samples, R rows, B batch, T queries, T' keys, H query heads, G
key/value heads, D head size.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import cpu

CAUSAL_FROM_THE_LAST = 2  # torch's CustomMaskType: the last query of a sample sees all of its keys


def visible(queries: Tensor, keys: Tensor, config: Any) -> Tensor | None:
    """Whether the token at each position of `queries` sees that at each of `keys`, of the same sample: bool,
    in the shape to which the two broadcast. None: causal, it sees itself and what is before it; kernels have
    a faster form of that than a mask.

    For another rule change this line, such as to `(keys <= queries) & (queries - keys < config.window)`."""
    return None


def visible_mask(queries: Tensor, keys: Tensor, config: Any) -> Tensor:
    """`visible`, with the causal mask in place of None."""
    mask = visible(queries, keys, config)
    return keys <= queries if mask is None else mask


# --- padded batches and decoding


def unpadded_mask(position_ids: Tensor, config: Any) -> Tensor | None:
    """The mask [B, 1, T, T] of batches without padding at positions [B, T]; None: causal."""
    mask = visible(position_ids[..., None], position_ids[..., None, :], config)
    return None if mask is None else mask[:, None]


def padded_mask(
    attention_mask: Tensor | None, rows: int, length: int, seen: int | Tensor, end: int, config, device
) -> Tensor:
    """The mask [B, 1, T, T'] of a padded batch: bool, who sees whom.

    attention_mask: [B, up to T'], 1 for tokens and 0 for padding; None: no padding. rows: B. length: T, of
    the queries, which stand behind `seen` keys. end: T', with places of a cache that are still empty."""
    real = torch.ones(rows, end, dtype=torch.bool, device=device)
    if attention_mask is not None:
        real = F.pad(attention_mask.bool(), (0, end - attention_mask.shape[1]))
    positions = real.cumsum(dim=-1) - 1  # of tokens, padding does not count
    places = seen + torch.arange(length, device=device)
    mask = visible_mask(positions[:, places, None], positions[:, None], config) & real[:, None]
    # padding sees everything: a softmax of nothing would give NaN, which spreads
    return (mask | ~real[:, places, None])[:, None]


def padded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q [B, T, H, D] over k, v [B, T', G, D] -> [B, T, H, D]. mask: bool [B, 1, T, T']; None:
    each query sees the keys up to its own place, T = T'."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if q.shape[1] == 1 and mask is not None:
        # the heads that share a key take the place of queries, so no key is repeated
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])  # [B, G, H / G, D]
        return cpu.attention_of_one_query(grouped, k, v, mask).reshape(q.shape)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, mask, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(1, 2)


# --- flat batches


class Spans(NamedTuple):
    """Where the samples of a flat batch begin and end, and who sees whom in them.

    mask: `visible` of the positions in the longest sample, bool [T', T'], or None. shared_prefix: where
    samples begin alike, each also sees keys of that beginning; the rows [R] of the keys that each sample
    sees, one sample behind the other, and where those of each begin and end."""

    cu_seqlens: Tensor  # [S + 1] on the device
    max_seqlen: int
    host_cu_seqlens: Tensor  # [S + 1] on the host
    mask: Tensor | None = None
    shared_prefix: "tuple[Tensor, Spans] | None" = None


def spans_of(
    config: Any,
    cu_seqlens: Tensor,
    max_seqlen: int,
    host_cu_seqlens: np.ndarray | None,
    seen_keys: tuple[Tensor, Tensor, int, np.ndarray | None] | None = None,
) -> Spans:
    """From the arguments of these names of `MiniMindForCausalLM.forward_flat`."""
    on_host = cu_seqlens if host_cu_seqlens is None else torch.from_numpy(host_cu_seqlens)
    if seen_keys is None:
        positions = torch.arange(max_seqlen, device=cu_seqlens.device)
        return Spans(cu_seqlens, max_seqlen, on_host, visible(positions[:, None], positions, config))
    rows, cu_seqlens_k, max_seqlen_k, host_cu_seqlens_k = seen_keys
    keys = spans_of(config, cu_seqlens_k, max_seqlen_k, host_cu_seqlens_k)
    return Spans(cu_seqlens, max_seqlen, on_host, keys.mask, (rows, keys))


def spans_with_padding(spans: Spans, extra: int) -> Spans:
    """Spans with a shared prefix, and so many rows of padding behind them, which may see any keys."""
    rows, keys = cast(tuple[Tensor, Spans], spans.shared_prefix)
    return spans._replace(shared_prefix=(F.pad(rows, (0, extra)), keys))


def samples_of_rows(spans: Spans, rows: int) -> Tensor:
    """The number of the sample of each row [N]; rows of padding have that behind the last sample's."""
    ends = spans.cu_seqlens[1:].to(torch.int64)
    return torch.bucketize(torch.arange(rows, device=ends.device), ends, right=True)


def flat_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Attention within each sample of a flat batch: q [N, H, D], k and v [N, G, D] -> [N, H, D].

    On a GPU one kernel for all samples where torch has one, else one call for each sample."""
    if not len(q):  # an empty micro-batch: DDP wants zero gradients, not None
        return (q + 0 * (k.sum() + v.sum())).to(v.dtype)
    seen = spans
    if spans.shared_prefix is not None:
        rows, seen = spans.shared_prefix
        k, v = take_rows(k, rows), take_rows(v, rows)
    if spans.mask is None and has_cutlass_kernel(v):
        return cutlass_attention(q.to(v.dtype), k.to(v.dtype), v, spans, seen)
    if spans.mask is not None or not has_varlen_kernel(v):
        return attention_by_sample(q, k, v, spans, seen)
    from torch.nn.attention.varlen import varlen_attn  # takes long, and no other device needs it

    borders = (spans.cu_seqlens, seen.cu_seqlens, spans.max_seqlen, seen.max_seqlen)
    q, k = q.to(v.dtype), k.to(v.dtype)
    return cast(Tensor, varlen_attn(q, k, v, *borders, window_size=(-1, 0), enable_gqa=True))  # causal


def has_varlen_kernel(values: Tensor) -> bool:
    """Whether torch has a variable-length attention kernel: in half precision, on GPUs from Ampere on."""
    half, head_dim = values.dtype in (torch.float16, torch.bfloat16), values.shape[-1]
    if not (values.is_cuda and half and head_dim % 8 == 0 and head_dim <= 256):
        return False
    return torch.cuda.get_device_capability(values.device) >= (8, 0)


def has_cutlass_kernel(values: Tensor) -> bool:
    """Whether `cutlass_attention` takes them: on NVIDIA GPUs in float32, and before Ampere in float16."""
    if not values.is_cuda or torch.version.hip or values.shape[-1] % 8:
        return False
    is_float32 = values.dtype == torch.float32
    return is_float32 or (values.dtype == torch.float16 and not has_varlen_kernel(values))


def cutlass_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans, seen: Spans) -> Tensor:
    """`flat_attention` by the kernel of torch's nested tensors, which is there for all NVIDIA GPUs; `seen`:
    the spans of the keys, of which the queries are the last. It knows no grouped heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out, *_ = torch.ops.aten._efficient_attention_forward(
        q[None], k[None], v[None], None, spans.cu_seqlens, seen.cu_seqlens, spans.max_seqlen,
        seen.max_seqlen, 0.0, CAUSAL_FROM_THE_LAST, compute_log_sumexp=True,
    )  # fmt: skip
    return out[0]


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows [R] of x [N, ...], some of them several times.

    The gradients of a row must be summed in the same order each time. On CUDA indexing does so, compiled with
    `--deterministic 1`; index_select, which uses atomic additions, does not. On a CPU index_select does, but
    not the compiler's kernels."""
    return take_rows_outside_of_graphs(x, rows) if x.device.type == "cpu" else x[rows]


@torch.compiler.disable
def take_rows_outside_of_graphs(x: Tensor, rows: Tensor) -> Tensor:
    """`take_rows` on a CPU."""
    return x.index_select(0, rows)


@torch.compiler.disable
def attention_by_sample(q: Tensor, k: Tensor, v: Tensor, spans: Spans, seen: Spans) -> Tensor:
    """`flat_attention` with one call for each sample, whose queries are the last of its keys; `seen`: the
    spans of the keys.

    On a CPU it computes in float32: the bfloat16 kernel would be compiled for every new length."""
    lengths, lengths_k = spans.host_cu_seqlens.diff().tolist(), seen.host_cu_seqlens.diff().tolist()
    padding = len(q) - sum(lengths)
    if padding:
        lengths, lengths_k = [*lengths, padding], [*lengths_k, padding]
    out_dtype = v.dtype
    if v.device.type == "cpu":
        v = v.float()
    q, k, out = q.to(v.dtype), k.to(v.dtype), []
    samples = zip(q.split(lengths), k.split(lengths_k), v.split(lengths_k), strict=True)
    with torch.autocast(q.device.type, enabled=False):
        for number, (queries, keys, values) in enumerate(samples):
            is_padding = number == len(spans.host_cu_seqlens) - 1
            mask = None if is_padding else spans.mask
            out.append(attention_of_sample(queries, keys, values, mask))
    return torch.cat(out).to(out_dtype)


def attention_of_sample(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of the queries q [T, H, D] of a sample, the last of its keys k, v [T', G, D]: those before
    are of a shared prefix. mask: of `Spans`."""
    before, end = len(k) - len(q), len(k)
    if mask is not None:
        mask = mask[None, None, before:end, :end]
    elif before == 0:
        return padded_attention(q[None], k[None], v[None], None)[0]
    elif len(q) > 1 and before < len(q):
        # pad the queries: the causal kernel skips the future, with a mask it computes all
        q = F.pad(q, (0, 0, 0, 0, before, 0))
        return padded_attention(q[None], k[None], v[None], None)[0, before:]
    else:
        mask = torch.ones(1, 1, len(q), end, dtype=torch.bool, device=q.device).tril(before)
    return padded_attention(q[None], k[None], v[None], mask)[0]
