"""The flat batch, against a naive one written with Python lists; and the way back to its samples."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.batch import READ, FlatBatch, collate_flat, collate_shared
from tests.trainer.stage_flags import assert_same_tensors


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
    assert {name for name in READ if name in batch} - {"sample_bytes", "target_counts"} == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert batch[name].dtype == value.dtype and torch.equal(batch[name], value), name
        elif isinstance(value, np.ndarray):
            assert batch[name].dtype == value.dtype and np.array_equal(batch[name], value), name
        else:
            assert type(batch[name]) is int and batch[name] == value, name


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
    assert all(map(same_sample, batch.samples(), samples)) and len(batch.samples()) == len(samples)
    if batch.shared_keys is None:
        assert batch["input_ids"].equal(plain["input_ids"]) and batch["cu_seqlens"].equal(plain["cu_seqlens"])
        return
    assert len(batch["input_ids"]) < len(plain["input_ids"])
    keys, cu_seqlens, longest, on_host = batch.shared_keys
    assert cu_seqlens.dtype == torch.int32 and np.array_equal(on_host, cu_seqlens.numpy())
    assert longest == int(cu_seqlens.diff().max())
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


def same_sample(one: dict, other: dict) -> bool:
    """Whether two samples are the same; a first token is never a target."""
    weight = other["loss_weight"].copy()
    weight[:1] = 0
    fields = all(one[name] == other[name] for name in ("sample_id", "target_bytes"))
    return (
        fields
        and np.array_equal(one["input_ids"], other["input_ids"])
        and np.array_equal(one["loss_weight"], weight)
    )


def assert_equal_batches(one: FlatBatch, other: FlatBatch) -> None:
    assert_same_tensors(one.state_dict(), other.state_dict())
    assert (
        np.array_equal(one.host_cu_seqlens, other.host_cu_seqlens)
        and one.target_counts == other.target_counts
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(GROUP, max_size=4), st.booleans(), st.randoms())
def test_the_batch_of_some_samples_is_the_one_made_of_them(rows, shared, random):
    """What samples share, too, while two are left; with the fields of their targets. A way through a checkpoint
    changes nothing."""
    collate = collate_shared if shared else collate_flat
    batch = collate(rows)
    number = torch.arange(len(batch.targets))
    batch = batch | {"number": number, "whole": 7}
    keep = [[random.random() < 0.5 for _ in row] for row in rows]
    kept = [
        [each for each, is_kept in zip(*pair, strict=True) if is_kept]
        for pair in zip(rows, keep, strict=True)
    ]
    flat_keep = sum(keep, [])
    expected = collate(kept)
    found = batch.select(flat_keep)
    counts = torch.tensor(batch.target_counts, dtype=torch.int64)
    of_kept = torch.tensor(flat_keep, dtype=torch.bool).repeat_interleave(counts)
    assert found["whole"] == 7 and found["number"].equal(number[of_kept])
    assert same_but_for_sharing(found, expected)
    assert found.target_samples().equal(expected.target_samples())
    assert_equal_batches(FlatBatch.from_state_dict(batch.state_dict()), batch)


def same_but_for_sharing(found: FlatBatch, expected: FlatBatch) -> bool:
    """Samples that once shared nothing may share something now."""
    return all(map(same_sample, found.samples(), expected.samples())) and found.targets.equal(
        expected.targets
    )


def test_fields_are_read_as_of_a_dict():
    batch = collate_flat([])
    assert "loss_weight" not in batch and "size" not in batch and batch.get("advantages", 3) == 3
    with pytest.raises(KeyError, match="loss_weight"):
        batch["loss_weight"]
    other = batch | {"advantages": torch.zeros(0), "targets": torch.ones(0, dtype=torch.int64)}
    assert "advantages" in other and "advantages" not in batch and other.targets is other["targets"]


def test_the_lengths_on_the_host_are_a_copy():
    """A loader process moves a batch's tensors to shared memory when it passes the batch on. A view of a
    tensor would then read memory that is free."""
    lengths = (3, 5)
    samples = [
        {
            "input_ids": np.arange(length),
            "loss_weight": np.ones(length, dtype=np.float32),
            "sample_id": length,
            "target_bytes": length,
        }
        for length in lengths
    ]
    batch = FlatBatch.from_samples(samples)
    batch.cu_seqlens.zero_()
    assert batch.host_cu_seqlens.tolist() == [0, 3, 8]
