"""Torch's kernel for attention within samples of several lengths. Imported where it is called: it takes long,
and only GPUs need it."""

import inspect
from typing import Any, cast

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from model.layout import Samples

# Torch 2.11 takes fewer key heads than query heads as they are; later versions want to be told. Asked here,
# as the call is compiled, and the question would cut its graph.
GROUPED_HEADS: dict[str, Any] = {}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    GROUPED_HEADS["enable_gqa"] = True


def fast_varlen_attention(q: Tensor, k: Tensor, v: Tensor, queries: Samples, keys: Samples) -> Tensor:
    """Causal attention within each sample: q [N, H, D], k and v [R, G, D] -> [N, H, D]. The queries of a
    sample are the last of its keys."""
    borders = (queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen)
    return cast(Tensor, varlen_attn(q, k, v, *borders, window_size=(-1, 0), **GROUPED_HEADS))
