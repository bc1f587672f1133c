"""The callbacks that are included. callback_list.py has the interface; docs/CALLBACKS.md shows when it is called."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from common.errors import UserError, reason, warn
from llm.training.core.callback_list import HOOKS, Callback, CallbackError, CallbackList, State
from llm.training.core.interface import Engine
from trainer.components.metrics import MetricsLog, headline
from trainer.components.run_files import metrics_path
from trainer.components.tracker import MODES, Tracker, drawable, earlier_points

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


def monitored(callback: str, monitor: str, metrics: dict[str, float | None]) -> float | None:
    """The value of the metric that a callback monitors.

    Raises:
        UserError: validation does not report it.
    """
    if monitor not in metrics:
        there = ", ".join(sorted(metrics)) or "nothing"
        raise UserError(f"{callback}: validation gives no {monitor!r} to monitor; it gives {there}")
    return metrics[monitor]


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
        return MetricsLog(path, engine.state.total_updates, engine.resumed_update, records, engine.state.shown)

    def on_checkpoint_saved(self, engine: Engine, path: Path) -> None:
        if self.log is not None:
            self.log.sync()

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
        value, sign = monitored("EarlyStopping", self.monitor, metrics), 1 if self.mode == "max" else -1
        finite = value is not None and math.isfinite(value)
        if finite and (self.best is None or sign * (value - self.best) > self.min_delta):
            self.best, self.waited = float(value), 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "was never finite" if self.best is None else f"got no better than {self.best:.6g}"
            engine.stop(f"EarlyStopping: {self.monitor} {best} in {self.waited} validations")

    def state_dict(self) -> State:
        return {"best": self.best, "waited": self.waited, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state: State) -> None:
        saved, mine = (state.get("monitor", self.monitor), state.get("mode", self.mode)), (self.monitor, self.mode)
        if saved == mine:
            self.best, self.waited = state["best"], state["waited"]
        else:
            warn(f"EarlyStopping begins to count anew: {' '.join(mine)} is monitored instead of {' '.join(saved)}")


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
        last = engine.resumed_update or 0
        earlier = earlier_points(metrics_path(engine.state.args.save_dir, engine.run_name), last) if last else []
        return Tracker(self.project, name, self.mode, settings, self.run_id, last, earlier)

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
            told = f"ReduceLROnPlateau has mode {scheduler.mode}, but --monitor {training.monitor} has --mode"
            raise UserError(f"{told} {training.mode}; give both the same")
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
