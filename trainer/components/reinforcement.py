"""What the stages of reinforcement learning share: their flags, prompts and loaders, and the frozen reference."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from common.errors import UserError
from common.plugins import source_files
from common.settings import ROOT, StageArgs, setting
from dataset.rollout_prompts import PromptDataset, collate_prompts
from model.sampling import COLDEST
from trainer.components.distributed import world_size
from trainer.components.environments import Environment
from trainer.components.loaders import epoch_order, ordered_loader
from trainer.components.resume import files_fingerprint
from trainer.components.reward_model import reward_model
from trainer.components.rewards import Reward, load_rewards, reward_parts
from trainer.components.run_files import start_path
from trainer.components.trajectories import TrajectoryWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EPSILON = 0.2
CODE = tuple(
    f"trainer/components/{name}.py"
    for name in ("rollouts", "trajectories", "rewards", "reward_model", "environments", "policy_loss", "ppo")
)
CODE += ("model/generation.py", "model/sampling.py", "model/answers.py", "model/prompts.py")


@dataclass(kw_only=True)
class RolloutArgs(StageArgs):
    """The flags of all stages that learn from rollouts."""

    monitor: str = "eval_reward"
    mode: Literal["min", "max"] = "max"
    max_gen_len: int = setting(256, "longest completion (--max_seq_len: longest prompt)", "tokens", ge=1)
    temperature: float = setting(1.0, "sampling temperature; also applied in the loss", ge=COLDEST)
    reward: str = setting("exact_answer", "rewards: module:function or a shipped one, several with commas, NAME=WEIGHT")
    reward_model: str | None = setting(None, "adds a model's score: sequence classifier, or weights with a scalar head")
    reward_timeout: float = setting(10.0, "longest time of a reward, or of a reply of an environment", "seconds", gt=0)
    beta: float = setting(0.0, "weight of the KL divergence from the start weights", ge=0)
    num_iterations: int = setting(1, "updates per rollout", ge=1)
    epsilon: float = setting(
        EPSILON, "lower clip: the ratio is at least 1 - epsilon; needs --num_iterations 2", gt=0, lt=1
    )
    open_thinking: bool = setting(False, "1: completions begin with thoughts, as in chat")

    clips: ClassVar[tuple[str, ...]] = ("epsilon",)  # flags that need num_iterations > 1

    def frozen_weights(self) -> dict[str, Path]:
        return {"from_weight": start_path(self.save_dir, self.from_weight, self)} if self.beta else {}

    def builds_on_start_weights(self) -> bool:
        return self.beta > 0  # they are the reference

    def code_files(self) -> list[Path]:
        return rollout_code(self)

    def frozen_hashes(self) -> dict[str, str]:
        if self.reward_model is None:
            return {}
        path = Path(self.reward_model)
        files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())  # its template
        return files_fingerprint("reward_model", files, self.cache_dir)

    def contradictions(self) -> list[str]:
        """Flags that have no effect, or do not go together."""
        wrong = super().contradictions()
        given = [name for name in self.clips if getattr(self, name) != getattr(type(self), name)]
        if given and self.num_iterations == 1:
            wrong.append(
                f"--{given[0]} has no effect with one update per rollout; add --num_iterations 2, or leave it out"
            )
        for name in ("packing", "use_compile"):
            if getattr(self, name) is True:
                wrong.append(f"--{name} 1 has no effect on completions, which are sampled; leave it out")
        if self.parallel == "fsdp":
            wrong.append("--parallel fsdp: completions are sampled from whole weights; leave it out")
        return wrong


@dataclass(kw_only=True)
class ReinforcementArgs(RolloutArgs):
    """The flags of the stages that compare the completions of a prompt with each other."""

    num_generations: int = setting(8, "completions per prompt: the group that they are compared in", ge=2)
    scale_rewards: bool = setting(True, "1: divide an advantage by the group's standard deviation")
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = setting("dapo", "loss and its normalisation")
    epsilon_high: float = setting(EPSILON, "upper clip: the ratio is at most 1 + epsilon_high", gt=0)

    clips: ClassVar[tuple[str, ...]] = ("epsilon", "epsilon_high")

    def contradictions(self) -> list[str]:
        """Flags that have no effect, or do not go together."""
        wrong = super().contradictions()
        if self.loss_type == "cispo" and self.epsilon != EPSILON:
            wrong.append("--epsilon has no effect with --loss_type cispo, which clips from above only; leave it out")
        return wrong


def open_prompts(
    args: RolloutArgs, tokenizer: "PreTrainedTokenizerBase", tools: list[dict] | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """The training and held-out (or None) prompts. Raises UserError."""
    if not args.data_path:
        raise UserError("--data_path is missing: give a file, a folder or a pattern")
    options: dict[str, Any] = {name: getattr(args, name) for name in ("cache_dir", "on_bad_data", "max_bad_share")}
    options |= {"tools": tools, "enable_thinking": args.open_thinking}
    paths = (args.data_path, args.eval_data_path)
    train, held_out = (PromptDataset(path, tokenizer, args.max_seq_len, **options) if path else None for path in paths)
    return cast(PromptDataset, train), held_out


def run_rewards(args: RolloutArgs, device: torch.device) -> list[Reward]:
    """The rewards of a run. Raises UserError."""
    return load_rewards(args.reward, reward_model(args.reward_model, device) if args.reward_model else None)


def trajectory_writer(
    args: Any,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: PromptDataset,
    environment: type[Environment] | None = None,
) -> TrajectoryWriter:
    """What lets the model write completions to the prompts, or, in an environment, trajectories of several turns."""
    sampling = (args.num_generations, args.temperature, args.max_gen_len, args.seed, prompts.source)
    writer = TrajectoryWriter(tokenizer, *sampling, reply_timeout=args.reward_timeout)
    if environment is None:
        return writer
    limits = {"max_turns": args.max_turns, "max_total_len": args.max_total_len}
    return replace(writer, environment=environment, **limits)


def samples_per_epoch(prompts: PromptDataset, args: RolloutArgs) -> int:
    """Prompts that an epoch trains, each counted once per update that it takes part in. Only whole updates are made;
    the prompts left over are others in the next epoch. Raises UserError if there are fewer than an update takes."""
    per_update = args.batch_size * args.accumulation_steps * world_size()
    if len(prompts) < per_update:
        raise UserError(
            f"--data_path holds {len(prompts)} prompts, and an update takes {per_update} (batch_size x "
            "accumulation_steps x processes); lower --batch_size"
        )
    return len(prompts) // per_update * per_update * args.num_iterations


def prompt_loader(prompts: PromptDataset, args: RolloutArgs, epoch: int, skip_batches: int = 0) -> DataLoader:
    """This rank's micro-batches of prompts of one epoch; those of an update come --num_iterations times."""
    per_update = args.batch_size * args.accumulation_steps * world_size()
    order = epoch_order(len(prompts), args.seed, epoch)
    updates = order[: len(order) // per_update * per_update].reshape(-1, per_update)
    order = np.repeat(updates, args.num_iterations, axis=0).reshape(-1)
    return ordered_loader(prompts, order, args.batch_size, skip_batches, args.num_workers, collate_prompts)


def rollout_code(args: Any) -> list[Path]:
    """The files whose change is a warning on resume, beside those of every stage: the code of rollouts, and the modules
    of the rewards and of the environment that the settings name."""
    names = [part.partition("=")[0] for part in reward_parts(args.reward)] + [getattr(args, "environment", "")]
    return [ROOT / path for path in CODE] + [path for name in names if ":" in name for path in source_files(name)]
