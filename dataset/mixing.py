"""Several sources of data mixed by weight: each has its share of the tokens of every epoch, which has as many
tokens as all sources together. A source with a large share is passed more than once in it, one with a small
share only in part; the part goes on where that of the epoch before ended, so that all its items are trained
equally often, or once more. All tokens count, also those of prompts, which are not trained: the shares of the
targets are reported.
"""

import hashlib
import json

import numpy as np

from common.errors import say, warn
from dataset.lm_dataset import StageDataset

MANY_PASSES = 4  # over a source; more of them teach little (arXiv:2305.16264)


def even_order(lengths: np.ndarray, seed: list[int]) -> np.ndarray:
    """A random order of items of these lengths, int [items], in which the tokens of any stretch (the first
    item follows the last) differ from as many mean lengths by less than the longest item: long and short
    ones, each in random order, take turns. The next one is a long one where the items so far are not longer
    than the mean."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(lengths))
    excess = lengths[order] - lengths.mean()
    is_long = excess >= 0
    sums = [np.cumsum(np.where(side, np.abs(excess), 0.0)) for side in (is_long, ~is_long)]
    # what the items of its own kind before it differ from the mean
    before = np.where(is_long, *sums) - np.abs(excess)
    return order[np.lexsort((~is_long, before))]


class MixedDataset(StageDataset):
    """Sources (name, data) whose items, numbered through, make up the epochs; weights: above 0, their ratio
    counts. The length is that of an epoch, which consists of `items_of_epoch`: of each source `counts`
    items."""

    def __init__(self, sources: list[tuple[str, StageDataset]], weights: list[float]):
        self.names, self.sources = [name for name, _ in sources], [source for _, source in sources]
        self.packing, self.kind, self.collate = (
            self.sources[0].packing,
            self.sources[0].kind,
            self.sources[0].collate,
        )
        self.shares = [weight / sum(weights) for weight in weights]
        shares = zip(self.shares, self.sources, strict=True)
        self.counts = [max(1, round(share * self.num_tokens / each.mean_tokens)) for share, each in shares]
        self.first_items = np.cumsum([0, *map(len, self.sources)])
        self.first_samples = np.cumsum([0, *(len(source.cache) for source in self.sources)])

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, index: int) -> list[dict]:
        index = range(self.first_items[-1])[index]
        number = int(np.searchsorted(self.first_items, index, side="right")) - 1
        row, first = (
            self.sources[number][index - int(self.first_items[number])],
            int(self.first_samples[number]),
        )
        return [sample | {"sample_id": first + sample["sample_id"]} for sample in row]

    def __getitems__(self, indices: list[int]) -> list[list[dict]]:
        items = [self[index] for index in indices]
        for source in self.sources:
            source.cache.release()
        return items

    def items_of_epoch(self, seed: int, epoch: int) -> np.ndarray:
        """The items of an epoch, source by source: of each the next `counts` items of its order, which begins
        anew where it ends. A function of seed and epoch, so there is no state to save."""
        chosen = []
        for number, (source, count) in enumerate(zip(self.sources, self.counts, strict=True)):
            order = even_order(source.item_tokens, [seed, number, 0])
            taken = np.arange(epoch * count, (epoch + 1) * count)
            chosen.append(self.first_items[number] + np.take(order, taken, mode="wrap"))
        return np.concatenate(chosen)

    @property
    def num_tokens(self) -> int:
        return sum(source.num_tokens for source in self.sources)

    @property
    def records(self) -> int:
        return sum(source.records for source in self.sources)

    @property
    def fingerprint(self) -> dict[str, str | float]:
        content = json.dumps([[source.fingerprint["data"] for source in self.sources], self.counts])
        data = hashlib.sha256(content.encode()).hexdigest()[:16]
        weights = ", ".join(f"{share:.4g}" for share in self.shares)
        return self.sources[0].fingerprint | {"data": data, "weights": weights}

    def source(self, sample_id: int) -> str:
        number = int(np.searchsorted(self.first_samples, sample_id, side="right")) - 1
        return self.sources[number].source(sample_id - int(self.first_samples[number]))

    def report(self, epochs: int) -> None:
        """Print a line for each source, and warn of those that are passed many times."""
        passes_of = [count / len(source) for source, count in zip(self.sources, self.counts, strict=True)]
        tokens = [passes * source.num_tokens for passes, source in zip(passes_of, self.sources, strict=True)]
        targets = [
            passes * source.num_targets for passes, source in zip(passes_of, self.sources, strict=True)
        ]
        for i, (name, source, passes) in enumerate(zip(self.names, self.sources, passes_of, strict=True)):
            say(
                f"{name}: {len(source.cache):,} samples, {source.num_tokens:,} tokens; "
                f"{tokens[i] / sum(tokens):.1%} of the tokens and {targets[i] / sum(targets):.1%} of the targets; "
                f"{passes:.2f} passes an epoch, {passes * epochs:.2f} in all"
            )
            if passes * epochs > MANY_PASSES:
                text = f"{name} is passed {passes * epochs:.1f} times; more than {MANY_PASSES} passes teach little: "
                warn(text + "give it a smaller weight, or train fewer epochs")
