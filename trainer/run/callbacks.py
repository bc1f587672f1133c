"""What a callback is, and the list of those of a run. included_callbacks.py has the included ones;
docs/CALLBACKS.md is the user's page."""

import inspect
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import UserError, reason, warn

State = dict[str, Any]
SAVABLE_TYPES = (type(None), bool, int, float, str)


class Callback:
    """Base class: all methods do nothing. A subclass overrides those it needs; each is called on every rank.

    `engine` is the TrainingEngine; in a stage script the TrainState. Both have `state`, the TrainState. The
    methods stand in the order of the calls.

    key: the name of its state in checkpoints; None: that of its class.
    """

    key: str | None = None

    def on_train_start(self, engine: Any) -> None:
        """Everything is set up and restored; this process has not made an update yet."""

    def on_epoch_start(self, engine: Any, epoch: int) -> None:
        """Before the first update of an epoch (from 0); not again after a resume within it."""

    def on_batch_start(self, engine: Any, update: int) -> None:
        """Before an optimizer update; `update` is its number, from 1."""

    def on_optimizer_step(self, engine: Any, update: int) -> None:
        """After the optimizer step of an update, before the update is saved, validated or logged."""

    def on_record(self, engine: Any, record: State) -> None:
        """A log record is made; values may be added to it. The checkpoint of the update holds them."""

    def on_checkpoint_saved(self, engine: Any, path: Path) -> None:
        """The checkpoint of the last update is being written in the background; it may not be complete
        yet."""

    def on_validation_start(self, engine: Any) -> None:
        """Before a validation; other weights may be put in place, which `<name>_best` then holds."""

    def on_validation_end(self, engine: Any, metrics: dict[str, float | None]) -> None:
        """After a validation; `metrics` are the same on all ranks."""

    def on_log(self, engine: Any, record: State) -> None:
        """A log record is complete, with the metrics of a validation if there was one, and will be written;
        values may be added to it."""

    def on_batch_end(self, engine: Any, update: int, record: State | None) -> None:
        """After an optimizer update; `record` is its complete log record at a log point, else None."""

    def on_epoch_end(self, engine: Any, epoch: int) -> None:
        """After the last update of an epoch, its validation and its checkpoint."""

    def on_train_end(self, engine: Any) -> None:
        """Training is finished, or was stopped by `engine.stop`. Not called after an exception."""

    def on_exception(self, engine: Any, error: BaseException) -> None:
        """This exception ends training (`Interrupted`: a signal does); it is raised again afterwards."""

    def state_dict(self) -> State:
        """State to save in the checkpoint: numbers, strings, tensors, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`; called before `on_train_start` of a resumed run."""

    def forget_evaluations(self, state: Any) -> None:
        """After `load_state_dict`, if the run has other held-out data than before: what is kept of earlier
        evaluations does not count any more."""


EPOCH_HOOKS = ("on_epoch_start", "on_epoch_end")  # called once per epoch, also over resumes
HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class CallbackList(list[Callback]):
    """The callbacks of a run, called in order. Raises UserError for a method `on_...` of one it is created
    with that is never called, or cannot be called with its arguments.

    epochs: for each callback the last epoch for which each of EPOCH_HOOKS was called; a checkpoint saves it.
    absent: the saved states of callbacks that this run does not have; they are kept.
    engine: what they are called with, the TrainingEngine or the TrainState.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()):
        super().__init__(callbacks)
        self.epochs: dict[str, dict[str, int]] = {}
        self.absent: dict[str, State] = {}
        self.engine: Any = None
        for callback in self:
            check_methods(callback)

    def by_name(self) -> dict[str, Callback]:
        """The callbacks by their keys, by default the class name, `EarlyStopping#2` for the second of a
        class."""
        named: dict[str, Callback] = {}
        numbers: Counter[str] = Counter()
        for callback in self:
            name = callback.key or type(callback).__name__
            numbers[name] += 1
            named[name if numbers[name] == 1 else f"{name}#{numbers[name]}"] = callback
        return named

    def call(self, name: str, *args: Any) -> None:
        """Call a method of each callback that overrides it; the traceback of an exception names the callback.
        In `on_exception` one is only a warning, because the other callbacks still have to close their
        files."""
        base_method = getattr(Callback, name)
        for key, callback in self.by_name().items():
            method = getattr(callback, name)
            if getattr(method, "__func__", method) is base_method:
                continue  # it does nothing
            if name in EPOCH_HOOKS:
                last = self.epochs.setdefault(key, {})
                if args[0] <= last.get(name, -1):
                    continue  # before the resume
                last[name] = args[0]
            try:
                method(self.engine, *args)
            except Exception as error:
                if name != "on_exception":
                    error.add_note(f"callback {key} failed in {name}")
                    raise
                warn(f"callback {key} failed in {name}: {type(error).__name__}: {reason(error)}")

    def state_dict(self) -> dict[str, State]:
        """The non-empty states by name. Raises UserError if one contains a type that a checkpoint cannot
        hold."""
        states = dict(self.absent)
        for key, callback in self.by_name().items():
            state = _savable(callback.state_dict(), f"the state of callback {key}")
            if state:
                states[key] = state
        return states

    def load_state_dict(self, states: dict[str, State]) -> None:
        """Restore the state of each callback; warn of the states of callbacks that are no longer there."""
        named = self.by_name()
        self.absent = {key: state for key, state in states.items() if key not in named}
        if self.absent:
            gone = ", ".join(self.absent)
            warn(f"callbacks of the checkpoint that this run does not have: {gone}; their state is kept")
        for key in named.keys() & states.keys():
            named[key].load_state_dict(states[key])


def check_methods(callback: Callback) -> None:
    """Raise UserError if this is no callback, or a method is declared so that it cannot be called."""
    if not isinstance(callback, Callback):
        raise UserError(f"{callback!r} is not a callback, an instance of a subclass of Callback")
    name = type(callback).__name__
    for key in dir(callback):
        if key.startswith("on_") and key not in HOOKS:
            raise UserError(
                f"callback {name}: {key} would never be called; the methods are {', '.join(HOOKS)}"
            )
    for hook in HOOKS:
        arguments = list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
        signature = inspect.signature(getattr(callback, hook))
        try:
            signature.bind(*arguments)
        except TypeError as error:
            declared = f"callback {name}: {hook} is declared with {signature}"
            raise UserError(f"{declared}, but it is called as {hook}({', '.join(arguments)})") from error


def _savable(value: Any, where: str) -> Any:
    """The value in types that `torch.load(weights_only=True)` accepts: any other would make the file
    unreadable."""
    if isinstance(value, dict):
        return {
            _savable(key, f"a key of {where}"): _savable(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_savable(item, f"{where}[{i}]") for i, item in enumerate(value))
    if type(value) in SAVABLE_TYPES or isinstance(value, Tensor):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise UserError(f"{where} is a {kind}; a checkpoint holds numbers, strings, tensors, lists and dicts")


def monitored(who: str, monitor: str, metrics: dict[str, float | None]) -> float | None:
    """The value of a held-out metric; `who` monitors it. Raises UserError if validation does not report
    it."""
    if monitor not in metrics:
        there = ", ".join(sorted(metrics)) or "nothing"
        raise UserError(f"{who}: validation gives no {monitor!r} to monitor; it gives {there}")
    return metrics[monitor]
