"""The callbacks that only the engine has, in addition to those of trainer/callbacks/. docs/engine.md is the
user's page."""

import math
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from common.errors import UserError
from trainer.callbacks.base import Callback as Callback
from trainer.callbacks.base import monitored
from trainer.callbacks.included import EarlyStopping as EarlyStopping
from trainer.callbacks.included import TensorBoardLogger as TensorBoardLogger
from trainer.devices.process_group import Logger


class MetricsLogger(Callback):
    """Keeps this process's log records in `records`. The loop writes them to the metrics file and the
    console."""

    def __init__(self):
        self.records: list[dict[str, Any]] = []

    def on_batch_end(self, state: Any, update: int, record: dict[str, Any] | None) -> None:
        if record is not None:
            self.records.append(record)


class LRSchedulerCallback(Callback):
    """Steps a torch scheduler after each epoch or update, by `interval`; `ReduceLROnPlateau` is stepped after
    each validation. It also records the learning rate: `rates` holds each change that is seen at a log point,
    as {update: rate}. The engine sets the scheduler that the task builds; without one, the rate is only
    recorded."""

    def __init__(self, scheduler: Any = None, interval: str | None = None):
        self.scheduler, self.interval = scheduler, interval
        self.monitor: str | None = None  # what ReduceLROnPlateau follows
        self.rates: dict[int, float] = {}

    @property
    def follows_metric(self) -> bool:
        """Whether the scheduler is stepped after validations."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def on_train_start(self, state: Any) -> None:
        if self.scheduler is None:
            return
        name, epochs, updates = type(self.scheduler).__name__, state.args.epochs, state.total_updates
        if self.follows_metric:
            if state.eval_loader is None or self.scheduler.mode != state.args.mode:
                raise UserError(f"{name} needs held-out data, and the mode of --mode ({state.args.mode})")
            if self.monitor not in (None, state.args.monitor):
                raise UserError(
                    f"--monitor {state.args.monitor}: the learning rate of this run follows {self.monitor}, "
                    f"by {name}; give that, or another --save_weight for another run"
                )
            self.monitor = state.args.monitor
            return
        if self.interval not in ("epoch", "update", None):
            raise UserError(f"scheduler_interval must be 'epoch' or 'update', not {self.interval!r}")
        lengths = [getattr(self.scheduler, key, None) for key in ("total_steps", "T_max", "total_iters")]
        if self.interval is None and updates in lengths and updates != epochs:
            raise UserError(
                f"{name} is made for {updates} steps, as many as there are updates, but it is stepped after "
                f'each of {epochs} epochs; set scheduler_interval = "update" in the task, or "epoch"'
            )
        steps = updates if self.interval == "update" else epochs
        Logger(f"{name} is stepped after each {self.interval or 'epoch'}: {steps:,} times")

    def on_validation_end(self, state: Any, metrics: dict[str, float | None]) -> None:
        if self.follows_metric:
            value = monitored("ReduceLROnPlateau", state.args.monitor, metrics)
            self.scheduler.step(math.nan if value is None else value)  # NaN is no improvement

    def on_batch_end(self, state: Any, update: int, record: dict[str, Any] | None) -> None:
        if self.interval == "update" and self.scheduler is not None and not self.follows_metric:
            self.scheduler.step()
        if record is not None and record["learning_rate"] != next(reversed(self.rates.values()), None):
            self.rates[update] = record["learning_rate"]

    def on_epoch_end(self, state: Any, epoch: int) -> None:
        if self.interval != "update" and self.scheduler is not None and not self.follows_metric:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"scheduler": scheduler, "rates": self.rates, "monitor": self.monitor}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if self.scheduler is not None and saved["scheduler"] is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
            self.scheduler.optimizer._opt_called = True  # before the resume
        self.rates, self.monitor = dict(saved["rates"]), saved.get("monitor")
