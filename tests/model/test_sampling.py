"""Drawn tokens against the distribution that they are drawn from, and against transformers' filters."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model.sampling import Sampling, draw, draw_index, penalise, uniform_numbers


def draws(logits: torch.Tensor, count: int, **fields) -> torch.Tensor:
    """Shares of the tokens that so many seeds draw."""
    samplings = [Sampling(seed=seed, **fields) for seed in range(count)]
    chosen, _ = draw(logits.expand(count, -1), samplings, [0] * count)
    return torch.bincount(chosen, minlength=logits.shape[-1]) / count


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 5}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.6}],
)
def test_the_tokens_have_the_probabilities_that_transformers_filters_leave(fields):
    logits = 2 * torch.randn(1, 24, generator=torch.Generator().manual_seed(1))
    expected = TemperatureLogitsWarper(fields.get("temperature", 1.0))(None, logits)
    if "top_k" in fields:
        expected = TopKLogitsWarper(fields["top_k"])(None, expected)
    if "top_p" in fields:
        expected = TopPLogitsWarper(fields["top_p"])(None, expected)
    expected = expected.softmax(-1)[0]
    count = 4000
    found = draws(logits, count, **fields)
    assert not found[expected == 0].any()
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs() <= 4.5 * spread + 1e-9).all()


@pytest.mark.parametrize("top_p", [0.6, 0.9, 0.999])
def test_a_nucleus_is_that_of_transformers(top_p):
    logits = torch.randn(1, 512, generator=torch.Generator().manual_seed(2))
    kept = TopPLogitsWarper(top_p)(None, logits)[0].isfinite()
    found = draws(logits, 3000, top_p=top_p) > 0
    assert not found[~kept].any() and found.sum() > 0.5 * kept.sum()


@pytest.mark.parametrize("temperature", [9e-6, 1e-40, 5e-324])
def test_a_temperature_that_no_logit_can_be_divided_by_takes_the_likeliest_token(temperature):
    logits = 100 * torch.randn(3, 200, generator=torch.Generator().manual_seed(6))
    for fields in ({}, {"top_k": 5}, {"top_p": 0.9}):
        samplings = [Sampling(temperature=temperature, seed=seed, **fields) for seed in range(3)]
        chosen, logprobs = draw(logits, samplings, [0] * 3)
        assert torch.equal(chosen, logits.argmax(-1))
        assert torch.equal(logprobs, draw(logits, [Sampling(temperature=0)] * 3, [0] * 3)[1])
    coldest = [Sampling(temperature=1e-5, seed=seed) for seed in range(3)]
    assert torch.equal(draw(logits, coldest, [0] * 3)[0], logits.argmax(-1))


FILTERS = [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 30, "top_p": 0.5}, {"temperature": 0.0}]


def test_a_row_is_drawn_alike_alone_and_beside_rows_of_other_kinds():
    """Also where tokens are equally likely: half of the logits are rounded."""
    logits = 2 * torch.randn(200, 700, generator=torch.Generator().manual_seed(4))
    logits[::2] = logits[::2].round()
    samplings = [Sampling(seed=i, **FILTERS[i % len(FILTERS)]) for i in range(len(logits))]
    numbers = list(range(len(logits)))
    tokens, logprobs = draw(logits, samplings, numbers)
    for row, sampling in enumerate(samplings):
        token, logprob = draw(logits[row : row + 1], [sampling], [row])
        assert (token.item(), logprob.item()) == (tokens[row], pytest.approx(logprobs[row].item(), abs=1e-6))


def splitmix64(state: int):
    """Vigna's reference generator, in Python's integers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        x = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        yield x ^ (x >> 31)


def test_the_numbers_are_a_function_of_seed_and_number():
    assert next(splitmix64(1234567)) == 6457827717110365317  # as published
    found = uniform_numbers([7, 0, -7, 7 + 2**64], [3, 0, 10**6, 3])[:, 0]
    assert found[0] == found[3] and found.min() >= 0 and found.max() < 1
    start = next(splitmix64(7 - 0x9E3779B97F4A7C15))  # the seed's own bits are mixed first
    stream = splitmix64(start)
    assert [(next(stream) >> 11) / 2**53 for _ in range(4)][3] == found[0]
    many = np.stack([uniform_numbers(range(200), [number] * 200)[:, 0] for number in range(200)])
    counts = np.histogram(many, 100, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 160  # chi-square, 99 degrees of freedom
    for rows in (many, many.T):
        assert abs(np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("size", [1, 7, 152_000])
def test_the_whole_range_is_drawn_and_nothing_of_probability_zero(size):
    """Also by the smallest and the largest number, and where nothing but one token is possible."""
    ends = torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)
    weights = torch.zeros(2, size)
    possible = torch.arange(min(2, size - 1), size, 3)
    weights[:, possible] = torch.rand(len(possible), generator=torch.Generator().manual_seed(1)) + 1e-30
    assert draw_index(weights, ends).tolist() == [possible[0], possible[-1]]
    for one in {0, size // 2, size - 1}:
        alone = torch.zeros(2, size)
        alone[:, one] = 1e-38
        assert draw_index(alone, ends).tolist() == [one, one]


def test_the_tail_of_a_large_vocabulary_has_its_probability():
    """Each number finds the token in whose interval of exact sums it lies; float32 sums would not do."""
    logits = 4 * torch.randn(1, 152_000, generator=torch.Generator().manual_seed(2))
    probs = logits.softmax(-1)
    ends = probs.double().cumsum(-1)[0] / probs.double().sum()
    numbers = uniform_numbers(range(500), [0] * 500)[:, 0]
    numbers = torch.cat((numbers, 1 - torch.logspace(-2, -9, 100, dtype=torch.float64)))
    found = torch.cat([draw_index(probs.expand(len(some), -1), some[:, None]) for some in numbers.split(100)])
    exact = torch.searchsorted(ends, numbers, right=True)
    assert (found == exact).float().mean() > 0.99


@torch.no_grad()
def test_logits_that_are_no_numbers_draw_some_token():
    """Of a model that has diverged: an index beyond the vocabulary would end the process on a GPU."""
    logits = torch.full((3, 200), torch.nan)
    samplings = [Sampling(seed=1), Sampling(top_k=5, seed=2), Sampling(top_p=0.5, seed=3)]
    tokens, logprobs = draw(logits, samplings, [0] * 3)
    assert (tokens >= 0).all() and (tokens < 200).all() and logprobs.isnan().all()


TOKENS = st.lists(st.integers(0, 29), max_size=40)


@given(TOKENS, TOKENS, st.floats(0.1, 10), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_are_those_of_transformers_and_of_openais_formula(
    prompt, answer, repetition, frequency, presence
):
    logits = 3 * torch.randn(30, generator=torch.Generator().manual_seed(7))
    expected = logits.clone()[None]
    if prompt or answer:
        expected = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + answer]), expected)
    for token in set(answer):
        expected[0, token] -= answer.count(token) * frequency + presence
    penalise(logits, prompt, answer, Sampling(1.0, 0, 1.0, 0, repetition, frequency, presence))
    torch.testing.assert_close(logits, expected[0])


def test_without_penalties_nothing_is_changed():
    assert not Sampling().has_penalty
    for name, value in (("repetition_penalty", 1.1), ("frequency_penalty", 0.1), ("presence_penalty", -0.1)):
        assert Sampling(**{name: value}).has_penalty
