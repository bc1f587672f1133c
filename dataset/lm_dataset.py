"""The datasets PretrainDataset, SFTDataset and DPODataset, and the padding-free batch: samples concatenated.

A sample is {"input_ids": unsigned [T], "loss_mask": bool [T], "sample_id": int, "target_bytes": int};
`loss_mask[t]` marks token t as a target, predicted from the tokens before it, so a sample's first token never
is one. An item of a dataset is a list of samples: one, or with `packing` those of a packed sequence of at
most `max_length` tokens (packing neither changes nor drops samples; it only makes the items nearly equal in
size), or the two of a pair.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dataset.token_cache import STAGE_LENGTH, CacheOptions, build_token_cache

ITEMS_PER_RELEASE = 64  # after so many, the pages of a large cache that were read are released


def collate_pairs(items: list[list[dict]]) -> dict:
    """The flat batch of P pairs, whose samples are chosen, rejected, chosen, rejected ...; beside the fields
    of `collate_shared`: target_counts, the number of targets of each sample."""
    counts = [int(sample["loss_mask"].sum()) for item in items for sample in item]
    return collate_shared(items) | {"target_counts": counts}


def collate_shared(items: list[list[dict]]) -> dict:
    """`collate_flat` for items whose samples begin alike, such as the answers to one prompt. What an item's
    samples share becomes a sequence that is computed once; the others continue it, and see its keys. Losses
    and gradients are those of `collate_flat`, but for a load-balancing loss, which counts what is shared
    once, and for rounding.

    Beside `collate_flat`'s fields, whose S counts what is shared (but not in sample_ids): key_index int64
    [K], for each sequence in turn the positions whose keys its last query sees; cu_seqlens_k,
    host_cu_seqlens_k and max_seqlen_k of these. None of them if nothing is shared.

    Example: the prompt 1 2 3 with the answers 7 8 and 9. They share 1 2 (3 predicts a target), so input_ids
    is [1, 2, 3, 7, 8, 3, 9] in three sequences, with position_ids [0, 1, 2, 3, 4, 2, 3] and cu_seqlens
    [0, 2, 5, 7]. key_index is [0, 1,  0, 1, 2, 3, 4,  0, 1, 5, 6] and cu_seqlens_k [0, 2, 7, 11].
    """
    sequences: list[dict] = []
    shared_before: list[int] = []  # for each sequence, how many shared tokens it continues
    keys: list[np.ndarray] = []
    position = 0  # in the batch, of the next sequence
    for item in items:
        count = shared_tokens(item)
        shared_keys = np.arange(position, position + count)
        if count:
            sequences.append(_cut(item[0], 0, count) | {"target_bytes": 0})
            shared_before.append(0)
            keys.append(shared_keys)
            position += count
        for sample in item:
            length = len(sample["input_ids"]) - count
            sequences.append(_cut(sample, count, count + length))
            shared_before.append(count)
            keys += [shared_keys, np.arange(position, position + length)]
            position += length
    batch = collate_flat([sequences])
    sample_ids = [sample["sample_id"] for item in items for sample in item]
    batch["sample_ids"] = torch.tensor(sample_ids, dtype=torch.int64)
    if not any(shared_before):
        return batch
    lengths = np.diff(batch["host_cu_seqlens"])  # of the sequences, without what they continue
    cu_seqlens_k = np.concatenate([[0], np.cumsum(lengths + shared_before)]).astype(np.int32)
    batch["position_ids"] += torch.from_numpy(np.repeat(shared_before, lengths))
    batch["key_index"] = torch.from_numpy(np.concatenate(keys))
    batch["cu_seqlens_k"] = torch.from_numpy(cu_seqlens_k)
    batch["host_cu_seqlens_k"] = cu_seqlens_k
    batch["max_seqlen_k"] = int(np.diff(cu_seqlens_k).max())
    return batch


def _cut(sample: dict, begin: int, end: int) -> dict:
    """The sample with its tokens from `begin` to `end` alone."""
    tokens, mask = sample["input_ids"][begin:end], sample["loss_mask"][begin:end]
    return sample | {"input_ids": tokens, "loss_mask": mask}


def shared_tokens(samples: list[dict]) -> int:
    """How many tokens at the beginning of all the samples are the same, up to those that predict targets.

    Example: 1 2 3 7 8, of which 7 8 are targets, and 1 2 3 9 with the target 9. The 3 predicts the 7 and the
    9, so 2 tokens are shared.
    """
    if len(samples) < 2:
        return 0
    limit = len(samples[0]["input_ids"])
    for sample in samples:
        predicts_target = np.append(sample["loss_mask"][1:], True)  # a sample's last token is never shared
        limit = min(limit, int(predicts_target.argmax()))  # the first one that does
    first = samples[0]["input_ids"]
    for sample in samples[1:]:
        differs = sample["input_ids"][:limit] != first[:limit]
        if differs.any():
            limit = int(differs.argmax())  # the first one that does
    return limit


def collate_flat(items: list[list[dict]]) -> dict:
    """Concatenate the samples of all items: S samples, N tokens, M targets. An empty list gives an empty
    batch.

    Returns input_ids int64 [N]; position_ids int64 [N], from 0 in each sample; cu_seqlens int32 [S+1],
    cumulative lengths; host_cu_seqlens, the same as a numpy array, which stays on the host; max_seqlen int;
    target_index int64 [M], the positions whose next token is a target; targets int64 [M], these next tokens;
    sample_ids int64 [S]; target_bytes int, UTF-8 bytes of the targets' text.

    Example: the samples 1 2 3 and 4 5, in which all but the first token are targets. input_ids is
    [1, 2, 3, 4, 5], position_ids [0, 1, 2, 0, 1], cu_seqlens [0, 3, 5], target_index [0, 1, 3], targets
    [2, 3, 5].
    """
    samples = [sample for item in items for sample in item]
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


class StageDataset(Dataset):
    """The data of a training stage: items of a token cache. Worker processes receive only its path and open
    the memory maps again. `options`: of CacheOptions."""

    kind: str
    samples_per_item = 1  # without packing
    collate: Callable[[list], dict] = staticmethod(collate_flat)  # makes a batch of items

    def __init__(
        self,
        data_path: str,
        tokenizer,
        max_length: int | None = None,
        packing: bool = False,
        cache_dir: str | None = None,
        **options: Any,
    ):
        length = STAGE_LENGTH[self.kind] if max_length is None else max_length
        self.packing = packing and self.samples_per_item == 1
        how = CacheOptions(self.kind, length, cache_dir, packing=self.packing, **options)
        self.cache = build_token_cache(data_path, tokenizer, how)
        self.items_read = 0
        self.records: int = self.cache.report["records"]  # that were read, bad ones too
        self.num_tokens: int = self.cache.report["tokens"]  # of all samples
        self.num_targets: int = self.cache.report["targets"]
        meta = self.cache.meta
        content = json.dumps([meta[key] for key in ("kind", "data", "text_separator", "split")]).encode()
        # identifies the tokenised data
        self.fingerprint: dict[str, Any] = {
            "data": hashlib.sha256(content).hexdigest()[:16],
            "tokenizer": meta["tokenizer"][:16],
        }
        if meta["split"]:
            self.fingerprint["eval_share"] = meta["split"][0]

    def __len__(self) -> int:
        if self.packing:
            return len(self.cache.packed_offsets) - 1
        return self.cache.num_samples // self.samples_per_item

    def __getitem__(self, index: int) -> list[dict]:
        """The samples of an item; their arrays are copies, so that the memory maps can be released."""
        cache = self.cache
        index = range(len(self))[index]
        if self.packing:
            begin, end = cache.packed_offsets[index : index + 2]
            sample_ids = cache.packed_samples[begin:end].tolist()
        else:
            sample_ids = range(index * self.samples_per_item, (index + 1) * self.samples_per_item)
        item = []
        for sample_id in sample_ids:
            begin, end = cache.offsets[sample_id], cache.offsets[sample_id + 1]
            if cache.loss_mask is None:
                loss_mask = np.arange(end - begin) > 0
            else:
                loss_mask = np.array(cache.loss_mask[begin:end])
            item.append(
                {
                    "input_ids": np.array(cache.tokens[begin:end]),
                    "loss_mask": loss_mask,
                    "sample_id": sample_id,
                    "target_bytes": int(cache.target_bytes[sample_id]),
                }
            )
        self.items_read += 1
        if cache.is_large and self.items_read % ITEMS_PER_RELEASE == 0:
            cache.release()
        return item

    def source(self, sample_id: int) -> str:
        """FILE:LINE of a sample."""
        return self.cache.source(sample_id)

    @property
    def item_tokens(self) -> np.ndarray:
        """Tokens of each item, integers [items]."""
        lengths = np.diff(self.cache.offsets)
        if not self.packing:
            return lengths.reshape(-1, self.samples_per_item).sum(axis=1)
        starts = self.cache.packed_offsets[:-1].astype(np.int64)
        return np.add.reduceat(lengths[self.cache.packed_samples], starts)

    @property
    def mean_tokens(self) -> float:
        """Tokens of an item, on average."""
        return self.num_tokens / len(self)

    def describe_packing(self) -> str:
        """How full the packed sequences are."""
        samples, length = self.cache.num_samples, self.cache.meta["max_length"]
        text = f"packing: {samples:,} samples in {len(self):,} sequences of {length} tokens, "
        return text + f"{self.num_tokens / (len(self) * length):.1%} filled, no sample split"


class PretrainDataset(StageDataset):
    """Documents, `{"text": ...}`; every token is a target once."""

    kind = "pretrain"


class SFTDataset(StageDataset):
    """Conversations; the assistant's turns are targets."""

    kind = "sft"


class DPODataset(StageDataset):
    """Preferences: an item is the pair of a chosen and a rejected answer."""

    kind = "dpo"
    samples_per_item = 2
    collate: Callable[[list], dict] = staticmethod(collate_pairs)


DATASETS: dict[str, type[StageDataset]] = {"pretrain": PretrainDataset, "sft": SFTDataset, "dpo": DPODataset}
