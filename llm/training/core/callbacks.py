"""The callbacks that are included: what the settings add to every run, as callbacks for a list of one's own.

callback_list.py has the interface; docs/CALLBACKS.md shows when it is called."""

import math
from collections.abc import Callable
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from common.errors import UserError
from llm.training.core.callback_list import HOOKS, Callback, CallbackError, CallbackList, Engine, State
from trainer.components.run_hooks import Patience, TensorBoardCurves
from trainer.components.state import monitored
from trainer.components.tracker import MODES, Tracker, drawable

__all__ = [
    "HOOKS",
    "Callback",
    "CallbackError",
    "CallbackList",
    "EarlyStopping",
    "LRSchedulerCallback",
    "MetricsLogger",
    "SwanLabLogger",
    "TensorBoardLogger",
]


class MetricsLogger(Callback):
    """Keeps this process's log records in `records`. The loop writes them to the metrics file and the console."""

    def __init__(self):
        self.records: list[State] = []

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        self.records += [record] if record is not None else []


class EarlyStopping(Callback, Patience):
    """Ends training when a validation metric no longer improves, as --patience does; for the arguments see Patience."""

    def on_validation_end(self, engine: Engine, metrics: dict[str, float | None]) -> None:
        if why := self.judge(metrics):
            engine.stop(why)

    def state_dict(self) -> State:
        return self.counts()

    def load_state_dict(self, state: State) -> None:  # type: ignore[override]  # Patience, a hook, names it `saved`
        self.restore(state)


class TensorBoardLogger(Callback):
    """Logs the finite numbers of each log record to TensorBoard, as --use_tensorboard does.

    Args:
        log_dir: folder of this run's event files; UserError during the run if it cannot be written, or TensorBoard is
            not installed.
    """

    def __init__(self, log_dir: str | Path):
        self.log_dir = Path(log_dir)

    def on_train_start(self, engine: Engine) -> None:
        self.curves = TensorBoardCurves(self.log_dir) if engine.is_main_process else None

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        if record is not None and self.curves is not None:
            self.curves.write(record, engine.resumed_update)


class SwanLabLogger(Callback):
    """Logs the finite numbers of each log record to SwanLab, as --use_wandb does; a resumed run continues its curves
    (mode cloud).

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
        self.tracker: Tracker | None = None

    def on_train_start(self, engine: Engine) -> None:
        if engine.is_main_process:
            name, settings = self.name or engine.run_name, vars(engine.config.to_args())
            last = engine.resumed_update or 0
            self.tracker = Tracker(self.project, name, self.mode, settings, self.run_id, last)

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        if self.tracker is not None and record is not None:
            self.tracker.log(drawable(record, leave_out=("update", "seconds")), update)

    def on_train_end(self, engine: Engine) -> None:
        self._close(timeout=None)

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        self._close(timeout=10.0)  # seconds for the network: a stopped run should exit soon

    def _close(self, timeout: float | None) -> None:
        if self.tracker is not None:
            self.tracker.finish(timeout)
            self.run_id, self.tracker = self.tracker.id, None

    def state_dict(self) -> State:
        return {"id": self.run_id if self.tracker is None else self.tracker.id}

    def load_state_dict(self, state: State) -> None:
        self.run_id = state["id"]


class LRSchedulerCallback(Callback):
    """Steps a `torch.optim.lr_scheduler` at the end of each update or epoch, `ReduceLROnPlateau` after each validation,
    and records the learning rate: `rates` has each change, {update: rate}, as seen at the log points.

    Args:
        scheduler: the scheduler, or a function that creates it from the optimizer when training starts. By default the
            one of the task's `build_scheduler`; if that is none of torch, the callback only records.
        interval: `update` or `epoch`; by default the task's `scheduler_interval`.
        monitor: name of the metric for `ReduceLROnPlateau`; by default --monitor.
    """

    def __init__(
        self,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        interval: str | None = None,
        monitor: str | None = None,
    ):
        if interval not in ("update", "epoch", None):
            raise UserError(f"LRSchedulerCallback: interval {interval!r} must be update or epoch")
        self.scheduler = scheduler if isinstance(scheduler, LRScheduler) else None
        self.make = None if isinstance(scheduler, LRScheduler) else scheduler
        self.interval, self.monitor = interval, monitor
        self.rates: dict[int, float] = {}
        self.done = 0  # updates or epochs; a resumed run may report the last one again
        self.saved: State | None = None

    def adopt(self, scheduler: LRScheduler, interval: str) -> None:
        """Take the task's scheduler and interval where none was given."""
        if self.make is None and self.scheduler is None:
            self.scheduler = scheduler
        self.interval = self.interval or interval

    def on_train_start(self, engine: Engine) -> None:
        optimizer = engine.state.optimizer
        groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        if self.make is not None:
            self.scheduler = self.make(optimizer)
        if self.scheduler is None:
            return
        if self.scheduler.optimizer is not optimizer:
            raise UserError("LRSchedulerCallback: the scheduler belongs to another optimizer than the engine's")
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self._check_plateau(engine, self.scheduler)
        if self.saved is not None:
            self.scheduler.load_state_dict(self.saved)
            for group, restored in zip(optimizer.param_groups, groups, strict=True):
                group.update(restored)  # creating a scheduler sets its initial rate
            optimizer._opt_called = True  # type: ignore[attr-defined]  # it stepped before the resume: no warning

    def _check_plateau(self, engine: Engine, scheduler: ReduceLROnPlateau) -> None:
        if engine.state.eval_loader is None:
            raise UserError("ReduceLROnPlateau is stepped after each validation, but no data are held out")
        training = engine.config.training
        if self.monitor is None and scheduler.mode != training.mode:
            modes = f"ReduceLROnPlateau has mode {scheduler.mode}, but --monitor {training.monitor} has --mode"
            raise UserError(f"{modes} {training.mode}; give both the same")
        self.monitor = self.monitor or training.monitor

    def on_validation_end(self, engine: Engine, metrics: dict[str, float | None]) -> None:
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            return
        value = monitored("ReduceLROnPlateau", str(self.monitor), metrics)
        before = self.scheduler.get_last_lr()
        self.scheduler.step(math.nan if value is None else value)  # NaN is no improvement
        if self.scheduler.get_last_lr() != before:
            engine.logger.info(f"ReduceLROnPlateau: learning rate {self.scheduler.get_last_lr()[0]:.3e}")

    def on_batch_end(self, engine: Engine, update: int, record: State | None) -> None:
        self._step("update", update)
        rate = record["learning_rate"] if record else None
        if rate is not None and rate != next(reversed(self.rates.values()), None):
            self.rates[update] = rate
            engine.logger.debug(f"update {update}: learning rate {rate:.3e}")

    def on_epoch_end(self, engine: Engine, epoch: int) -> None:
        self._step("epoch", epoch + 1)

    def _step(self, interval: str, count: int) -> None:
        if self.scheduler is None or isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if interval == (self.interval or "update") and count > self.done:
            self.scheduler.step()
            self.done = count

    def state_dict(self) -> State:
        scheduler = self.saved if self.scheduler is None else self.scheduler.state_dict()
        return {"done": self.done, "scheduler": scheduler, "rates": self.rates}

    def load_state_dict(self, state: State) -> None:
        self.done, self.saved, self.rates = state["done"], state["scheduler"], dict(state.get("rates", {}))
