"""Trajectories: what a model generates for a prompt, in one turn or, with tools, in several.

After each turn of an agent, the environment answers its calls, and the tokens of the reply are appended. They
are context and never targets. The tokens of a turn stay as they were sampled."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from common.errors import UserError
from common.plugins import user_code
from common.seeds import draw
from dataset.rollout_prompts import RolloutPrompt
from model.answers import answer_message
from model.generation import generate
from model.prompts import Piece, encode_pieces, prompt_pieces
from model.sampling import Sampling
from trainer.devices.wrapping import decoding_model
from trainer.rollouts.environments import Call, Environment, checked_replies

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


@dataclass
class Trajectory:
    """One member of a prompt's group."""

    prompt: RolloutPrompt
    number: int  # in the group
    tokens: list[int]  # tokens of the prompt, and of all turns and replies
    is_target: list[bool]  # which of them were sampled
    messages: list[dict] = field(default_factory=list)  # messages of the turns and replies after the prompt
    environment: Environment | None = None
    text: str = ""  # of the last turn
    log_probs: list[float] = field(default_factory=list)  # of the sampled tokens
    is_cut: bool = False  # ended by a limit of tokens or turns

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(self.is_target)


@dataclass
class TrajectoryWriter:
    """Makes a model generate trajectories: one turn each, or with an environment several."""

    tokenizer: "PreTrainedTokenizerBase"
    group: int  # trajectories per prompt
    temperature: float  # 0 always takes the likeliest token
    max_gen_len: int  # tokens of one turn at most
    seed: int  # of the run
    environment: type[Environment] | None = None  # made anew for each trajectory
    max_turns: int = 1
    max_total_len: int = 1 << 20  # tokens of a trajectory at most, with prompt and replies
    reply_timeout: float = 10.0  # seconds

    def write(self, model: Any, prompts: Sequence[RolloutPrompt], update: int) -> list[Trajectory]:
        """`group` trajectories of each prompt, prompt by prompt."""
        trajectories = []
        for prompt in prompts:
            for number in range(self.group):
                tokens = list(prompt.input_ids)
                trajectory = Trajectory(prompt, number, tokens, [False] * len(tokens))
                if self.environment is not None:
                    with user_code("the environment", prompt.source, self.reply_timeout):
                        trajectory.environment = self.environment(deepcopy(prompt.record))
                trajectories.append(trajectory)
        active = trajectories
        for turn in range(self.max_turns):
            if not active:
                break
            self._write_turn(model, active, update, turn)
            is_last = turn == self.max_turns - 1
            active = [trajectory for trajectory in active if self._reply(trajectory, is_last)]
        return trajectories

    def _write_turn(self, model: Any, active: list[Trajectory], update: int, turn: int) -> None:
        """Generate one turn of each trajectory. Trajectories whose tokens are still equal share one
        prefill."""
        groups: dict[tuple[int, ...], list[Trajectory]] = {}
        for trajectory in active:
            groups.setdefault(tuple(trajectory.tokens), []).append(trajectory)

        samplings: list[list[Sampling]] = []
        for group in groups.values():
            samplings.append([])
            for trajectory in group:
                seed = draw(self.seed, update, trajectory.prompt.sample_id, trajectory.number, turn)
                samplings[-1].append(Sampling(self.temperature, seed=seed))
        room = [max(1, min(self.max_gen_len, self.max_total_len - len(tokens))) for tokens in groups]
        end_ids = [int(cast(int, self.tokenizer.eos_token_id))]
        answers = generate(model, list(groups), samplings, room, end_ids)
        for group, written in zip(groups.values(), answers, strict=True):
            for trajectory, answer in zip(group, written, strict=True):
                trajectory.tokens += answer.tokens
                trajectory.is_target += [True] * len(answer.tokens)
                trajectory.log_probs += answer.logprobs
                trajectory.is_cut = answer.finish == "length"
                trajectory.text = str(self.tokenizer.decode(answer.tokens, skip_special_tokens=True))
                trajectory.messages.append({"role": "assistant", "content": trajectory.text})

    def _reply(self, trajectory: Trajectory, is_last: bool) -> bool:
        """Append the environment's replies to the calls of the last turn. Returns whether another turn
        follows."""
        if trajectory.environment is None or trajectory.is_cut:
            return False
        calls = calls_of(trajectory.text)
        if not calls:
            return False
        if is_last:
            trajectory.is_cut = True
            return False
        with user_code("the environment", trajectory.prompt.source, self.reply_timeout):
            replies = checked_replies(trajectory.environment.reply(calls))
        tokens = self._between_turns(trajectory, replies)
        if len(trajectory.tokens) + len(tokens) >= self.max_total_len:
            trajectory.is_cut = True
            return False
        trajectory.messages += replies
        trajectory.tokens += tokens
        trajectory.is_target += [False] * len(tokens)
        return True

    def _between_turns(self, trajectory: Trajectory, replies: list[dict]) -> list[int]:
        """The tokens between two turns: from after the end token of one to the beginning of the next."""
        start = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        # up to the end token
        before = str(self.tokenizer.apply_chat_template(start, tokenize=False)).rstrip()
        try:
            first, *others = prompt_pieces(self.tokenizer, [*start, *replies])
        except ValueError as error:
            raise UserError(f"{trajectory.prompt.source}: {error}") from error
        if not first.text.startswith(before):
            raise UserError(
                "the chat template rewrites earlier turns when tools reply, so an agent cannot continue"
            )
        return encode_pieces(self.tokenizer, [Piece(first.text[len(before) :], False), *others])


def policy_for_decoding(policy: Any, earlier: "nn.Module | None") -> "nn.Module":
    """The policy as it generates: on a GPU a copy whose matrices are in autocast's dtype, otherwise the
    policy itself. earlier: an earlier copy, which gets the current weights."""
    from model.model_minimind import product_dtype  # brings in the compiler

    head = policy.lm_head.weight
    return decoding_model(policy, product_dtype(head) if head.is_cuda else head.dtype, earlier)


def calls_of(text: str) -> list[Call]:
    """The well-formed tool calls in a turn: [{"name", "arguments"}]."""
    return [call["function"] for call in answer_message(text).get("tool_calls", ())]
