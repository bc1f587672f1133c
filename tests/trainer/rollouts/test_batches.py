"""Rollouts of trajectories that are given: what becomes of their rewards, in the batches and in the log."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.errors import UserError
from dataset.order import train_loader
from dataset.rollout_prompts import PromptDataset, RolloutPrompt
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.trainer.rollouts.test_policy import log_probs_one_by_one
from tests.trainer.stage_flags import assert_same_tensors
from trainer.rollouts.batches import Rollouts, rollout_size
from trainer.rollouts.ppo import PPO, ActorCritic, moved_since_rollout, token_advantages
from trainer.rollouts.rewards import Reward
from trainer.rollouts.writer import Trajectory, TrajectoryWriter

GROUP, TEMPERATURE = 4, 0.6
CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50)
# rewards of the first prompt's group; the others' are all 1
ODD, SIZE = [0.0, 1.0, 0.0, 1.0], [0.0, 0.5, 1.0, 1.5]
WEIGHTED = [0.0, 1.25, 0.5, 1.75]  # their sum with weights 1 and 0.5


def prompt(number: int) -> RolloutPrompt:
    messages = [{"role": "user", "content": f"{number}?"}]
    return RolloutPrompt([number + 3, 4, 5, 6], messages, None, {}, number, f"p:{number}")


def by_number(factor):
    """A reward that is a function of the number in the group, for the first prompt; 1 for the others."""

    def reward(prompt, text, record):
        sample_id, number = map(int, text.split())
        return factor(number) if sample_id == 0 else 1.0

    return reward


REWARDS = [
    Reward("odd", by_number(lambda number: number % 2), 1.0),
    Reward("size", by_number(lambda number: number / 2), 0.5),
]


@dataclass
class Scripted(TrajectoryWriter):
    """Trajectory n of a prompt has n + 1 tokens (without a group, that of prompt n has), of probability 1 / e
    each; its text names both."""

    asked: list[tuple] = field(default_factory=list)

    def write(self, model, prompts, update) -> list[Trajectory]:
        self.asked.append((self.temperature, self.group, model.training))
        written = []
        for each in prompts:
            for number in range(self.group):
                length = 1 + (number if self.group > 1 else each.sample_id)
                tokens = [*each.input_ids, *(10 + each.sample_id + i for i in range(length))]
                text = f"{each.sample_id} {number}"
                options = {"messages": [{"role": "assistant", "content": text}], "text": text}
                options |= {"log_probs": [-1.0] * length, "is_cut": number == 3}
                written.append(Trajectory(each, number, tokens, [False] * 4 + [True] * length, **options))
        return written


def rollouts_of(with_critic: bool = False, **settings) -> tuple[Rollouts, SimpleNamespace]:
    """Rollouts, and a state with their model."""
    defaults = {"num_iterations": 2, "beta": 0.1, "loss_type": "dapo", "scale_rewards": True}
    defaults |= {"reward_timeout": 9.0, "temperature": TEMPERATURE}
    args = SimpleNamespace(**defaults | settings)
    torch.manual_seed(0)
    model, reference = MiniMindForCausalLM(CONFIG), MiniMindForCausalLM(CONFIG).eval()
    if with_critic:
        model = ActorCritic(model)
    writer = Scripted(None, 1 if with_critic else GROUP, TEMPERATURE, 9, 1)  # type: ignore[arg-type]
    rollouts = (PPO if with_critic else Rollouts)(args, writer, REWARDS)
    assert rollouts.needs_reference == bool(args.beta)
    rollouts.reference = reference if args.beta else None
    progress = SimpleNamespace(update=0)
    state = SimpleNamespace(
        model=model, progress=progress, device=torch.device("cpu"), autocast=nullcontext()
    )
    return rollouts, state


def record_of(rollouts: Rollouts) -> dict:
    """What the rollouts add to a record."""
    record: dict = {}
    rollouts.on_log(None, record)
    return record


def micro_batches_of(*micro_batches: tuple[int, ...]) -> list[dict]:
    return [{"prompts": [prompt(number) for number in each]} for each in micro_batches]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize(("beta", "scale_rewards"), [(0.1, True), (0.0, False)])
def test_a_rollout_becomes_a_flat_batch(loss_type, beta, scale_rewards):
    """Without --beta, groups of equal rewards are left out, yet counted."""
    rollouts, state = rollouts_of(beta=beta, loss_type=loss_type, scale_rewards=scale_rewards)
    (batch,) = rollouts.prepare(state, micro_batches_of((1, 0)))
    kept = [1, 0] if beta else [0]
    assert batch["sample_ids"].tolist() == [number for number in kept for _ in range(GROUP)]
    advantages = torch.tensor(WEIGHTED).double() - np.mean(WEIGHTED)
    advantages /= np.std(WEIGHTED, ddof=1) + 1e-4 if scale_rewards else 1.0
    of_completion = {1: [0.0] * GROUP, 0: advantages.tolist()}
    lengths = torch.arange(1, GROUP + 1).repeat(len(kept))
    wanted = torch.tensor([of_completion[number] for number in kept]).flatten().repeat_interleave(lengths)
    assert batch["advantages"].tolist() == pytest.approx(wanted.tolist())
    assert batch["lengths"].tolist() == lengths.repeat_interleave(lengths).tolist()
    assert rollout_size(batch, CONFIG).targets == (2 * sum(range(1, 5)) if loss_type == "dapo" else 2 * GROUP)
    with torch.no_grad():
        old = log_probs_one_by_one(state.model, batch, TEMPERATURE)
        torch.testing.assert_close(batch["old_log_probs"], old)
        assert ("ref_log_probs" in batch) == bool(beta)
        if beta:
            wanted = log_probs_one_by_one(rollouts.reference, batch, TEMPERATURE)
            torch.testing.assert_close(batch["ref_log_probs"], wanted)
    assert rollouts.writer.asked == [(TEMPERATURE, GROUP, False)] and state.model.training


def test_the_record_holds_means_since_the_last_one():
    rollouts, state = rollouts_of(num_iterations=1)
    rollouts.prepare(state, micro_batches_of((1,), (1,)))  # stopped by a signal
    rollouts.prepare(state, micro_batches_of((0,), (1,)))
    rollouts.on_batch_start(state, 1)
    rollouts.prepare(state, micro_batches_of((1,)))
    rollouts.on_batch_start(state, 1)
    rollouts.on_batch_start(state, 1)  # of an update without a rollout
    figures, weighted = record_of(rollouts), [*WEIGHTED, *[1.5] * 2 * GROUP]
    assert figures["reward"] == pytest.approx(np.mean(weighted))
    assert figures["reward_std"] == pytest.approx(np.std(weighted))
    assert figures["reward_odd"] == pytest.approx(np.mean([*ODD, *[1.0] * 2 * GROUP]))
    assert figures["reward_size"] == pytest.approx(np.mean([*SIZE, *[1.0] * 2 * GROUP]))
    assert (figures["completion_length"], figures["entropy"]) == (2.5, 1.0)
    assert (figures["cut_share"], figures["frac_reward_zero_std"]) == (0.25, pytest.approx(2 / 3))
    assert [each["reward"] for each in figures["samples"]] == [1.5, 1.5]
    assert record_of(rollouts)["reward"] is None


def test_a_rollout_is_kept_for_its_later_updates():
    """After a resume with the same grouping, the batches are the same bits; with another, they are made
    anew."""
    rollouts, state = rollouts_of(beta=0.0)
    whole = rollouts.prepare(state, micro_batches_of((1, 0, 2), (3,)))
    saved = rollouts.state_dict()
    rollouts, state = rollouts_of(beta=0.0)
    rollouts.load_state_dict(saved)
    state.progress.update = 1
    again = rollouts.prepare(state, micro_batches_of((1, 0, 2), (3,)))
    for one, other in zip(whole, again, strict=True):
        assert_same_tensors(one.state_dict(), other.state_dict())
        assert np.array_equal(one.host_cu_seqlens, other.host_cu_seqlens)
        assert one.target_counts == other.target_counts and "loss_denominator" in other
        if one.shared_keys:
            assert np.array_equal(one.shared_keys.host_cu_seqlens, other.shared_keys.host_cu_seqlens)
    assert not rollouts.writer.asked
    cut = rollouts.prepare(state, micro_batches_of((1,), (0,), (2, 3)))
    assert [batch["sample_ids"].tolist() for batch in cut] == [[], [0] * GROUP, []] and rollouts.writer.asked


def test_held_out_prompts_are_judged_by_their_likeliest_completions():
    rollouts, state = rollouts_of()
    sums = {
        name: float(value)
        for name, value in rollouts.held_out(state.model, *micro_batches_of((0, 1))).items()
    }
    assert sums == {"loss": -1.5, "reward": 1.5, "reward_odd": 1.0, "reward_size": 1.0}
    assert rollouts.writer.asked[0][:2] == (0.0, 1)
    assert float(rollouts.held_out(state.model, *micro_batches_of(()))["loss"]) == 0.0


@pytest.mark.parametrize("several", [1, 3])
def test_tokens_are_judged_with_the_values_of_the_critic(several):
    """Advantages, on one scale over the update, and returns, which are not scaled."""
    options = {"gamma": 0.9, "lam": 0.7, "early_stop_kl": 0.0, "num_iterations": several}
    rollouts, state = rollouts_of(with_critic=True, **options)
    torch.nn.init.normal_(state.model.critic.lm_head.weight)
    batches = rollouts.prepare(state, micro_batches_of((0, 1), (2,)))
    advantages, returns = [], []
    for batch, rewards in zip(batches, ([0.0, 1.5], [1.5]), strict=True):
        with torch.no_grad():
            values, _ = state.model.values(batch)
        of_completions = values.double().split((batch["sample_ids"] + 1).tolist())
        for own, reward in zip(of_completions, rewards, strict=True):
            found = token_advantages(own.tolist(), reward, 0.9, 0.7)
            advantages += found
            returns += [advantage + value for advantage, value in zip(found, own.tolist(), strict=True)]
        assert ("old_values" in batch) == (several > 1)
        if several > 1:
            torch.testing.assert_close(batch["old_values"], values)
    scaled = (np.array(advantages) - np.mean(advantages)) / np.sqrt(np.var(advantages, ddof=1) + 1e-8)
    found = [torch.cat([batch[name] for batch in batches]).tolist() for name in ("advantages", "returns")]
    assert found[0] == pytest.approx(scaled.tolist(), abs=1e-5)
    assert found[1] == pytest.approx(returns, abs=1e-5)


def test_how_far_the_policy_has_moved_is_a_mean_per_token():
    rollouts, state = rollouts_of(with_critic=True, gamma=1.0, lam=1.0, early_stop_kl=1e-9)
    batches = rollouts.prepare(state, micro_batches_of((0, 1), (2,)))
    assert moved_since_rollout(state, batches, TEMPERATURE) == pytest.approx(0.0, abs=1e-7)
    with torch.no_grad():
        for parameter in state.model.actor.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        moved = []
        for batch in batches:
            log_probs = log_probs_one_by_one(state.model.actor, batch, TEMPERATURE)
            moved.append(log_probs - batch["old_log_probs"])
    apart = torch.cat(moved)
    wanted = float((apart.exp() - apart - 1).mean())
    assert moved_since_rollout(state, batches, TEMPERATURE) == pytest.approx(wanted, rel=1e-3)
    state.progress.update = 1
    assert all(len(each["targets"]) == 0 for each in rollouts.prepare(state, micro_batches_of((0, 1), (2,))))
    rollouts.on_batch_start(state, 1)
    rollouts.args.early_stop_kl = 9.0
    assert [len(each["targets"]) for each in rollouts.prepare(state, micro_batches_of((0, 1), (2,)))] == [
        3,
        3,
    ]
    rollouts.on_batch_start(state, 1)
    record: dict = {}
    rollouts.on_log(state, record)
    assert record["stopped"] == 0.5


class Prompts(PromptDataset):
    """Prompts of no file."""

    def __init__(self, prompts):
        self.prompts = list(prompts)


def test_the_prompts_of_an_update_come_once_for_each_iteration():
    """And prompts that are left over by the last update are not trained."""
    settings = {"batch_size": 2, "accumulation_steps": 2, "num_iterations": 3, "seed": 1}
    args = SimpleNamespace(**settings, num_workers=0, max_tokens=0)
    prompts = Prompts(prompt(number) for number in range(11))
    assert prompts.epoch_samples(args) == 8 * 3
    batches = [batch["sample_ids"].tolist() for batch in train_loader(prompts, args, epoch=0)]
    updates = [one + other for one, other in zip(batches[::2], batches[1::2], strict=True)]
    assert updates == [updates[0]] * 3 + [updates[3]] * 3
    assert len({*updates[0], *updates[3]}) == 8
    args.batch_size = 6
    with pytest.raises(UserError, match="an epoch has 11 prompts, and an update takes 12"):
        prompts.epoch_samples(args)
