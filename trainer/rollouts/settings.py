"""What the stages of reinforcement learning share: their flags, and how a run gets its rollouts."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from torch import nn

from common.plugins import source_files
from common.settings import StageArgs, setting
from model.sampling import COLDEST
from trainer.devices.wrapping import is_sharded, unwrap, whole_model, wrap_model
from trainer.objectives.next_token import frozen_model
from trainer.rollouts.batches import MakeBatches, Rollouts, group_batches, rollout_size
from trainer.rollouts.environments import Environment
from trainer.rollouts.rewards import load_rewards, reward_model, reward_parts
from trainer.rollouts.writer import TrajectoryWriter
from trainer.run.resume import FrozenModelArgs, files_fingerprint
from trainer.run.state import TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RolloutArgs(FrozenModelArgs):
    """The flags of all stages that learn from rollouts."""

    monitor: str = "eval_reward"
    mode: Literal["min", "max"] = "max"
    max_gen_len: int = setting(256, "longest completion (--max_seq_len: longest prompt)", "tokens", ge=1)
    temperature: float = setting(1.0, "sampling temperature; also applied in the loss", ge=COLDEST)
    reward: str = setting(
        "exact_answer", "rewards: module:function or a shipped one, several with commas, NAME=WEIGHT"
    )
    reward_model: str | None = setting(
        None, "adds a sequence classifier's score: a Hugging Face folder", hashed_as="reward_model_sha256"
    )
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

    @property
    def reference_is_start_weights(self) -> bool:
        return self.beta > 0

    @property
    def resume_needs_start_weights(self) -> bool:
        return self.beta > 0

    def code_files(self) -> list[Path]:
        """The modules of the rewards and of the environment that the settings name."""
        names = [part.partition("=")[0] for part in reward_parts(self.reward)]
        names.append(getattr(self, "environment", ""))
        paths: list[Path] = []
        for name in names:
            if ":" in name:
                paths += source_files(name)
        return paths

    def frozen_hashes(self) -> dict[str, str]:
        if self.reward_model is None:
            return {}
        files = sorted(each for each in Path(self.reward_model).glob("*") if each.is_file())
        return files_fingerprint("reward_model", files)  # also of its template

    def contradictions(self) -> list[str]:
        """Flags that have no effect, or do not go together."""
        wrong = super().contradictions()
        given = [name for name in self.clips if not self.is_default(name)]
        if given and self.num_iterations == 1:
            why = "has no effect with one update per rollout"
            wrong.append(f"--{given[0]} {why}; add --num_iterations 2, or leave it out")
        if self.open_thinking and self.thinking_ratio:
            wrong.append("--open_thinking 1 is --thinking_ratio 1; leave one of them out")
        for name in ("packing", "use_compile"):
            if getattr(self, name) is True:
                wrong.append(f"--{name} 1 has no effect on completions, which are sampled; leave it out")
        return wrong


class ReinforcementArgs(RolloutArgs):
    """The flags of the stages that compare the completions of a prompt with each other."""

    num_generations: int = setting(8, "completions per prompt: the group that they are compared in", ge=2)
    scale_rewards: bool = setting(True, "1: divide an advantage by the group's standard deviation")
    loss_type: Literal["grpo", "dapo", "cispo"] = setting("dapo", "loss and its normalisation")
    epsilon_high: float = setting(0.2, "upper clip: the ratio is at most 1 + epsilon_high", gt=0)

    clips: ClassVar[tuple[str, ...]] = ("epsilon", "epsilon_high")


def add_rollouts(
    state: TrainState,
    tokenizer: "PreTrainedTokenizerBase",
    environment: type[Environment] | None = None,
    make_batches: MakeBatches = group_batches,
    policy_of: Callable[[nn.Module], nn.Module] = unwrap,
) -> Rollouts:
    """Have the loop train what the model writes to the prompts: in an environment, over several turns. With
    --beta the policy as it is now, which are the start weights, is kept as the reference. Raises UserError if
    a reward, the reward model or an environment cannot be used."""
    args = cast(Any, state.args)
    score = reward_model(args.reward_model, state.device) if args.reward_model else None
    rewards = load_rewards(args.reward, score)
    writer = TrajectoryWriter(
        tokenizer, args.num_generations, args.temperature, args.max_gen_len, args.seed,
        environment, reply_timeout=args.reward_timeout,
    )  # fmt: skip
    if environment is not None:
        writer.max_turns, writer.max_total_len = args.max_turns, args.max_total_len
    reference: nn.Module | None = None
    if args.beta:
        policy: Any = policy_of(state.model)
        if is_sharded(policy):
            policy = whole_model(policy)
            policy = wrap_model(policy, state.device, args.parallel, False, False, state.autocast)
        else:
            policy = copy.deepcopy(policy)
        reference = frozen_model(cast(Any, policy), state.device)
    rollouts = Rollouts(args, writer, rewards, reference, make_batches, policy_of)
    state.callbacks.append(rollouts)
    state.prepare, state.shown = rollouts.prepare, rollouts.shown
    state.size_fn, state.eval_fn = rollout_size, rollouts.held_out
    return rollouts
