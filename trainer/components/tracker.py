"""SwanLab behind a queue: if it is missing, not logged in, raises or hangs, training goes on unchanged."""

import math
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError, reason, warn
from common.settings import StageArgs
from trainer.components.distributed import is_main_process
from trainer.components.metrics import read_metrics
from trainer.components.run_files import metrics_path, run_name

Point = tuple[dict[str, float], int]  # values by name, and the update

MODES = {"cloud": "online", "online": "online", "local": "local", "offline": "offline", "disabled": "disabled"}

START_PATIENCE, END_PATIENCE = 30.0, 60.0  # seconds


def start_tracker(
    args: StageArgs, run: Mapping[str, Any], checkpoint: Mapping[str, Any] | None = None
) -> "Tracker | None":
    """SwanLab on rank 0 if asked for; a resumed run continues the curves of its first part. `run`: its fingerprint."""
    if not (args.use_wandb and is_main_process()):
        return None
    name = f"{args.save_weight}-epochs-{args.epochs}-batch-{run['global_batch']}-lr-{args.learning_rate}"
    run_id, last, earlier = None, 0, []
    if checkpoint:  # a pending record has not been drawn yet
        callbacks = checkpoint["hooks"].get("callbacks") or {}  # where the engine's early versions kept it
        run_id = checkpoint["wandb_id"] or callbacks.get("SwanLabLogger", {}).get("id")
        last = checkpoint["update"] - (checkpoint["record"] is not None)
        earlier = earlier_points(metrics_path(args.save_dir, run_name(args.save_weight, args)), last)
    return Tracker(args.wandb_project, name, args.swanlab_mode, dict(run), run_id, last, earlier)


def earlier_points(path: Path, last_update: int) -> list[Point]:
    """The points of the records up to an update in a metrics file, for a tracker that must begin a run anew."""
    try:
        records = read_metrics(path)
    except (OSError, UserError):  # of an unreadable file training tells on its own
        return []
    points = ((drawable(record, leave_out=("update", "seconds")), record["update"]) for record in records)
    return [(values, update) for values, update in points if update <= last_update]


def drawable(record: dict[str, Any], leave_out: Iterable[str] = ()) -> dict[str, float]:
    """The numbers of a log record that a tracker can draw: finite ones; those of a list as `name/0`, `name/1` ..."""
    points = {}
    for key in record.keys() - {"skipped", *leave_out}:
        value = record[key]
        points |= {f"{key}/{i}": item for i, item in enumerate(value)} if isinstance(value, list) else {key: value}
    return {key: v for key, v in sorted(points.items()) if isinstance(v, int | float) and math.isfinite(v)}


class Tracker:
    """One SwanLab run, fed by a thread of its own; its first failure is a warning and ends the tracking.

    Args:
        project, name, mode: as in `swanlab.init`; mode `cloud` is SwanLab's `online`.
        config: the run's settings, shown beside its curves.
        run_id: id of an earlier run to continue (from the checkpoint).
        last_step: updates up to this one are in that run already and are not drawn again.
        earlier: their points. SwanLab continues a run only in its cloud; elsewhere they begin a new one.
    """

    def __init__(
        self,
        project: str,
        name: str,
        mode: str,
        config: dict,
        run_id: str | None = None,
        last_step: int = 0,
        earlier: Sequence[Point] = (),
    ):
        self.id = run_id
        self.last_step = last_step
        self._queue: queue.Queue = queue.Queue(maxsize=10_000)
        self._ready = threading.Event()
        resume = {"id": run_id, "resume": "allow"} if run_id and MODES[mode] == "online" else {}
        settings = {"project": project, "name": name, "mode": MODES[mode], "config": config, **resume}
        self._thread = threading.Thread(target=self._work, args=(settings, earlier), daemon=True, name="swanlab")
        self._thread.start()
        self._ready.wait(START_PATIENCE)  # time to learn the run's id; a slower network is not waited for

    def _work(self, settings: dict[str, Any], earlier: Sequence[Point]) -> None:
        try:
            import swanlab

            run, continues = self._start(swanlab, settings)
            self.id = getattr(run, "id", None)
            self._ready.set()
            for metrics, step in () if continues else earlier:
                run.log(metrics, step=step)
            while (item := self._queue.get()) is not None:
                metrics, step = item
                run.log(metrics, step=step)
            swanlab.finish()
        except BaseException as error:  # also SystemExit and KeyboardInterrupt raised inside the tracker
            why = f"{type(error).__name__}: {reason(error)}"
            warn(f"SwanLab stopped ({why}); training goes on, the metrics file is complete")
        finally:
            self._ready.set()

    def _start(self, swanlab: Any, settings: dict[str, Any]) -> tuple[Any, bool]:
        """The run, and whether it is the earlier one, continued; a new one if that cannot be (deleted, another
        account)."""
        try:
            return swanlab.init(**settings), "id" in settings
        except Exception as error:
            if "id" not in settings:
                raise
            run = swanlab.init(**{key: value for key, value in settings.items() if key not in ("id", "resume")})
            warn(f"SwanLab cannot continue run {settings['id']} ({reason(error)}); the curves go on in a new run")
            return run, False

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Queue the points of update `step`; never waits. An update is drawn at most once."""
        if step <= self.last_step or not self._thread.is_alive():
            return
        self.last_step = step
        try:
            self._queue.put_nowait((metrics, step))
        except queue.Full:
            warn("SwanLab is far behind; a point was dropped")

    def finish(self, timeout: float | None = None) -> None:
        """Let the queue drain and close the run, waiting `timeout` seconds at most (END_PATIENCE)."""
        timeout = END_PATIENCE if timeout is None else timeout
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            warn(f"SwanLab did not finish within {timeout:.0f} s; leaving it behind")
