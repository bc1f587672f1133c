"""The rehearsal of a task: before training, its methods are tried on two samples, so that what they must not do is told
in one line and at once. It changes nothing: buffers and random states are put back.
"""

import inspect
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import UserError
from llm.training.data.base import DataModule
from llm.training.tasks.base_task import TrainingTask
from trainer.components.meter import Size
from trainer.components.parallel import is_sharded, unwrap
from trainer.components.state import TrainState
from trainer.loop import to_device

CALLED = {  # method -> the names of its arguments
    "build_model": (),
    "build_optimizer": ("model",),
    "build_criterion": (),
    "train_step": ("model", "batch"),
    "validation_step": ("model", "batch"),
}
SUMS = "the loop divides the sums by the number of targets of the whole update"


def check_forms(task: TrainingTask, data: DataModule) -> None:
    """Raise UserError if a method is declared so that the engine cannot call it, or would mix up its arguments."""
    for owner, forms in ((task, CALLED), (data, {"train_dataloader": ("epoch", "skip_batches")})):
        for name, arguments in forms.items():
            signature = inspect.signature(getattr(owner, name))
            try:
                bound = signature.bind(*arguments).arguments
            except TypeError:
                bound = None
            if bound is None or any(key != value and key in arguments for key, value in bound.items()):
                told = f"{type(owner).__name__}.{name} is declared with {signature}"
                raise UserError(f"{told}, but it is called as {name}({', '.join(arguments)})")


def check_criterion(task: TrainingTask, criterion: Any) -> None:
    """Raise UserError if a loss function of torch is set to return means."""
    if getattr(criterion, "reduction", None) == "mean":
        made, kind = f"{type(task).__name__}.build_criterion", type(criterion).__name__
        raise UserError(f"{made} returns {kind}(reduction='mean'), but {SUMS}: use {kind}(reduction='sum')")


def checked_loss(task: TrainingTask, result: Any) -> tuple[Any, ...]:
    """The loss, the auxiliary loss and, if the task has metrics, their sums, as `train_step` returned them.

    Raises:
        UserError: it returned something else.
    """
    loss, *others = result if isinstance(result, tuple) and 2 <= len(result) <= 3 else (result,)
    name = f"{type(task).__name__}.train_step"
    if not all(isinstance(each, Tensor) for each in (loss, *others[:1])):
        raise UserError(f"{name} returns a {type(result).__name__}; it must return a tensor, the sum of the losses")
    if loss.numel() != 1:
        raise UserError(f"{name} returns a tensor of shape {list(loss.shape)}; it must return one number, the sum")
    return (loss, *(others or [torch.zeros_like(loss)]))


def checked_sums(task: TrainingTask, result: Any) -> dict[str, float]:
    """The sums that `validation_step` returned.

    Raises:
        UserError: it returned something else.
    """
    name, wanted = f"{type(task).__name__}.validation_step", "it must return sums by name, such as {'loss': ...}"
    if not isinstance(result, dict):
        raise UserError(f"{name} returns a {type(result).__name__}; {wanted}")
    if "loss" not in result:
        raise UserError(f"{name} returns {', '.join(map(str, result)) or 'nothing'}; `loss` must be one of its sums")
    for key, value in result.items():
        if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise UserError(f"{name}: {key!r} is a {type(value).__name__} that is not one number; {wanted}")
    return {key: float(value) for key, value in result.items()}


def rehearse(task: TrainingTask, data: DataModule, state: TrainState) -> None:
    """Try a task on two training samples and two held-out ones: each alone, then both as one batch.

    Raises:
        UserError: a batch is no dict; `train_step` calls `backward` or changes the weights; a step returns a mean, or
            something else than the sums. Other exceptions are left to training, which raises them where they belong.
    """
    model = unwrap(state.model)
    with _untouched(model, state.device):
        try:
            if not is_sharded(model):  # its forward pass for gradients must be followed by a backward pass
                _rehearse_training(task, data, state, model)
            if state.eval_loader is not None:
                _rehearse_validation(task, data, state, model)
        except UserError:
            raise
        except Exception:
            return


def _rehearse_training(task: TrainingTask, data: DataModule, state: TrainState, model: nn.Module) -> None:
    name = f"{type(task).__name__}.train_step"
    losses, targets = [], []
    versions = [parameter._version for parameter in model.parameters()]
    for batch in _batches(data, data.train_dataset):
        targets.append(_targets(task, batch))
        with state.autocast:
            result = task.train_step(model, to_device(batch, state.device))
        if any(parameter.grad is not None for parameter in model.parameters()):
            raise UserError(f"{name} calls backward; leave that to the loop and return the sum of the losses")
        if versions != [parameter._version for parameter in model.parameters()]:
            raise UserError(f"{name} changes the weights; leave that to the loop and return the sum of the losses")
        loss, *_ = checked_loss(task, result)
        if not loss.requires_grad:
            raise UserError(f"{name} returns a loss without a gradient; return it as computed, not detached")
        losses.append(float(loss.detach()))
    if is_mean(losses, targets):
        raise UserError(f"{name} returns a mean over the batch, but {SUMS}: return the sum")


@torch.no_grad()
def _rehearse_validation(task: TrainingTask, data: DataModule, state: TrainState, model: nn.Module) -> None:
    found, targets = [], []
    from_rows = data.val_dataset is not None
    for batch in _batches(data, data.val_dataset) if from_rows else [next(iter(state.eval_loader or []))]:
        targets.append(_targets(task, batch))
        with state.autocast:
            found.append(checked_sums(task, task.validation_step(model, to_device(batch, state.device))))
    for key in found[0]:
        if is_mean([sums[key] for sums in found if key in sums], targets):
            name = f"{type(task).__name__}.validation_step"
            raise UserError(f"{name}: {key!r} is a mean over the batch; return the sum, which is divided afterwards")


def _batches(data: DataModule, dataset: Any) -> Iterator[dict[str, Any]]:
    """The first sample alone, the second alone, and both; the only one of a smaller data set."""
    rows = [dataset[i] for i in range(min(2, len(dataset)))]
    for part in (rows[:1], rows[1:], rows) if len(rows) == 2 else (rows,):
        batch = data.collate(part)
        if not isinstance(batch, dict):
            told = f"{type(data).__name__}: collate_fn returns a {type(batch).__name__}"
            raise UserError(f"{told}; a batch is a dict of tensors, such as {{'x': ..., 'y': ...}}")
        yield batch


def _targets(task: TrainingTask, batch: dict[str, Any]) -> int:
    size = task.size(batch)
    if not isinstance(size, Size):
        told = f"{type(task).__name__}.size returns a {type(size).__name__}"
        raise UserError(f"{told}; it must return Size(targets=..., tokens=...) of trainer/components/meter.py")
    return size.targets


def is_mean(values: list[float], targets: list[int]) -> bool:
    """Whether a function of batches is a mean over their targets and no sum; undecided where both would be the same.

    values, targets: of one batch, of another, and of the two as one.
    """
    if len(values) < 3 or 0 in targets:
        return False
    first, second, both = values
    mean = (first * targets[0] + second * targets[1]) / (targets[0] + targets[1])
    return math.isclose(both, mean, rel_tol=0.02) and not math.isclose(both, first + second, rel_tol=0.2)


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode, without compiling; afterwards training mode, and buffers and random states as before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        model.eval()
        try:
            yield
        finally:
            model.train()
            for parameter in model.parameters():
                parameter.grad = None
            for buffer, value in buffers:
                buffer.data.copy_(value)
            random.setstate(python)
            np.random.set_state(numpy)
