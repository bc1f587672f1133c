"""The flat batch: the samples of a micro-batch, concatenated without padding.

Shape legend: S samples, N tokens, M targets, C sequences (samples and shared prefixes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from model.model_minimind import MiniMindConfig

Batch = Any  # a FlatBatch; for prompts, and in a user's own task, a dict of tensors by name


class Size(NamedTuple):
    """The size of a micro-batch. The loss is a mean over targets, the auxiliary loss a mean over tokens."""

    targets: float  # the sum of their weights, which is their number where all are 1
    tokens: int
    # UTF-8 bytes that the targets spell, times their weights; 0: bits per byte are not defined
    text_bytes: float = 0
    flops: float = 0.0
    samples: int = 0


class SharedKeys(NamedTuple):
    """The keys that each sequence sees if samples share a prefix; see `collate_shared`."""

    index: Tensor  # int64 [K]: for each sequence in turn the rows whose keys its last query sees
    cu_seqlens: Tensor  # int32 [C + 1], cumulative numbers of them
    max_seqlen: int
    host_cu_seqlens: np.ndarray  # a copy that stays on the host


@dataclass(eq=False)
class FlatBatch:
    """The samples of a micro-batch, concatenated. `batch["targets"]` is `batch.targets`; a field that is None
    is not in the batch. `batch["name"] = value` adds a further field, for example one that an objective
    needs.

    Host copies are derived, and stay on the host: nothing waits for the device to read them."""

    input_ids: Tensor  # int64 [N]
    position_ids: Tensor  # int64 [N], from 0 in each sample
    cu_seqlens: Tensor  # int32 [C + 1], cumulative lengths
    target_index: Tensor  # int64 [M], rows whose next token is a target
    targets: Tensor  # int64 [M], these next tokens
    sample_ids: Tensor  # int64 [S], on the host
    sample_bytes: list[float]  # [S], UTF-8 bytes of the text that the targets spell, times their weights
    loss_weight: Tensor | None = None  # float32 [M], how much each target counts; None: all of them 1
    shared_keys: SharedKeys | None = None  # None: each sequence is a sample and sees its own keys alone
    more: dict[str, Any] = field(default_factory=dict)
    host_cu_seqlens: Any = None  # int32 [C + 1], a numpy array
    target_counts: Any = None  # list of ints [S], how many targets each sample has

    def __post_init__(self):
        if self.host_cu_seqlens is None:
            # a copy: a loader process moves the tensor to shared memory and frees the memory of a view
            self.host_cu_seqlens = self.cu_seqlens.numpy().copy()
        if self.target_counts is None:
            sequence = np.searchsorted(self.host_cu_seqlens, self.target_index.numpy(), side="right") - 1
            counts = np.bincount(sequence, minlength=len(self.host_cu_seqlens) - 1)
            self.target_counts = counts[self._sequences()].tolist()

    @classmethod
    def from_samples(cls, samples: Sequence[Mapping[str, Any]]) -> "FlatBatch":
        """Concatenate samples; an empty list gives an empty batch.

        Example: the samples 1 2 3 and 4 5, in which all but the first token are targets. input_ids is
        [1, 2, 3, 4, 5], position_ids [0, 1, 2, 0, 1], cu_seqlens [0, 3, 5], target_index [0, 1, 3], targets
        [2, 3, 5].
        """
        lengths = np.array([len(sample["input_ids"]) for sample in samples], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        input_ids = np.concatenate(
            [np.empty(0, np.int64), *(sample["input_ids"] for sample in samples)], dtype=np.int64
        )
        loss_weight = np.concatenate(
            [np.empty(0, np.float32), *(sample["loss_weight"] for sample in samples)], dtype=np.float32
        )
        loss_weight[offsets[:-1][lengths > 0]] = 0.0  # the token before belongs to another sample
        position_ids = np.arange(len(input_ids), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
        target_at = np.flatnonzero(loss_weight)
        weights = loss_weight[target_at]
        return cls(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(position_ids),
            cu_seqlens=torch.from_numpy(offsets.astype(np.int32)),
            target_index=torch.from_numpy(target_at - 1),
            targets=torch.from_numpy(input_ids[target_at]),
            sample_ids=torch.tensor([sample["sample_id"] for sample in samples], dtype=torch.int64),
            sample_bytes=[sample["target_bytes"] for sample in samples],
            loss_weight=torch.from_numpy(weights) if (weights != 1.0).any() else None,
        )

    # --- as a dict of tensors

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or the default if the batch does not have it."""
        value = getattr(self, name) if name in READ else self.more.get(name)
        return default if value is None else value

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        if name in FIELDS:
            setattr(self, name, value)
        else:
            self.more[name] = value

    def __or__(self, other: Mapping[str, Any]) -> "FlatBatch":
        """A copy with other or further fields."""
        batch = replace(self, more=dict(self.more))
        for name, value in other.items():
            batch[name] = value
        return batch

    # --- sizes

    @property
    def max_seqlen(self) -> int:
        """The length of the longest sequence."""
        return int(np.diff(self.host_cu_seqlens).max(initial=0))

    @property
    def target_bytes(self) -> float:
        """The UTF-8 bytes of the targets' text, times their weights."""
        return sum(self.sample_bytes)

    @property
    def weight_sum(self) -> float:
        """The sum of the targets' weights; their number if all weights are 1. The batch must be on the
        host."""
        weights = self.loss_weight
        return len(self.targets) if weights is None else float(weights.sum(dtype=torch.float64))

    def size(self, config: "MiniMindConfig") -> Size:
        """The size of the batch for a language model of this shape."""
        flops = self.flops(config, len(self.targets))
        return Size(self.weight_sum, len(self.input_ids), self.target_bytes, flops, len(self.sample_ids))

    def flops(self, config: "MiniMindConfig", targets: int) -> float:
        """Floating-point operations of training on the batch with this many targets; see `training_flops`."""
        keys = None if self.shared_keys is None else self.shared_keys.host_cu_seqlens
        return training_flops(config, len(self.input_ids), targets, self.host_cu_seqlens, keys)

    # --- for the model

    def to(self, device: torch.device) -> "FlatBatch":
        """The batch with its tensors on a device, without waiting; `sample_ids` stay on the host."""
        return self._map(lambda value: value.to(device, non_blocking=True))

    def pin_memory(self) -> "FlatBatch":
        """The batch in pinned memory, so that copies to a GPU overlap with computing. A DataLoader calls
        it."""
        return self._map(lambda value: value.pin_memory())

    def model_inputs(self) -> dict[str, Any]:
        """The fields that the model takes, without `targets`; use it to write your own loss."""
        names = ("input_ids", "position_ids", "cu_seqlens", "max_seqlen", "target_index")
        inputs = {name: self[name] for name in names} | {"host_cu_seqlens": self.host_cu_seqlens}
        return inputs if self.shared_keys is None else inputs | {"shared_keys": tuple(self.shared_keys)}

    # --- back to samples

    def target_samples(self) -> Tensor:
        """The sample id of each target [M], on the host; for a metric over some of the samples."""
        return self.sample_ids.repeat_interleave(torch.tensor(self.target_counts, dtype=torch.int64))

    def samples(self) -> list[dict[str, Any]]:
        """The samples of a batch on the host; samples with a shared prefix are whole again."""
        weights = np.zeros(len(self.input_ids) + 1, dtype=np.float32)
        weights[self.target_index.numpy() + 1] = 1.0 if self.loss_weight is None else self.loss_weight.numpy()
        samples = []
        for number, sequence in enumerate(self._sequences()):
            begin, end = self.host_cu_seqlens[sequence : sequence + 2]
            rows = np.arange(begin, end)
            if self.shared_keys is not None:
                begin, end = self.shared_keys.host_cu_seqlens[sequence : sequence + 2]
                rows = self.shared_keys.index.numpy()[begin:end]
            sample = {"input_ids": self.input_ids.numpy()[rows], "loss_weight": weights[rows]}
            sample |= {"sample_id": int(self.sample_ids[number]), "target_bytes": self.sample_bytes[number]}
            samples.append(sample)
        return samples

    def select(self, keep: Sequence[bool]) -> "FlatBatch":
        """The batch with only some of its samples [S], on the host. Further fields with one value per target
        keep the values of these samples; other fields stay unchanged."""
        kept = [sample for sample, is_kept in zip(self.samples(), keep, strict=True) if is_kept]
        batch = FlatBatch.from_samples(kept)
        if self.shared_keys is not None:
            continued = self._continued()[self._sequences()][np.array(keep, dtype=bool)].tolist()
            pairs = groupby(zip(continued, kept, strict=True), key=lambda pair: pair[0])
            batch = collate_shared([[sample for _, sample in pair] for _, pair in pairs])
        counts = torch.tensor(self.target_counts, dtype=torch.int64)
        of_target = torch.tensor(keep, dtype=torch.bool).repeat_interleave(counts)
        for name, value in self.more.items():
            is_of_targets = isinstance(value, Tensor) and value.shape[:1] == of_target.shape
            batch[name] = value[of_target] if is_of_targets else value
        return batch

    # --- a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """The batch on the host as plain values; `FlatBatch.from_state_dict` restores it."""
        batch = self._map(lambda value: value.detach().cpu())
        derived = ("host_cu_seqlens", "target_counts")
        state = {each.name: getattr(batch, each.name) for each in fields(batch) if each.name not in derived}
        return state | {"shared_keys": batch.shared_keys and list(batch.shared_keys[:3])}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "FlatBatch":
        """Restore a batch from its `state_dict`."""
        keys = state["shared_keys"]
        if keys is not None:
            keys = SharedKeys(*keys, host_cu_seqlens=keys[1].numpy().copy())
        return cls(**(state | {"shared_keys": keys}))

    # --- details

    def _map(self, change: Any) -> "FlatBatch":
        """A copy whose tensors are changed, except for `sample_ids`."""
        keys = self.shared_keys
        if keys is not None:
            keys = keys._replace(index=change(keys.index), cu_seqlens=change(keys.cu_seqlens))
        values = {name: getattr(self, name) for name in TENSORS}
        more = self.more | {
            name: change(value) for name, value in self.more.items() if isinstance(value, Tensor)
        }
        changed = {name: change(value) for name, value in values.items() if value is not None}
        return replace(self, **changed, shared_keys=keys, more=more)

    def _continued(self) -> np.ndarray:
        """The number of the sequence that each one continues, its own if it continues none; [C], on the
        host."""
        numbers = np.arange(len(self.host_cu_seqlens) - 1)
        keys = self.shared_keys
        if keys is not None:
            continues = np.diff(keys.host_cu_seqlens) > np.diff(self.host_cu_seqlens)
            first_rows = keys.index.numpy()[keys.host_cu_seqlens[:-1][continues]]
            numbers[continues] = np.searchsorted(self.host_cu_seqlens, first_rows, side="right") - 1
        return numbers

    def _sequences(self) -> np.ndarray:
        """The numbers of the sequences that are samples [S], and not what samples share."""
        numbers = np.arange(len(self.host_cu_seqlens) - 1)
        if self.shared_keys is None:
            return numbers
        continued = self._continued()
        return np.setdiff1d(numbers, continued[continued != numbers])


FIELDS = [each.name for each in fields(FlatBatch) if each.name != "more"]
READ = {*FIELDS, "max_seqlen", "target_bytes"}
TENSORS = ("input_ids", "position_ids", "cu_seqlens", "target_index", "targets", "loss_weight")


def collate_flat(items: list[list[dict]]) -> FlatBatch:
    """The batch of the samples of all items."""
    return FlatBatch.from_samples([sample for item in items for sample in item])


def collate_shared(items: list[list[dict]]) -> FlatBatch:
    """`collate_flat` for items whose samples have a common prefix, such as the answers to one prompt. The
    prefix becomes a sequence of its own that is computed once; the samples continue it, and attend to its
    keys. Losses and gradients are those of `collate_flat`, except for a load-balancing loss, which counts the
    prefix once, and for rounding. Without any common prefix there are no `shared_keys`.

    Example: the prompt 1 2 3 with the answers 7 8 and 9. They share 1 2 (3 predicts a target), so input_ids
    is [1, 2, 3, 7, 8, 3, 9] in three sequences, with position_ids [0, 1, 2, 3, 4, 2, 3] and cu_seqlens
    [0, 2, 5, 7]. Of shared_keys, index is [0, 1,  0, 1, 2, 3, 4,  0, 1, 5, 6] and cu_seqlens [0, 2, 7, 11].
    """
    sequences: list[dict] = []
    shared_before: list[int] = []  # for each sequence, how many shared tokens it continues
    keys: list[np.ndarray] = []
    position = 0  # in the batch, of the next sequence
    for item in items:
        count = shared_tokens(item)
        shared = np.arange(position, position + count)
        if count:
            sequences.append(_slice(item[0], 0, count))
            shared_before.append(0)
            keys.append(shared)
            position += count
        for sample in item:
            length = len(sample["input_ids"]) - count
            sequences.append(_slice(sample, count, count + length))
            shared_before.append(count)
            keys += [shared, np.arange(position, position + length)]
            position += length
    if not any(shared_before):
        return collate_flat(items)
    batch = FlatBatch.from_samples(sequences)
    lengths = np.diff(batch.host_cu_seqlens)  # of the sequences, without what they continue
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths + shared_before)]).astype(np.int32)
    samples = [sample for item in items for sample in item]
    return replace(
        batch,
        position_ids=batch.position_ids + torch.from_numpy(np.repeat(shared_before, lengths)),
        sample_ids=torch.tensor([sample["sample_id"] for sample in samples], dtype=torch.int64),
        sample_bytes=[sample["target_bytes"] for sample in samples],
        shared_keys=SharedKeys(
            torch.from_numpy(np.concatenate(keys)),
            torch.from_numpy(cu_seqlens),
            int(np.diff(cu_seqlens).max()),
            cu_seqlens,
        ),
        target_counts=None,
    )


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
    """The batch with its tensors copied to a device, without waiting."""
    if isinstance(batch, FlatBatch):
        return batch.to(device)
    moved = {key: value for key, value in batch.items() if isinstance(value, Tensor) and key != "sample_ids"}
    return batch | {key: value.to(device, non_blocking=True) for key, value in moved.items()}


def training_flops(
    config: "MiniMindConfig",
    tokens: int,
    targets: int,
    cu_seqlens: np.ndarray,
    cu_seqlens_k: np.ndarray | None = None,
) -> float:
    """Floating-point operations of the forward and backward pass over a flat batch, without padding rows.

    Six per weight and token for the layers (two forward, four backward), six per weight and target for the
    head, and causal attention at half of the square. The embedding is a look-up and counts nothing.
    `cu_seqlens` [S + 1] as arrays of the host, and `cu_seqlens_k` if samples see more keys than their own.
    """
    c, d = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = c * d * (2 * heads + 2 * kv_heads)
    mlp = 3 * c * config.intermediate_size
    if config.use_moe:
        mlp = 3 * c * config.moe_intermediate_size * config.num_experts_per_tok + c * config.num_experts
    own = np.diff(cu_seqlens).astype(np.float64)
    visible = own if cu_seqlens_k is None else np.diff(cu_seqlens_k).astype(np.float64)
    squares = float((visible**2 - (visible - own) ** 2).sum())
    products = 6.0 * config.num_hidden_layers * (tokens * (attention + mlp) + squares * heads * d)
    return products + 6.0 * targets * c * config.vocab_size
