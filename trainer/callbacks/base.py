"""The base class of callbacks, and the list of a run's callbacks. docs/engine.md is the user's page."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from common.errors import UserError, check_utf8, reason, warn
from trainer.objectives.base import Objective


class Callback:
    """Base class: all methods do nothing. A subclass overrides those it needs; each is called on every rank,
    with the TrainState. The methods are in the order of the calls; a checkpoint is written after them."""

    def on_train_start(self, state: Any) -> None:
        """Everything is set up and restored; this process has not made an update yet."""

    def on_epoch_start(self, state: Any, epoch: int) -> None:
        """Before the first update of an epoch (from 0); not again after a resume within it."""

    def on_batch_start(self, state: Any, update: int) -> None:
        """Before an optimizer update; `update` is its number, from 1."""

    def on_before_step(self, state: Any, micro_batches: list[Any]) -> None:
        """The gradients of an update are complete and equal on all ranks, but not clipped yet. A parameter
        whose `grad` is set to None here is left out of the update. `micro_batches`: this rank's
        micro-batches."""

    def on_optimizer_step(self, state: Any, update: int) -> None:
        """After the optimizer step of an update, before it is validated, logged or saved."""

    def on_validation_start(self, state: Any) -> None:
        """Before a validation. You may swap in other weights, which `<name>_best` then holds."""

    def on_validation_end(self, state: Any, metrics: dict[str, float | None]) -> None:
        """After a validation; `metrics` are the same on all ranks."""

    def on_log(self, state: Any, record: dict[str, Any]) -> None:
        """A log record is complete and will be written. You may add values to it."""

    def on_batch_end(self, state: Any, update: int, record: dict[str, Any] | None) -> None:
        """After an optimizer update; `record` is its log record at a log point, otherwise None."""

    def on_epoch_end(self, state: Any, epoch: int) -> None:
        """After the last update of an epoch and its validation."""

    def on_train_end(self, state: Any) -> None:
        """Training is finished, or was stopped. Not called after an exception."""

    def on_exception(self, state: Any, error: BaseException) -> None:
        """This exception ends training (`Interrupted` after a signal). It is raised again afterwards."""

    def held_out_metrics(self) -> list[str]:
        """The names of the metrics that `on_validation_end` needs. If validation does not give one of them,
        the run is refused before its first update."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """State to save in the checkpoint: numbers, strings, tensors, and lists and dicts of them."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. Called before `on_train_start` of a resumed run. Also called
        after the first checkpoint of a run, and must then change nothing."""


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class CallbackList(list[Callback]):
    """The callbacks of a run, called in order. The run's Objective may have the same methods and is called
    first."""

    state: Any = None  # the TrainState

    def check(self) -> None:
        """Raise UserError for a method `on_...` that would never be called, or a state that would never be
        restored."""
        for member in self.members().values():
            check_restores(type(member), Callback if isinstance(member, Callback) else Objective)
            for name in dir(member):
                if name.startswith("on_") and name not in HOOKS:
                    text = f"{describe(member)}: {name} would never be called"
                    raise UserError(f"{text}; there are {', '.join(HOOKS)}")

    def by_name(self) -> dict[str, Callback]:
        """The callbacks by class name, with `EarlyStopping#2` for the second of a class."""
        named: dict[str, Callback] = {}
        numbers: Counter[str] = Counter()
        for callback in self:
            name = type(callback).__name__
            numbers[name] += 1
            named[name if numbers[name] == 1 else f"{name}#{numbers[name]}"] = callback
        return named

    def members(self) -> dict[str, Any]:
        """The members that may have a state to save, by name: the Objective, then the callbacks."""
        objective = getattr(self.state, "objective", None)
        of_run = {"the Objective": objective} if isinstance(objective, Objective) else {}
        return of_run | self.by_name()

    def call(self, name: str, *args: Any) -> None:
        """Call a method of each member that has it. The traceback of an exception names the member. An
        exception in `on_exception` is only a warning, because the others still have to close their files."""
        for member in self.members().values():
            if not hasattr(member, name):
                continue
            who, rates = describe(member), self.learning_rates()
            try:
                getattr(member, name)(self.state, *args)
            except Exception as error:
                if name != "on_exception":
                    error.add_note(f"{who} failed in {name}")
                    raise
                warn(f"{who} failed in {name}: {type(error).__name__}: {reason(error)}")
            if self.learning_rates() != rates and self.state.has_schedule():
                raise UserError(
                    f"{who} changes the learning rate in {name}, but the schedule sets it at each update; "
                    "change the schedule, or let build_scheduler of a task return None"
                )
            if name == "on_log":
                (record,) = args
                for key, value in record.items():
                    record[key] = plain(value, f"{key!r}, which {who} puts into the record,", in_record=True)

    def learning_rates(self) -> list[Any]:
        """The learning rates of the optimizer, if there is a run."""
        if self.state is None:
            return []
        return [group["lr"] for group in self.state.optimizer.param_groups]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The states by name."""
        return {
            name: plain(member.state_dict(), f"the state of {name}")
            for name, member in self.members().items()
        }

    def load_state_dict(self, states: dict[str, dict[str, Any]]) -> None:
        """Restore the states. Warns of states whose callbacks no longer exist."""
        named = self.members()
        gone = [name for name in states if states[name] and name not in named]
        if gone:
            warn(f"callbacks of the checkpoint that this run does not have: {', '.join(gone)}")
        for name in named.keys() & states.keys():
            if states[name]:  # otherwise there was no state yet
                named[name].load_state_dict(states[name])


def describe(member: Callback | Objective) -> str:
    """A callback or an objective, in a message."""
    return f"{'callback' if isinstance(member, Callback) else 'objective'} {type(member).__name__}"


def check_restores(kind: type, base: Any) -> None:
    """Raise UserError for a subclass of `base` that saves a state and does not restore it."""
    given: Any = kind
    if given.state_dict is not base.state_dict and given.load_state_dict is base.load_state_dict:
        raise UserError(
            f"{kind.__name__} has state_dict and no load_state_dict: a resumed run would lose its state; "
            "write `def load_state_dict(self, saved)`"
        )


def plain(value: Any, where: str, in_record: bool = False) -> Any:
    """A value in the form that a checkpoint can hold; other values would make its file unreadable. A number
    of NumPy becomes one of Python, a path becomes text. in_record: the form for JSON, where a tensor of one
    number becomes that number, and NaN and infinities become None. Raises UserError for anything but a
    number, a text, a tensor, or a list or dict of them."""
    if isinstance(value, dict):
        return {
            plain(key, where): plain(item, f"{where.rstrip(',')}[{key!r}]", in_record)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [plain(item, where, in_record) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Tensor):
        if not in_record:
            return value
        if value.numel() == 1:
            value = value.item()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, float):
        return None if in_record and not math.isfinite(value) else float(value)
    if isinstance(value, str):
        check_utf8(where, value)  # as text, because a checkpoint with a path object could not be read again
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    raise UserError(
        f"{where} is a {type(value).__name__}; it must be a number, a text, or a list or dict of them"
        + ("" if in_record else ", or a tensor")
    )


def is_better(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Whether a value improves on the best one so far (None: there is none) by more than `min_delta`; mode:
    `min` if lower is better, `max` if higher is."""
    if best is None:
        return True
    return (value - best if mode == "max" else best - value) > min_delta


def monitored(who: str, monitor: str, metrics: dict[str, float | None]) -> float | None:
    """The value of a held-out metric; `who` monitors it. Raises UserError if validation does not report
    it."""
    if monitor not in metrics:
        there = ", ".join(sorted(metrics)) or "nothing"
        raise UserError(f"{who}: validation does not report {monitor!r}; it reports {there}")
    return metrics[monitor]
