"""Attention in plain PyTorch, for any rule and every form of input. The rules belong to the layer
(`Attention` in model_minimind.py): `visible` says which keys a query sees, `score` changes the scores, and
`sinks` adds a logit to the softmax. layout.py has the positions of the tokens.

If the scores of a layer are the scaled products, kernels.py computes them faster, with the result of
`visible` as a mask. Tests compare these kernels with `attend`.

Shape legend: N tokens of a flat batch, B batch, T queries, T' keys, H query heads, G key/value heads, D head
size.
"""

from typing import Any

import torch
from torch import Tensor

from model import kernels
from model.layout import Layout, split_samples


def attention(layer: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Attention of a layer: q [B, T, H, D] over k, v [B, T', G, D] -> [B, T, H, D]; in a flat batch, within
    each sample, q [N, H, D] over k, v [N, G, D] -> [N, H, D]."""
    if layout.key_rows is not None:
        k, v = kernels.take_rows(k, layout.key_rows), kernels.take_rows(v, layout.key_rows)
    mask = layout.mask(layer)
    if kernels_fit(layer, q):
        return kernels.fast_attention(q, k, v, mask, layout.samples)
    if layout.samples is None or not len(q):  # an empty micro-batch: rules get zero gradients, too
        return attend(layer, q, k, v, layout.queries, layout.keys, mask)
    return attend_by_sample(layer, q, k, v, layout, mask)


def kernels_fit(layer: Any, q: Tensor) -> bool:
    """Whether kernels compute this layer: its scores are the scaled products, and it has no sinks."""
    scores = q.new_empty(q.shape[-2], 0, 0)
    positions = scores.long()
    return layer.sinks is None and layer.score(scores, positions, positions) is scores


def attend(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention of q [..., T, H, D] over k, v [..., T', G, D] -> [..., T, H, D], computed in float32.

    queries, keys: positions, which broadcast to [..., H, T, T']. mask: which keys each query sees; None:
    those up to its own position."""
    k, v = (x.repeat_interleave(q.shape[-2] // x.shape[-2], dim=-2) for x in (k, v))
    mask = keys <= queries if mask is None else mask
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("...qhd,...khd->...hqk", q.float(), k.float()) * q.shape[-1] ** -0.5
        scores = layer.score(scores, queries, keys)
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        if layer.sinks is not None:  # a key that every query sees, without a value
            sinks = layer.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., : k.shape[-3]]  # [..., H, T, T']
        return torch.einsum("...hqk,...khd->...qhd", weights, v.float()).to(v.dtype)


@torch.compiler.disable
def attend_by_sample(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, mask: Tensor | None
) -> Tensor:
    """`attend` for each sample of a flat batch."""
    assert layout.samples is not None
    out = []
    for queries, keys, values, own in split_samples(q, k, v, mask, layout.samples):
        places = torch.arange(len(keys), device=q.device)
        own_places = places[len(keys) - len(queries) :, None]
        out.append(attend(layer, queries, keys, values, own_places, places, own))
    return torch.cat(out)
