"""The trigram model against a plain one, which counts in dictionaries."""

import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.planning import trigrams

VOCABULARY = 5
SAMPLES = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=12), min_size=1, max_size=8)


def dataset(samples: list[list[int]], masks: list[list[bool]] | None = None) -> SimpleNamespace:
    tokens = np.concatenate([np.array(each, dtype=np.uint8) for each in samples])
    if masks is None:
        masks = [[False] + [True] * (len(each) - 1) for each in samples]
    mask = np.concatenate([np.array(each, dtype=bool) for each in masks])
    offsets = np.cumsum([0, *map(len, samples)])
    return SimpleNamespace(
        cache=SimpleNamespace(tokens=tokens, loss_mask=mask, offsets=offsets), num_tokens=len(tokens)
    )


def targets(samples: list[list[int]]):
    """(two tokens before, one token before, target) over the samples as they stand one after another."""
    stream = [0, *(token for sample in samples for token in sample)]
    begins = np.cumsum([0, *map(len, samples)])
    for at in range(len(stream) - 1):
        if at not in begins:
            yield stream[at - 1 if at > 1 else 1], stream[at], stream[at + 1]


def plain_loss(known: list[list[int]], asked: list[list[int]]) -> float:
    counts: dict[tuple, Counter] = defaultdict(Counter)
    for before, last, target in targets(known):
        for context in ((), (last,), (before, last)):
            counts[context][target] += 1

    def probability(context: tuple, target: int) -> float:
        seen = counts[context]
        total = sum(seen.values())
        if not context:
            return (seen[target] + 0.5) / (total + 0.5 * VOCABULARY)
        shorter = probability(context[1:], target)
        if total == 0:
            return shorter
        taken = trigrams.DISCOUNT * len(seen)
        return (max(seen[target] - trigrams.DISCOUNT, 0) + taken * shorter) / total

    losses = [-math.log(probability((before, last), target)) for before, last, target in targets(asked)]
    return sum(losses) / len(losses)


@given(SAMPLES, SAMPLES)
def test_the_loss_is_that_of_a_model_counted_in_dictionaries(known, asked):
    data = dataset(known)
    loss = trigrams.trigram_loss(data, dataset(asked), VOCABULARY)(data.num_tokens)
    assert loss == pytest.approx(plain_loss(known, asked), rel=1e-9)


def test_masked_tokens_are_context_only():
    known, asked = [[1, 2, 3, 1, 2, 3]], [[1, 2, 3]]
    every = trigrams.ngrams(dataset(known), VOCABULARY)
    masked = trigrams.ngrams(dataset(known, [[0, 0, 1, 0, 0, 1]]), VOCABULARY)
    assert [len(each) for each in every] == [5, 5, 5] and next(each.tolist() for each in masked) == [3, 3]
    loss = trigrams.trigram_loss(
        dataset(known, [[0, 0, 1, 0, 0, 1]]), dataset(asked, [[0, 0, 1]]), VOCABULARY
    )
    assert loss(6) < trigrams.trigram_loss(dataset(known), dataset(asked, [[0, 0, 1]]), VOCABULARY)(6)


def test_a_corpus_larger_than_what_is_counted_is_extrapolated(monkeypatch):
    """On text of one source the loss falls with the text like a power: half of it predicts all of it within 3
    %."""
    rng = np.random.default_rng(0)
    table = rng.dirichlet(np.full(40, 0.05), size=(40, 40))

    def text(length: int) -> list[int]:
        tokens = [0, 1]
        while len(tokens) < length:
            tokens.append(int(rng.choice(40, p=table[tokens[-2], tokens[-1]])))
        return tokens

    known, asked = dataset([text(8000)]), dataset([text(2000)])
    of_whole = trigrams.trigram_loss(known, asked, 40)
    whole = of_whole(8000)
    monkeypatch.setattr(trigrams, "COUNTED", 4000)
    of_half = trigrams.trigram_loss(known, asked, 40)
    assert of_half(8000) == pytest.approx(whole, rel=0.05)
    assert of_whole(4000) == pytest.approx(of_half(4000), rel=1e-9)
    assert trigrams.interpolated_loss(*(trigrams.ngrams(each, 40) for each in (known, asked)), 40) > whole
