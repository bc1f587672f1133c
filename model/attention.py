"""Attention: who sees whom (`visible`), how scores are made (`score`), and `attend`, which is both in plain
PyTorch, for every form of input: flat batches in training, padded batches, and decoding.

Where scores are the scaled products, kernels.py has faster forms, which take what `visible` says as a mask;
they are taken there, and tests hold them equal to `attend`. So a change of either rule is one line here.

Shape legend: N tokens of a flat batch, S samples, R rows, B batch, T queries, T' keys, H query heads, G
key/value heads, D head size.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import kernels


def visible(queries: Tensor, keys: Tensor, config: Any) -> Tensor | None:
    """Whether the token at each position of `queries` sees that at each of `keys`, of the same sample: bool,
    in the shape to which the two broadcast. None: causal, it sees itself and what is before it; kernels have
    a faster form of that than a mask.

    For another rule change this line, such as to `(keys <= queries) & (queries - keys < config.window)`."""
    return None


def score(scores: Tensor, queries: Tensor, keys: Tensor, config: Any) -> Tensor:
    """The scores, before the softmax, of queries at their positions for keys at theirs: made of the scaled
    products `scores` [..., H, T, T'] in float32; the positions broadcast to them. `scores` themselves, as
    here, let kernels be used.

    For other scores change this line, such as to `config.cap * (scores / config.cap).tanh()`."""
    return scores


def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, config: Any, mask: Tensor | None = None
) -> Tensor:
    """Attention of q [..., T, H, D] at positions `queries` [..., T] over k, v [..., T', G, D] at positions
    `keys` [..., T'] -> [..., T, H, D], computed in float32.

    mask: who sees whom, bool, broadcast to [..., 1, T, T'], where it is not `visible` alone."""
    k, v = (x.repeat_interleave(q.shape[-2] // x.shape[-2], dim=-2) for x in (k, v))
    queries, keys = queries[..., None, :, None], keys[..., None, None, :]
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("...qhd,...khd->...hqk", q.float(), k.float()) * q.shape[-1] ** -0.5
        scores = score(scores, queries, keys, config)
        mask = visible_mask(queries, keys, config) if mask is None else mask
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)  # [..., H, T, T']
        return torch.einsum("...hqk,...khd->...qhd", weights, v.float()).to(v.dtype)


def visible_mask(queries: Tensor, keys: Tensor, config: Any) -> Tensor:
    """`visible`, with the causal mask in place of None."""
    mask = visible(queries, keys, config)
    return keys <= queries if mask is None else mask


def has_other_scores(config: Any) -> bool:
    """Whether `score` changes the scaled products for this config, so that no kernel fits."""
    probe = torch.empty(0)
    return score(probe, probe, probe, config) is not probe


# --- padded batches and decoding


class PaddedLayout(NamedTuple):
    """Who sees whom in a padded batch, made by `padded_layout`."""

    queries: Tensor  # positions, [B or 1, T]
    keys: Tensor  # positions, [B or 1, T']
    config: Any
    mask: Tensor | None  # bool [B or 1, 1, T, T']; None: causal, and T = T'
    other_scores: bool


def padded_layout(
    config: Any, queries: Tensor, keys: Tensor | None = None, mask: Tensor | None = None
) -> PaddedLayout:
    """Who sees whom among tokens at positions `queries` [B or 1, T] and `keys` [B or 1, T']. keys: None where
    they are those of the queries. mask: bool [B or 1, 1, T, T'], in place of `visible`."""
    is_square, keys = keys is None, queries if keys is None else keys
    if mask is None and is_square:
        mask = visible(queries[:, None, :, None], keys[:, None, None, :], config)
    elif mask is None:
        mask = visible_mask(queries[:, None, :, None], keys[:, None, None, :], config)
    return PaddedLayout(queries, keys, config, mask, has_other_scores(config))


def layout_with_padding(
    config: Any, attention_mask: Tensor | None, rows: int, length: int, before: int | Tensor, end: int, device
) -> PaddedLayout:
    """Who sees whom in a padded batch.

    attention_mask: [B, up to T'], 1 for tokens and 0 for padding; None: no padding. rows: B. length: T, of
    the queries, which stand behind `before` keys. end: T', with places of a cache that are still empty."""
    real = torch.ones(rows, end, dtype=torch.bool, device=device)
    if attention_mask is not None:
        real = F.pad(attention_mask.bool(), (0, end - attention_mask.shape[1]))
    positions = real.cumsum(dim=-1) - 1  # of tokens, padding does not count
    places = before + torch.arange(length, device=device)
    queries = positions[:, places]
    mask = visible_mask(queries[..., None], positions[:, None], config) & real[:, None]
    # padding sees everything: a softmax of nothing would give NaN, which spreads
    return padded_layout(config, queries, positions, (mask | ~real[:, places, None])[:, None])


def padded_attention(q: Tensor, k: Tensor, v: Tensor, layout: PaddedLayout) -> Tensor:
    """Attention of q [B, T, H, D] over k, v [B, T', G, D] -> [B, T, H, D]."""
    if layout.other_scores:
        return attend(q, k, v, layout.queries, layout.keys, layout.config, layout.mask)
    return kernels.padded_attention(q, k, v, layout.mask)


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
    config: Any = None  # where `score` is not the scaled product: of which config


def spans_of(
    config: Any,
    cu_seqlens: Tensor,
    max_seqlen: int,
    host_cu_seqlens: np.ndarray | None,
    shared_keys: tuple[Tensor, Tensor, int, np.ndarray | None] | None = None,
) -> Spans:
    """From the arguments of these names of `MiniMindForCausalLM.forward_flat`."""
    on_host = cu_seqlens if host_cu_seqlens is None else torch.from_numpy(host_cu_seqlens)
    if shared_keys is None:
        positions = torch.arange(max_seqlen, device=cu_seqlens.device)
        mask = visible(positions[:, None], positions, config)
        other = config if has_other_scores(config) else None
        return Spans(cu_seqlens, max_seqlen, on_host, mask, config=other)
    rows, cu_seqlens_k, max_seqlen_k, host_cu_seqlens_k = shared_keys
    keys = spans_of(config, cu_seqlens_k, max_seqlen_k, host_cu_seqlens_k)
    return Spans(cu_seqlens, max_seqlen, on_host, keys.mask, (rows, keys), keys.config)


def spans_with_padding(spans: Spans, extra: int) -> Spans:
    """Spans with a shared prefix, and so many rows of padding behind them, which may see any keys."""
    rows, keys = cast(tuple[Tensor, Spans], spans.shared_prefix)
    return spans._replace(shared_prefix=(F.pad(rows, (0, extra)), keys))


def samples_of_rows(spans: Spans, rows: int) -> Tensor:
    """The number of the sample of each row [N]; rows of padding have that behind the last sample's."""
    ends = spans.cu_seqlens[1:].to(torch.int64)
    return torch.bucketize(torch.arange(rows, device=ends.device), ends, right=True)


def flat_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Attention within each sample of a flat batch: q [N, H, D], k and v [N, G, D] -> [N, H, D]."""
    if not len(q):  # an empty micro-batch: DDP wants zero gradients, not None
        return (q + 0 * (k.sum() + v.sum())).to(v.dtype)
    key_spans = spans
    if spans.shared_prefix is not None:
        rows, key_spans = spans.shared_prefix
        k, v = kernels.take_rows(k, rows), kernels.take_rows(v, rows)
    if spans.config is not None:
        return attend_by_sample(q, k, v, spans, key_spans)
    return kernels.flat_attention(q, k, v, spans, key_spans)


@torch.compiler.disable
def attend_by_sample(q: Tensor, k: Tensor, v: Tensor, spans: Spans, key_spans: Spans) -> Tensor:
    """`attend` for each sample, whose queries are the last of its keys; `key_spans`: the spans of the
    keys."""
    out = []
    for queries, keys, values in kernels.samples(q, k, v, spans, key_spans):
        places = torch.arange(len(keys), device=q.device)
        out.append(attend(queries, keys, values, places[len(keys) - len(queries) :], places, spans.config))
    return torch.cat(out)
