"""The two datasets, PretrainDataset and SFTDataset, and the padding-free batch: samples laid end to end.

A sample is {"input_ids": unsigned [T], "trained": bool [T], "sample_id": int, "target_bytes": int}; `trained[t]` says
that token t is a target, which its forerunner predicts, so a sample's first token never is one. An item of a dataset is
a list of samples: one, or with `packing` those of a row of at most `max_length` tokens. Packing changes no sample and
drops none; it only makes the items nearly equal in size.
"""

import numpy as np
import torch
from torch.utils.data import Dataset

from dataset.token_cache import MAX_BAD_SHARE, TokenCache, build_token_cache


class TokenDataset(Dataset):
    """Items of a token cache. In a worker process only the path travels, and the memory maps are opened again."""

    def __init__(self, cache: TokenCache, packing: bool = False):
        self.cache, self.packing = cache, packing
        self.members, self.borders = (cache.members, cache.borders) if packing else (None, None)

    def __len__(self) -> int:
        return len(self.cache) if self.borders is None else len(self.borders) - 1

    def __getitem__(self, index: int) -> list[dict]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        index %= len(self)
        if self.borders is None:
            return [self._sample(int(index))]
        return [self._sample(int(i)) for i in self.members[self.borders[index] : self.borders[index + 1]]]

    def describe(self) -> str:
        """How well the rows are filled; nothing without packing."""
        if self.borders is None:
            return ""
        samples, tokens, row = len(self.cache), int(self.cache.offsets[-1]), self.cache.meta["max_length"]
        text = f"packing: {samples:,} samples in {len(self):,} rows of {row} tokens, "
        return text + f"{tokens / (len(self) * row):.1%} filled, no sample split"

    def __getitems__(self, indices: list[int]) -> list[list[dict]]:
        """The items of a micro-batch, as the data loader asks for them; the memory they were read through is let go."""
        items = [self[index] for index in indices]
        self.cache.release()
        return items

    def _sample(self, sample_id: int) -> dict:
        cache = self.cache
        begin, end = cache.offsets[sample_id], cache.offsets[sample_id + 1]
        tokens = np.array(cache.tokens[begin:end])  # copies: nothing handed out keeps the memory map busy
        trained = np.arange(len(tokens)) > 0 if cache.trained is None else np.array(cache.trained[begin:end])
        target_bytes = int(cache.target_bytes[sample_id])
        return {"input_ids": tokens, "trained": trained, "sample_id": sample_id, "target_bytes": target_bytes}

    @property
    def num_tokens(self) -> np.ndarray:
        """int64 [len(self)]: tokens of each item."""
        return self._per_item(np.diff(self.cache.offsets))

    @property
    def num_targets(self) -> np.ndarray:
        """int64 [len(self)]: targets of each item."""
        return self._per_item(np.array(self.cache.num_targets))

    def _per_item(self, values: np.ndarray) -> np.ndarray:
        return values if self.borders is None else np.add.reduceat(values[self.members], self.borders[:-1])


class StageDataset(TokenDataset):
    """The data of a training stage. See `build_token_cache` for the arguments; `max_length` is the stage's if None."""

    kind: str
    usual_length: int

    def __init__(
        self,
        data_path,
        tokenizer,
        max_length=None,
        packing=False,
        cache_dir=None,
        num_proc=None,
        on_bad_data="stop",
        *,
        max_bad_share=MAX_BAD_SHARE,
    ):
        max_length = self.usual_length if max_length is None else max_length
        options = (cache_dir, num_proc, on_bad_data)
        cache = build_token_cache(self.kind, data_path, tokenizer, max_length, *options, max_bad_share=max_bad_share)
        super().__init__(cache, packing)


class PretrainDataset(StageDataset):
    """Documents, `{"text": ...}`; every token is a target once."""

    kind, usual_length = "pretrain", 512


class SFTDataset(StageDataset):
    """Conversations; the assistant's turns are targets."""

    kind, usual_length = "sft", 768


def collate_flat(rows: list[list[dict]]) -> dict:
    """Lay the samples of all items end to end: S samples, N tokens, M targets. An empty list gives an empty batch.

    Returns input_ids int64 [N]; position_ids int64 [N], from 0 in each sample; cu_seqlens int32 [S+1], cumulative
    lengths; max_seqlen int; target_index int64 [M], the positions whose next token is a target; targets int64 [M],
    these next tokens; sample_ids int64 [S]; target_bytes int, UTF-8 bytes that the targets spell.
    """
    samples = [sample for row in rows for sample in row]
    lengths = np.array([len(sample["input_ids"]) for sample in samples], dtype=np.int64)
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    input_ids = np.concatenate([np.empty(0, np.int64), *(sample["input_ids"] for sample in samples)], dtype=np.int64)
    trained = np.concatenate([np.empty(0, bool), *(sample["trained"] for sample in samples)], dtype=bool)
    trained[borders[:-1][lengths > 0]] = False  # the token before belongs to another sample
    position_ids = np.arange(len(input_ids), dtype=np.int64) - np.repeat(borders[:-1], lengths)
    target_at = np.flatnonzero(trained)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "cu_seqlens": torch.from_numpy(borders.astype(np.int32)),
        "max_seqlen": int(lengths.max(initial=0)),
        "target_index": torch.from_numpy(target_at - 1),
        "targets": torch.from_numpy(input_ids[target_at]),
        "sample_ids": torch.from_numpy(np.array([sample["sample_id"] for sample in samples], dtype=np.int64)),
        "target_bytes": sum(int(sample["target_bytes"]) for sample in samples),
    }
