"""PPO: a critic estimates the value before each token, so each token has its own advantage
(arXiv:1707.06347).

The critic is a second transformer, of the policy's shape and start weights, with one value per position as
its head. With one trunk and two heads, the value loss would change the policy, and two learning rates would
make no sense."""

from copy import deepcopy
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dataset.batch import Batch, Size
from trainer.callbacks.train_state import TrainState
from trainer.devices.process_group import reduce_sum
from trainer.devices.wrapping import recompute_layers, unwrap
from trainer.objectives.next_token import target_log_probs, target_logits
from trainer.rollouts.batches import RewardedTrajectories, Rollouts, empty_batch, flat_batch
from trainer.rollouts.policy import policy_loss, sampling_difference
from trainer.weights.files import Description, save_weights
from trainer.weights.tensor_file import Writer

if TYPE_CHECKING:
    from model.model_minimind import MiniMindForCausalLM


class ActorCritic(nn.Module):
    """The policy, which generates, and the critic, which estimates the future reward. The critic's first
    values are 0."""

    supports_gradient_checkpointing = True

    def __init__(self, actor: "MiniMindForCausalLM"):
        super().__init__()
        self.actor, self.critic = actor, scalar_head(deepcopy(actor))

    def forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """For a flat batch: the log-probability of each target and the value before it, both [M], and the sum
        of the auxiliary losses []."""
        log_probs, aux_loss = target_log_probs(self.actor, batch, temperature)
        values, critics = self.values(batch)
        return log_probs, values, aux_loss + critics

    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The value before each target [M], and the critic's auxiliary loss []."""
        values, aux_loss = target_logits(self.critic, batch)
        return values.float().squeeze(-1), aux_loss

    def activation_checkpointing_enable(self, options: dict[str, Any]) -> None:
        """Recompute the activations of both."""
        for model in (self.actor, self.critic):
            recompute_layers(model)


def scalar_head(model: "MiniMindForCausalLM") -> "MiniMindForCausalLM":
    """Replace a model's head, in place, by a head with one number per position, which starts at 0."""
    model.config.tie_word_embeddings = False
    model.lm_head = nn.Linear(model.config.hidden_size, 1)
    for parameter in model.lm_head.parameters():
        nn.init.zeros_(parameter)
    return model


def unwrapped(model: nn.Module) -> ActorCritic:
    """The two models without their wrapper."""
    return cast(ActorCritic, unwrap(model))


def actor_of(model: nn.Module) -> nn.Module:
    """The policy, which generates."""
    return unwrapped(model).actor


def token_advantages(values: list[float], reward: float, gamma: float, lam: float) -> list[float]:
    """Generalised advantage estimates (arXiv:1506.02438) of a completion's tokens, from the `values` before
    each token and the reward, which is given at the last token."""
    advantages: list[float] = []
    next_value = advantage = 0.0
    for value in reversed(values):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        advantages.append(advantage)
        next_value, reward = value, 0.0
    return advantages[::-1]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the squared error of the values [M], summed. If a value has moved by more than `clip` since the
    rollout, the error of the clipped value counts if it is larger."""
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (bounded - returns).square()).sum()


def policy_divergence(log_probs: Tensor, old: Tensor) -> Tensor:
    """KL divergence of the current policy from the one that sampled, summed over its tokens, by the k3
    estimator."""
    difference = log_probs - old
    return (difference.exp() - difference - 1).sum()


def actor_critic_loss(model: nn.Module, batch: Batch, args: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The loss of the stage: the sum of the policy's and the critic's losses over the sampled tokens, the sum
    of the auxiliary losses over all tokens, and metrics by name, each []. model: an ActorCritic. args: the
    settings of the stage."""
    log_probs, values, aux_loss = model(batch, args.temperature)  # [M]
    old = batch.get("old_log_probs", log_probs.detach())  # the first update of a rollout
    old_values = batch.get("old_values", values.detach())
    loss, metrics = policy_loss(
        log_probs, old, batch["advantages"], batch["lengths"], "dapo", args.epsilon,
        args.epsilon, batch.get("ref_log_probs"), args.beta,
    )  # fmt: skip
    critic = value_loss(values, old_values, batch["returns"], args.cliprange_value)
    metrics |= {"value_loss": critic.detach(), "approx_kl": policy_divergence(log_probs.detach(), old)}
    return loss + args.vf_coef * critic, aux_loss, metrics | sampling_difference(old, batch)


def critic_batches(
    model: nn.Module, rollouts: list[RewardedTrajectories], args: Any, device: torch.device
) -> list[Batch]:
    """The flat batches of trajectories, one per prompt, whose tokens are judged with the critic's values.
    Advantages are normalised to mean 0 and standard deviation 1 over the tokens of the update on all ranks;
    returns are not. All ranks must call it (a collective)."""
    batches = []
    for written, rewards in rollouts:
        sampled = [trajectory.sampled for trajectory in written]
        batch = flat_batch(written, sum(sampled)).to(device)
        values, _ = unwrapped(model).values(batch)
        advantages: list[float] = []
        values_of_each = values.cpu().double().split(sampled)
        for before, reward in zip(values_of_each, rewards.flatten().tolist(), strict=True):
            advantages += token_advantages(before.tolist(), reward, args.gamma, args.lam)
        batch["advantages"] = torch.tensor(advantages, device=device)
        batch["returns"] = batch["advantages"] + values
        if args.num_iterations > 1:
            batch["old_values"] = values
        batches.append(batch)
    of_update = torch.cat([batch["advantages"] for batch in batches]).cpu().double()
    moments = torch.stack((torch.ones_like(of_update), of_update, of_update.square()))
    count, total, squares = reduce_sum(moments.sum(dim=1)).tolist()
    mean = total / count
    scale = 1 / sqrt(max(0.0, squares - count * mean**2) / max(count - 1, 1) + 1e-8)  # as in TRL
    return [batch | {"advantages": (batch["advantages"] - mean) * scale} for batch in batches]


class PPO(Rollouts):
    """What the stage learns: the actor's completions, judged by the critic.

    It skips the later updates of a rollout once the policy has moved too far from the one that sampled it
    (--early_stop_kl), and adds the share of skipped later updates to a record."""

    later = left_out = 0  # updates since the last record
    is_over: bool | None = None  # of the next update; None if it is a rollout's first

    def loss(self, model: nn.Module, batch: Batch, args: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return actor_critic_loss(model, batch, args)

    def size(self, batch: Batch, lm_config: Any) -> Size:
        size = super().size(batch, lm_config)
        if "prompts" in batch:  # held-out ones
            return size
        return size._replace(flops=size.flops + batch.flops(lm_config, targets=0))  # of the critic

    def save(self, model: nn.Module, path: Path, writer: Writer, description: Description) -> Path:
        return save_weights(actor_of(model), path, writer, description)  # under the names of any other stage

    @staticmethod
    def policy_of(model: nn.Module) -> nn.Module:
        return actor_of(model)

    def make_batches(
        self, model: nn.Module, rollouts: list[RewardedTrajectories], device: torch.device
    ) -> list[Batch]:
        return critic_batches(model, rollouts, self.args, device)

    def prepare(self, state: TrainState, micro_batches: list[Batch]) -> list[Batch]:
        """The micro-batches of a rollout, or empty ones."""
        batches = super().prepare(state, micro_batches)
        self.is_over = None
        is_first = state.progress.update % self.args.num_iterations == 0
        if is_first or not any(batch["prompts"] for batch in micro_batches):
            return batches
        limit = self.args.early_stop_kl
        self.is_over = 0 < limit < moved_since_rollout(state, batches, self.args.temperature)
        return [empty_batch() for _ in micro_batches] if self.is_over else batches

    def on_batch_start(self, state: TrainState, update: int) -> None:
        super().on_batch_start(state, update)
        if self.is_over is not None:
            self.later += 1
            self.left_out += self.is_over

    def on_log(self, state: TrainState, record: dict[str, Any]) -> None:
        super().on_log(state, record)
        record["stopped"] = self.left_out / max(self.later, 1)
        self.later = self.left_out = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"later": self.later, "left_out": self.left_out}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.later, self.left_out = saved["later"], saved["left_out"]


@torch.no_grad()
def moved_since_rollout(state: TrainState, batches: list[Batch], temperature: float) -> float:
    """Mean KL divergence per token from the policy that sampled, over all ranks."""
    model = unwrapped(state.model)
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        with state.autocast:
            log_probs, _ = target_log_probs(model.actor, batch, temperature)
        sums += torch.tensor([float(policy_divergence(log_probs, batch["old_log_probs"])), len(log_probs)])
    model.train()
    total, count = reduce_sum(sums).tolist()
    return total / max(count, 1)
