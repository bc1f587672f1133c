"""Torch's kernel for attention within samples of several lengths. It is imported where it is called, because
the import takes long and only GPUs need it."""

import inspect
from typing import Any, cast

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from model.layout import Samples

# Torch 2.11 accepts fewer key heads than query heads by default; later versions need an argument. It is asked
# here and not in the call, because the call is compiled and the question would break its graph.
GROUPED_HEADS: dict[str, Any] = {}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    GROUPED_HEADS["enable_gqa"] = True


def fast_varlen_attention(q: Tensor, k: Tensor, v: Tensor, queries: Samples, keys: Samples) -> Tensor:
    """Causal attention within each sample: q [N, H, D], k and v [R, G, D] -> [N, H, D]. The queries of a
    sample are the last of its keys."""
    borders = (queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen)
    return cast(Tensor, varlen_attn(q, k, v, *borders, window_size=(-1, 0), **GROUPED_HEADS))
