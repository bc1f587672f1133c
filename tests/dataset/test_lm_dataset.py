"""Datasets and the flat batch, against a naive one written with Python lists."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.batch import collate_flat, collate_shared
from dataset.lm_dataset import PretrainDataset, SFTDataset

ANSWERS = [f"answer {'very ' * (i % 13)}{i} 回答" for i in range(60)]
CHATS = [
    {"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": answer}]}
    for i, answer in enumerate(ANSWERS)
]


def naive_batch(rows):
    """The flat batch as the definition reads, one token at a time."""
    input_ids, position_ids, cu, index, targets, sample_ids, weights = [], [], [0], [], [], [], []
    for row in rows:
        for sample in row:
            tokens, weight = sample["input_ids"].tolist(), sample["loss_weight"].tolist()
            for position, token in enumerate(tokens):
                if position + 1 < len(tokens) and weight[position + 1]:
                    weights.append(weight[position + 1])
                    index.append(len(input_ids))
                    targets.append(tokens[position + 1])
                input_ids.append(token)
                position_ids.append(position)
            cu.append(len(input_ids))
            sample_ids.append(sample["sample_id"])
    lengths = [b - a for a, b in itertools.pairwise(cu)]
    batch = {"loss_weight": torch.tensor(weights)} if set(weights) - {1.0} else {}
    return batch | {
        "input_ids": torch.tensor(input_ids, dtype=torch.int64),
        "position_ids": torch.tensor(position_ids, dtype=torch.int64),
        "cu_seqlens": torch.tensor(cu, dtype=torch.int32),
        "host_cu_seqlens": np.array(cu, dtype=np.int32),
        "max_seqlen": max(lengths, default=0),
        "target_index": torch.tensor(index, dtype=torch.int64),
        "targets": torch.tensor(targets, dtype=torch.int64),
        "sample_ids": torch.tensor(sample_ids, dtype=torch.int64),
        "target_bytes": sum(sample["target_bytes"] for row in rows for sample in row),
    }


def assert_same_batch(batch, expected):
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert batch[name].dtype == value.dtype and torch.equal(batch[name], value), name
        elif isinstance(value, np.ndarray):
            assert batch[name].dtype == value.dtype and np.array_equal(batch[name], value), name
        else:
            assert type(batch[name]) is int and batch[name] == value, name


@pytest.fixture
def sft(write, tokenizer, cache_dir):
    def make(packing=False, max_length=64):
        return SFTDataset(write("sft.jsonl", CHATS), tokenizer, max_length, packing, cache_dir)

    return make


SAMPLE = st.integers(0, 6).flatmap(
    lambda n: st.builds(
        lambda ids, trained, weight, number, size: {
            "input_ids": np.array(ids, dtype=np.uint16),
            "loss_weight": np.array(trained, dtype=np.float32) * np.float32(weight),
            "sample_id": number,
            "target_bytes": size,
        },
        st.lists(st.integers(0, 65535), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.sampled_from([0.3, 1.0, 1.0, 1.0, 2.0]),
        st.integers(0, 2**40),
        st.integers(0, 100),
    )
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(SAMPLE, max_size=3), max_size=4))
def test_collate_equals_the_definition(rows):
    before = copy.deepcopy(rows)
    assert_same_batch(collate_flat(rows), naive_batch(rows))
    for row, old in zip(rows, before, strict=True):
        for sample, old_sample in zip(row, old, strict=True):
            assert np.array_equal(
                sample["loss_weight"], old_sample["loss_weight"]
            )  # nothing is changed in place


def behind(prompt: list[int], each: dict) -> dict:
    """The sample behind a prompt."""
    ids = np.concatenate([np.array(prompt, dtype=np.uint16), each["input_ids"]])
    return each | {
        "input_ids": ids,
        "loss_weight": np.concatenate([np.zeros(len(prompt), np.float32), each["loss_weight"]]),
    }


GROUP = st.builds(
    lambda prompt, rest: [behind(prompt, each) for each in rest],
    st.lists(st.integers(0, 9), max_size=9),
    st.lists(SAMPLE, max_size=4),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(GROUP, max_size=4))
def test_what_samples_share_is_there_once_and_seen_by_all(rows):
    """The keys that each sample's last query sees are the tokens of the sample, at their positions."""
    plain, batch = collate_flat(rows), collate_shared(rows)
    same = ("targets", "sample_ids")
    assert all(torch.equal(batch[name], plain[name]) for name in same)
    assert batch["target_bytes"] == plain["target_bytes"]
    samples = [sample for row in rows for sample in row]
    if "key_index" not in batch:
        assert batch["input_ids"].equal(plain["input_ids"]) and batch["cu_seqlens"].equal(plain["cu_seqlens"])
        return
    assert len(batch["input_ids"]) < len(plain["input_ids"])
    cu_seqlens, keys = batch["cu_seqlens_k"], batch["key_index"]
    assert cu_seqlens.dtype == torch.int32 and np.array_equal(batch["host_cu_seqlens_k"], cu_seqlens.numpy())
    assert batch["max_seqlen_k"] == int(cu_seqlens.diff().max())
    seen, own = keys.split(cu_seqlens.diff().tolist()), torch.arange(len(batch["input_ids"]))
    queries = own.split(batch["cu_seqlens"].diff().tolist())
    assert all(
        torch.equal(one[len(one) - len(other) :], other) for one, other in zip(seen, queries, strict=True)
    )
    assert all(batch["position_ids"][each].tolist() == list(range(len(each))) for each in seen)
    texts, rest = [batch["input_ids"][each].tolist() for each in seen], iter(samples)
    wanted = next(rest, None)
    for text in texts:  # what is shared comes before the samples that continue it
        if wanted is not None and text == wanted["input_ids"].tolist():
            wanted = next(rest, None)
    assert wanted is None
    predicted = batch["input_ids"][batch["target_index"]]
    assert predicted.equal(plain["input_ids"][plain["target_index"]])
    assert len(batch["target_index"].unique()) == len(batch["target_index"])


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
