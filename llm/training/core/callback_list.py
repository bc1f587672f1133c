"""What a callback is, and the list of a run's callbacks that the engine calls. docs/CALLBACKS.md shows when."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from common.errors import UserError, reason, warn
from llm.training.core.config import Config
from llm.training.core.utils import Logger
from trainer.components.state import TrainState

State = dict[str, Any]
PLAIN = (type(None), bool, int, float, str)


class Engine(Protocol):
    """The running engine, as a callback sees it."""

    config: Config
    state: TrainState
    logger: Logger
    run_name: str
    is_main_process: bool  # on rank 0

    @property
    def resumed_update(self) -> int | None:
        """The last update reported before the resume; None in a new run."""

    def stop(self, reason: str) -> None:
        """End training after this update. Must be called on all ranks, at the same update."""


class Callback:
    """Base class: all methods do nothing. A subclass overrides those it needs; each is called on every rank."""

    def on_train_start(self, engine: Engine) -> None:
        """Everything is set up and restored; this process has not made an update yet."""

    def on_train_end(self, engine: Engine) -> None:
        """Training is finished, or was stopped by `engine.stop`. Not called after an exception."""

    def on_epoch_start(self, engine: Engine, epoch: int) -> None:
        """Before the first update of an epoch (from 0); not again after a resume within it."""

    def on_epoch_end(self, engine: Engine, epoch: int) -> None:
        """After the last update of an epoch, its validation and its checkpoint."""

    def on_batch_start(self, engine: Engine, update: int) -> None:
        """Before an optimizer update; `update` is its number, from 1."""

    def on_optimizer_step(self, engine: Engine, update: int) -> None:
        """After the optimizer step of an update, before the update is saved, validated or logged."""

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        """After an optimizer update; `record` is its complete log record at a log point, else None."""

    def on_validation_start(self, engine: Engine) -> None:
        """Before a validation."""

    def on_validation_end(self, engine: Engine, metrics: dict[str, float | None]) -> None:
        """After a validation; `metrics` are the same on all ranks."""

    def on_checkpoint_saved(self, engine: Engine, path: Path) -> None:
        """The checkpoint of the last update is being written in the background; it may not be complete yet."""

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        """This exception ends training (`Interrupted`: a signal does); it is raised again afterwards."""

    def state_dict(self) -> State:
        """State to save in the checkpoint: numbers, strings, tensors, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`; called before `on_train_start` of a resumed run."""


EPOCH_HOOKS = ("on_epoch_start", "on_epoch_end")  # called once per epoch, also over resumes
HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class CallbackError(RuntimeError):
    """A callback raised an exception, which is the cause; the message names the callback and the method."""


class CallbackList:
    """The callbacks of a run, called in order. Raises UserError for a method `on_...` that is never called.

    epochs: for each callback the last epoch for which each of EPOCH_HOOKS was called; a checkpoint saves it.
    """

    def __init__(self, callbacks: Iterable[Callback]):
        self.callbacks: dict[str, Callback] = {}
        self.epochs: dict[str, dict[str, int]] = {}
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise UserError(f"{callback!r} is not a callback, an instance of a subclass of Callback")
            name = type(callback).__name__
            for key in dir(callback):
                if key.startswith("on_") and key not in HOOKS:
                    raise UserError(f"callback {name}: {key} would never be called; the methods are {', '.join(HOOKS)}")
            same = sum(type(one).__name__ == name for one in self.callbacks.values())
            self.callbacks[f"{name}#{same + 1}" if same else name] = callback

    def dispatch(self, name: str, engine: Engine, *args: Any) -> None:
        """Call a method of each callback. In `on_exception` a failure is only a warning, because the other callbacks
        still have to close their files; elsewhere it raises CallbackError."""
        for key, callback in self.callbacks.items():
            if name in EPOCH_HOOKS:
                last = self.epochs.setdefault(key, {})
                if args[0] <= last.get(name, -1):
                    continue  # before the resume
                last[name] = args[0]
            try:
                _call(key, callback, name, engine, *args)
            except (CallbackError, UserError) as error:
                if name != "on_exception":
                    raise
                warn(str(error))

    def state_dict(self) -> dict[str, State]:
        """The non-empty states by class name (`EarlyStopping#2` for the second of a class). Raises CallbackError if one
        fails, or contains a type that a checkpoint cannot hold."""
        states = {key: _call(key, callback, "state_dict") for key, callback in self.callbacks.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: dict[str, State] | None) -> None:
        """Restore the state of each callback; warn about callbacks that were added or removed."""
        states = states or {}
        keeping = [key for key, one in self.callbacks.items() if type(one).state_dict is not Callback.state_dict]
        changes = [f"{key} has no saved state" for key in keeping if key not in states]
        gone = [key for key in states if key not in self.callbacks]
        changes += [f"the saved state of {key} is ignored" for key in gone]
        if changes:
            warn(f"the callbacks are not those of the checkpoint: {'; '.join(changes)}")
        for key, callback in self.callbacks.items():
            if key in states:
                _call(key, callback, "load_state_dict", states[key])


def _call(key: str, callback: Callback, method: str, *args: Any) -> Any:
    """Call one method and turn an exception into a CallbackError. A UserError and a signal are passed on unchanged."""
    try:
        result = getattr(callback, method)(*args)
        return _plain(result, "the state") if method == "state_dict" else result
    except UserError:
        raise
    except Exception as error:
        raise CallbackError(f"callback {key} failed in {method}: {type(error).__name__}: {reason(error)}") from error


def _plain(value: Any, where: str) -> Any:
    """The value in types that `torch.load(weights_only=True)` accepts: any other would make the file unreadable."""
    if isinstance(value, dict):
        return {_plain(key, f"a key of {where}"): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    if type(value) in PLAIN or isinstance(value, Tensor):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise TypeError(f"{where} is a {kind}; a checkpoint holds numbers, strings, tensors, lists and dicts")
