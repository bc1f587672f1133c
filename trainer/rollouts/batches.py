"""Rollouts: the model generates completions for a micro-batch of prompts, and they become a flat batch. A
completion is a function of (weights, seed, update, prompt, number in the group), so a run that was killed
generates the same texts again. A checkpoint holds a rollout only if further updates of it follow
(--num_iterations). The sampled token ids themselves are trained, including the end token; they are drawn from
softmax(logits / temperature)."""

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dataset.batch import Batch, FlatBatch, Size, collate_shared
from dataset.rollout_prompts import RolloutPrompt
from trainer.callbacks.train_state import TrainState
from trainer.devices.process_group import all_gather, reduce_sum, this_rank, world_size
from trainer.devices.wrapping import unwrap
from trainer.objectives.base import Objective
from trainer.objectives.next_token import target_log_probs
from trainer.report.sums import Means, add_means, quotient
from trainer.rollouts.policy import TOKEN_LEVEL, group_advantages
from trainer.rollouts.rewards import Reward, compute
from trainer.rollouts.writer import Trajectory, TrajectoryWriter, policy_for_decoding

SHOWN_CHARACTERS = 300  # of a sample in the log
# metrics of a rollout besides its rewards; with several completions per prompt also `frac_reward_zero_std`
ROLLOUT_METRICS = (
    "reward_square", "completion_length", "cut_share", "entropy", "rollout_seconds", "reward_seconds",
    "rollout_tokens_per_second",
)  # fmt: skip

RewardedTrajectories = tuple[
    list[Trajectory], Tensor
]  # for a micro-batch of prompts: the trajectories and their rewards [P, G]


def group_batches(
    model: nn.Module, rollouts: list[RewardedTrajectories], args: Any, device: torch.device
) -> list[Batch]:
    """The flat batches of trajectories whose rewards are compared within a group. Trajectories without an
    advantage are left out if nothing else is learned from them."""
    batches = []
    for written, rewards in rollouts:
        advantages = group_advantages(rewards, args.scale_rewards).flatten().tolist()
        trained: list[Trajectory] = []
        of_tokens: list[float] = []
        for trajectory, advantage in zip(written, advantages, strict=True):
            if advantage or args.beta:
                trained.append(trajectory)
                of_tokens += [advantage] * trajectory.sampled
        loss_denominator = len(written)
        if args.loss_type in TOKEN_LEVEL:
            loss_denominator = sum(trajectory.sampled for trajectory in written)
        batch = flat_batch(trained, loss_denominator)
        batch["advantages"] = torch.tensor(of_tokens)
        batches.append(batch.to(device))
    return batches


def flat_batch(written: list[Trajectory], loss_denominator: int) -> FlatBatch:
    """The flat batch of trajectories; those of one prompt share its tokens. It has three more fields:
    `lengths` [M], the number of tokens of each target's completion; `sampling_log_probs` [M], the
    log-probability with which each target was drawn; and `loss_denominator`, this micro-batch's part of the
    denominator."""
    samples = [
        {
            "input_ids": np.array(trajectory.tokens, dtype=np.int64),
            "loss_weight": np.array(trajectory.is_target, dtype=np.float32),
            "sample_id": trajectory.prompt.sample_id,
            "target_bytes": 0,
        }
        for trajectory in written
    ]
    groups = groupby(samples, lambda sample: sample["sample_id"])
    batch = collate_shared([list(group) for _, group in groups])
    sampled = torch.tensor([trajectory.sampled for trajectory in written], dtype=torch.int64)
    batch["lengths"] = sampled.repeat_interleave(sampled).float()
    batch["sampling_log_probs"] = torch.tensor(sum((trajectory.log_probs for trajectory in written), []))
    batch["loss_denominator"] = loss_denominator
    return batch


def empty_batch() -> FlatBatch:
    """A flat batch without trajectories, with the fields of every loss."""
    return flat_batch([], 0) | {"advantages": torch.empty(0), "returns": torch.empty(0)}


def rollout_size(batch: Batch, lm_config: Any) -> Size:
    """The size of a flat batch, or of held-out prompts."""
    if "prompts" in batch:
        return Size(len(batch["prompts"]), sum(len(prompt.input_ids) for prompt in batch["prompts"]))
    return batch.size(lm_config)._replace(targets=batch["loss_denominator"])


class Rollouts(Objective):
    """Makes the micro-batches of reinforcement learning, and accumulates reward statistics.

    rewards: a trajectory's reward is their weighted sum. With --beta the start weights are kept as the
    reference of the KL divergence.
    """

    console_metrics = ("reward", "reward_std", "frac_reward_zero_std", "completion_length")
    # the settings that all held-out metrics depend on
    held_out_reads: Mapping[str, str] = {"": "reward reward_model max_gen_len open_thinking thinking_ratio"}

    def __init__(self, args: Any, writer: TrajectoryWriter, rewards: list[Reward]):
        self.args, self.writer, self.rewards = args, writer, rewards
        self.needs_reference = args.beta > 0
        several = [f"reward_{reward.name}" for reward in rewards] if len(rewards) > 1 else []
        self.reward_names = ("reward", *several)
        of_groups = ["frac_reward_zero_std"] if writer.group > 1 else []
        self.metric_names = (*self.reward_names, *ROLLOUT_METRICS, *of_groups)
        self.this_rollout: Means = {}  # of this rank; its update has not begun yet
        self.since_last_record: Means = {}  # of all ranks
        self.samples: list[dict] = []  # of the last rollout, for the log
        self.decoding_copy: nn.Module | None = None  # of the policy; it generates
        # this rank's last rollout, with --num_iterations 2 or more
        self.rollout_for_next_updates: list[FlatBatch] = []

    @staticmethod
    def policy_of(model: nn.Module) -> nn.Module:
        """The part of the trained model that generates."""
        return unwrap(model)

    def make_batches(
        self, model: nn.Module, rollouts: list[RewardedTrajectories], device: torch.device
    ) -> list[Batch]:
        """Flat batches with advantages, one for the completions of each micro-batch."""
        return group_batches(model, rollouts, self.args, device)

    # ---- called by the loop

    def size(self, batch: Batch, lm_config: Any) -> Size:
        return rollout_size(batch, lm_config)

    def prepare(self, state: TrainState, micro_batches: list[Batch]) -> list[Batch]:
        """Flat batches of new trajectories for micro-batches of prompts, or those of the rollout's first
        update if this is a later update of it."""
        if not any(batch["prompts"] for batch in micro_batches):
            return [empty_batch() for _ in micro_batches]
        is_first_update = state.progress.update % self.args.num_iterations == 0
        if not is_first_update and len(self.rollout_for_next_updates) == len(micro_batches):
            batches = self.rollout_for_next_updates  # on the host after a resume
            self.rollout_for_next_updates = [batch.to(state.device) for batch in batches]
            return self.rollout_for_next_updates
        model = unwrap(state.model)
        model.eval()
        batches = self._roll_out(state, model, micro_batches)
        model.train()
        if self.args.num_iterations > 1:
            self.rollout_for_next_updates = batches
        return batches

    def on_batch_start(self, state: Any, update: int) -> None:
        """Count the rollout, because its update is about to be made on all ranks."""
        own = [self.this_rollout.get(name, (0.0, 0.0)) for name in self.metric_names]
        pairs = reduce_sum(torch.tensor(own, dtype=torch.float64)).tolist()
        add_means(self.since_last_record, dict(zip(self.metric_names, pairs, strict=True)))
        self.this_rollout = {}

    def on_log(self, state: Any, record: dict[str, Any]) -> None:
        """Add the means over the rollouts since the last record, over all ranks (None if there was no
        rollout), and samples of rank 0's last rollout."""
        sums = self.since_last_record
        means = {name: quotient(*sums.get(name, (0.0, 0.0))) for name in self.metric_names}
        mean, square = means["reward"], means.pop("reward_square")
        means["reward_std"] = None
        if mean is not None and square is not None:
            means["reward_std"] = max(0.0, square - mean**2) ** 0.5
        record |= means
        record["samples"] = [*self.samples, *record.get("samples", ())]
        self.since_last_record = {}

    def state_dict(self) -> dict[str, Any]:
        """Reward statistics since the last record, and the rollouts of all ranks that further updates use.
        All ranks must call it (a collective)."""
        rollout = [batch.state_dict() for batch in self.rollout_for_next_updates]
        return {
            "since_last_record": self.since_last_record,
            "rollout_for_next_updates": all_gather(rollout),
            "samples": all_gather(self.samples)[0],  # the log is rank 0's
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.since_last_record = saved["since_last_record"]
        self.samples = saved["samples"]
        of_ranks = saved["rollout_for_next_updates"]
        own = of_ranks[this_rank()] if len(of_ranks) == world_size() else []
        self.rollout_for_next_updates = [FlatBatch.from_state_dict(batch) for batch in own]

    # ---- a rollout

    def _roll_out(self, state: TrainState, model: nn.Module, micro_batches: list[Batch]) -> list[Batch]:
        """The flat batch of the trajectories of each micro-batch of prompts. All trajectories are generated
        together."""
        prompts = [prompt for batch in micro_batches for prompt in batch["prompts"]]
        start = time.perf_counter()
        with state.autocast:
            written = self._write(self.writer, model, prompts, state.progress.update)
        written_at = time.perf_counter()
        scores = [self._score(trajectory) for trajectory in written]
        scored_at = time.perf_counter()
        values = torch.tensor([score["reward"] for score in scores], dtype=torch.float64)
        rewards = values.view(-1, self.writer.group)
        self._count(written, scores, rewards)
        seconds, (sampled, _) = written_at - start, self.this_rollout["completion_length"]
        self.this_rollout["rollout_seconds"] = seconds, 1.0
        self.this_rollout["reward_seconds"] = scored_at - written_at, 1.0
        self.this_rollout["rollout_tokens_per_second"] = sampled * world_size(), seconds
        rollouts, rest = [], written
        for part in rewards.split([len(batch["prompts"]) for batch in micro_batches]):
            rollouts.append((rest[: part.numel()], part))
            rest = rest[part.numel() :]
        with torch.no_grad(), state.autocast:
            batches = self.make_batches(model, rollouts, state.device)
            for batch in batches:
                self.add_log_probs(model, batch)
        return batches

    def add_log_probs(self, model: nn.Module, batch: Batch) -> None:
        """Add the log-probabilities of the targets [M], which later updates compare with those under their
        weights."""
        temperature = self.args.temperature
        if self.reference is not None:
            batch["ref_log_probs"], _ = target_log_probs(self.reference, batch, temperature)
        if self.args.num_iterations > 1:
            batch["old_log_probs"], _ = target_log_probs(self.policy_of(model), batch, temperature)

    def _write(
        self, writer: TrajectoryWriter, model: nn.Module, prompts: list[RolloutPrompt], update: int
    ) -> list[Trajectory]:
        """The trajectories that the policy generates."""
        self.decoding_copy = policy_for_decoding(self.policy_of(model), self.decoding_copy)
        return writer.write(self.decoding_copy, prompts, update)

    def _score(self, trajectory: Trajectory) -> dict[str, float]:
        """The rewards of a trajectory by the names of their metrics; `reward` is their weighted sum."""
        prompt = trajectory.prompt
        messages = prompt.messages + trajectory.messages[:-1]
        limit = self.args.reward_timeout
        parts = compute(self.rewards, messages, trajectory.text, prompt.record, prompt.source, limit)
        scores = {f"reward_{name}": value for name, value in parts.items()}
        scores["reward"] = sum(reward.weight * parts[reward.name] for reward in self.rewards)
        return scores

    def _count(self, written: list[Trajectory], scores: list[dict[str, float]], rewards: Tensor) -> None:
        """Set the metrics of this rollout, without its times, and the samples for the log."""
        values = rewards.flatten().tolist()
        number = len(written)
        sampled = sum(trajectory.sampled for trajectory in written)
        metrics: Means = {}
        for name in self.reward_names:
            metrics[name] = sum(score[name] for score in scores), number
        metrics["reward_square"] = sum(value**2 for value in values), number
        metrics["completion_length"] = sampled, number
        metrics["cut_share"] = sum(trajectory.is_cut for trajectory in written), number
        # estimated, per token
        metrics["entropy"] = -sum(sum(trajectory.log_probs) for trajectory in written), sampled
        alike = (rewards == rewards[:, :1]).all(dim=1).sum()
        metrics["frac_reward_zero_std"] = int(alike), len(rewards)
        self.this_rollout = metrics
        self.samples = []
        for trajectory, value in zip(written[:2], values[:2], strict=True):
            question = trajectory.prompt.messages[-1]["content"]
            answer = "\n".join(message["content"] for message in trajectory.messages)
            self.samples.append({"prompt": _excerpt(question), "answer": _excerpt(answer), "reward": value})

    def held_out(self, model: nn.Module, batch: Batch, args: Any = None) -> dict[str, Tensor]:
        """Sums over held-out prompts: the rewards of their likeliest completions, and `loss`, which is minus
        the weighted reward."""
        writer = replace(self.writer, group=1, temperature=0.0)
        scores = [self._score(trajectory) for trajectory in self._write(writer, model, batch["prompts"], 0)]
        metrics = {name: sum(score[name] for score in scores) for name in self.reward_names}
        metrics["loss"] = -metrics["reward"]
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def _excerpt(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
