"""The losses of reinforcement learning against formulas written out completion by completion, in float64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dataset.batch import FlatBatch, collate_flat
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.rollouts.policy import TOKEN_LEVEL, group_advantages, policy_loss, sampled_tokens_loss
from trainer.rollouts.ppo import ActorCritic, actor_critic_loss

LENGTHS = [3, 1, 5, 2]
LOSS_TYPES = ("grpo", "dapo", "cispo")
EPSILON, EPSILON_HIGH = 0.2, 0.28
# By TRL 1.16's GRPOTrainer in float64 from the tokens of `drawn_by_numpy`, (loss type, beta): the loss, the
# norm of its gradient by the log-probabilities, and the gradient's product with 1 .. M. Its CISPO was given 1
# + EPSILON_HIGH.
BY_TRL = {
    ("grpo", 0.0): (0.171237389529, 0.412788969607, 3.972602820499),
    ("grpo", 0.04): (0.175708066707, 0.406968995404, 3.912023843666),
    ("dapo", 0.0): (-0.207888087032, 0.306863975067, 2.018797439308),
    ("dapo", 0.04): (-0.204261704369, 0.304123369655, 1.971910801283),
    ("cispo", 0.0): (0.041993833480, 0.315383056619, 0.966591717219),
    ("cispo", 0.04): (0.045620216143, 0.313206186812, 0.919705079194),
}


def written_out(
    log_probs, old, reference, advantages, loss_type: str, beta: float, high: float = EPSILON_HIGH
) -> torch.Tensor:
    """The mean loss of an update of these completions, as the papers write it."""
    total, at = 0.0, 0
    for length, advantage in zip(LENGTHS, advantages, strict=True):
        of_completion = 0.0
        for t in range(at, at + length):
            ratio = torch.exp(log_probs[t] - old[t])
            if loss_type == "cispo":
                objective = min(float(ratio.detach()), 1 + high) * advantage * log_probs[t]
            else:
                bounded = min(max(ratio, 1 - EPSILON), 1 + high)
                objective = min(ratio * advantage, bounded * advantage)
            kl = torch.exp(reference[t] - log_probs[t]) - (reference[t] - log_probs[t]) - 1
            of_completion = of_completion - (objective - beta * ratio * kl)
        at += length
        total = total + of_completion / (length if loss_type == "grpo" else 1)
    return total / (sum(LENGTHS) if loss_type in TOKEN_LEVEL else len(LENGTHS))


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
    of_token = advantages, lengths.repeat_interleave(lengths).double()
    options = loss_type, EPSILON, EPSILON_HIGH, reference, beta
    found, _ = policy_loss(log_probs.requires_grad_(), old, *of_token, *options)
    loss = found / (sum(LENGTHS) if loss_type in TOKEN_LEVEL else len(LENGTHS))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    products = (gradient @ torch.arange(1, len(gradient) + 1, dtype=torch.float64)).item()
    assert (loss.item(), gradient.norm().item(), products) == pytest.approx(BY_TRL[loss_type, beta], rel=1e-9)


def sampled_batch(lengths: list[int]) -> FlatBatch:
    """A flat batch of completions of these lengths, behind prompts of 4 tokens."""
    draw, rows = np.random.RandomState(0), []
    for number, length in enumerate(lengths):
        sample = {"input_ids": draw.randint(3, 50, 4 + length), "loss_weight": np.arange(4 + length) >= 4}
        rows.append([sample | {"sample_id": number, "target_bytes": 0}])
    of_tokens = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
    return collate_flat(rows) | {"lengths": of_tokens.float()}


def log_probs_one_by_one(model: MiniMindForCausalLM, batch: FlatBatch, temperature: float) -> torch.Tensor:
    """The log-probabilities [M] of the targets, from each sample's own logits, behind prompts of 4 tokens."""
    found, ends, tokens = [], batch["cu_seqlens"], batch["input_ids"]
    if batch.shared_keys:  # samples continue what others share with them; that itself has no targets
        ends, tokens = batch.shared_keys.cu_seqlens, tokens[batch.shared_keys.index]
    for sample in tokens.split(torch.diff(ends).tolist()):
        scores = torch.log_softmax(model(sample[None]).logits[0] / temperature, dim=-1)
        found.append(scores[3:-1].gather(1, sample[4:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, "ppo"])
def test_several_updates_of_one_rollout_are_those_of_the_formula(loss_type):
    """From the model on, with the temperature of the sampling, while the ratios leave their bounds on both
    sides."""
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50)
    start, actor = MiniMindForCausalLM(config), MiniMindForCausalLM(config)
    batch, temperature, beta = sampled_batch(LENGTHS), 0.6, 0.04
    with torch.no_grad():
        old, reference = (log_probs_one_by_one(model, batch, temperature) for model in (actor, start))
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.5])
    batch |= {"old_log_probs": old, "ref_log_probs": reference, "sampling_log_probs": old.clone()}
    batch["sampling_log_probs"][3] -= 0.25
    batch["advantages"] = advantages.repeat_interleave(torch.tensor(LENGTHS))
    args = SimpleNamespace(temperature=temperature, epsilon=EPSILON, epsilon_high=EPSILON_HIGH, beta=beta)
    args.loss_type, as_written, model = loss_type, loss_type, actor
    if loss_type == "ppo":  # the loss of dapo with one epsilon; that of the critic has tests of its own
        model, as_written, args.vf_coef, args.cliprange_value = ActorCritic(actor), "dapo", 0.0, 0.2
        batch |= {"old_values": torch.zeros(sum(LENGTHS)), "returns": torch.zeros(sum(LENGTHS))}
    loss_fn = actor_critic_loss if loss_type == "ppo" else sampled_tokens_loss
    high = EPSILON if loss_type == "ppo" else EPSILON_HIGH
    count = sum(LENGTHS) if as_written in TOKEN_LEVEL else len(LENGTHS)
    sides = set()
    for _ in range(4):
        log_probs = log_probs_one_by_one(actor, batch, temperature)
        wanted = count * written_out(log_probs, old, reference, advantages, as_written, beta, high)
        loss, _, metrics = loss_fn(model, batch, args)
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
        parameters = list(actor.parameters())
        gradients = [torch.autograd.grad(each, parameters, retain_graph=True) for each in (loss, wanted)]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        gaps, count_of_gaps = metrics["sampling_logp_difference"]
        assert float(gaps) == pytest.approx(0.25) and count_of_gaps == sum(LENGTHS)
        ratio = (log_probs - old).exp()
        weight = 1 / batch["lengths"] if loss_type == "grpo" else 1.0  # shown as means of completions' means
        apart = reference - log_probs
        kl = (weight * ratio * (apart.exp() - apart - 1)).sum().item()
        assert metrics["kl"].item() == pytest.approx(kl, rel=1e-3)
        lower = (ratio < 1 - EPSILON) & (batch["advantages"] < 0)
        upper = (ratio > 1 + high) & (batch["advantages"] > 0)
        sides |= {side for side, clipped in (("below", lower), ("above", upper)) if clipped.any()}
        assert (metrics["clip_ratio"] > 0) == bool(upper.any() or (loss_type != "cispo" and lower.any()))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients[0], strict=True):
                parameter -= 0.2 * gradient / count
    assert sides == {"below", "above"}


def test_advantages_are_zero_in_the_mean_and_where_all_rewards_are_equal():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1]], dtype=torch.float64)
    assert not group_advantages(torch.tensor([[0.1] * 3], dtype=torch.float64)).any(), "the mean is not exact"
    plain, scaled = group_advantages(rewards, scale=False), group_advantages(rewards)
    assert plain[0].tolist() == [0.5, -0.5, -0.5, 0.5] and not plain[1].any() and not scaled[1].any()
    torch.testing.assert_close(scaled[0], plain[0] / (math.sqrt(1 / 3) + 1e-4))
