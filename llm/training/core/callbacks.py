"""What a callback is, the list of those that the engine calls, and the ones that are included.
docs/CALLBACKS.md shows when each method is called; for what the included ones do there are settings, too."""

import inspect
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from common.errors import UserError, reason, warn
from trainer.run.hooks import Patience, TensorBoardCurves
from trainer.run.state import TrainState, monitored

Engine = Any  # the TrainingEngine of engine.py, which imports this file
State = dict[str, Any]
PLAIN = (type(None), bool, int, float, str)


class Callback:
    """Base class: all methods do nothing. A subclass overrides those it needs; each is called on every
    rank."""

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
        """The checkpoint of the last update is being written in the background; it may not be complete
        yet."""

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        """This exception ends training (`Interrupted`: a signal does); it is raised again afterwards."""

    def state_dict(self) -> State:
        """State to save in the checkpoint: numbers, strings, tensors, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`; called before `on_train_start` of a resumed run."""

    def forget_evaluations(self, state: TrainState) -> None:
        """After `load_state_dict`, if the run has other held-out data or another --monitor than before: what
        is kept of earlier evaluations does not count any more."""


EPOCH_HOOKS = ("on_epoch_start", "on_epoch_end")  # called once per epoch, also over resumes
HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class CallbackList:
    """The callbacks of a run, called in order. Raises UserError for a method `on_...` that is never called,
    or cannot be called with its arguments.

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
                    raise UserError(
                        f"callback {name}: {key} would never be called; the methods are {', '.join(HOOKS)}"
                    )
            check_methods(callback)
            same = sum(type(one).__name__ == name for one in self.callbacks.values())
            self.callbacks[f"{name}#{same + 1}" if same else name] = callback

    def dispatch(self, name: str, engine: Engine, *args: Any) -> None:
        """Call a method of each callback; the traceback of an exception names the callback. In `on_exception`
        one is only a warning, because the other callbacks still have to close their files."""
        for key, callback in self.callbacks.items():
            if name in EPOCH_HOOKS:
                last = self.epochs.setdefault(key, {})
                if args[0] <= last.get(name, -1):
                    continue  # before the resume
                last[name] = args[0]
            try:
                getattr(callback, name)(engine, *args)
            except Exception as error:
                if name != "on_exception":
                    error.add_note(f"callback {key} failed in {name}")
                    raise
                warn(f"callback {key} failed in {name}: {type(error).__name__}: {reason(error)}")

    def state_dict(self) -> dict[str, State]:
        """The non-empty states by class name (`EarlyStopping#2` for the second of a class). Raises UserError
        if one contains a type that a checkpoint cannot hold."""
        states = {
            key: _plain(one.state_dict(), f"the state of callback {key}")
            for key, one in self.callbacks.items()
        }
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: dict[str, State] | None) -> None:
        """Restore the state of each callback; warn about callbacks that were added or removed."""
        states = states or {}
        keeping = [
            key for key, one in self.callbacks.items() if type(one).state_dict is not Callback.state_dict
        ]
        changes = [f"{key} has no saved state" for key in keeping if key not in states]
        gone = [key for key in states if key not in self.callbacks]
        changes += [f"the saved state of {key} is ignored" for key in gone]
        if changes:
            warn(f"the callbacks are not those of the checkpoint: {'; '.join(changes)}")
        for key in self.callbacks.keys() & states.keys():
            self.callbacks[key].load_state_dict(states[key])


def check_methods(callback: Callback) -> None:
    """Raise UserError if a method of a callback is declared so that it cannot be called."""
    for hook in HOOKS:
        arguments = list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
        signature = inspect.signature(getattr(callback, hook))
        try:
            signature.bind(*arguments)
        except TypeError as error:
            declared = f"callback {type(callback).__name__}: {hook} is declared with {signature}"
            raise UserError(f"{declared}, but it is called as {hook}({', '.join(arguments)})") from error


def _plain(value: Any, where: str) -> Any:
    """The value in types that `torch.load(weights_only=True)` accepts: any other would make the file
    unreadable."""
    if isinstance(value, dict):
        return {
            _plain(key, f"a key of {where}"): _plain(item, f"{where}[{key!r}]") for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    if type(value) in PLAIN or isinstance(value, Tensor):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise UserError(f"{where} is a {kind}; a checkpoint holds numbers, strings, tensors, lists and dicts")


# --- the included ones
# -----------------------------------------------------------------------------------------------


class MetricsLogger(Callback):
    """Keeps this process's log records in `records`. The loop writes them to the metrics file and the
    console."""

    def __init__(self):
        self.records: list[State] = []

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        if record is not None:
            self.records.append(record)


class EarlyStopping(Callback, Patience):
    """Ends training when a validation metric no longer improves, as --patience does; for the arguments see
    Patience."""

    def on_validation_end(self, engine: Engine, metrics: dict[str, float | None]) -> None:
        if why := self.judge(metrics):
            engine.stop(why)

    def state_dict(self) -> State:
        return self.counts()

    # Patience, a hook, names the argument `saved`
    def load_state_dict(self, state: State) -> None:  # type: ignore[override]
        self.restore(state)


class TensorBoardLogger(Callback):
    """Logs the finite numbers of each log record to TensorBoard, as --use_tensorboard does.

    Args:
        log_dir: folder of this run's event files; UserError during the run if it cannot be written, or
            TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | Path):
        self.log_dir = Path(log_dir)

    def on_train_start(self, engine: Engine) -> None:
        self.curves = TensorBoardCurves(self.log_dir) if engine.is_main_process else None

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        if record is not None and self.curves is not None:
            self.curves.write(record, engine.resumed_update)


class LRSchedulerCallback(Callback):
    """Steps the scheduler of torch that the task's `build_scheduler` returned: after each epoch or update, as
    its `scheduler_interval` says, `ReduceLROnPlateau` after each validation. Records the learning rate:
    `rates` has each change, {update: rate}, as seen at the log points. Raises UserError before training if
    the scheduler is made for another number of steps."""

    def __init__(self):
        self.scheduler: LRScheduler | None = None
        self.rates: dict[int, float] = {}
        self.done = 0  # updates or epochs; a resumed run may report the last one again
        self.saved: State | None = None

    def on_train_start(self, engine: Engine) -> None:
        if not isinstance(engine.scheduler, LRScheduler):
            return
        self.scheduler, training = engine.scheduler, engine.config.training
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if engine.state.eval_loader is None:
                raise UserError(
                    "ReduceLROnPlateau is stepped after each validation, but no data are held out"
                )
            if self.scheduler.mode != training.mode:
                raise UserError(
                    f"ReduceLROnPlateau has mode {self.scheduler.mode}, but --monitor {training.monitor} has "
                    f"--mode {training.mode}; give both the same"
                )
        else:
            epochs, updates = engine.state.args.epochs, engine.state.total_updates
            engine.logger.info(steps_ahead(self.scheduler, engine.task, epochs, updates))
        if self.saved is not None:
            self.scheduler.load_state_dict(self.saved)
            # it was, before the resume: no warning
            self.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]

    def on_validation_end(self, engine: Engine, metrics: dict[str, float | None]) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            value = monitored("ReduceLROnPlateau", engine.config.training.monitor, metrics)
            self.scheduler.step(math.nan if value is None else value)  # NaN is no improvement

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        self._step(engine, "update", update)
        rate = record["learning_rate"] if record else None
        if rate is not None and rate != next(reversed(self.rates.values()), None):
            self.rates[update] = rate
            engine.logger.debug(f"update {update}: learning rate {rate:.3e}")

    def on_epoch_end(self, engine: Engine, epoch: int) -> None:
        self._step(engine, "epoch", epoch + 1)

    def _step(self, engine: Engine, interval: str, count: int) -> None:
        if self.scheduler is None or isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if interval == (engine.task.scheduler_interval or "epoch") and count > self.done:
            self.scheduler.step()
            self.done = count

    def forget_evaluations(self, state: TrainState) -> None:
        if self.saved is not None and "num_bad_epochs" in self.saved:  # of ReduceLROnPlateau
            worst = -math.inf if self.saved["mode"] == "max" else math.inf
            self.saved = self.saved | {"best": worst, "num_bad_epochs": 0}

    def state_dict(self) -> State:
        scheduler = self.saved if self.scheduler is None else self.scheduler.state_dict()
        return {"done": self.done, "scheduler": scheduler, "rates": self.rates}

    def load_state_dict(self, state: State) -> None:
        self.done, self.saved, self.rates = state["done"], state["scheduler"], dict(state.get("rates", {}))


def steps_ahead(scheduler: LRScheduler, task: Any, epochs: int, updates: int) -> str:
    """When a scheduler of torch is stepped, as a line for people. Raises UserError if the task's
    `scheduler_interval` is unknown, or not the one that the scheduler is made for."""
    name, given = type(scheduler).__name__, task.scheduler_interval
    if given not in ("epoch", "update", None):
        raise UserError(
            f"{type(task).__name__}.scheduler_interval must be 'epoch' or 'update', not {given!r}"
        )
    steps = updates if given == "update" else epochs
    made_for = [getattr(scheduler, key, None) for key in ("total_steps", "T_max", "total_iters")]
    if given is None and updates in made_for and updates != epochs:
        raise UserError(
            f"{name} is made for {updates} steps, as many as there are updates, but it is stepped after "
            f'each of {epochs} epochs; set scheduler_interval = "update" in the task, or "epoch" if that is '
            "meant"
        )
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < steps:
        raise UserError(f"OneCycleLR is made for {scheduler.total_steps} steps, but there will be {steps}")
    if given == "update":
        return f"{name} is stepped after each update: {steps:,} times"
    text = f"{name} is stepped after each epoch: {steps:,} times"
    return f'{text} (scheduler_interval = "update" makes it {updates:,})'
