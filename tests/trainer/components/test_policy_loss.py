"""The losses of reinforcement learning against formulas written out completion by completion, in float64."""

import math

import numpy as np
import pytest
import torch

from trainer.components.policy_loss import LOSS_TYPES, TOKEN_LEVEL, group_advantages, policy_loss

LENGTHS = [3, 1, 5, 2]
EPSILON, EPSILON_HIGH, MAX_GEN_LEN = 0.2, 0.28, 7
# By TRL 1.16's GRPOTrainer in float64 from the tokens of `drawn_by_numpy`, (loss type, beta): the loss, the norm of its
# gradient by the log-probabilities, and the gradient's product with 1 .. M. Its CISPO was given 1 + EPSILON_HIGH.
BY_TRL = {
    ("grpo", 0.0): (0.171237389529, 0.412788969607, 3.972602820499),
    ("grpo", 0.04): (0.175708066707, 0.406968995404, 3.912023843666),
    ("dapo", 0.0): (-0.207888087032, 0.306863975067, 2.018797439308),
    ("dapo", 0.04): (-0.204261704369, 0.304123369655, 1.971910801283),
    ("dr_grpo", 0.0): (-0.081670319906, 0.120553704491, 0.793098994014),
    ("dr_grpo", 0.04): (-0.080245669574, 0.119477038079, 0.774679243361),
    ("cispo", 0.0): (0.041993833480, 0.315383056619, 0.966591717219),
    ("cispo", 0.04): (0.045620216143, 0.313206186812, 0.919705079194),
}


@pytest.fixture
def tokens():
    """Log-probabilities of four completions' tokens: present (a leaf), old, of the reference; advantages."""
    generator = torch.Generator().manual_seed(0)
    count = sum(LENGTHS)
    log_probs = (-3 * torch.rand(count, generator=generator, dtype=torch.float64)).requires_grad_()
    old = log_probs.detach() + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)
    reference = log_probs.detach() + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)
    return log_probs, old, reference, torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64)


def written_out(log_probs, old, reference, advantages, loss_type: str, beta: float) -> torch.Tensor:
    """The mean loss of an update of these completions, as the papers write it."""
    total, at = 0.0, 0
    for length, advantage in zip(LENGTHS, advantages, strict=True):
        of_completion = 0.0
        for t in range(at, at + length):
            ratio = torch.exp(log_probs[t] - old[t])
            if loss_type == "cispo":
                objective = min(float(ratio.detach()), 1 + EPSILON_HIGH) * advantage * log_probs[t]
            else:
                bounded = min(max(ratio, 1 - EPSILON), 1 + EPSILON_HIGH)
                objective = min(ratio * advantage, bounded * advantage)
            kl = torch.exp(reference[t] - log_probs[t]) - (reference[t] - log_probs[t]) - 1
            of_completion = of_completion - (objective - beta * ratio * kl)
        at += length
        total = total + of_completion / {"grpo": length, "dr_grpo": MAX_GEN_LEN}.get(loss_type, 1)
    return total / (sum(LENGTHS) if loss_type in TOKEN_LEVEL else len(LENGTHS))


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_are_those_of_the_formula(tokens, loss_type, beta):
    log_probs, old, reference, advantages = tokens
    lengths = torch.tensor(LENGTHS)
    options = {"epsilon": EPSILON, "epsilon_high": EPSILON_HIGH, "max_gen_len": MAX_GEN_LEN, "beta": beta}
    of_token = advantages.repeat_interleave(lengths), lengths.repeat_interleave(lengths).double()
    found = policy_loss(log_probs, old, *of_token, loss_type, ref_logp=reference, **options)
    loss = found.loss / (sum(LENGTHS) if loss_type in TOKEN_LEVEL else len(LENGTHS))
    wanted = written_out(log_probs, old, reference, advantages, loss_type, beta)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(each, log_probs)[0] for each in (loss, wanted))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert (found.kl > 0) == bool(beta) and found.clipped > 0


def drawn_by_numpy() -> list[torch.Tensor]:
    """Log-probabilities as in `tokens`, from a generator that numpy never changes."""
    draw = np.random.RandomState(16)
    log_probs = -3 * draw.rand(sum(LENGTHS))
    others = [log_probs + scale * draw.randn(sum(LENGTHS)) for scale in (0.5, 0.3)]
    return [torch.tensor(each) for each in (log_probs, *others)]


@pytest.mark.parametrize(("loss_type", "beta"), BY_TRL)
def test_loss_and_gradient_are_those_of_trl(loss_type, beta):
    log_probs, old, reference = drawn_by_numpy()
    lengths = torch.tensor(LENGTHS)
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64).repeat_interleave(lengths)
    options = {"epsilon": EPSILON, "epsilon_high": EPSILON_HIGH, "max_gen_len": MAX_GEN_LEN, "beta": beta}
    of_token = advantages, lengths.repeat_interleave(lengths).double()
    found = policy_loss(log_probs.requires_grad_(), old, *of_token, loss_type, ref_logp=reference, **options)
    loss = found.loss / (sum(LENGTHS) if loss_type in TOKEN_LEVEL else len(LENGTHS))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    products = (gradient @ torch.arange(1, len(gradient) + 1, dtype=torch.float64)).item()
    assert (loss.item(), gradient.norm().item(), products) == pytest.approx(BY_TRL[loss_type, beta], rel=1e-9)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_right_after_the_rollout_the_gradient_is_that_of_reinforce(tokens, loss_type):
    log_probs, _, _, advantages = tokens
    lengths = torch.tensor(LENGTHS)
    of_token = advantages.repeat_interleave(lengths), lengths.repeat_interleave(lengths).double()
    found = policy_loss(log_probs, log_probs.detach(), *of_token, loss_type, max_gen_len=MAX_GEN_LEN)
    (gradient,) = torch.autograd.grad(found.loss, log_probs)
    weight = {"grpo": 1 / of_token[1], "dr_grpo": 1 / MAX_GEN_LEN}.get(loss_type, 1.0)
    torch.testing.assert_close(gradient, -of_token[0] * weight)
    assert found.clipped == 0


def test_advantages_are_zero_in_the_mean_and_where_all_rewards_are_equal():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1]], dtype=torch.float64)
    plain, scaled = group_advantages(rewards, scale=False), group_advantages(rewards)
    assert plain[0].tolist() == [0.5, -0.5, -0.5, 0.5] and not plain[1].any() and not scaled[1].any()
    torch.testing.assert_close(scaled[0], plain[0] / (math.sqrt(1 / 3) + 1e-4))
