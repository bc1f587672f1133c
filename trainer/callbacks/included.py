"""The included callbacks: early stopping and TensorBoard. Settings add them to any run."""

import math
from pathlib import Path
from typing import Any

from common.errors import UserError, reason
from trainer.callbacks.base import Callback, is_better, monitored
from trainer.devices.process_group import is_main_process
from trainer.report.trackers import drawable


class EarlyStopping(Callback):
    """Ends training when a held-out metric no longer improves.

    Args:
        monitor: name of the metric; UserError if validation does not report it.
        mode: `min` if lower is better, `max` if higher is better.
        patience: stop after this many validations in a row without an improvement.
        min_delta: a change counts as an improvement if it is larger than this.
    """

    def __init__(
        self, monitor: str = "eval_loss", mode: str = "min", patience: int = 3, min_delta: float = 0.0
    ):
        if mode not in ("min", "max") or patience < 1 or not 0 <= min_delta < math.inf:
            given = f"mode {mode!r}, patience {patience}, min_delta {min_delta}"
            raise UserError(
                f"EarlyStopping: mode must be min or max, patience >= 1, min_delta >= 0; not {given}"
            )
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, patience, min_delta
        self.best: float | None = None
        self.waited = 0  # validations since the best

    def held_out_metrics(self) -> list[str]:
        return [self.monitor]

    def on_validation_end(self, state: Any, metrics: dict[str, float | None]) -> None:
        value = monitored("EarlyStopping", self.monitor, metrics)
        is_finite = value is not None and math.isfinite(value)
        if is_finite and is_better(value, self.best, self.mode, self.min_delta):
            self.best, self.waited = float(value), 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "was never finite" if self.best is None else f"got no better than {self.best:.6g}"
            state.finish(f"EarlyStopping: {self.monitor} {best} in {self.waited} validations")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        before = saved.get("monitor", self.monitor), saved.get("mode", self.mode)
        if before == (self.monitor, self.mode):  # before that, the metric has no value yet
            self.best, self.waited = saved["best"], saved["waited"]


class TensorBoardLogger(Callback):
    """The finite numbers of each log record as TensorBoard's curves, by update, under the names of the
    metrics file.

    Each process writes its own event file. It removes the points of its updates from earlier files in the
    folder, so the curves of a resumed run contain each update once.

    Args:
        log_dir: folder of this run's event files.

    Raises:
        UserError: TensorBoard is not installed; during the run, the folder cannot be written.
    """

    def __init__(self, log_dir: str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(f"TensorBoard: {reason(error)}; pip install tensorboard") from error
        self.log_dir, self.writer_class = Path(log_dir), SummaryWriter
        self.log: Any = None

    def on_batch_end(self, state: Any, update: int, record: dict[str, Any] | None) -> None:
        if record is None or not is_main_process():
            return
        try:
            if self.log is None:  # event files are read in the order of their names, which begin with a time
                first = 0 if state.resumed_update is None else state.resumed_update + 1
                self.log = self.writer_class(str(self.log_dir), purge_step=first)
            for name, value in drawable(record, leave_out=("update",)).items():
                self.log.add_scalar(name, value, record["update"])
            self.log.flush()  # so that a kill loses no point of an update before the checkpoint
        except OSError as error:
            why = f"{self.log_dir} cannot be written ({error.strerror or error})"
            raise UserError(f"TensorBoard: {why}; make room or give another folder, then resume") from error
