"""What the engine requires of a task: how its methods are declared, what they return, and the rehearsal,
which tells before training whether they return sums or, wrongly, means.
"""

import copy
import inspect
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from llm.training.data.base import DataModule
from llm.training.tasks.base_task import TrainingTask
from trainer.devices.wrapping import unwrap
from trainer.loop import to_device
from trainer.report.speed import Size
from trainer.run.state import TrainState

CALLED = ("build_model", "build_optimizer", "build_criterion", "train_step", "validation_step", "size")
LOADERS = ("train_dataloader", "val_dataloader")
SUMS = "the loop divides the sums by the number of targets of the whole update"


def check_forms(task: TrainingTask, data: DataModule) -> None:
    """Raise UserError if a method is declared so that the engine cannot call it, or would mix up its
    arguments."""
    for owner, base, names in ((task, TrainingTask, CALLED), (data, DataModule, LOADERS)):
        for name in names:
            arguments = list(inspect.signature(getattr(base, name)).parameters)[1:]
            signature = inspect.signature(getattr(owner, name))
            try:
                bound = signature.bind(*arguments).arguments
            except TypeError:
                bound = None
            if bound is None or any(key != value and key in arguments for key, value in bound.items()):
                declared = f"{type(owner).__name__}.{name} is declared with {signature}"
                raise UserError(f"{declared}, but it is called as {name}({', '.join(arguments)})")


def check_criterion(task: TrainingTask) -> None:
    """Raise UserError if the loss function is one of torch that returns means."""
    if getattr(task.criterion, "reduction", None) == "mean":
        made, kind = f"{type(task).__name__}.build_criterion", type(task.criterion).__name__
        raise UserError(f"{made} returns {kind}(reduction='mean'), but {SUMS}: use {kind}(reduction='sum')")


def checked_loss(task: TrainingTask, result: Any) -> tuple[Any, ...]:
    """The loss, the auxiliary loss and, if the task has metrics, their sums, as `train_step` returned them;
    losses of one element are taken as numbers []. Raises UserError if it returned something else."""
    loss, *others = result if isinstance(result, tuple) and 2 <= len(result) <= 3 else (result,)
    name = f"{type(task).__name__}.train_step"
    if not all(isinstance(each, Tensor) for each in (loss, *others[:1])):
        raise UserError(
            f"{name} returns a {type(result).__name__}; it must return a tensor, the sum of the losses"
        )
    for each in (loss, *others[:1]):
        if each.numel() != 1:
            raise UserError(
                f"{name} returns a tensor of shape {list(each.shape)}; it must return one number, the sum"
            )
    if not loss.requires_grad:
        raise UserError(f"{name} returns a loss without a gradient; return it as computed, not detached")
    sums = others[1] if len(others) == 2 else {}
    if not isinstance(sums, dict):
        raise UserError(
            f"{name} returns a {type(sums).__name__} as its third value; it must be sums by name, a dict"
        )
    if set(sums) - {"cross_entropy"} != set(task.metric_names) - {"cross_entropy"}:
        returned, named = ", ".join(sums) or "no metrics", ", ".join(task.metric_names) or "none"
        raise UserError(
            f"{name} returns {returned} beside the losses, but the task's metric_names are {named}; return (loss, "
            "auxiliary loss, {name: sum})"
        )
    aux_loss = others[0] if others else torch.zeros_like(loss)
    return (
        (loss.reshape(()), aux_loss.reshape(()), sums) if sums else (loss.reshape(()), aux_loss.reshape(()))
    )


def checked_sums(task: TrainingTask, result: Any) -> dict[str, Any]:
    """The sums that `validation_step` returned. Raises UserError if it returned something else."""
    name, wanted = (
        f"{type(task).__name__}.validation_step",
        "it must return sums by name, such as {'loss': ...}",
    )
    if not isinstance(result, dict) or "loss" not in result:
        what = (
            f"only {', '.join(map(str, result))}"
            if isinstance(result, dict)
            else f"a {type(result).__name__}"
        )
        raise UserError(f"{name} returns {what}; {wanted}")
    return result


def rehearse(task: TrainingTask, data: DataModule, state: TrainState) -> None:
    """Try the steps of a task on two samples of their data, each alone and then both as one batch, with a
    copy of the model. Raises UserError if a step returns a mean or something else than sums, calls `backward`
    or changes the weights. Other exceptions are left to training, which raises them where they belong."""
    try:
        for method, dataset in (("train_step", data.train_dataset), ("validation_step", data.val_dataset)):
            _rehearse_step(task, data, state, method, dataset)
    except UserError:
        raise
    except Exception:  # also that of copying a sharded model
        return


def _rehearse_step(
    task: TrainingTask, data: DataModule, state: TrainState, method: str, dataset: Any
) -> None:
    model, name = copy.deepcopy(unwrap(state.model)).eval(), type(task).__name__
    versions = [parameter._version for parameter in model.parameters()]
    rows = [dataset[i] for i in range(min(2, len(dataset or ())))]
    values, targets = [], []
    for part in (rows[:1], rows[1:], rows) if len(rows) == 2 else ():
        batch = data.collate(part)
        size = task.size(batch)
        if not isinstance(size, Size):
            raise UserError(
                f"{name}.size returns a {type(size).__name__}; it must return Size(targets=..., tokens=...)"
            )
        targets.append(size.targets)
        is_training = method == "train_step"
        with state.autocast, nullcontext() if is_training else torch.no_grad():
            result = getattr(task, method)(model, to_device(batch, state.device))
        if any(
            each.grad is not None or each._version != v
            for each, v in zip(model.parameters(), versions, strict=True)
        ):
            raise UserError(f"{name}.{method} calls backward or changes the weights; leave both to the loop")
        sums = {"loss": checked_loss(task, result)[0].detach()} if is_training else checked_sums(task, result)
        values.append({key: float(value) for key, value in sums.items()})
    for key in values[0] if values else ():
        if is_mean([sums[key] for sums in values], targets):
            raise UserError(f"{name}.{method}: {key!r} is a mean over the batch, but {SUMS}: return the sum")


def is_mean(values: list[float], targets: list[int]) -> bool:
    """Whether a function of batches is a mean over their targets and no sum; undecided where both would be
    the same.

    values, targets: of one batch, of another, and of the two as one.
    """
    if 0 in targets:
        return False
    first, second, both = values
    mean = (first * targets[0] + second * targets[1]) / (targets[0] + targets[1])
    return math.isclose(both, mean, rel_tol=0.02) and not math.isclose(both, first + second, rel_tol=0.2)
