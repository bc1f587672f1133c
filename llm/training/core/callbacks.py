"""Callbacks extend a run without changing the engine: the interface, and the callbacks that are included.

docs/CALLBACKS.md shows when each method is called.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.errors import UserError, reason, warn
from llm.training.core.interface import Engine
from trainer.components.metrics import MetricsLog, headline
from trainer.components.run_files import metrics_path
from trainer.components.tracker import MODES, Tracker, drawable

State = dict[str, Any]
PLAIN = (type(None), bool, int, float, str)


class Callback:
    """Base class: all methods do nothing. A subclass overrides those it needs; each is called on every rank."""

    def on_train_start(self, engine: Engine) -> None:
        """Everything is set up and restored; this process has not made an update yet."""

    def on_train_end(self, engine: Engine) -> None:
        """Training is finished, or was stopped by `engine.stop`. Not called after an exception."""

    def on_epoch_start(self, engine: Engine, epoch: int) -> None:
        """Before the first update of an epoch (from 0), or the first after a resume."""

    def on_epoch_end(self, engine: Engine, epoch: int) -> None:
        """After the last update of an epoch, its validation and its checkpoint."""

    def on_batch_start(self, engine: Engine, update: int) -> None:
        """Before an optimizer update; `update` is its number, from 1."""

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


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class CallbackError(RuntimeError):
    """A callback raised an exception, which is the cause; the message names the callback and the method."""


class CallbackList:
    """The callbacks of a run, called in order. Raises UserError for a method `on_...` that is never called."""

    def __init__(self, callbacks: Iterable[Callback]):
        self.callbacks: dict[str, Callback] = {}
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
        changes += [f"the saved state of {key} is ignored" for key in states if key not in self.callbacks]
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


class _RecordLog(Callback):
    """Base class of callbacks that write log records, on rank 0 only. The log is closed even after an exception."""

    log: Any = None

    def on_train_start(self, engine: Engine) -> None:
        if engine.is_main_process:
            self.log = self._open(engine)

    def on_train_end(self, engine: Engine) -> None:
        self._close(timeout=None)

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        self._close(timeout=10.0)  # seconds for the network: a stopped run should exit soon

    def _open(self, engine: Engine) -> Any:
        raise NotImplementedError

    def _close(self, timeout: float | None) -> None:
        if self.log is not None:
            self.log.close()
        self.log = None


class MetricsLogger(_RecordLog):
    """Writes each log record to `<save_dir>/<run_name>_metrics.jsonl` and to the console, as the stage scripts do. A
    resumed run keeps the records up to its checkpoint and writes the later ones again."""

    def _open(self, engine: Engine) -> MetricsLog:
        path = metrics_path(engine.state.args.save_dir, engine.run_name)
        records = engine.state.records if engine.resumed_update is not None else None
        return MetricsLog(path, engine.state.total_updates, engine.resumed_update, records)

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        if self.log is None:
            return
        self.log.tick(update)
        if record is not None:
            self.log.write(record, headline(record, engine.state.args.epochs, engine.state.iters))


class EarlyStopping(Callback):
    """Ends training when a validation metric no longer improves.

    Args:
        monitor: name of the metric; UserError during the run if validation does not report it.
        mode: `min` if lower is better, `max` if higher is better.
        patience: stop after this many validations in a row without an improvement.
        min_delta: a change counts as an improvement if it is larger than this.
    """

    def __init__(self, monitor: str = "eval_loss", mode: str = "min", patience: int = 3, min_delta: float = 0.0):
        if mode not in ("min", "max") or patience < 1 or not 0 <= min_delta < math.inf:
            given = f"mode {mode!r}, patience {patience}, min_delta {min_delta}"
            raise UserError(f"EarlyStopping: mode must be min or max, patience >= 1, min_delta >= 0; not {given}")
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, patience, min_delta
        self.best: float | None = None
        self.waited = 0  # validations since the best

    def on_validation_end(self, engine: Engine, metrics: dict[str, float | None]) -> None:
        if self.monitor not in metrics:
            there = ", ".join(sorted(metrics)) or "nothing"
            raise UserError(f"EarlyStopping: validation gives no {self.monitor!r} to monitor; it gives {there}")
        value, sign = metrics[self.monitor], 1 if self.mode == "max" else -1
        finite = value is not None and math.isfinite(value)
        if finite and (self.best is None or sign * (value - self.best) > self.min_delta):
            self.best, self.waited = float(value), 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "was never finite" if self.best is None else f"got no better than {self.best:.6g}"
            engine.stop(f"EarlyStopping: {self.monitor} {best} in {self.waited} validations")

    def state_dict(self) -> State:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: State) -> None:
        self.best, self.waited = state["best"], state["waited"]


class TensorBoardLogger(_RecordLog):
    """Logs the finite numbers of each log record to TensorBoard, by update, under the names of the metrics file.

    Each process writes its own event file, which purges the points of its updates from earlier files in the folder: the
    curves of a resumed run contain each update once.

    Args:
        log_dir: folder of this run's event files; UserError during the run if it cannot be written, or TensorBoard is
            not installed.
    """

    def __init__(self, log_dir: str | Path):
        self.log_dir = Path(log_dir)

    def _open(self, engine: Engine) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(f"TensorBoardLogger: {reason(error)}; pip install tensorboard") from error
        first = 0 if engine.resumed_update is None else engine.resumed_update + 1
        with self._writing():
            # event files are read in the order of their names, which start with the second of their creation
            seconds = [path.name.split(".")[3] for path in self.log_dir.glob("events.out.tfevents.[0-9]*.*")]
            time.sleep(min(max(0.0, int(max(seconds, default=0)) + 1 - time.time()), 1.0))
            return SummaryWriter(str(self.log_dir), purge_step=first)

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        if self.log is None or record is None:
            return
        with self._writing():
            for name, value in drawable(record, leave_out=("update",)).items():
                self.log.add_scalar(name, value, update)
            self.log.flush()  # so that a kill loses no point of an update that a resume continues from

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"{self.log_dir} cannot be written ({error.strerror or error})"
            raise UserError(f"TensorBoardLogger: {why}; make room or give another folder, then resume") from error


class SwanLabLogger(_RecordLog):
    """Logs the finite numbers of each log record to SwanLab; a resumed run continues its curves (mode cloud).

    Args:
        project: SwanLab project.
        mode: where SwanLab stores the run: cloud (or online), local, offline, disabled.
        name: name of the run; by default the engine's `run_name`.
    """

    def __init__(self, project: str = "MiniMind-Trainer", mode: str = "cloud", name: str | None = None):
        if mode not in MODES:
            raise UserError(f"SwanLabLogger: mode {mode!r} must be one of {', '.join(sorted(MODES))}")
        self.project, self.mode, self.name = project, mode, name
        self.run_id: str | None = None

    def _open(self, engine: Engine) -> Tracker:
        name, settings = self.name or engine.run_name, vars(engine.config.to_args())
        return Tracker(self.project, name, self.mode, settings, self.run_id, engine.resumed_update or 0)

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        if self.log is not None and record is not None:
            self.log.log(drawable(record, leave_out=("update", "seconds")), update)

    def _close(self, timeout: float | None) -> None:
        if self.log is not None:
            self.log.finish(timeout)
            self.run_id, self.log = self.log.id, None

    def state_dict(self) -> State:
        return {"id": self.run_id if self.log is None else self.log.id}

    def load_state_dict(self, state: State) -> None:
        self.run_id = state["id"]


class LRSchedulerCallback(Callback):
    """Steps a `torch.optim.lr_scheduler` at the end of each update or epoch.

    Args:
        scheduler: the scheduler, or a function that creates it from the optimizer when training starts.
        interval: `update` or `epoch`.
    """

    def __init__(self, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler], interval: str = "update"):
        if interval not in ("update", "epoch"):
            raise UserError(f"LRSchedulerCallback: interval {interval!r} must be update or epoch")
        self.scheduler = scheduler if isinstance(scheduler, LRScheduler) else None
        self.make = None if isinstance(scheduler, LRScheduler) else scheduler
        self.interval = interval
        self.done = 0  # updates or epochs; a resumed run may report the last one again
        self.saved: State | None = None

    def on_train_start(self, engine: Engine) -> None:
        optimizer = engine.state.optimizer
        groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        if self.make is not None:
            self.scheduler = self.make(optimizer)
        assert self.scheduler is not None
        if self.scheduler.optimizer is not optimizer:
            raise UserError("LRSchedulerCallback: the scheduler belongs to another optimizer than the engine's")
        if self.saved is not None:
            self.scheduler.load_state_dict(self.saved)
            for group, restored in zip(optimizer.param_groups, groups, strict=True):
                group.update(restored)  # creating a scheduler sets its initial rate
            optimizer._opt_called = True  # type: ignore[attr-defined]  # it stepped before the resume: no warning

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        self._step("update", update)

    def on_epoch_end(self, engine: Engine, epoch: int) -> None:
        self._step("epoch", epoch + 1)

    def _step(self, interval: str, count: int) -> None:
        if self.scheduler is not None and interval == self.interval and count > self.done:
            self.scheduler.step()
            self.done = count

    def state_dict(self) -> State:
        return {"done": self.done, "scheduler": self.saved if self.scheduler is None else self.scheduler.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.done, self.saved = state["done"], state["scheduler"]
