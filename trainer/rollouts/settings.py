"""What the stages of reinforcement learning share: their flags, and the objective that makes rollouts."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch

from common.files import files_in, is_file
from common.settings import LONGEST, FrozenModelArgs, StageArgs, setting
from model.sampling import COLDEST
from trainer.rollouts.batches import Rollouts
from trainer.rollouts.environments import Environment
from trainer.rollouts.rewards import (
    check_record,
    check_reward_model,
    load_rewards,
    reward_model,
    reward_parts,
)
from trainer.rollouts.writer import TrajectoryWriter
from trainer.weights.files import files_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

R = TypeVar("R", bound=Rollouts)


def too_long(max_seq_len: int, max_gen_len: int) -> list[str]:
    """The mistake if the longest prompt and the longest completion together exceed a model's positions."""
    if max_seq_len + max_gen_len <= LONGEST:
        return []
    return [
        f"--max_seq_len {max_seq_len} and --max_gen_len {max_gen_len} together exceed the {LONGEST} "
        "positions of a model; lower one of them"
    ]


class RolloutArgs(FrozenModelArgs):
    """The flags of all stages that learn from rollouts."""

    may_change: ClassVar[str] = "reward_model reward_timeout"  # the reward model is compared by its hash
    monitor: str = "eval_reward"
    mode: Literal["min", "max"] = "max"
    max_gen_len: int = setting(256, "longest completion (--max_seq_len: longest prompt)", "tokens", ge=1)
    temperature: float = setting(1.0, "sampling temperature; also applied in the loss", ge=COLDEST)
    reward: str = setting(
        "exact_answer", "rewards: module:function or a shipped one, several with commas, NAME=WEIGHT"
    )
    reward_model: str | None = setting(None, "adds a sequence classifier's score: a Hugging Face folder")
    reward_timeout: float = setting(
        10.0, "longest time of a reward, or of a reply of an environment", "seconds", gt=0
    )
    beta: float = setting(0.0, "weight of the KL divergence from the start weights", ge=0)
    num_iterations: int = setting(1, "updates per rollout", ge=1)
    epsilon: float = setting(
        0.2, "lower clip: the ratio is at least 1 - epsilon; needs --num_iterations 2", gt=0, lt=1
    )
    open_thinking: bool = setting(False, "1: completions begin with thoughts, as in chat")
    thinking_ratio: float = setting(
        0.0, "share of the prompts whose completions begin with thoughts, 0 to 1", ge=0, le=1
    )

    aliases = StageArgs.aliases | {"reward_model_path": "reward_model"}  # MiniMind's name
    clips: ClassVar[tuple[str, ...]] = ("epsilon",)  # flags that need num_iterations > 1

    def frozen_model_hashes(self) -> dict[str, str | None]:
        if self.reward_model is None:
            return {"reward_model_sha256": None}
        files = [each for each in files_in(self.reward_model) if is_file(each)]
        return {"reward_model_sha256": files_hash(files)}  # also of its template

    def check_names(self) -> None:
        if reward_parts(self.reward) or self.reward_model is None:
            load_rewards(self.reward)
        if self.reward_model is not None:
            check_reward_model(self.reward_model)

    def check_of_prompts(self) -> Callable[[dict], None]:
        """A function that raises BadRecord for a record that the rewards cannot judge."""
        rewards = load_rewards(self.reward) if reward_parts(self.reward) else []
        return partial(check_record, rewards)

    def contradictions(self) -> list[str]:
        """Mistakes: flags that have no effect, or that exclude each other."""
        wrong = super().contradictions() + too_long(self.max_seq_len, self.max_gen_len)
        given = [name for name in self.clips if not self.is_default(name)]
        if given and self.num_iterations == 1:
            why = "has no effect with one update per rollout"
            wrong.append(f"--{given[0]} {why}; add --num_iterations 2, or leave it out")
        if self.open_thinking and self.thinking_ratio:
            wrong.append("--open_thinking 1 is --thinking_ratio 1; leave one of them out")
        if self.packing:
            wrong.append("--packing 1 has no effect on completions, which are sampled; leave it out")
        if self.parallel == "fsdp":
            wrong.append("--parallel fsdp: completions are sampled from a whole model; use --parallel ddp")
        return wrong


class ReinforcementArgs(RolloutArgs):
    """The flags of the stages that compare the completions of a prompt with each other."""

    num_generations: int = setting(8, "completions per prompt: the group that they are compared in", ge=2)
    scale_rewards: bool = setting(True, "1: divide an advantage by the group's standard deviation")
    loss_type: Literal["grpo", "dapo", "cispo"] = setting("dapo", "loss and its normalisation")
    epsilon_high: float = setting(0.2, "upper clip: the ratio is at most 1 + epsilon_high", gt=0)

    clips: ClassVar[tuple[str, ...]] = ("epsilon", "epsilon_high")


def make_rollouts(
    kind: type[R],
    args: Any,
    tokenizer: "PreTrainedTokenizerBase",
    device: torch.device,
    environment: type[Environment] | None = None,
) -> R:
    """The objective of a stage that trains on the model's own completions; with an environment, over several
    turns. Raises UserError if a reward, the reward model or an environment cannot be used."""
    score = reward_model(args.reward_model, device) if args.reward_model else None
    rewards = load_rewards(args.reward, score)
    writer = TrajectoryWriter(
        tokenizer, args.num_generations, args.temperature, args.max_gen_len, args.seed,
        environment, reply_timeout=args.reward_timeout,
    )  # fmt: skip
    if environment is not None:
        writer.max_turns, writer.max_total_len = args.max_turns, args.max_total_len
    return kind(args, writer, rewards)
