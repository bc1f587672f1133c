"""Drawn tokens against the distribution that they are drawn from, and against transformers' filters."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from model.sampling import NUCLEUS, Sampling, draw_tokens, gumbel, token_logprobs, uniform_noise


def draws(logits: torch.Tensor, count: int, **fields) -> torch.Tensor:
    """Shares of the tokens that so many seeds draw."""
    samplings = [Sampling(seed=seed, **fields) for seed in range(count)]
    chosen = draw_tokens(logits.expand(count, -1), samplings, [0] * count)
    return torch.bincount(chosen, minlength=logits.shape[-1]) / count


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 5}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.6}]
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


def test_the_nucleus_is_one_of_the_top_k():
    """top_p counts the probabilities that top_k leaves: 4/7 and 3/7."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert draws(logits, 100, top_k=2, top_p=0.55).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert (draws(logits, 100, top_k=2, top_p=0.6) > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("top_p", [0.6, 0.9, 0.999])
def test_a_wide_nucleus_is_looked_at_as_a_whole(top_p):
    """Wider than the candidates that are looked at first."""
    logits = torch.randn(1, 8 * NUCLEUS, generator=torch.Generator().manual_seed(2))
    kept = TopPLogitsWarper(top_p)(None, logits)[0].isfinite()
    found = draws(logits, 3000, top_p=top_p) > 0
    assert not found[~kept].any() and found.sum() > 0.5 * kept.sum() and kept.sum() > NUCLEUS


@pytest.mark.parametrize("temperature", [9e-6, 1e-40, 1e-46, 5e-324])
def test_a_temperature_that_no_logit_can_be_divided_by_takes_the_likeliest_token(temperature):
    logits = 100 * torch.randn(3, 200, generator=torch.Generator().manual_seed(6))
    for fields in ({}, {"top_k": 5}, {"top_p": 0.9}):
        samplings = [Sampling(temperature=temperature, seed=seed, **fields) for seed in range(3)]
        chosen = draw_tokens(logits, samplings, [0] * 3)
        assert torch.equal(chosen, logits.argmax(-1))
        greedy = token_logprobs(logits, chosen, [Sampling(temperature=0)] * 3)
        assert torch.equal(token_logprobs(logits, chosen, samplings), greedy)
    coldest = [Sampling(temperature=1e-5, seed=seed) for seed in range(3)]
    assert torch.equal(draw_tokens(logits, coldest, [0] * 3), logits.argmax(-1))


def test_rows_do_not_know_each_other():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, 200, generator=generator)
    samplings = [
        Sampling(temperature=0.0),
        Sampling(seed=1),
        Sampling(top_k=1, seed=2),
        Sampling(top_p=0.0, seed=3),
        Sampling(top_p=0.5, seed=4),
        Sampling(top_k=10_000, seed=5),
        Sampling(temperature=1e-6, seed=6),
    ]
    numbers = [0, 5, 1, 2, 3, 4, 9]
    together = draw_tokens(logits, samplings, numbers).tolist()
    alone = [draw_tokens(logits[i : i + 1], [samplings[i]], [numbers[i]]).item() for i in range(7)]
    assert together == alone
    best = logits.argmax(-1).tolist()
    assert [together[i] for i in (0, 2, 3, 6)] == [best[i] for i in (0, 2, 3, 6)]


def test_the_noise_is_a_function_of_seed_and_number():
    noise = uniform_noise(7, 3, 1000)
    assert torch.equal(noise, uniform_noise(7, 3, 1000)) and torch.equal(noise, uniform_noise(7 + 2**64, 3, 1000))
    others = [
        uniform_noise(7, 4, 1000),
        uniform_noise(8, 3, 1000),
        uniform_noise(-7, 3, 1000),
        uniform_noise(73, 0, 1000),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1]) < 0.15
    assert gumbel(torch.tensor([0.0, 1 - 2.0**-24])).isfinite().all()
    wide = gumbel(uniform_noise(0, 0, 100_000))
    assert abs(wide.mean() - 0.5772) < 0.02 and abs(wide.var() - 1.6449) < 0.05


def test_logprobs_of_tokens():
    logits, tokens = torch.randn(3, 50, generator=torch.Generator().manual_seed(4)), torch.tensor([1, 2, 3])
    found = token_logprobs(logits, tokens, [Sampling(2.0), Sampling(0.0), Sampling(0.5, top_k=1)])
    for i, temperature in enumerate((2.0, 1.0, 0.5)):
        assert found[i].item() == pytest.approx((logits[i] / temperature).log_softmax(-1)[i + 1].item(), abs=1e-5)
