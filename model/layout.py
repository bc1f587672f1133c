"""`Layout` holds the positions of the tokens of a forward pass. It is one class for flat batches in training,
for padded batches and for decoding, and it is made once for all layers. `visible` of a layer (`Attention` in
model_minimind.py) says which keys a query sees in that layer.

Shape legend: N tokens of a flat batch, S samples, R keys of a flat batch, B batch, T queries, T' keys, H
query heads, G key/value heads, D head size.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class Samples(NamedTuple):
    """Where the samples of a flat batch begin and end."""

    cu_seqlens: Tensor  # cumulative lengths, int32 [S + 1], on the device
    max_seqlen: int  # the length of the longest sample
    host_cu_seqlens: Tensor  # `cu_seqlens` on the host


class Layout(NamedTuple):
    """The positions of queries and keys, and other limits on which keys a query sees.

    In a padded batch and in decoding, each row has its positions. In a flat batch, the positions are those of
    the longest sample, and each sample takes a part of them. The queries of a sample belong to the last of
    its keys.

    causal_mask: for layers whose `visible` returns None. If it is None itself, the last query sees all keys,
    and each query before it sees one key less. limits: the keys that a query may see, and those that it must
    see, whatever the rule of the layer says.

    samples: the samples of a flat batch, by queries and by keys. The two differ if samples share their
    beginning: then `key_rows` lists the keys of each sample, one sample after the other."""

    queries: Tensor  # [B or 1, 1, T, 1], in a flat batch [1, T', 1]
    keys: Tensor  # [B or 1, 1, 1, T'], in a flat batch [1, 1, T']
    causal_mask: Tensor | None = None  # [B or 1, 1, T, T'], bool, or float to be added to the scores
    limits: tuple[Tensor, Tensor] | None = None  # bool, they broadcast to [B, 1, T, T']
    samples: tuple[Samples, Samples] | None = None
    key_rows: Tensor | None = None  # [R]

    def mask(self, layer: Any) -> Tensor | None:
        """Which keys each query sees in a layer: `causal_mask`, or bool [B or 1, 1, T, T'], in a flat batch
        [1, T', T']."""
        seen = layer.visible(self.queries, self.keys)
        return self.causal_mask if seen is None else self.limited(seen)

    def limited(self, seen: Tensor) -> Tensor:
        """The result of a rule, restricted by `limits`."""
        if self.limits is None:
            return seen
        may_see, must_see = self.limits
        return seen & may_see | must_see


# --- padded batches and decoding


def padded_layout(
    queries: Tensor, keys: Tensor | None = None, limits: tuple[Tensor, Tensor] | None = None
) -> Layout:
    """The layout of queries and keys at these positions, [B or 1, T] and [B or 1, T']. keys: None if they are
    the positions of the queries, without padding."""
    places = queries if keys is None else keys
    layout = Layout(queries[:, None, :, None], places[:, None, None, :], limits=limits)
    if keys is None:
        return layout
    return layout._replace(causal_mask=layout.limited(layout.keys <= layout.queries))


def layout_with_padding(
    attention_mask: Tensor | None, rows: int, length: int, before: int | Tensor, end: int, device: Any
) -> Layout:
    """The layout of a padded batch.

    attention_mask: [B, up to T'], 1 for tokens and 0 for padding; None: no padding. rows: B. length: T, the
    number of queries, which follow `before` keys. end: T', which includes places of a cache that are still
    empty."""
    real = torch.ones(rows, end, dtype=torch.bool, device=device)
    if attention_mask is not None:
        real = F.pad(attention_mask.bool(), (0, end - attention_mask.shape[1]))
    positions = real.cumsum(dim=-1) - 1  # of tokens, padding does not count
    places = before + torch.arange(length, device=device)
    # padding sees every key: a softmax over no key would give NaN, which spreads
    limits = real[:, None, None, :], ~real[:, None, places, None]
    return padded_layout(positions[:, places], positions, limits)


# --- flat batches


def flat_layout(
    cu_seqlens: Tensor,
    max_seqlen: int,
    host_cu_seqlens: np.ndarray | None,
    shared_keys: tuple[Tensor, Tensor, int, np.ndarray | None] | None = None,
    padding: int = 0,
) -> Layout:
    """The layout of a flat batch, from the arguments of `MiniMindForCausalLM.forward_flat` with the same
    names. padding: the number of rows after the samples; they may see any keys."""
    queries = keys = samples_between(cu_seqlens, max_seqlen, host_cu_seqlens)
    key_rows = None
    if shared_keys is not None:
        key_rows, keys = F.pad(shared_keys[0], (0, padding)), samples_between(*shared_keys[1:])
    positions = torch.arange(keys.max_seqlen, device=cu_seqlens.device)
    return Layout(positions[None, :, None], positions[None, None], samples=(queries, keys), key_rows=key_rows)


def samples_between(cu_seqlens: Tensor, max_seqlen: int, host_cu_seqlens: np.ndarray | None) -> Samples:
    """Samples from cumulative lengths. Without the lengths on the host, it may wait for the device."""
    on_host = cu_seqlens if host_cu_seqlens is None else torch.from_numpy(host_cu_seqlens)
    return Samples(cu_seqlens, max_seqlen, on_host)


def samples_of_rows(cu_seqlens: Tensor, rows: int) -> Tensor:
    """The number of the sample of each row [N]. Rows of padding get the number after the last sample's."""
    ends = cu_seqlens[1:].to(torch.int64)
    return torch.bucketize(torch.arange(rows, device=ends.device), ends, right=True)


def split_samples(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, samples: tuple[Samples, Samples]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """The queries [T, H, D], keys and values [T', G, D] of each sample, and its part [1, T, T'] of the mask.
    If there is padding, it comes last, without a mask. The host reads the lengths."""
    lengths, lengths_k = (each.host_cu_seqlens.diff().tolist() for each in samples)
    masks = [mask] * len(lengths)
    if padding := len(q) - sum(lengths):
        lengths, lengths_k, masks = [*lengths, padding], [*lengths_k, padding], [*masks, None]
    parts = (x.split(each) for x, each in ((q, lengths), (k, lengths_k), (v, lengths_k)))
    for queries, keys, values, own in zip(*parts, masks, strict=True):
        end = len(keys)
        yield queries, keys, values, own if own is None else own[:, end - len(queries) : end, :end]
