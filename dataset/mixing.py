"""Several sources of data mixed by weight. An epoch has as many tokens as all sources together, or
--max_tokens, and each source has its share of them. A source with a large share is repeated within an epoch.
From a source with a small share an epoch takes only a part, and the next epoch continues after this part.
So all items of a source are trained equally often, or some of them once more. Shares are of all tokens,
including those of prompts; the resulting shares of the targets are reported."""

import hashlib
import json
import re
from typing import Any

import numpy as np

from common.errors import UserError, say, warn
from common.files import is_taken
from dataset.lm_dataset import StageDataset

MAX_USEFUL_PASSES = 4  # over a dataset; further passes improve the model little (arXiv:2305.16264)
PATH_AND_WEIGHT = re.compile(r"(.+):\s*((?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?)")


def split_weights(data_path: str) -> tuple[list[str], list[float]]:
    """The sources of a data path and their weights: `a.jsonl:0.7,b/*.jsonl:0.3` -> (["a.jsonl", "b/*.jsonl"],
    [0.7, 0.3]). Without weights ([data_path], []). A path that exists as typed has no weight."""
    paths, weights = [], []
    for part in filter(None, map(str.strip, data_path.split(","))):
        match = PATH_AND_WEIGHT.fullmatch(part)
        if match and not is_taken(part):
            paths.append(match[1])
            weights.append(float(match[2]))
        else:
            paths.append(part)
    if not weights or is_taken(data_path):
        return [data_path], []
    if len(weights) < len(paths) or min(weights) == 0:
        raise UserError(f"--data_path {data_path}: give each source a weight above 0, or none of them")
    return paths, weights


def even_order(lengths: np.ndarray, seed: list[int]) -> np.ndarray:
    """A random order of items with these lengths, int [items]. Long and short items alternate, each kind in
    random order. In any stretch of items (cyclic), the number of tokens differs from the mean by less than
    the longest item.

    The place of an item is the sum by which the preceding items of its kind exceed (long) or fall short of
    (short) the mean length. Example: lengths 9, 1, 1, 5 (mean 4) in the random order 1, 9, 1, 5. The long
    ones 9, 5 are 5, 1 above the mean, so they come at 0 and 5; the short ones 1, 1 are 3 below, so they come
    at 0 and 3. Sorted, long before short where equal: 9, 1, 1, 5.
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(lengths))
    excess = lengths[order] - lengths.mean()
    is_long = excess >= 0
    position = np.empty(len(order))
    for kind in (is_long, ~is_long):
        differences = np.abs(excess[kind])
        position[kind] = np.cumsum(differences) - differences
    return order[np.lexsort((~is_long, position))]


class MixedDataset(StageDataset):
    """Datasets, given as (name, data). Their items, numbered one dataset after another, make up the epochs.

    weights: above 0; only their ratio matters. max_tokens: tokens of an epoch; 0, or a number above those of
    all datasets, means all. len() is the number of items of an epoch (`counts` of each dataset, see
    `items_of_epoch`), but an index may be that of any item.
    """

    def __init__(self, datasets: list[tuple[str, StageDataset]], weights: list[float], max_tokens: int = 0):
        self.names = [name for name, _ in datasets]
        self.datasets = [dataset for _, dataset in datasets]
        first = self.datasets[0]
        self.packing, self.kind, self.collate = first.packing, first.kind, first.collate
        self.records = sum(dataset.records for dataset in self.datasets)
        self.num_tokens = sum(dataset.num_tokens for dataset in self.datasets)
        epoch_tokens = min(max_tokens or self.num_tokens, self.num_tokens)
        self.shares = [weight / sum(weights) for weight in weights]
        self.counts = []
        for share, dataset in zip(self.shares, self.datasets, strict=True):
            self.counts.append(max(1, round(share * epoch_tokens / dataset.mean_tokens)))
        self.first_items = np.cumsum([0, *map(len, self.datasets)])
        self.first_samples = np.cumsum([0, *(dataset.cache.num_samples for dataset in self.datasets)])
        content = json.dumps([[dataset.fingerprint["data"] for dataset in self.datasets], self.shares])
        self.fingerprint = first.fingerprint | {
            "data": hashlib.sha256(content.encode()).hexdigest()[:16],
            "weights": ", ".join(f"{share:.4g}" for share in self.shares),
        }

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def item_tokens(self) -> np.ndarray:
        """Tokens of each item of all datasets, not of the items of an epoch."""
        return np.concatenate([dataset.item_tokens for dataset in self.datasets])

    @property
    def mean_tokens(self) -> float:
        """The mean number of tokens of an item of an epoch."""
        pairs = zip(self.counts, self.datasets, strict=True)
        return sum(count * dataset.mean_tokens for count, dataset in pairs) / len(self)

    def __getitem__(self, index: int) -> list[dict]:
        index = range(self.first_items[-1])[index]
        number = int(np.searchsorted(self.first_items, index, side="right")) - 1
        item = self.datasets[number][index - int(self.first_items[number])]
        first = int(self.first_samples[number])
        return [sample | {"sample_id": first + sample["sample_id"]} for sample in item]

    def epoch_items(self, args: Any) -> int:
        return len(self)

    def items_of_epoch(self, args: Any, epoch: int) -> np.ndarray:
        """The items of an epoch, dataset by dataset. From each it takes the next `counts` items of the
        dataset's order, which repeats endlessly. It is a function of --seed and epoch, so there is no state
        to save.

        Example: a source of 3 items in the order 2, 0, 1 gives 2 items to each epoch: 2, 0, then 1, 2, then
        0, 1.
        """
        chosen = []
        for number, (dataset, count) in enumerate(zip(self.datasets, self.counts, strict=True)):
            order = even_order(dataset.item_tokens, [args.seed, number, 0])
            positions = np.arange(epoch * count, (epoch + 1) * count) % len(order)
            chosen.append(self.first_items[number] + order[positions])
        return np.concatenate(chosen)

    def source(self, sample_id: int) -> str:
        number = int(np.searchsorted(self.first_samples, sample_id, side="right")) - 1
        return self.datasets[number].source(sample_id - int(self.first_samples[number]))

    @property
    def file_hashes(self) -> set[str]:
        return set().union(*(dataset.file_hashes for dataset in self.datasets))

    def report(self, epochs: int) -> None:
        """Print a line for each source, and warn about sources that are read many times."""
        passes, tokens, targets = [], [], []  # an epoch, of each source
        for dataset, count in zip(self.datasets, self.counts, strict=True):
            passes.append(count / len(dataset))
            tokens.append(passes[-1] * dataset.num_tokens)
            targets.append(passes[-1] * dataset.num_targets)
        for i, (name, dataset) in enumerate(zip(self.names, self.datasets, strict=True)):
            token_share, target_share = tokens[i] / sum(tokens), targets[i] / sum(targets)
            total = passes[i] * epochs
            say(
                f"{name}: {dataset.cache.num_samples:,} samples, {dataset.num_tokens:,} tokens; "
                f"{token_share:.1%} of the tokens and {target_share:.1%} of the targets; "
                f"{passes[i]:.2f} passes per epoch, {total:.2f} in all"
            )
            if total > MAX_USEFUL_PASSES:
                warn(
                    f"{name} is read {total:.1f} times; more than {MAX_USEFUL_PASSES} passes teach little: "
                    "give it a smaller weight, or train fewer epochs"
                )
