"""Checks the form of the classes that a user writes for the engine. Each mistake gives one line that says
what to write."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

from common.errors import UserError
from dataset.batch import Batch, FlatBatch


def check_class(kind: type, base: type, called_in_other_ways: tuple[str, ...] = ()) -> None:
    """Raise UserError if a class of a task or its data lacks a method that it must implement, has a method
    that cannot be called like that of `base`, or has a member with a misspelt name of `base`."""
    if missing := getattr(kind, "__abstractmethods__", ()):
        raise UserError(f"{kind.__name__} does not implement {', '.join(sorted(missing))}")
    known = {name for each in base.__mro__ for name in (*vars(each), *inspect.get_annotations(each))}
    check_spelling(kind.__name__, set(dir(kind)) - known, known)
    for name in sorted(known):
        function = inspect.getattr_static(base, name, None)
        is_private = name.startswith("_") and name != "__init__"
        if not inspect.isfunction(function) or is_private or name in called_in_other_ways:
            continue
        arguments = list(inspect.signature(function).parameters)
        if isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod):
            arguments = arguments[1:]
        try:
            inspect.signature(getattr(kind, name)).bind(*arguments)
        except TypeError:
            form = f"def {name}({', '.join(arguments)})"
            raise UserError(
                f"{kind.__name__}.{name} is called with other arguments: write `{form}`"
            ) from None


def check_spelling(owner: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserError for a user's name that looks like a misspelt name of the engine."""
    known = [name for name in known if not name.startswith("_")]
    for name in sorted(names):
        near = difflib.get_close_matches(name, known, 1, cutoff=0.85)
        if near and not name.startswith("_"):
            raise UserError(
                f"{owner}.{name} is not known to the engine; did you mean {near[0]}? If not, give it "
                "another name"
            )


def describe(value: Any) -> str:
    """A value in an error message."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a Tensor of shape {list(value.shape)}, requires_grad={value.requires_grad}"
    if isinstance(value, tuple):
        return "(" + ", ".join(type(item).__name__ for item in value) + ")"
    return f"a {type(value).__name__}"


def checked_type(owner: Any, method: str, value: Any, kind: type, form: str) -> Any:
    """Returns what a method returned. Raises UserError if it is not a `kind`."""
    if isinstance(value, kind):
        return value
    hint = " (is its `return` missing?)" if value is None else ""
    raise UserError(f"{type(owner).__name__}.{method} returns {describe(value)}{hint}; it must return {form}")


def names_of(owner: Any, name: str) -> tuple[str, ...]:
    """A task's attribute that holds names: a tuple, a list or a single one. Raises UserError for anything
    else."""
    value = getattr(owner, name)
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not all(isinstance(each, str) for each in names):
        raise UserError(f"{type(owner).__name__}.{name} is {value!r}; write names, such as ('accuracy',)")
    return tuple(names)


def checked_criterion(task: Any) -> Callable[..., Any]:
    """The task's loss function. Raises UserError if it cannot be called, or if it is a loss of torch that
    returns means."""
    criterion = task.build_criterion()
    if not callable(criterion):
        checked_type(task, "build_criterion", criterion, nn.Module, "the loss function")
    if getattr(criterion, "reduction", None) == "mean":
        method, kind = f"{type(task).__name__}.build_criterion", type(criterion).__name__
        why = "but the loop divides the sums by the number of targets of the whole update"
        raise UserError(f"{method} returns {kind}(reduction='mean'), {why}: use {kind}(reduction='sum')")
    return criterion


def checked_batch(data: Any, batch: Any) -> Batch:
    """A batch of a data module. Raises UserError if it is not a dict, or if it is empty."""
    if isinstance(batch, FlatBatch) or (isinstance(batch, dict) and batch):
        return batch
    raise UserError(
        f"{type(data).__name__}: a batch is {describe(batch)}; let collate_fn return a dict of tensors, "
        "such as {'x': ..., 'y': ...}"
    )


def checked_loss(task: Any, result: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The loss [], the auxiliary loss [] and the sums of metrics that `train_step` returned; the last two may
    be missing. Raises UserError if the loss is not a single number with a gradient."""
    step = f"{type(task).__name__}.train_step"
    values = result if isinstance(result, tuple) else (result,)
    if len(values) > 3 or (len(values) == 2 and isinstance(values[1], dict)):
        raise UserError(
            f"{step} returns {describe(result)}; write `return loss, 0.0, metrics`, where the second is the "
            "sum of auxiliary losses over the tokens"
        )
    loss = values[0] if values else None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UserError(
            f"{step} returns {describe(loss)}; it must return the sum of the losses as computed, one number "
            "with a gradient"
        )
    aux_loss = checked_number(f"the auxiliary loss of {step}", values[1] if len(values) > 1 else 0.0)
    if not isinstance(aux_loss, Tensor):
        aux_loss = loss.new_tensor(float(aux_loss))
    sums = checked_sums(task, "train_step", values[2]) if len(values) > 2 else {}
    return loss.reshape(()), aux_loss.reshape(()), sums


def checked_sums(task: Any, method: str, result: Any) -> dict[str, Any]:
    """The sums by name, each a number or a pair (sum, count), that a method returned. Raises UserError if it
    returned something else."""
    checked_type(task, method, result, dict, "sums by name, such as {'loss': ...}")
    sums: dict[str, Any] = {}
    for name, value in result.items():
        what = f"{name!r} of {type(task).__name__}.{method}"
        if isinstance(value, tuple | list) and len(value) == 2:
            sums[name] = checked_number(what, value[0]), checked_number(what, value[1])
        else:
            sums[name] = checked_number(what, value)
    return sums


def checked_number(what: str, value: Any) -> Tensor | float:
    """A number, or a tensor of one. Raises UserError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    if isinstance(value, int | float | np.generic):
        return float(value)
    raise UserError(
        f"{what} is {describe(value)}; it must be one number, a sum over the batch, or a pair (sum, count)"
    )
