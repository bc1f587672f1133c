"""PPO's parts against their definitions, written out in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.trainer.rollouts.test_policy import sampled_batch
from trainer.objectives.next_token import target_log_probs
from trainer.rollouts.ppo import ActorCritic, actor_critic_loss, critic_batches, token_advantages
from trainer.rollouts.writer import Trajectory

EPSILON, CLIP, VF_COEF, BETA = 0.2, 0.15, 0.5, 0.04
VALUES, REWARD = [0.3, -0.2, 0.8, 0.1, 0.4], 1.5


def tiny(use_moe: bool = False) -> ActorCritic:
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50, use_moe=use_moe)
    return ActorCritic(MiniMindForCausalLM(config))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (0.9, 0.0), (0.99, 1.0)])
def test_advantages_are_the_discounted_sums_of_the_errors(gamma, lam):
    rewards, following = [0.0] * 4 + [REWARD], [*VALUES[1:], 0.0]
    errors = [r + gamma * v - value for r, v, value in zip(rewards, following, VALUES, strict=True)]
    wanted = [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, 5)) for t in range(5)]
    found = token_advantages(VALUES, REWARD, gamma, lam)
    assert found == pytest.approx(wanted, rel=1e-12)
    if lam == 1.0:  # the return without any critic
        returns = [advantage + value for advantage, value in zip(found, VALUES, strict=True)]
        assert returns == pytest.approx([gamma ** (4 - t) * REWARD for t in range(5)])


def test_loss_and_gradient_are_those_of_the_formula():
    draw, count = np.random.RandomState(0), 24
    log_probs, values = (torch.tensor(-2 * draw.rand(count), requires_grad=True) for _ in range(2))
    names = {"old_log_probs": log_probs, "ref_log_probs": log_probs, "old_values": values, "returns": values}
    batch = {name: near.detach() + torch.tensor(draw.randn(count) * 0.3) for name, near in names.items()}
    batch |= {"advantages": torch.tensor(draw.randn(count)), "lengths": torch.ones(count)}
    batch["sampling_log_probs"] = batch["old_log_probs"]
    args = SimpleNamespace(temperature=1.0, epsilon=EPSILON, cliprange_value=CLIP, vf_coef=VF_COEF, beta=BETA)
    loss, _, metrics = actor_critic_loss(lambda *_: (log_probs, values, torch.zeros(())), batch, args)
    wanted = 0.0
    for t in range(count):
        ratio, advantage = torch.exp(log_probs[t] - batch["old_log_probs"][t]), batch["advantages"][t]
        bounded = min(max(ratio, 1 - EPSILON), 1 + EPSILON)
        apart = batch["ref_log_probs"][t] - log_probs[t]
        kl = ratio * (apart.exp() - apart - 1)
        wanted = wanted - min(ratio * advantage, bounded * advantage) + BETA * kl
        old, now = batch["old_values"][t], values[t]
        bounded = min(max(now, old - CLIP), old + CLIP)
        errors = (now - batch["returns"][t]) ** 2, (bounded - batch["returns"][t]) ** 2
        wanted = wanted + VF_COEF / 2 * max(errors)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    gradients = (torch.cat(torch.autograd.grad(each, (log_probs, values))) for each in (loss, wanted))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert all(float(metrics[name]) > 0 for name in ("value_loss", "kl", "approx_kl", "clip_ratio"))


def test_the_critic_begins_at_zero_and_shares_nothing_with_the_policy():
    model, batch = tiny(), sampled_batch([3, 2])
    values, _ = model.values(batch)
    assert values.tolist() == [0.0] * 5
    pointers = [{p.data_ptr() for p in part.parameters()} for part in (model.actor, model.critic)]
    assert not pointers[0] & pointers[1]
    before, _ = target_log_probs(model.actor, batch)
    values.sum().backward()
    assert all(p.grad is None for p in model.actor.parameters())
    assert torch.equal(target_log_probs(model.actor, batch)[0], before)


def test_the_critic_learns_the_rewards_and_advantages_are_normalised():
    """With gamma and lambda of 1 the return of each token is the reward of its completion, whatever the
    critic says; its values are not zero here."""
    model, rewards = tiny(), torch.tensor([[1.5], [-0.25]], dtype=torch.float64)
    torch.nn.init.normal_(model.critic.lm_head.weight)
    written = []
    for number, tokens in enumerate(([4, 5, 6, 7, 8], [9, 10, 11])):
        prompt = SimpleNamespace(sample_id=number)
        written.append(Trajectory(prompt, 0, tokens, [False, False, *[True] * (len(tokens) - 2)]))
    args = SimpleNamespace(gamma=1.0, lam=1.0, num_iterations=2)
    with torch.no_grad():
        (batch,) = critic_batches(model, [(written, rewards)], args, torch.device("cpu"))
    assert batch["returns"].tolist() == pytest.approx([1.5] * 3 + [-0.25], abs=1e-6)
    assert batch["old_values"].abs().min() > 1e-3
    apart = batch["returns"] - batch["old_values"]
    torch.testing.assert_close(
        batch["advantages"], (apart - apart.mean()) / apart.std(), rtol=1e-4, atol=1e-5
    )
