"""The datasets PretrainDataset, SFTDataset and DPODataset, and the padding-free batch: samples concatenated.

A sample is {"input_ids": unsigned [T], "loss_mask": bool [T], "sample_id": int, "target_bytes": int};
`loss_mask[t]` marks token t as a target, predicted from the tokens before it, so a sample's first token never
is one. An item of a dataset is a list of samples: one, or with `packing` those of a row of at most
`max_length` tokens (packing neither changes nor drops samples; it only makes the items nearly equal in size),
or the two of a pair.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dataset.held_out import Split
from dataset.token_cache import STAGE_LENGTH, TokenCache, build_token_cache
from dataset.tokenizing import SPECIAL_TEXTS


def collate_pairs(rows: list[list[dict]]) -> dict:
    """The flat batch of P pairs, whose samples are chosen, rejected, chosen, rejected ...; beside
    `collate_shared`'s
    fields: target_counts, the number of targets of each sample."""
    counts = [int(sample["loss_mask"].sum()) for row in rows for sample in row]
    return collate_shared(rows) | {"target_counts": counts}


def collate_shared(rows: list[list[dict]]) -> dict:
    """`collate_flat` for rows of samples that begin alike, such as the answers to one prompt. What a row's
    samples share is a sample of its own and computed once; the others continue it, and see its keys. Losses
    and gradients are those of `collate_flat`, but for a load-balancing loss, which counts what is shared
    once, and for rounding.

    Beside `collate_flat`'s fields, whose S counts what is shared (but not in sample_ids): key_index int64
    [R], for each sample in turn the rows whose keys its last query sees; cu_seqlens_k, host_cu_seqlens_k and
    max_seqlen_k of these. None of them if nothing is shared.
    """
    pieces: list[dict] = []
    shared: list[np.ndarray] = []  # for each piece, the rows that it continues
    begin = 0
    for row in rows:
        count = shared_tokens(row)
        before = np.arange(begin, begin + count)
        if count:
            pieces.append(row[0] | {name: row[0][name][:count] for name in ("input_ids", "loss_mask")})
            pieces[-1]["target_bytes"] = 0
            shared.append(before[:0])
        pieces += [each | {name: each[name][count:] for name in ("input_ids", "loss_mask")} for each in row]
        shared += [before] * len(row)
        begin += count + sum(len(each["input_ids"]) - count for each in row)
    batch = collate_flat([pieces])
    batch["sample_ids"] = torch.tensor([each["sample_id"] for row in rows for each in row], dtype=torch.int64)
    if not any(map(len, shared)):
        return batch
    ends, counts = batch["host_cu_seqlens"], np.array([len(each) for each in shared])
    own = np.split(np.arange(begin), ends[1:-1])
    cu_seqlens = np.concatenate([[0], np.cumsum(np.diff(ends) + counts)]).astype(np.int32)
    batch["position_ids"] += torch.from_numpy(np.repeat(counts, np.diff(ends)))
    keys = np.concatenate([index for both in zip(shared, own, strict=True) for index in both])
    batch |= {"key_index": torch.from_numpy(keys), "cu_seqlens_k": torch.from_numpy(cu_seqlens)}
    return batch | {"host_cu_seqlens_k": cu_seqlens, "max_seqlen_k": int(np.diff(cu_seqlens).max())}


def shared_tokens(samples: list[dict]) -> int:
    """With how many tokens all of the samples begin, up to those that predict targets."""
    if len(samples) < 2:
        return 0
    first_targets = [np.flatnonzero(np.append(each["loss_mask"][1:], True))[0] for each in samples]
    limit = int(min(first_targets))
    heads = np.stack([each["input_ids"][:limit].astype(np.int64) for each in samples])
    differs = (heads != heads[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else limit


def collate_flat(rows: list[list[dict]]) -> dict:
    """Concatenate the samples of all items: S samples, N tokens, M targets. An empty list gives an empty
    batch.

    Returns input_ids int64 [N]; position_ids int64 [N], from 0 in each sample; cu_seqlens int32 [S+1],
    cumulative lengths; host_cu_seqlens, the same as a numpy array, which stays on the host; max_seqlen int;
    target_index int64 [M], the positions whose next token is a target; targets int64 [M], these next tokens;
    sample_ids int64 [S]; target_bytes int, UTF-8 bytes of the targets' text.
    """
    samples = [sample for row in rows for sample in row]
    lengths = np.array([len(sample["input_ids"]) for sample in samples], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cu_seqlens = offsets.astype(np.int32)
    input_ids = np.concatenate(
        [np.empty(0, np.int64), *(sample["input_ids"] for sample in samples)], dtype=np.int64
    )
    loss_mask = np.concatenate([np.empty(0, bool), *(sample["loss_mask"] for sample in samples)], dtype=bool)
    loss_mask[offsets[:-1][lengths > 0]] = False  # the token before belongs to another sample
    position_ids = np.arange(len(input_ids), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
    target_at = np.flatnonzero(loss_mask)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "host_cu_seqlens": cu_seqlens,
        "max_seqlen": int(lengths.max(initial=0)),
        "target_index": torch.from_numpy(target_at - 1),
        "targets": torch.from_numpy(input_ids[target_at]),
        "sample_ids": torch.from_numpy(np.array([sample["sample_id"] for sample in samples], dtype=np.int64)),
        "target_bytes": sum(int(sample["target_bytes"]) for sample in samples),
    }


class TokenDataset(Dataset):
    """Items of a token cache. Worker processes receive only its path and open the memory maps again."""

    def __init__(self, cache: TokenCache, packing: bool = False):
        self.cache, self.packing = cache, packing

    def __len__(self) -> int:
        return len(self.cache.row_offsets) - 1 if self.packing else len(self.cache)

    def __getitem__(self, index: int) -> list[dict]:
        return [self._sample(sample_id) for sample_id in self.samples_of(range(len(self))[index])]

    @property
    def item_tokens(self) -> np.ndarray:
        """Tokens of each item, integers [items]."""
        lengths = np.diff(self.cache.offsets)
        if not self.packing:
            return lengths
        return np.add.reduceat(lengths[self.cache.row_samples], self.cache.row_offsets[:-1].astype(np.int64))

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.cache.offsets[-1])

    @property
    def num_targets(self) -> int:
        """Targets of all samples."""
        return self.cache.report["targets"]

    @property
    def mean_tokens(self) -> float:
        """Tokens of an item, on average."""
        return self.num_tokens / len(self)

    @property
    def records(self) -> int:
        """Records that were read, bad ones too."""
        return self.cache.report["records"]

    def samples_of(self, item: int) -> Sequence[int]:
        """The ids of the samples of an item: one, or those of a packed row."""
        if not self.packing:
            return [item]
        begin, end = self.cache.row_offsets[item : item + 2]
        return self.cache.row_samples[begin:end].tolist()

    def describe(self) -> str:
        """How full the packed rows are; empty without packing."""
        if not self.packing:
            return ""
        samples, row = len(self.cache), self.cache.meta["max_length"]
        text = f"packing: {samples:,} samples in {len(self):,} rows of {row} tokens, "
        return text + f"{self.num_tokens / (len(self) * row):.1%} filled, no sample split"

    def __getitems__(self, indices: list[int]) -> list[list[dict]]:
        """The items of a micro-batch, called by the data loader; releases the mapped memory afterwards."""
        items = [self[index] for index in indices]
        self.cache.release()
        return items

    def _sample(self, sample_id: int) -> dict:
        cache = self.cache
        begin, end = cache.offsets[sample_id], cache.offsets[sample_id + 1]
        tokens = np.array(cache.tokens[begin:end])  # copies, so that the memory map can be released
        loss_mask = (
            np.arange(len(tokens)) > 0 if cache.loss_mask is None else np.array(cache.loss_mask[begin:end])
        )
        target_bytes = int(cache.target_bytes[sample_id])
        return {
            "input_ids": tokens,
            "loss_mask": loss_mask,
            "sample_id": sample_id,
            "target_bytes": target_bytes,
        }


class StageDataset(TokenDataset):
    """The data of a training stage. For the arguments, `options` included, see `build_token_cache`."""

    kind: str
    collate: Callable[[list], dict] = staticmethod(collate_flat)  # makes a batch of items

    def __init__(
        self,
        data_path: str,
        tokenizer,
        max_length: int | None = None,
        packing=False,
        cache_dir=None,
        **options,
    ):
        max_length = STAGE_LENGTH[self.kind] if max_length is None else max_length
        cache = build_token_cache(self.kind, data_path, tokenizer, max_length, cache_dir, **options)
        super().__init__(cache, packing)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Identifies the tokenised data."""
        meta, special = self.cache.meta, SPECIAL_TEXTS * bool(self.cache.report.get("special_texts"))
        content = json.dumps([meta[key] for key in ("format", "kind", "data", "split") if key in meta])
        data = hashlib.sha256(content.encode()).hexdigest()[:16] + special
        return {"data": data, "tokenizer": meta["tokenizer"][:16]} | Split(
            *meta.get("split", ())
        ).fingerprint()

    def source(self, sample_id: int) -> str:
        """FILE:LINE of a sample."""
        return self.cache.source(sample_id)


class PretrainDataset(StageDataset):
    """Documents, `{"text": ...}`; every token is a target once."""

    kind = "pretrain"


class SFTDataset(StageDataset):
    """Conversations; the assistant's turns are targets."""

    kind = "sft"


class DPODataset(StageDataset):
    """Preferences: an item is the pair of a chosen and a rejected answer."""

    kind = "dpo"
    collate: Callable[[list], dict] = staticmethod(collate_pairs)

    def __len__(self) -> int:
        return len(self.cache) // 2

    @property
    def item_tokens(self) -> np.ndarray:
        """Tokens of each pair, integers [pairs]."""
        return np.diff(self.cache.offsets).reshape(-1, 2).sum(axis=1)

    def samples_of(self, item: int) -> Sequence[int]:
        """The ids of the chosen and the rejected answer of a pair."""
        return [2 * item, 2 * item + 1]
