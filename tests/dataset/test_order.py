"""Another order of the samples, a change of one function (`in_order`): resumed and on several ranks."""

from types import SimpleNamespace

import numpy as np
import pytest

from common.launcher import Launch
from dataset import order as order_of_items
from dataset.lm_dataset import DPODataset, SFTDataset
from dataset.mixing import MixedDataset
from dataset.order import epoch_order, train_loader
from dataset.rollout_prompts import PromptDataset
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT


def short_first(dataset, items, seed, epoch):
    items = items[epoch_order(len(items), seed, epoch)]
    return items[np.argsort(np.asarray(dataset.item_tokens)[items], kind="stable")]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "model")


def open_data(kind: str, corpus, tokenizer):
    options = {"cache_dir": corpus["cache"]}
    if kind == "prompts":
        return PromptDataset(str(corpus["sft"]), tokenizer, 64)
    if kind == "pairs":
        return DPODataset(str(corpus["dpo"]), tokenizer, 64, **options)
    paths = [str(corpus["sft"]), str(corpus["sft_eval"])]
    sources = [(path, SFTDataset(path, tokenizer, 64, **options)) for path in paths]
    return MixedDataset(sources, [2, 1])


def item_length(dataset, item) -> int:
    if isinstance(dataset, PromptDataset):
        return len(item.input_ids)
    return sum(len(sample["input_ids"]) for sample in item)


@pytest.mark.parametrize("kind", ["pairs", "mixture", "prompts"])
def test_short_samples_first(kind, corpus, tokenizer, monkeypatch):
    train_set = open_data(kind, corpus, tokenizer)
    args = SimpleNamespace(
        batch_size=2, accumulation_steps=1, num_iterations=1, num_workers=0, max_tokens=0, seed=3
    )
    items = sorted(train_set.items_of_epoch(args, 1).tolist())
    monkeypatch.setattr(order_of_items, "in_order", short_first)

    def batches(rank: int, ranks: int, skip: int = 0) -> list[list[int]]:
        monkeypatch.setattr(order_of_items, "launch", lambda: Launch(rank, ranks))
        args.batch_size = 4 // ranks
        return list(train_loader(train_set, args, 1, skip).batch_sampler)

    alone = batches(0, 1)
    order = sum(alone, [])
    assert sorted(order) == items
    lengths = [item_length(train_set, train_set[item]) for item in order]
    assert lengths == sorted(lengths) and len(set(lengths)) > 3
    assert batches(0, 1, skip=2) == alone[2:]
    halves = zip(batches(0, 2), batches(1, 2), strict=True)
    assert [first + second for first, second in halves] == alone
