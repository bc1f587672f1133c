"""Attention by torch's kernels, with a mask or the causal one: faster forms of `attend` in attention.py, for
scores that are the scaled products.

Shape legend: N tokens of a flat batch, S samples, R rows, B batch, T queries, T' keys, H query heads, G
key/value heads, D head size. `spans` and `key_spans` are `Spans` of attention.py: of the queries, and of the
keys.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model import cpu

amd_has_varlen_kernel = False  # until `try_amd_kernel`
CAUSAL_FROM_THE_LAST = 2  # torch's CustomMaskType: the last query of a sample sees all of its keys


# --- padded batches and decoding


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


def flat_attention(q: Tensor, k: Tensor, v: Tensor, spans: Any, key_spans: Any) -> Tensor:
    """Attention within each sample of a flat batch: q [N, H, D], k and v [R, G, D] -> [N, H, D]. On a GPU one
    kernel for all samples where torch has one, else one call for each sample."""
    if spans.mask is None and has_cutlass_kernel(v):
        return cutlass_attention(q.to(v.dtype), k.to(v.dtype), v, spans, key_spans)
    if spans.mask is not None or not has_varlen_kernel(v):
        return attention_by_sample(q, k, v, spans, key_spans)
    from model.varlen import varlen_attention

    return varlen_attention(q.to(v.dtype), k.to(v.dtype), v, spans, key_spans)


def has_varlen_kernel(values: Tensor) -> bool:
    """Whether torch has a variable-length attention kernel: in half precision, on NVIDIA GPUs from Ampere on,
    and on AMD's where `try_amd_kernel` found it."""
    half, head_dim = values.dtype in (torch.float16, torch.bfloat16), values.shape[-1]
    if not (values.is_cuda and half and head_dim % 8 == 0 and head_dim <= 256):
        return False
    if torch.version.hip:
        return amd_has_varlen_kernel
    return torch.cuda.get_device_capability(values.device) >= (8, 0)


def try_amd_kernel(device: torch.device) -> None:
    """Find out whether an AMD GPU has the variable-length attention kernel, by calling it: numbers do not
    tell (gfx906 and RDNA2 report those of Ampere and more). Called before anything is compiled."""
    global amd_has_varlen_kernel
    from model.varlen import varlen_attention

    q = torch.zeros(16, 2, 64, dtype=torch.float16, device=device, requires_grad=True)
    ends = torch.tensor([0, 16], dtype=torch.int32, device=device)
    spans = SimpleNamespace(cu_seqlens=ends, max_seqlen=16)
    try:
        varlen_attention(q, q, q, spans, spans).sum().backward()
        amd_has_varlen_kernel = True
    except RuntimeError:
        amd_has_varlen_kernel = False


def has_cutlass_kernel(values: Tensor) -> bool:
    """Whether `cutlass_attention` takes them: on NVIDIA GPUs in float32, and before Ampere in float16."""
    if not values.is_cuda or torch.version.hip or values.shape[-1] % 8:
        return False
    is_float32 = values.dtype == torch.float32
    return is_float32 or (values.dtype == torch.float16 and not has_varlen_kernel(values))


def cutlass_attention(q: Tensor, k: Tensor, v: Tensor, spans: Any, key_spans: Any) -> Tensor:
    """`flat_attention` by the kernel of torch's nested tensors, which is there for all NVIDIA GPUs;
    `key_spans`: the spans of the keys, of which the queries are the last. It knows no grouped heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out, *_ = torch.ops.aten._efficient_attention_forward(
        q[None], k[None], v[None], None, spans.cu_seqlens, key_spans.cu_seqlens, spans.max_seqlen,
        key_spans.max_seqlen, 0.0, CAUSAL_FROM_THE_LAST, compute_log_sumexp=True,
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
def attention_by_sample(q: Tensor, k: Tensor, v: Tensor, spans: Any, key_spans: Any) -> Tensor:
    """`flat_attention` with one call for each sample, whose queries are the last of its keys; `key_spans`:
    the spans of the keys.

    On a CPU it computes in float32: the bfloat16 kernel would be compiled for every new length."""
    out_dtype = v.dtype
    if v.device.type == "cpu":
        v = v.float()
    q, k, out = q.to(v.dtype), k.to(v.dtype), []
    with torch.autocast(q.device.type, enabled=False):
        for number, sample in enumerate(samples(q, k, v, spans, key_spans)):
            is_padding = number == len(spans.host_cu_seqlens) - 1
            out.append(attention_of_sample(*sample, None if is_padding else spans.mask))
    return torch.cat(out).to(out_dtype)


def samples(
    q: Tensor, k: Tensor, v: Tensor, spans: Any, key_spans: Any
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries [T, H, D], keys and values [T', G, D] of each sample, and at the end those of padding, if there
    is any. The lengths are read by the host."""
    lengths, lengths_k = spans.host_cu_seqlens.diff().tolist(), key_spans.host_cu_seqlens.diff().tolist()
    padding = len(q) - sum(lengths)
    if padding:
        lengths, lengths_k = [*lengths, padding], [*lengths_k, padding]
    return zip(q.split(lengths), k.split(lengths_k), v.split(lengths_k), strict=True)


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
