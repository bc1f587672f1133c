"""Rollouts: where a micro-batch of prompts becomes a flat batch of the completions that the model writes to
them.

A completion is a function of (weights, seed, update, prompt, number in the group): its draws are keyed by
these, so a run that was killed writes the same texts again, and a checkpoint holds nothing of them. Only
where a rollout is used for several updates (--num_iterations) a checkpoint between them holds it, for as many
ranks and micro-batches.

Token ids are trained as they were sampled, with the end token; nothing is decoded and tokenised again.
Sampled is softmax(logits / temperature), which is also what is trained.
"""

import time
from collections import defaultdict
from dataclasses import replace
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dataset.lm_dataset import collate_shared
from dataset.rollout_prompts import RolloutPrompt
from trainer.devices.process_group import gather, reduce_sum, this_rank, world_size
from trainer.devices.wrapping import unwrap, whole_model
from trainer.objectives.next_token import flat_size, target_log_probs, to_device
from trainer.objectives.policy import TOKEN_LEVEL, group_advantages
from trainer.report.speed import Size
from trainer.rollouts.rewards import Reward, compute
from trainer.rollouts.writer import Trajectory, TrajectoryWriter
from trainer.run.checkpoint import snapshot
from trainer.run.state import Batch, Hooks, TrainState

if TYPE_CHECKING:
    from model.model_minimind import MiniMindConfig

SHOWN_CHARACTERS = 300  # of a sample in the log
COUNTS = ("completions", "groups", "reward", "reward_square", "length", "log_prob", "cut", "equal_groups")
COUNTS += ("seconds", "reward_seconds", "rollouts")  # sums from which the figures of a record are computed


class Rollouts(Hooks):
    """Makes the micro-batches of reinforcement learning, and accumulates reward statistics.

    Args:
        args: the settings of the stage. lm_config: of its model.
        writer: lets the model write the trajectories.
        rewards: a trajectory's reward is their weighted sum.
        reference: a frozen model for the KL divergence; None with --beta 0.
    """

    shown = ("reward", "reward_std", "frac_reward_zero_std", "completion_length")
    counts: tuple[str, ...] = COUNTS
    of_target: tuple[str, ...] = ("advantages",)  # what a batch holds for each target, beside `lengths`

    def __init__(
        self,
        args: Any,
        lm_config: "MiniMindConfig",
        writer: TrajectoryWriter,
        rewards: list[Reward],
        reference: nn.Module | None = None,
    ):
        self.args, self.lm_config, self.writer, self.rewards = args, lm_config, writer, rewards
        self.reference = reference
        self.of_rewards = tuple(f"reward_{reward.name}" for reward in rewards)
        self.sums = (*self.counts, *self.of_rewards)  # their names
        self.totals: defaultdict[str, float] = defaultdict(float)  # since the last record, of all ranks
        # of this rank's rollout whose update is still to come
        self.fresh: defaultdict[str, float] = defaultdict(float)
        self.samples: list[dict] = []  # of the last rollout
        self.kept: list[Batch] = []  # for --num_iterations: this rank's last rollout

    # ---- the loop's hooks

    def prepare(self, state: TrainState, window: list[Batch]) -> list[Batch]:
        """Flat batches of the trajectories for micro-batches of prompts, or those of this rollout's first
        update."""
        if not any(batch["prompts"] for batch in window):
            return self._nothing(window)
        if state.update % self.args.num_iterations and len(self.kept) == len(window):
            # those of a checkpoint are on the host
            self.kept = [to_device(batch, state.device) for batch in self.kept]
            return self.kept
        model = unwrap(state.model)
        model.eval()
        self.samples = []
        self.fresh.clear()
        batches = self._complete(self._roll_out(state, [batch["prompts"] for batch in window]))
        model.train()
        if self.args.num_iterations > 1:
            self.kept = batches
        return batches

    def batch_start(self, state: TrainState) -> None:
        """The update will be made: its rollout counts, on all ranks."""
        host = torch.tensor([self.fresh[name] for name in self.sums], dtype=torch.float64)
        sums = dict(zip(self.sums, reduce_sum(host).tolist(), strict=True))
        for name, value in sums.items():
            self.totals[name] += value
        state.reward = sums["reward"] / sums["completions"] if sums["completions"] else None
        self.fresh.clear()

    def record_values(self, state: TrainState) -> dict[str, Any]:
        """Means over the rollouts since the last record, over all ranks, and samples of rank 0's last
        rollout."""
        means = self._means({name: self.totals[name] for name in self.sums})
        self.totals.clear()
        return means | {"samples": self.samples}

    def _means(self, total: dict[str, float]) -> dict[str, float | None]:
        """The reward statistics of a record; None where there was no rollout since the last one."""
        completions, rollouts = max(total["completions"], 1), max(total["rollouts"], 1)
        mean = total["reward"] / completions
        figures: dict[str, float | None] = {"reward": mean}
        if len(self.rewards) > 1:
            figures |= {name: total[name] / completions for name in self.of_rewards}
        figures["reward_std"] = max(0.0, total["reward_square"] / completions - mean**2) ** 0.5
        figures |= {
            "completion_length": total["length"] / completions,
            "cut_share": total["cut"] / completions,
        }
        figures["entropy"] = -total["log_prob"] / max(total["length"], 1)  # estimated, per token
        figures["frac_reward_zero_std"] = total["equal_groups"] / max(total["groups"], 1)
        figures["rollout_seconds"] = total["seconds"] / rollouts
        figures["reward_seconds"] = total["reward_seconds"] / rollouts
        figures["rollout_tokens_per_second"] = total["length"] / max(total["seconds"], 1e-9) * world_size()
        return figures if total["rollouts"] else dict.fromkeys(figures)

    def state_dict(self) -> dict[str, Any]:
        """Reward statistics since the last record, and the rollout that further updates use, of all ranks. A
        collective."""
        own = [
            {name: each for name, each in batch.items() if not name.startswith("host_")}
            for batch in self.kept
        ]
        return {"totals": dict(self.totals), "kept": gather(snapshot(own)), "samples": self.samples}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.totals = defaultdict(float, saved["totals"])
        # `completion` in early versions
        self.samples = [sample for sample in saved["samples"] if "answer" in sample]
        own = saved["kept"][this_rank()] if len(saved["kept"]) == world_size() else []
        on_host = ("cu_seqlens", "cu_seqlens_k")
        self.kept = [
            batch | {f"host_{name}": batch[name].numpy() for name in on_host if name in batch}
            for batch in own
        ]

    # ---- a rollout

    def _roll_out(self, state: TrainState, window: list[list[RolloutPrompt]]) -> list[Batch]:
        """The flat batch of the trajectories of each micro-batch of prompts; all are written in one go."""
        model = unwrap(state.model)
        begin = time.perf_counter()
        with state.autocast:
            written = self._write(self.writer, model, list(chain.from_iterable(window)), state.update)
        middle = time.perf_counter()
        judged = [self._judge(each) for each in written]
        rewards = torch.tensor([each["reward"] for each in judged], dtype=torch.float64).view(
            -1, self.writer.group
        )
        self.fresh["seconds"] += middle - begin
        self.fresh["reward_seconds"] += time.perf_counter() - middle
        self.fresh["rollouts"] += 1
        self._count(written, judged, rewards)
        rest, parts = iter(written), rewards.split([len(prompts) for prompts in window])
        with torch.no_grad(), state.autocast:
            return [
                self._learnable(model, list(islice(rest, own.numel())), own, state.device) for own in parts
            ]

    def _write(
        self, writer: TrajectoryWriter, model: nn.Module, prompts: list[RolloutPrompt], update: int
    ) -> list[Trajectory]:
        """What the policy writes, with whole weights and on a GPU with matrices in autocast's dtype: of a
        copy, which is freed behind it. A collective if the model is sharded."""
        from model.feed_forward import product_dtype  # brings in the compiler

        policy: Any = self.policy(model)
        head = policy.lm_head.weight
        return writer.write(
            whole_model(policy, product_dtype(head) if head.is_cuda else head.dtype), prompts, update
        )

    def policy(self, model: nn.Module) -> nn.Module:
        """The part of the model that writes."""
        return model

    def _learnable(
        self, model: nn.Module, written: list[Trajectory], rewards: Tensor, device: torch.device
    ) -> Batch:
        """The flat batch of trajectories with these rewards [P, G]. Those without an advantage are left out
        where nothing else is learned from them."""
        advantages = group_advantages(rewards, self.args.scale_rewards).flatten().tolist()
        pairs = [(each, a) for each, a in zip(written, advantages, strict=True) if a or self.args.beta]
        counted = (
            sum(each.sampled for each in written) if self.args.loss_type in TOKEN_LEVEL else len(written)
        )
        batch = to_device(self._flat([each for each, _ in pairs], counted), device)
        values = [value for each, a in pairs for value in [a] * each.sampled]
        batch["advantages"] = torch.tensor(values, device=device)
        return batch | self._log_probs(model, batch)

    def _log_probs(self, policy: nn.Module, batch: Batch) -> Batch:
        """Log-probabilities of the targets [M] that are compared with those under later weights."""
        log_probs, temperature = {}, self.args.temperature
        if self.reference is not None:
            log_probs["ref_log_probs"], _ = target_log_probs(self.reference, batch, temperature)
        if self.args.num_iterations > 1:
            log_probs["old_log_probs"], _ = target_log_probs(policy, batch, temperature)
        return log_probs

    def _complete(self, batches: list[Batch]) -> list[Batch]:
        """This rank's rollout, when all ranks have theirs."""
        return batches

    def _judge(self, each: Trajectory) -> dict[str, float]:
        """The rewards of a trajectory by the names of their figures; `reward` is their weighted sum."""
        prompt, where = each.prompt.messages + each.messages[:-1], each.prompt.source
        parts = compute(self.rewards, prompt, each.text, each.prompt.record, where, self.args.reward_timeout)
        total = sum(reward.weight * parts[reward.name] for reward in self.rewards)
        return {"reward": total} | {f"reward_{name}": value for name, value in parts.items()}

    def _count(self, written: list[Trajectory], judged: list[dict[str, float]], rewards: Tensor) -> None:
        values = rewards.flatten().tolist()
        for name in ("reward", *self.of_rewards):
            self.fresh[name] += sum(each[name] for each in judged)
        self.fresh["completions"] += len(written)
        self.fresh["groups"] += len(rewards)
        self.fresh["reward_square"] += sum(value**2 for value in values)
        self.fresh["length"] += sum(each.sampled for each in written)
        self.fresh["log_prob"] += sum(each.log_prob for each in written)
        self.fresh["cut"] += sum(each.is_cut for each in written)
        self.fresh["equal_groups"] += int((rewards == rewards[:, :1]).all(dim=1).sum())
        self.samples = self.samples or [
            {
                "prompt": _shown(each.prompt.messages[-1]["content"]),
                "answer": _shown("\n".join(message["content"] for message in each.messages)),
                "reward": value,
            }
            for each, value in zip(written[:2], values[:2], strict=True)
        ]

    def _flat(self, written: list[Trajectory], counted: int) -> Batch:
        """The flat batch, in which the trajectories to a prompt share it; with, for each target [M], the
        length of its completion (`lengths`) and zeros for the fields `of_target`; and with this micro-batch's
        part of what the loss is divided by (`counted`)."""
        samples = [
            {
                "input_ids": np.array(each.tokens, dtype=np.int64),
                "loss_mask": np.array(each.is_target),
                "sample_id": each.prompt.sample_id,
                "target_bytes": 0,
            }
            for each in written
        ]
        groups = groupby(samples, lambda sample: sample["sample_id"])
        batch: Batch = collate_shared([list(group) for _, group in groups])
        sampled = torch.tensor([each.sampled for each in written], dtype=torch.int64)
        batch["lengths"] = sampled.repeat_interleave(sampled).float()
        batch |= {name: torch.zeros_like(batch["lengths"]) for name in self.of_target}
        return batch | {"counted": counted}

    def _nothing(self, window: list[Batch]) -> list[Batch]:
        """As many batches without trajectories."""
        return [self._flat([], 0) for _ in window]

    def size(self, batch: Batch, lm_config: Any = None) -> Size:
        """The size of a flat batch, or of held-out prompts."""
        if "prompts" in batch:
            return Size(len(batch["prompts"]), sum(len(prompt.input_ids) for prompt in batch["prompts"]))
        return flat_size(batch, self.lm_config)._replace(targets=batch["counted"])

    def held_out(self, model: nn.Module, batch: Batch, args: Any = None) -> dict[str, Tensor]:
        """Sums over held-out prompts, of which the likeliest completions are judged: the rewards, and `loss`,
        minus the weighted one."""
        writer = replace(self.writer, group=1, temperature=0.0)
        judged = [self._judge(each) for each in self._write(writer, model, batch["prompts"], 0)]
        names = ("reward", *self.of_rewards) if len(self.rewards) > 1 else ("reward",)
        figures = {name: sum(each[name] for each in judged) for name in names}
        figures["loss"] = -figures["reward"]
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
