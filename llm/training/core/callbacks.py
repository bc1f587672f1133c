"""The callbacks that only the engine has, beside those of trainer/run/. docs/CALLBACKS.md is the user's
page."""

import math
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from common.errors import UserError
from trainer.run.callbacks import Callback as Callback
from trainer.run.callbacks import monitored
from trainer.run.included_callbacks import EarlyStopping as EarlyStopping
from trainer.run.included_callbacks import TensorBoardLogger as TensorBoardLogger
from trainer.run.state import TrainState

State = dict[str, Any]


class MetricsLogger(Callback):
    """Keeps this process's log records in `records`. The loop writes them to the metrics file and the
    console."""

    def __init__(self):
        self.records: list[State] = []

    def on_batch_end(self, engine: Any, update: int, record: State | None) -> None:
        if record is not None:
            self.records.append(record)


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
        self.monitor: str | None = None  # what ReduceLROnPlateau follows

    def on_train_start(self, engine: Any) -> None:
        if not isinstance(engine.scheduler, LRScheduler):
            return
        self.scheduler, training = engine.scheduler, engine.config.training
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if engine.state.eval_loader is None:
                why = "but no data are held out"
                raise UserError(f"ReduceLROnPlateau is stepped after each validation, {why}")
            if self.scheduler.mode != training.mode:
                of_monitor = f"--monitor {training.monitor} has --mode {training.mode}"
                mode = self.scheduler.mode
                raise UserError(f"ReduceLROnPlateau has mode {mode}, but {of_monitor}; give both the same")
            if self.monitor not in (None, training.monitor):
                self.forget_evaluations(engine.state)
            self.monitor = training.monitor
        else:
            epochs, updates = engine.state.args.epochs, engine.state.total_updates
            engine.logger.info(steps_ahead(self.scheduler, engine.task, epochs, updates))
        if self.saved is not None:
            self.scheduler.load_state_dict(self.saved)
            # it was, before the resume: no warning
            self.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]

    def on_validation_end(self, engine: Any, metrics: dict[str, float | None]) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            value = monitored("ReduceLROnPlateau", engine.config.training.monitor, metrics)
            self.scheduler.step(math.nan if value is None else value)  # NaN is no improvement

    def on_batch_end(self, engine: Any, update: int, record: State | None) -> None:
        self._step(engine, "update", update)
        rate = record["learning_rate"] if record else None
        if rate is not None and rate != next(reversed(self.rates.values()), None):
            self.rates[update] = rate
            engine.logger.debug(f"update {update}: learning rate {rate:.3e}")

    def on_epoch_end(self, engine: Any, epoch: int) -> None:
        self._step(engine, "epoch", epoch + 1)

    def _step(self, engine: Any, interval: str, count: int) -> None:
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
        return {"done": self.done, "scheduler": scheduler, "rates": self.rates, "monitor": self.monitor}

    def load_state_dict(self, state: State) -> None:
        self.done, self.saved, self.monitor = state["done"], state["scheduler"], state["monitor"]
        self.rates = dict(state["rates"])


def steps_ahead(scheduler: LRScheduler, task: Any, epochs: int, updates: int) -> str:
    """When a scheduler of torch is stepped, as a line for people. Raises UserError if the task's
    `scheduler_interval` is unknown, or not the one that the scheduler is made for."""
    name, given = type(scheduler).__name__, task.scheduler_interval
    if given not in ("epoch", "update", None):
        interval = f"{type(task).__name__}.scheduler_interval"
        raise UserError(f"{interval} must be 'epoch' or 'update', not {given!r}")
    steps = updates if given == "update" else epochs
    made_for = [getattr(scheduler, key, None) for key in ("total_steps", "T_max", "total_iters")]
    if given is None and updates in made_for and updates != epochs:
        raise UserError(
            f"{name} is made for {updates} steps, as many as there are updates, but it is stepped after each "
            f'of {epochs} epochs; set scheduler_interval = "update" in the task, or "epoch" if that is meant'
        )
    if given == "update":
        return f"{name} is stepped after each update: {steps:,} times"
    text = f"{name} is stepped after each epoch: {steps:,} times"
    return f'{text} (scheduler_interval = "update" makes it {updates:,})'
