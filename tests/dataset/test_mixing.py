"""Sources mixed by weight: their shares, what an epoch consists of, and the weights of a data path."""

import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from dataset.batch import collate_flat
from dataset.lm_dataset import DPODataset, PretrainDataset, SFTDataset, StageDataset
from dataset.mixing import MixedDataset, even_order, split_weights

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40) | st.lists(
    st.just(7), min_size=1, max_size=40
)


class FakeSource:
    """Items of these lengths, a sample each."""

    mean_tokens = StageDataset.mean_tokens

    def __init__(self, lengths: list[int]):
        self.item_tokens, self.num_tokens, self.records = np.array(lengths), sum(lengths), len(lengths)
        self.cache, self.fingerprint = SimpleNamespace(num_samples=len(lengths)), {"data": ""}
        self.packing, self.kind, self.collate = False, "sft", collate_flat
        self.num_targets = len(lengths)  # an answer of one token each

    def __len__(self) -> int:
        return len(self.item_tokens)


def mixed(lengths: list[list[int]], weights: list[float], max_tokens: int = 0) -> MixedDataset:
    sources = [(f"s{i}", FakeSource(each)) for i, each in enumerate(lengths)]
    return MixedDataset(sources, weights, max_tokens)  # pyrefly: ignore


@settings(max_examples=60)
@given(lengths=LENGTHS, seed=st.integers(0, 2**63 - 1))
def test_every_stretch_of_the_order_has_its_share_of_the_tokens(lengths, seed):
    """However many items in a row, from wherever, also across the end."""
    lengths = np.array(lengths)
    order = even_order(lengths, [seed, 0, 0])
    assert sorted(order) == list(range(len(lengths)))
    sums = np.cumsum(np.concatenate([[0], np.tile(lengths[order], 2)]))
    counts = np.arange(len(sums))
    off = (sums[None, :] - sums[:, None]) - (counts[None, :] - counts[:, None]) * lengths.mean()
    assert abs(off).max() <= lengths.max() - lengths.min() + 1e-6


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_shares_are_exact_and_all_samples_are_seen_equally_often(data, seed):
    """Also with --max_tokens: what one epoch leaves out of a source comes in the next."""
    lengths = data.draw(st.lists(LENGTHS, min_size=1, max_size=4))
    weights = [data.draw(st.floats(0.01, 100)) for _ in lengths]
    max_tokens = data.draw(st.integers(0, 5000))
    train, total = mixed(lengths, weights, max_tokens), sum(map(sum, lengths))
    total = min(max_tokens or total, total)
    seen = np.zeros(train.first_items[-1], dtype=int)
    flat = np.concatenate([np.array(each) for each in lengths])
    for epoch in range(5):
        items = train.items_of_epoch(SimpleNamespace(seed=seed), epoch)
        assert len(items) == len(train) == sum(train.counts)
        assert np.array_equal(items, train.items_of_epoch(SimpleNamespace(seed=seed), epoch))
        np.add.at(seen, items, 1)
        for i, (first, end) in enumerate(itertools.pairwise(train.first_items)):
            own = items[(items >= first) & (items < end)]
            share = weights[i] / sum(weights) * total
            assert len(own) == train.counts[i]
            assert abs(flat[own].sum() - share) <= 2 * max(
                lengths[i]
            )  # half an item of rounding, less than one of order
            assert seen[first:end].max() - seen[first:end].min() <= 1
    assert seen.sum() == 5 * len(train)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", [PretrainDataset, SFTDataset, DPODataset])
def test_items_samples_and_sources_of_real_data(kind, packing, write, tokenizer, cache_dir):
    """Numbered through; a row holds samples of one source; what makes up the run is in the fingerprint."""

    def chat(text):
        return [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]

    def record(text):
        pair = {"prompt": text, "chosen": text[::-1], "rejected": text}
        return {PretrainDataset: {"text": text}, SFTDataset: {"messages": chat(text)}, DPODataset: pair}[kind]

    files = [
        write(f"{name}.jsonl", [record(f"{name} {i} " * (i % 5 + 1)) for i in range(n)])
        for name, n in (("a", 30), ("b", 12))
    ]
    sources = [(file, kind(file, tokenizer, 128, packing, cache_dir)) for file in files]
    train = MixedDataset(sources, [0.5, 0.5])
    for number, (file, source) in enumerate(sources):
        assert source.item_tokens.sum() == source.num_tokens and len(source.item_tokens) == len(source)
        assert source.num_targets == len(
            collate_flat([source[item] for item in range(len(source))])["targets"]
        )
        for item in range(len(source)):
            row = train[int(train.first_items[number]) + item]
            assert [sample["input_ids"].tolist() for sample in row] == [
                s["input_ids"].tolist() for s in source[item]
            ]
            assert sum(len(sample["input_ids"]) for sample in row) == source.item_tokens[item]
            for sample, own in zip(row, source[item], strict=True):
                assert train.source(sample["sample_id"]) == source.source(own["sample_id"])
                assert train.source(sample["sample_id"]).startswith(file)
    with pytest.raises(IndexError):
        train[int(train.first_items[-1])]
    again = pickle.loads(pickle.dumps(train))
    assert len([again[0], again[1]]) == 2 and again.fingerprint == train.fingerprint
    batch = train.collate([train[0], train[int(train.first_items[1])]])
    assert len(set(batch["sample_ids"].tolist())) == len(batch["sample_ids"])
    prints = [MixedDataset(sources, weights).fingerprint for weights in ([1, 1], [2, 1], [1, 2])]
    assert prints[0] == train.fingerprint and len({p["data"] for p in prints}) == 3
    assert [p["weights"] for p in prints] == ["0.5, 0.5", "0.6667, 0.3333", "0.3333, 0.6667"]
    assert MixedDataset(sources[::-1], [1, 1]).fingerprint["data"] != prints[0]["data"]
    assert len({repr(sorted(each.items())) for each in (*prints, *(s.fingerprint for _, s in sources))}) == 5


def test_the_report_names_each_source(capsys):
    """With its share of the targets: here the samples of the second source have longer prompts."""
    train = mixed([[10] * 90, [50] * 2], [0.5, 0.5])
    train.report(epochs=2)
    done = capsys.readouterr()
    assert done.out.splitlines() == [
        "s0: 90 samples, 900 tokens; 50.0% of the tokens and 83.3% of the targets; "
        "0.56 passes per epoch, 1.11 in all",
        "s1: 2 samples, 100 tokens; 50.0% of the tokens and 16.7% of the targets; "
        "5.00 passes per epoch, 10.00 in all",
    ]
    assert done.err.startswith("warning: s1 is read 10.0 times; more than 4 passes teach little")
    assert done.err.count("warning") == 1
    train = mixed([[10] * 90, [50] * 6], [0.5, 0.5])
    train.report(epochs=1)
    assert "2.00 passes per epoch, 2.00 in all" in (done := capsys.readouterr()).out and not done.err
    train.report(epochs=3)  # few passes of an epoch are many of all
    assert capsys.readouterr().err.startswith("warning: s1 is read 6.0 times")
    train = mixed([[10] * 90, [50] * 6], [0.5, 0.5], max_tokens=600)
    train.report(epochs=3)
    assert "1.00 passes per epoch, 3.00 in all" in (done := capsys.readouterr()).out and not done.err


def test_weights_of_a_data_path(write):
    named, weighted = write("a:0.5", [{"text": "a"}]), write("b.jsonl", [{"text": "b"}])
    assert split_weights("a.jsonl:0.7, b/*.jsonl:.3,c:2") == (["a.jsonl", "b/*.jsonl", "c"], [0.7, 0.3, 2.0])
    assert split_weights("a.jsonl:1e-3") == (["a.jsonl"], [0.001])
    for path in ("a.jsonl,b.jsonl", "a", "", "C:/a,b", "a:x", ":0.5", named, f"{named},{weighted}"):
        assert split_weights(path) == ([path], [])
    assert split_weights(f"{named}:2,{weighted}:1") == ([named, weighted], [2.0, 1.0])
    for wrong in ("a:0,b:1", "a:-1,b:1", "a:0.5,b", "a,b:0.5", f"{named},{weighted}:1"):
        with pytest.raises(UserError, match="give each source a weight above 0, or none of them"):
            split_weights(wrong)
