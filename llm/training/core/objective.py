"""What a task of the engine learns, as the loop takes it: the results of its methods, checked."""

from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UserError
from trainer.objectives.next_token import Batch, Metrics, Objective, defining_file
from trainer.report.speed import Size


class TaskObjective(Objective):
    """What a task learns, by its own methods."""

    def __init__(self, task: Any):
        self.task = task
        self.shown, self.needs_reference = task.shown, task.needs_reference

    @property
    def stage(self) -> str:
        return defining_file(self.task)

    def size(self, batch: Batch, lm_config: Any) -> Size:
        return self.task.size(batch)

    def loss(self, model: nn.Module, batch: Batch, args: Any) -> tuple[Tensor, Tensor, Metrics]:
        self.task.reference = self.reference
        return checked_loss(self.task, self.task.train_step(model, batch))

    def held_out(self, model: nn.Module, batch: Batch, args: Any) -> Metrics:
        self.task.reference = self.reference
        return checked_sums(self.task, self.task.validation_step(model, batch))


# --- the form of what a task's methods return


def check_criterion(task: Any) -> None:
    """Raise UserError if the loss function is one of torch that returns means."""
    if getattr(task.criterion, "reduction", None) == "mean":
        made, kind = f"{type(task).__name__}.build_criterion", type(task.criterion).__name__
        why = "but the loop divides the sums by the number of targets of the whole update"
        raise UserError(f"{made} returns {kind}(reduction='mean'), {why}: use {kind}(reduction='sum')")


def checked_loss(task: Any, result: Any) -> tuple[Tensor, Tensor, Metrics]:
    """The loss [], the auxiliary loss [] and the sums of metrics that `train_step` returned; the last two may
    be missing. Raises UserError if the loss is no single number with a gradient."""
    values = result if isinstance(result, tuple) else (result,)
    loss = values[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            what += f" of shape {list(loss.shape)}, requires_grad={loss.requires_grad}"
        raise UserError(
            f"{type(task).__name__}.train_step returns {what}; it must return the sum of the losses as "
            "computed, one number with a gradient"
        )
    aux_loss = values[1] if len(values) > 1 else torch.zeros_like(loss)
    sums = values[2] if len(values) > 2 else {}
    return loss.reshape(()), aux_loss.reshape(()), sums


def checked_sums(task: Any, result: Any) -> dict[str, Any]:
    """The sums that `validation_step` returned. Raises UserError if it returned something else."""
    if not isinstance(result, dict):
        returned = f"{type(task).__name__}.validation_step returns a {type(result).__name__}"
        raise UserError(f"{returned}; it must return sums by name, such as {{'loss': ...}}")
    return result
