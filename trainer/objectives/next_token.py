"""The loss of the next token on flat batches: pretraining and SFT."""

from typing import Any

from torch import Tensor, nn

from dataset.batch import Batch
from model.losses import cross_entropy
from trainer.objectives.base import Metrics, Objective


class NextToken(Objective):
    """Pretraining and SFT."""

    loss_is_cross_entropy = True

    def loss(self, model: nn.Module, batch: Batch, args: Any) -> tuple[Tensor, Tensor, Metrics]:
        return next_token_loss(model, batch)

    def held_out(self, model: nn.Module, batch: Batch, args: Any) -> Metrics:
        return {"loss": next_token_loss(model, batch)[0]}


def next_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
    """The sum over the targets of cross entropy times weight, the load-balancing loss summed over the tokens
    (zero for a dense model), and no metrics."""
    weights = batch.get("loss_weight")
    if weights is None:  # all are 1
        out = model(**batch.model_inputs(), targets=batch["targets"])
        return out.loss, out.aux_loss, {}
    out = model(**batch.model_inputs(), targets=batch["targets"], reduction="none")
    return (out.loss * weights).sum(), out.aux_loss, {}


def target_log_probs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The log-probability of each target [M] under softmax(logits / temperature), and the load-balancing
    loss."""
    if temperature != 1.0:
        logits, aux_loss = target_logits(model, batch)
        return -cross_entropy(logits / temperature, batch["targets"], "none"), aux_loss
    out = model(**batch.model_inputs(), targets=batch["targets"], reduction="none")
    return -out.loss, out.aux_loss


def target_logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """For a loss of your own: the logits [M, V] that predict `batch["targets"]` [M], and the load-balancing
    loss."""
    out = model(**batch.model_inputs())
    return out.logits, out.aux_loss
