"""What can be hung into a run without touching the engine: the callback interface, and the callbacks that are shipped.

docs/CALLBACKS.md shows when each method is called.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dataset.errors import UserError, reason, warn
from trainer.checkpoint import metrics_path
from trainer.console import MetricsLog, headline
from trainer.tracker import MODES, Tracker, drawable

if TYPE_CHECKING:
    from llm.training.core.engine import TrainingEngine

State = dict[str, Any]
PLAIN = (type(None), bool, int, float, str)


class Callback:
    """Does nothing; a subclass overrides what it wants to take part in. Every method is called on every rank."""

    def on_train_start(self, engine: "TrainingEngine") -> None:
        """Everything is set up and restored; no update has been made by this process."""

    def on_train_end(self, engine: "TrainingEngine") -> None:
        """Training came to its end, or was stopped by `engine.stop`. Not called after an exception."""

    def on_epoch_start(self, engine: "TrainingEngine", epoch: int) -> None:
        """Before the first update of an epoch (from 0), or the first one since a resume."""

    def on_epoch_end(self, engine: "TrainingEngine", epoch: int) -> None:
        """After the last update of an epoch and all that belongs to it."""

    def on_batch_start(self, engine: "TrainingEngine", update: int) -> None:
        """Before an optimizer update; `update` is the number that it will have, from 1."""

    def on_batch_end(self, engine: "TrainingEngine", update: int, record: State | None) -> None:
        """After an optimizer update; `record` is its finished log record at a log point, else None."""

    def on_validation_start(self, engine: "TrainingEngine") -> None:
        """Before a validation."""

    def on_validation_end(self, engine: "TrainingEngine", metrics: dict[str, float | None]) -> None:
        """After a validation; `metrics` are the same on all ranks."""

    def on_checkpoint_saved(self, engine: "TrainingEngine", path: Path) -> None:
        """The state of the last update has been handed to the writer; the file may not be complete yet."""

    def on_exception(self, engine: "TrainingEngine", error: BaseException) -> None:
        """Training ends by this exception (`Interrupted`: by a signal), which goes on afterwards."""

    def state_dict(self) -> State:
        """What the checkpoint keeps of this callback: numbers, strings, tensors, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Take over what `state_dict` gave; called before `on_train_start` of a resumed run."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class CallbackError(RuntimeError):
    """A callback raised; the message names it and the method, the cause is what it raised."""


class CallbackList:
    """The callbacks of a run, called in their order; a UserError for one that would never be called."""

    def __init__(self, callbacks: Iterable[Callback]):
        self.callbacks: dict[str, Callback] = {}
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise UserError(f"{callback!r} is not a callback; give an object of a subclass of Callback")
            name = type(callback).__name__
            for key in dir(callback):
                if key.startswith("on_") and key not in HOOKS:
                    raise UserError(f"callback {name}: {key} would never be called; there are {', '.join(HOOKS)}")
            same = sum(type(one).__name__ == name for one in self.callbacks.values())
            self.callbacks[f"{name}#{same + 1}" if same else name] = callback

    def dispatch(self, name: str, engine: "TrainingEngine", *args: Any) -> None:
        """Call a method of each callback. CallbackError: one failed; in `on_exception`, where another error is on its
        way and the others have files to close, that is a warning."""
        for key, callback in self.callbacks.items():
            try:
                _call(key, callback, name, engine, *args)
            except (CallbackError, UserError) as error:
                if name != "on_exception":
                    raise
                warn(str(error))

    def state_dict(self) -> dict[str, State]:
        """The states that are not empty, by class name (`EarlyStopping#2` for the second of a class). CallbackError:
        one failed, or holds what could not be read back from a checkpoint."""
        states = {key: _call(key, callback, "state_dict") for key, callback in self.callbacks.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: dict[str, State] | None) -> None:
        """Give each callback its state; those that came or went since are named in one warning."""
        states = states or {}
        keeping = [key for key, one in self.callbacks.items() if type(one).state_dict is not Callback.state_dict]
        new = [f"{key} starts without a saved state" for key in keeping if key not in states]
        gone = [f"the state of {key} is dropped" for key in states if key not in self.callbacks]
        if new or gone:
            warn(f"other callbacks than in the checkpoint: {'; '.join(new + gone)}")
        for key, callback in self.callbacks.items():
            if key in states:
                _call(key, callback, "load_state_dict", states[key])


def _call(key: str, callback: Callback, method: str, *args: Any) -> Any:
    """Call one method; whatever fails there is named. A user's mistake and a signal pass through as they are."""
    try:
        result = getattr(callback, method)(*args)
        return _plain(result, "the state") if method == "state_dict" else result
    except UserError:
        raise
    except Exception as error:
        raise CallbackError(f"callback {key} failed in {method}: {type(error).__name__}: {reason(error)}") from error


def _plain(value: Any, where: str) -> Any:
    """The value in types that `torch.load(weights_only=True)` reads: one wrong item would make the file unreadable."""
    if isinstance(value, dict):
        return {_plain(key, f"a key of {where}"): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    if type(value) in PLAIN or isinstance(value, Tensor):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise TypeError(f"{where} is a {kind}; a checkpoint holds numbers, strings, tensors, lists and dicts")


class _RecordLog(Callback):
    """What takes log records, on rank 0 only, and is closed however training ends."""

    log: Any = None

    def on_train_start(self, engine: "TrainingEngine") -> None:
        if engine.is_main_process:
            self.log = self._open(engine)

    def on_train_end(self, engine: "TrainingEngine") -> None:
        self._close(patience=None)

    def on_exception(self, engine: "TrainingEngine", error: BaseException) -> None:
        self._close(patience=10.0)  # seconds for a network: a run that was stopped is waited for

    def _close(self, patience: float | None) -> None:
        if self.log is not None:
            self.log.close()
        self.log = None


class MetricsLogger(_RecordLog):
    """Writes each log record to `<save_dir>/<run_name>_metrics.jsonl` and to the console, as the stage scripts do. A
    resumed run keeps the records that it stands on and writes the later ones again."""

    def _open(self, engine: "TrainingEngine") -> MetricsLog:
        path = metrics_path(engine.state.args.save_dir, engine.run_name)
        return MetricsLog(path, engine.state.total_updates, engine.resumed_update)

    def on_batch_end(self, engine: "TrainingEngine", update: int, record: State | None) -> None:
        if self.log is None:
            return
        self.log.tick(update)
        if record is not None:
            self.log.write(record, headline(record, engine.state.args.epochs, engine.state.iters))


class EarlyStopping(Callback):
    """Ends training when a validation metric no longer improves.

    Args:
        monitor: name of the metric; a UserError in the run if validation gives no such metric.
        mode: `min` if less is better, `max` if more is.
        patience: validations in a row without an improvement that end training.
        min_delta: an improvement is a change of more than this.
    """

    def __init__(self, monitor: str = "eval_loss", mode: str = "min", patience: int = 3, min_delta: float = 0.0):
        if mode not in ("min", "max") or patience < 1 or not 0 <= min_delta < math.inf:
            given = f"mode {mode!r}, patience {patience}, min_delta {min_delta}"
            raise UserError(f"EarlyStopping: mode is min or max, patience 1 or more, min_delta 0 or more; not {given}")
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, patience, min_delta
        self.best: float | None = None
        self.waited = 0  # validations since the best

    def on_validation_end(self, engine: "TrainingEngine", metrics: dict[str, float | None]) -> None:
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
    """Draws the finite numbers of each log record in TensorBoard, by update, under the names of the metrics file.

    Each process writes an event file of its own, which declares void what earlier files of the folder hold of its
    updates: a resumed run's curves have each update once.

    Args:
        log_dir: folder of this run's event files; a UserError in the run if it cannot be written, or TensorBoard is
            not installed.
    """

    def __init__(self, log_dir: str | Path):
        self.log_dir = Path(log_dir)

    def _open(self, engine: "TrainingEngine") -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(f"TensorBoardLogger: {reason(error)}; pip install tensorboard") from error
        first = 0 if engine.resumed_update is None else engine.resumed_update + 1
        with self._writing():
            # event files are read in the order of their names, which begin with the second that they were made in
            seconds = [path.name.split(".")[3] for path in self.log_dir.glob("events.out.tfevents.[0-9]*.*")]
            time.sleep(min(max(0.0, int(max(seconds, default=0)) + 1 - time.time()), 1.0))
            return SummaryWriter(str(self.log_dir), purge_step=first)

    def on_batch_end(self, engine: "TrainingEngine", update: int, record: State | None) -> None:
        if self.log is None or record is None:
            return
        with self._writing():
            for name, value in drawable(record, leave_out=("update",)).items():
                self.log.add_scalar(name, value, update)
            self.log.flush()  # a kill loses no point of an update that a resume goes on from

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"{self.log_dir} cannot be written ({error.strerror or error})"
            raise UserError(f"TensorBoardLogger: {why}; make room or give another folder, then resume") from error


class SwanLabLogger(_RecordLog):
    """Draws the finite numbers of each log record in SwanLab; a resumed run goes on in its curves (mode cloud).

    Args:
        project: SwanLab project.
        mode: where SwanLab keeps the run: cloud (or online), local, offline, disabled.
        name: of the run; by default the engine's `run_name`.
    """

    def __init__(self, project: str = "MiniMind-Trainer", mode: str = "cloud", name: str | None = None):
        if mode not in MODES:
            raise UserError(f"SwanLabLogger: mode {mode!r} must be one of {', '.join(sorted(MODES))}")
        self.project, self.mode, self.name = project, mode, name
        self.run_id: str | None = None

    def _open(self, engine: "TrainingEngine") -> Tracker:
        name, settings = self.name or engine.run_name, vars(engine.config.to_args())
        return Tracker(self.project, name, self.mode, settings, self.run_id, engine.resumed_update or 0)

    def on_batch_end(self, engine: "TrainingEngine", update: int, record: State | None) -> None:
        if self.log is not None and record is not None:
            self.log.log(drawable(record, leave_out=("update", "seconds")), update)

    def _close(self, patience: float | None) -> None:
        if self.log is not None:
            self.log.finish(patience)
            self.run_id, self.log = self.log.id, None

    def state_dict(self) -> State:
        return {"id": self.run_id if self.log is None else self.log.id}

    def load_state_dict(self, state: State) -> None:
        self.run_id = state["id"]


class LRSchedulerCallback(Callback):
    """Steps a `torch.optim.lr_scheduler` at the end of each update or epoch.

    Args:
        scheduler: the scheduler, or a function that makes it from the optimizer when training starts.
        interval: `update` or `epoch`.
    """

    def __init__(self, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler], interval: str = "update"):
        if interval not in ("update", "epoch"):
            raise UserError(f"LRSchedulerCallback: interval {interval!r} must be update or epoch")
        self.scheduler = scheduler if isinstance(scheduler, LRScheduler) else None
        self.make, self.interval = scheduler, interval
        self.done = 0  # updates or epochs; a resumed run may come by the last of them again
        self.saved: State | None = None

    def on_train_start(self, engine: "TrainingEngine") -> None:
        optimizer = engine.state.optimizer
        groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        if self.scheduler is None:
            self.scheduler = self.make(optimizer)
        if self.scheduler.optimizer is not optimizer:
            raise UserError("LRSchedulerCallback: the scheduler belongs to another optimizer than the engine's")
        if self.saved is not None:
            self.scheduler.load_state_dict(self.saved)
            for group, restored in zip(optimizer.param_groups, groups, strict=True):
                group.update(restored)  # making a scheduler sets the rate of its beginning
            optimizer._opt_called = True  # as the scheduler notes it: the optimizer stepped before the resume

    def on_batch_end(self, engine: "TrainingEngine", update: int, record: State | None) -> None:
        self._step("update", update)

    def on_epoch_end(self, engine: "TrainingEngine", epoch: int) -> None:
        self._step("epoch", epoch + 1)

    def _step(self, interval: str, count: int) -> None:
        if interval == self.interval and count > self.done:
            self.scheduler.step()
            self.done = count

    def state_dict(self) -> State:
        return {"done": self.done, "scheduler": self.saved if self.scheduler is None else self.scheduler.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.done, self.saved = state["done"], state["scheduler"]
