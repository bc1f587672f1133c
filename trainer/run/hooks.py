"""What the settings add to a run, in every stage and in the engine: early stopping, numbered and best
checkpoints, TensorBoard."""

import glob
import math
import os
import time
from pathlib import Path
from typing import Any

from common.errors import UserError, reason, warn
from common.files import link, remove, sync_folder, write_error
from common.settings import StageArgs
from trainer.devices.process_group import is_main_process
from trainer.report.trackers import drawable
from trainer.run.paths import is_state, run_name, tensorboard_folder
from trainer.run.state import Hooks, TrainState, monitored


def hooks_of_settings(args: StageArgs, has_held_out: bool) -> list[Hooks]:
    """What --patience, --keep_every, --keep_last and --use_tensorboard ask for; with held-out data the best
    checkpoint is kept, too. Raises UserError if TensorBoard is not installed."""
    hooks: list[Hooks] = []
    if args.keep_every or has_held_out:
        hooks.append(KeptStates(args))
    if args.patience:
        hooks.append(Patience(args.monitor, args.mode, args.patience, args.min_delta))
    if args.use_tensorboard or args.tensorboard_dir:
        hooks.append(TensorBoardCurves(tensorboard_folder(args, args)))
    return hooks


class Patience(Hooks):
    """Early stopping: ends training when a held-out metric no longer improves.

    Args:
        monitor: name of the metric; UserError during the run if validation does not report it.
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

    def judge(self, metrics: dict[str, float | None]) -> str:
        """Count a validation; why training should stop, or an empty text."""
        value, sign = monitored("EarlyStopping", self.monitor, metrics), 1 if self.mode == "max" else -1
        finite = value is not None and math.isfinite(value)
        if finite and (self.best is None or sign * (value - self.best) > self.min_delta):
            self.best, self.waited = float(value), 0
            return ""
        self.waited += 1
        if self.waited < self.patience:
            return ""
        best = "was never finite" if self.best is None else f"got no better than {self.best:.6g}"
        return f"EarlyStopping: {self.monitor} {best} in {self.waited} validations"

    def validation_end(self, state: TrainState, metrics: dict[str, Any], is_best: bool) -> None:
        if why := self.judge(metrics):
            state.finish(why)

    def forget_evaluations(self, state: TrainState) -> None:
        self.best, self.waited = None, 0

    def counts(self) -> dict[str, Any]:
        """What a checkpoint saves."""
        return {"best": self.best, "waited": self.waited, "monitor": self.monitor, "mode": self.mode}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what `counts` gave; another metric is counted anew."""
        before = (saved["monitor"], saved["mode"])
        if before == (self.monitor, self.mode):
            self.best, self.waited = saved["best"], saved["waited"]
        else:
            now = f"{self.monitor} {self.mode}"
            warn(f"EarlyStopping begins to count anew: {now} is monitored instead of {' '.join(before)}")

    def state_dict(self) -> dict[str, Any]:
        return {"early_stopping": self.counts()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if "early_stopping" in saved:
            self.restore(saved["early_stopping"])


class KeptStates(Hooks):
    """The checkpoints that are kept besides the latest: every --keep_every updates the last --keep_last, and
    the best.

    Files: `<run>_update_<number>.pth` and `<run>_best_resume.pth` in --checkpoint_dir, hard links to the file
    that was written to resume from. --resume_from continues from any of them.
    """

    def __init__(self, args: StageArgs):
        self.keep_every, self.keep_last = args.keep_every, args.keep_last
        self.folder, self.run = Path(args.checkpoint_dir), run_name(args.save_weight, args)
        self.best_update: int | None = None

    def wants_checkpoint(self, state: TrainState) -> bool:
        return self.keep_every > 0 and state.update % self.keep_every == 0

    def checkpoint_saved(self, state: TrainState, path: Path) -> None:
        if self.wants_checkpoint(state) and is_main_process():
            self._keep(state, f"update_{state.update:08d}")
            update = state.update
            state.writer.submit(lambda: self.prune(update))

    def validation_end(self, state: TrainState, metrics: dict[str, Any], is_best: bool) -> None:
        if is_best:
            self.best_update = state.update
            if is_main_process():
                self._keep(state, "best_resume")

    def forget_evaluations(self, state: TrainState) -> None:
        self.best_update = None

    def _keep(self, state: TrainState, name: str) -> None:
        source = state.state_file
        if source is not None:  # else nothing is saved yet
            state.writer.submit(lambda: link_state(source, self.folder / f"{self.run}_{name}.pth"))

    def prune(self, now: int) -> None:
        """Delete the numbered checkpoints up to update `now`, except for the last K (at least one) and the
        best. Later ones, of a run that went back to an older state, stay until it comes to them."""
        paths = self.folder.glob(f"{glob.escape(self.run)}_update_*")
        states = (path for path in paths if is_state(self.run, path.name))
        numbered = {int(path.stem.rpartition("_")[2]): path for path in states}
        past = sorted(update for update in numbered if update <= now)
        for update in past[: -max(1, self.keep_last)]:
            if update != self.best_update:
                remove(numbered[update])

    def state_dict(self) -> dict[str, Any]:
        return {"checkpoints": {"best_update": self.best_update}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if "checkpoints" in saved:
            self.best_update = saved["checkpoints"]["best_update"]


def link_state(source: Path, name: Path) -> None:
    """Hard-link a checkpoint under another name, atomically; copy where links fail. Raises UserError if the
    disk is full ..."""
    temp = name.with_name(f".{name.name}.tmp")
    try:
        remove(temp)
        link(source, temp)
        os.replace(temp, name)
        remove(temp)  # it is still there if both were links to the same file
        sync_folder(name.parent)
    except OSError as error:
        raise write_error(name, error) from error


class TensorBoardCurves(Hooks):
    """The finite numbers of each log record as TensorBoard's curves, by update, under the names of the
    metrics file.

    Each process writes its own event file, which purges the points of its updates from earlier files in the
    folder: the curves of a resumed run contain each update once.

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
        self.log_dir, self.log, self.writer_class = Path(log_dir), None, SummaryWriter

    def batch_end(self, state: TrainState, record: dict[str, Any] | None) -> None:
        if record is not None and is_main_process():
            self.write(record, state.resumed_update)

    def write(self, record: dict[str, Any], resumed_update: int | None) -> None:
        """Add the points of a record. resumed_update: the last one reported before the resume; None in a new
        run."""
        try:
            if self.log is None:
                self.log = self._open(0 if resumed_update is None else resumed_update + 1)
            for name, value in drawable(record, leave_out=("update",)).items():
                self.log.add_scalar(name, value, record["update"])
            self.log.flush()  # so that a kill loses no point of an update that a resume continues from
        except OSError as error:
            why = f"{self.log_dir} cannot be written ({error.strerror or error})"
            raise UserError(f"TensorBoard: {why}; make room or give another folder, then resume") from error

    def _open(self, first_update: int) -> Any:
        # event files are read in the order of their names, which start with the second of their creation
        seconds = [path.name.split(".")[3] for path in self.log_dir.glob("events.out.tfevents.[0-9]*.*")]
        time.sleep(min(max(0.0, int(max(seconds, default=0)) + 1 - time.time()), 1.0))
        return self.writer_class(str(self.log_dir), purge_step=first_update)
