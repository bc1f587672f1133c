"""The included callbacks, which settings add to any run: early stopping, numbered and best checkpoints,
TensorBoard."""

import glob
import math
import os
import time
from pathlib import Path
from typing import Any, cast

from common.errors import UserError, reason, warn
from common.files import link, remove, sync_folder, write_errors
from common.settings import StageArgs
from trainer.devices.process_group import is_main_process
from trainer.report.speed import read_meter
from trainer.report.trackers import drawable
from trainer.run.callbacks import Callback, monitored
from trainer.run.checkpoint import load, load_state
from trainer.run.paths import is_state, resume_path, run_name
from trainer.run.saving import save_checkpoint
from trainer.run.state import TrainState


class EarlyStopping(Callback):
    """Ends training when a held-out metric no longer improves.

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

    def on_validation_end(self, engine: Any, metrics: dict[str, float | None]) -> None:
        value = monitored("EarlyStopping", self.monitor, metrics)
        if value is not None and math.isfinite(value) and self.is_better(value):
            self.best, self.waited = float(value), 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "was never finite" if self.best is None else f"got no better than {self.best:.6g}"
            engine.state.finish(f"EarlyStopping: {self.monitor} {best} in {self.waited} validations")

    def is_better(self, value: float) -> bool:
        """Whether a value improves on the best one so far."""
        if self.best is None:
            return True
        if self.mode == "max":
            return value - self.best > self.min_delta
        return self.best - value > self.min_delta

    def forget_evaluations(self, state: TrainState) -> None:
        self.best, self.waited = None, 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; another metric is counted anew."""
        before = (state["monitor"], state["mode"])
        if before == (self.monitor, self.mode):
            self.best, self.waited = state["best"], state["waited"]
        else:
            now = f"{self.monitor} {self.mode}"
            warn(f"EarlyStopping begins to count anew: {now} is monitored instead of {' '.join(before)}")


class CheckpointManager(Callback):
    """The checkpoints of a run: the newest, which the loop writes, and those that are kept besides: every
    --keep_every updates the last --keep_last, and the best.

    Files: `<run>_update_<number>.pth` and `<run>_best_resume.pth` in --checkpoint_dir, hard links to the file
    that was written to resume from. --resume_from continues from any of them.
    """

    def __init__(self, args: StageArgs):
        self.args = args
        self.folder, self.run = Path(args.checkpoint_dir), run_name(args.save_weight, args)
        self.state: TrainState | None = None  # of the engine, once it is set up

    def save_checkpoint(self, state: TrainState | None = None) -> None:
        """Write the state of the last update, by default the engine's, as the newest checkpoint, and wait
        until it is on the disk; all ranks together. The loop saves at --save_interval and at the end of each
        epoch, without waiting. A callback should call it in `on_batch_start` or `on_epoch_end`, when the
        update before is complete."""
        state = cast(TrainState, state or self.state)
        read_meter(state)
        state.skipped_updates.read_and_warn()
        save_checkpoint(state)
        state.writer.wait()

    def load_checkpoint(self, path: str | Path | None = None) -> dict[str, Any] | None:
        """The checkpoint to continue from: the one at `path`, else what --resume_from and --from_resume ask
        for; None if there is none. Raises UserError if there is none at `path`, or it is damaged or something
        else."""
        args = self.args
        if path is None and args.resume_from is None and not args.from_resume:
            return None
        if path is not None:
            return load_state(Path(path))
        return load(resume_path(self.folder, args.save_weight, args), args.resume_from)

    def on_checkpoint_saved(self, engine: Any, path: Path) -> None:
        state, keep_every = engine.state, self.args.keep_every
        # a save at a multiple, whoever asked for it, or one that was postponed beyond a multiple
        is_due = keep_every and (state.keep_due or state.update % keep_every == 0)
        if is_due and is_main_process():
            self._keep(state, f"update_{state.update:08d}")
            update, best = state.update, state.best_update
            state.writer.submit(lambda: self.prune(update, best))
        state.keep_due = False

    def on_validation_end(self, engine: Any, metrics: dict[str, float | None]) -> None:
        state = engine.state
        if state.best_update == state.update and is_main_process():
            self._keep(state, "best_resume")

    def _keep(self, state: TrainState, name: str) -> None:
        source = state.state_file
        if source is not None:  # else nothing is saved yet
            state.writer.submit(lambda: link_state(source, self.folder / f"{self.run}_{name}.pth"))

    def prune(self, now: int, best: int | None) -> None:
        """Delete the numbered checkpoints up to update `now`, except for the last --keep_last (at least one)
        and the best. Later ones, of a run that went back to an older state, stay until it comes to them."""
        paths = self.folder.glob(f"{glob.escape(self.run)}_update_*")
        states = (path for path in paths if is_state(self.run, path.name))
        numbered = {int(path.stem.rpartition("_")[2]): path for path in states}
        past = sorted(update for update in numbered if update <= now)
        for update in past[: -max(1, self.args.keep_last)]:
            if update != best:
                remove(numbered[update])


def link_state(source: Path, name: Path) -> None:
    """Hard-link a checkpoint under another name, atomically; copy where links fail. Raises UserError if the
    disk is full ..."""
    temp = name.with_name(f".{name.name}.tmp")
    with write_errors(name):
        remove(temp)
        link(source, temp)
        os.replace(temp, name)
        remove(temp)  # it is still there if both were links to the same file
        sync_folder(name.parent)


class TensorBoardLogger(Callback):
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

    def on_batch_end(self, engine: Any, update: int, record: dict[str, Any] | None) -> None:
        if record is not None and is_main_process():
            self.write(record, engine.resumed_update)

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
