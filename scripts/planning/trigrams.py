"""How predictable a text is: the held-out loss of a trigram model of the training data, counted in
seconds."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dataset.lm_dataset import StageDataset

COUNTED = 1 << 22  # tokens; the loss of a larger corpus is extrapolated
DISCOUNT = 0.75  # taken off each count and given to the shorter contexts
Ngrams = list[np.ndarray]  # each target with 0, 1 and 2 tokens before it, as one number, int64 [M]


def trigram_loss(
    train: "StageDataset", held_out: "StageDataset", vocabulary: int
) -> Callable[[float], float]:
    """Nats per held-out target under a trigram model of so many tokens of the training data.

    At most the first COUNTED tokens are counted; a power law through the loss of these and of their half
    leads to other amounts.
    """
    seen, asked = ngrams(train, vocabulary), ngrams(held_out, vocabulary)
    counted = min(train.num_tokens, COUNTED)
    loss = half = interpolated_loss(seen, asked, vocabulary)
    if len(seen[0]) > 1:
        half = interpolated_loss([numbers[: len(numbers) // 2] for numbers in seen], asked, vocabulary)
    return lambda tokens: loss * (loss / half) ** float(np.log2(tokens / counted))


def ngrams(data: "StageDataset", vocabulary: int) -> Ngrams:
    """The n-grams of the targets among the first COUNTED tokens."""
    cache = data.cache
    tokens = np.array(cache.tokens[:COUNTED], dtype=np.int64)
    at = np.flatnonzero(cache.loss_mask[: len(tokens)])
    last, before = tokens[at - 1], tokens[np.maximum(at - 2, 0)]
    return [
        tokens[at],
        last * vocabulary + tokens[at],
        (before * vocabulary + last) * vocabulary + tokens[at],
    ]


def interpolated_loss(seen: Ngrams, asked: Ngrams, vocabulary: int) -> float:
    """Nats per n-gram of `asked`, with the counts of `seen` under absolute discounting, interpolated with
    those of shorter contexts (Ney, Essen and Kneser 1994)."""
    counts = np.bincount(seen[0], minlength=vocabulary) + 0.5
    probability = counts[asked[0]] / counts.sum()
    for order in (1, 2):
        contexts, asked_contexts = (side[order] // vocabulary for side in (seen, asked))
        follows = np.unique(seen[order])  # different targets after a context
        count, kinds = (occurrences(numbers, asked_contexts) for numbers in (contexts, follows // vocabulary))
        times = np.maximum(occurrences(seen[order], asked[order]) - DISCOUNT, 0)
        probability = np.where(
            count > 0, (times + DISCOUNT * kinds * probability) / np.maximum(count, 1), probability
        )
    return float(-np.log(probability).mean())


def occurrences(numbers: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How often each wanted number [M] occurs among the numbers [N]."""
    known, counts = np.unique(numbers, return_counts=True)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, counts[at], 0)
