"""The flat batch: the samples of a micro-batch, concatenated without padding."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Batch = dict[str, Any]  # of tensors by name; that of a language model is flat, see `collate_flat`


def collate_flat(items: list[list[dict]]) -> dict:
    """Concatenate the samples of all items: S samples, N tokens, M targets. An empty list gives an empty
    batch.

    Returns input_ids int64 [N]; position_ids int64 [N], from 0 in each sample; cu_seqlens int32 [S+1],
    cumulative lengths; host_cu_seqlens, the same as a numpy array, which stays on the host; max_seqlen int;
    target_index int64 [M], the positions whose next token is a target; targets int64 [M], these next tokens;
    sample_ids int64 [S]; target_bytes, UTF-8 bytes of the targets' text, times their weights; and, only if
    one of the targets has another weight than 1, loss_weight float32 [M].

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
    loss_weight = np.concatenate(
        [np.empty(0, np.float32), *(sample["loss_weight"] for sample in samples)], dtype=np.float32
    )
    loss_weight[offsets[:-1][lengths > 0]] = 0.0  # the token before belongs to another sample
    position_ids = np.arange(len(input_ids), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
    target_at = np.flatnonzero(loss_weight)
    batch = {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "host_cu_seqlens": cu_seqlens,
        "max_seqlen": int(lengths.max(initial=0)),
        "target_index": torch.from_numpy(target_at - 1),
        "targets": torch.from_numpy(input_ids[target_at]),
        "sample_ids": torch.from_numpy(np.array([sample["sample_id"] for sample in samples], dtype=np.int64)),
        "target_bytes": sum(sample["target_bytes"] for sample in samples),
    }
    weights = loss_weight[target_at]
    if (weights != 1.0).any():
        batch["loss_weight"] = torch.from_numpy(weights)
    return batch


def collate_pairs(items: list[list[dict]]) -> dict:
    """The flat batch of P pairs, whose samples are chosen, rejected, chosen, rejected ...: the fields of
    `collate_shared`, and target_counts, the number of targets of each sample."""
    counts = [int(np.count_nonzero(sample["loss_weight"])) for item in items for sample in item]
    return collate_shared(items) | {"target_counts": counts}


def collate_shared(items: list[list[dict]]) -> dict:
    """`collate_flat` for items whose samples have a common prefix, such as the answers to one prompt. The
    prefix becomes a sequence of its own that is computed once; the samples continue it, and attend to its
    keys. Losses and gradients are those of `collate_flat`, except for a load-balancing loss, which counts the
    prefix once, and for rounding.

    In addition to `collate_flat`'s fields, whose S counts prefixes (but not in sample_ids): key_index int64
    [K], for each sequence in turn the positions whose keys its last query sees; cu_seqlens_k,
    host_cu_seqlens_k and max_seqlen_k of these. Without any common prefix, these fields are absent.

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
            sequences.append(_slice(item[0], 0, count) | {"target_bytes": 0})
            shared_before.append(0)
            keys.append(shared_keys)
            position += count
        for sample in item:
            length = len(sample["input_ids"]) - count
            sequences.append(_slice(sample, count, count + length))
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


def _slice(sample: dict, begin: int, end: int) -> dict:
    """The sample with its tokens from `begin` to `end` alone."""
    tokens, weight = sample["input_ids"][begin:end], sample["loss_weight"][begin:end]
    return sample | {"input_ids": tokens, "loss_weight": weight}


def shared_tokens(samples: list[dict]) -> int:
    """How many tokens at the beginning of all the samples are the same, up to those that predict targets.

    Example: 1 2 3 7 8, of which 7 8 are targets, and 1 2 3 9 with the target 9. The 3 predicts the 7 and the
    9, so 2 tokens are shared.
    """
    if len(samples) < 2:
        return 0
    limit = len(samples[0]["input_ids"])
    for sample in samples:
        is_target = sample["loss_weight"][1:] != 0
        predicts_target = np.append(is_target, True)  # a sample's last token is never shared
        limit = min(limit, int(predicts_target.argmax()))  # the first one that does
    first = samples[0]["input_ids"]
    for sample in samples[1:]:
        differs = sample["input_ids"][:limit] != first[:limit]
        if differs.any():
            limit = int(differs.argmax())  # the first one that does
    return limit


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device, without waiting. `sample_ids`, which only the host reads, and
    what is no tensor stay on the host."""
    moved = {}
    for key, value in batch.items():
        if isinstance(value, Tensor) and key != "sample_ids":
            moved[key] = value.to(device, non_blocking=True)
    return batch | moved


def model_inputs(batch: Batch) -> dict[str, Any]:
    """What the model takes of a flat batch beside its `targets`, for a loss of your own."""
    inputs = {
        key: batch[key] for key in ("input_ids", "position_ids", "cu_seqlens", "max_seqlen", "target_index")
    }
    if "key_index" in batch:  # samples that begin alike: see `collate_shared`
        names = ("key_index", "cu_seqlens_k", "max_seqlen_k", "host_cu_seqlens_k")
        inputs["shared_keys"] = tuple(batch.get(name) for name in names)
    return inputs | {"host_cu_seqlens": batch.get("host_cu_seqlens")}


def weight_sum(batch: Batch) -> float:
    """What the weights of a flat batch's targets add up to: their number if all are 1. Of a batch on the
    host."""
    weights = batch.get("loss_weight")
    return len(batch["targets"]) if weights is None else float(weights.sum(dtype=torch.float64))
