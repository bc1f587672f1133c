"""What the engine requires of a task: how its methods are declared, and the form of what they return."""

import inspect
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from llm.training.data.base import DataModule
from llm.training.tasks.base_task import TrainingTask
from trainer.report.speed import Size

CALLED = ("build_model", "build_optimizer", "build_criterion", "train_step", "validation_step", "size")
LOADERS = ("train_dataloader", "val_dataloader")


def check_forms(task: TrainingTask, data: DataModule) -> None:
    """Raise UserError if a method is declared so that the engine cannot call it, or would mix up its
    arguments."""
    for owner, base, names in ((task, TrainingTask, CALLED), (data, DataModule, LOADERS)):
        for name in names:
            arguments = [*inspect.signature(getattr(base, name)).parameters][1:]
            signature = inspect.signature(getattr(owner, name))
            if not fits(signature, arguments):
                declared = f"{type(owner).__name__}.{name} is declared with {signature}"
                raise UserError(f"{declared}, but it is called as {name}({', '.join(arguments)})")


def fits(signature: inspect.Signature, arguments: list[str]) -> bool:
    """Whether a function can be called with these arguments by position, none of which stands in the place of
    another."""
    try:
        bound = signature.bind(*arguments).arguments
    except TypeError:
        return False
    return all(parameter == given or parameter not in arguments for parameter, given in bound.items())


def check_criterion(task: TrainingTask) -> None:
    """Raise UserError if the loss function is one of torch that returns means."""
    if getattr(task.criterion, "reduction", None) == "mean":
        made, kind = f"{type(task).__name__}.build_criterion", type(task.criterion).__name__
        why = "but the loop divides the sums by the number of targets of the whole update"
        raise UserError(f"{made} returns {kind}(reduction='mean'), {why}: use {kind}(reduction='sum')")


def checked_loss(task: TrainingTask, result: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss, the auxiliary loss and the sums of the metrics, if any, as `train_step` returned them; losses
    of one element are taken as numbers []. Raises UserError if it returned something else."""
    name = f"{type(task).__name__}.train_step"
    values = result if isinstance(result, tuple) and len(result) in (2, 3) else (result,)
    losses = values[:2]
    sums = values[2] if len(values) == 3 else {}
    for loss in losses:
        if not isinstance(loss, Tensor):
            what = type(result).__name__
            raise UserError(f"{name} returns a {what}; it must return a tensor, the sum of the losses")
        if loss.numel() != 1:
            shape = list(loss.shape)
            raise UserError(f"{name} returns a tensor of shape {shape}; it must return one number, the sum")
    if not losses[0].requires_grad:
        raise UserError(f"{name} returns a loss without a gradient; return it as computed, not detached")
    if not isinstance(sums, dict):
        what = type(sums).__name__
        raise UserError(f"{name} returns a {what} as its third value; it must be sums by name, a dict")
    if set(sums) - {"cross_entropy"} != set(task.metric_names) - {"cross_entropy"}:
        returned, named = ", ".join(sums) or "no metrics", ", ".join(task.metric_names) or "none"
        raise UserError(
            f"{name} returns {returned} beside the losses, but the task's metric_names are {named}; "
            "return (loss, auxiliary loss, {name: sum})"
        )
    loss = losses[0].reshape(())
    aux_loss = losses[1].reshape(()) if len(losses) == 2 else torch.zeros_like(loss)
    return loss, aux_loss, sums


def checked_sums(task: TrainingTask, result: Any) -> dict[str, Any]:
    """The sums that `validation_step` returned. Raises UserError if it returned something else."""
    if isinstance(result, dict) and "loss" in result:
        return result
    returned = f"a {type(result).__name__}"
    if isinstance(result, dict):
        returned = f"only {', '.join(map(str, result))}"
    name = f"{type(task).__name__}.validation_step"
    raise UserError(f"{name} returns {returned}; it must return sums by name, such as {{'loss': ...}}")


def checked_size(task: TrainingTask, size: Any) -> Size:
    """What `size` returned. Raises UserError if it returned something else than a Size."""
    if isinstance(size, Size):
        return size
    returned = f"{type(task).__name__}.size returns a {type(size).__name__}"
    raise UserError(f"{returned}; it must return Size(targets=..., tokens=...)")
