"""Attention by torch's kernels, with any mask or causal. These are the fast forms of `attend` in
attention.py, for layers whose scores are the scaled products. Their names begin with `fast_`.

Shape legend: N tokens of a flat batch, R keys of a flat batch, B batch, T queries, T' keys, H query heads, G
key/value heads, D head size. `samples` holds the samples by queries and by keys (`Layout` in layout.py); the
queries of a sample belong to the last of its keys."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model import cpu
from model.layout import Samples, split_samples

amd_has_varlen_kernel = False  # until `try_amd_kernel`
CAUSAL_FROM_THE_LAST = 2  # torch's CustomMaskType: the last query of a sample sees all of its keys


def fast_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, samples: tuple[Samples, Samples] | None
) -> Tensor:
    """Attention of q [B, T, H, D] over k, v [B, T', G, D] -> [B, T, H, D]; in a flat batch, which has
    `samples`, of q [N, H, D] over k, v [R, G, D] -> [N, H, D]. mask: of `Layout.mask`.

    A flat batch on a GPU takes one kernel for all samples if torch has one, and otherwise one call for each
    sample."""
    if not len(q):  # an empty micro-batch: DDP wants zero gradients, not None
        return (q + 0 * (k.sum() + v.sum())).to(v.dtype)
    if samples is None:
        return fast_padded_attention(q.to(v.dtype), k.to(v.dtype), v, mask)
    if mask is None and has_cutlass_kernel(v):
        return fast_cutlass_attention(q.to(v.dtype), k.to(v.dtype), v, *samples)
    if mask is not None or not has_varlen_kernel(v):
        return fast_attention_by_sample(q, k, v, mask, samples)
    from model.varlen import fast_varlen_attention

    return fast_varlen_attention(q.to(v.dtype), k.to(v.dtype), v, *samples)


# --- padded batches and decoding


def fast_padded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
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
    """Find out whether an AMD GPU has the variable-length attention kernel, by calling it. Version numbers do
    not show it (gfx906 and RDNA2 report those of Ampere and newer). Called before anything is compiled."""
    global amd_has_varlen_kernel
    from model.varlen import fast_varlen_attention

    q = torch.zeros(16, 2, 64, dtype=torch.float16, device=device, requires_grad=True)
    ends = torch.tensor([0, 16], dtype=torch.int32, device=device)
    samples = Samples(ends, 16, ends)
    try:
        fast_varlen_attention(q, q, q, samples, samples).sum().backward()
        amd_has_varlen_kernel = True
    except RuntimeError:
        amd_has_varlen_kernel = False


def has_cutlass_kernel(values: Tensor) -> bool:
    """Whether `fast_cutlass_attention` takes these values: on NVIDIA GPUs in float32, and on GPUs before
    Ampere in float16."""
    if not values.is_cuda or torch.version.hip or values.shape[-1] % 8:
        return False
    is_float32 = values.dtype == torch.float32
    return is_float32 or (values.dtype == torch.float16 and not has_varlen_kernel(values))


def fast_cutlass_attention(q: Tensor, k: Tensor, v: Tensor, queries: Samples, keys: Samples) -> Tensor:
    """Attention by the kernel of torch's nested tensors, which runs on all NVIDIA GPUs. It does not support
    grouped heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out, *_ = torch.ops.aten._efficient_attention_forward(
        q[None], k[None], v[None], None, queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen,
        keys.max_seqlen, 0.0, CAUSAL_FROM_THE_LAST, compute_log_sumexp=True,
    )  # fmt: skip
    return out[0]


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows [R] of x [N, ...]. A row may be taken several times.

    The gradients of a row must be summed in the same order each time. On CUDA, indexing does so (when
    compiled, only with `--deterministic 1`), but index_select does not, because it uses atomic additions. On
    a CPU, index_select does so, but the compiler's kernels do not."""
    return take_rows_outside_of_graphs(x, rows) if x.device.type == "cpu" else x[rows]


@torch.compiler.disable
def take_rows_outside_of_graphs(x: Tensor, rows: Tensor) -> Tensor:
    """`take_rows` on a CPU."""
    return x.index_select(0, rows)


@torch.compiler.disable
def fast_attention_by_sample(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, samples: tuple[Samples, Samples]
) -> Tensor:
    """Attention with one call for each sample of a flat batch.

    On a CPU it computes in float32: the bfloat16 kernel would be compiled for every new length."""
    out_dtype = v.dtype
    if v.device.type == "cpu":
        v = v.float()
    q, k = q.to(v.dtype), k.to(v.dtype)
    with torch.autocast(q.device.type, enabled=False):
        out = [fast_attention_of_sample(*sample) for sample in split_samples(q, k, v, mask, samples)]
    return torch.cat(out).to(out_dtype)


def fast_attention_of_sample(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of the queries q [T, H, D] of a sample over its keys k, v [T', G, D]. The queries belong to
    the last keys; the keys before them are a shared prefix. mask: bool [1, T, T']; None: causal."""
    before, end = len(k) - len(q), len(k)
    if mask is not None:
        mask = mask[None]
    elif before == 0:
        return fast_padded_attention(q[None], k[None], v[None], None)[0]
    elif len(q) > 1 and before < len(q):
        # pad the queries: the causal kernel skips the future, with a mask it computes all
        q = F.pad(q, (0, 0, 0, 0, before, 0))
        return fast_padded_attention(q[None], k[None], v[None], None)[0, before:]
    else:
        mask = torch.ones(1, 1, len(q), end, dtype=torch.bool, device=q.device).tril(before)
    return fast_padded_attention(q[None], k[None], v[None], mask)[0]
