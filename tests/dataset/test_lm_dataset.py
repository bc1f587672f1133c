"""Datasets: their items, and which tokens are targets."""

import pickle

import numpy as np
import pytest

from dataset.batch import collate_flat
from dataset.lm_dataset import PretrainDataset, SFTDataset

ANSWERS = [f"answer {'very ' * (i % 13)}{i} 回答" for i in range(60)]
CHATS = [
    {"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": answer}]}
    for i, answer in enumerate(ANSWERS)
]


@pytest.fixture
def sft(write, tokenizer, cache_dir):
    def make(packing=False, max_length=64):
        return SFTDataset(write("sft.jsonl", CHATS), tokenizer, max_length, packing, cache_dir)

    return make


def test_items_and_targets_of_sft(sft, tokenizer):
    ds = sft()
    assert len(ds) == 60 and ds[-1][0]["sample_id"] == 59
    for i, answer in enumerate(ANSWERS):
        (sample,) = ds[i]
        assert sample["sample_id"] == i and sample["target_bytes"] == len(answer.encode())
        assert sample["input_ids"].base is None  # a copy, which does not keep the memory map busy
        batch = collate_flat([[sample]])
        assert tokenizer.decode(batch["targets"].tolist()) == answer + "<|im_end|>"
    with pytest.raises(IndexError):
        ds[60]


def test_packed_rows_hold_the_same_samples(sft):
    plain, packed, again = sft(), sft(packing=True), sft(packing=True)
    filled = f"{packed.num_tokens / (64 * len(packed)):.1%}"
    assert len(packed) <= len(plain) / 2
    assert packed.describe_packing().endswith(f"sequences of 64 tokens, {filled} filled, no sample split")
    seen = []
    for r in range(len(packed)):
        assert sum(len(sample["input_ids"]) for sample in packed[r]) == packed.item_tokens[r] <= 64
        assert [s["sample_id"] for s in packed[r]] == [s["sample_id"] for s in again[r]]
        for sample in packed[r]:
            seen.append(sample["sample_id"])
            for name, value in plain[sample["sample_id"]][0].items():
                assert np.array_equal(value, sample[name])
    assert sorted(seen) == list(range(60))


def test_a_pickled_dataset_carries_no_tokens(write, tokenizer, cache_dir):
    path = write("pre.jsonl", [{"text": f"line {i} " * 200} for i in range(100)])
    ds = PretrainDataset(path, tokenizer, 128, cache_dir=cache_dir)
    travelling = pickle.dumps(ds)
    assert len(travelling) < 2000 < ds.cache.tokens.nbytes
    again = pickle.loads(travelling)
    assert isinstance(again.cache.tokens, np.memmap)
    assert all(np.array_equal(ds[i][0]["input_ids"], again[i][0]["input_ids"]) for i in range(len(ds)))
