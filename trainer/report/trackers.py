"""SwanLab behind a queue: if it is missing, not logged in, raises or hangs, training goes on unchanged."""

import math
import queue
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from common.errors import reason, warn
from common.settings import StageArgs
from trainer.devices.process_group import is_main_process

START_TIMEOUT, END_TIMEOUT = 30.0, 60.0  # seconds


def start_tracker(
    args: StageArgs, run: Mapping[str, Any], checkpoint: Mapping[str, Any] | None = None
) -> "Tracker | None":
    """SwanLab on rank 0 if asked for; a resumed run continues the curves of its first part, a new branch
    begins curves of its own. `run`: its fingerprint."""
    if not (args.use_wandb and is_main_process()):
        return None
    name = f"{args.save_weight}-epochs-{args.epochs}-batch-{run['global_batch']}-lr-{args.learning_rate}"
    if checkpoint is None:
        return Tracker(args.wandb_project, name, args.swanlab_mode, dict(run))
    return Tracker(
        args.wandb_project, name, args.swanlab_mode, dict(run), checkpoint["wandb_id"], checkpoint["update"]
    )


def drawable(record: dict[str, Any], leave_out: Iterable[str] = ()) -> dict[str, float]:
    """The numbers of a log record that a tracker can draw: finite ones; those of a list as `name/0`, `name/1`
    ..."""
    points = {}
    for key in record.keys() - {"skipped", *leave_out}:
        value = record[key]
        points |= (
            {f"{key}/{i}": item for i, item in enumerate(value)} if isinstance(value, list) else {key: value}
        )
    return {key: v for key, v in sorted(points.items()) if isinstance(v, int | float) and math.isfinite(v)}


class Tracker:
    """One SwanLab run, fed by a thread of its own; its first failure is a warning and ends the tracking.

    Args:
        project, name, mode: as in `swanlab.init`; mode `cloud` is SwanLab's `online`.
        config: the run's settings, shown beside its curves.
        run_id: id of an earlier run to continue (from the checkpoint); SwanLab does so only in its cloud.
        last_step: updates up to this one are in that run already and are not drawn again.
    """

    def __init__(
        self, project: str, name: str, mode: str, config: dict, run_id: str | None = None, last_step: int = 0
    ):
        self.id = run_id
        self.last_step = last_step
        self._queue: queue.Queue = queue.Queue(maxsize=10_000)
        self._ready = threading.Event()
        if mode == "cloud":
            mode = "online"
        settings = {"project": project, "name": name, "mode": mode, "config": config}
        if run_id and mode == "online":
            settings |= {"id": run_id, "resume": "allow"}
        self._thread = threading.Thread(target=self._work, args=(settings,), daemon=True, name="swanlab")
        self._thread.start()
        self._ready.wait(START_TIMEOUT)  # time to learn the run's id; a slower network is not waited for

    def _work(self, settings: dict[str, Any]) -> None:
        try:
            import swanlab

            run = swanlab.init(**settings)
            self.id = getattr(run, "id", None)
            self._ready.set()
            while (item := self._queue.get()) is not None:
                metrics, step = item
                texts = {
                    name: [swanlab.Text(each) for each in v]
                    for name, v in metrics.items()
                    if isinstance(v, list)
                }
                run.log(metrics | texts, step=step)
            swanlab.finish()
        except BaseException as error:  # also SystemExit and KeyboardInterrupt raised inside the tracker
            why = f"{type(error).__name__}: {reason(error)}"
            warn(f"SwanLab stopped ({why}); training goes on, the metrics file is complete")
        finally:
            self._ready.set()

    def log(self, metrics: Mapping[str, float | list[str]], step: int) -> None:
        """Queue the points of update `step`, and lists of texts; never waits. An update is drawn at most
        once."""
        if step <= self.last_step or not self._thread.is_alive():
            return
        self.last_step = step
        try:
            self._queue.put_nowait((dict(metrics), step))
        except queue.Full:
            warn("SwanLab is far behind; a point was dropped")

    def finish(self, timeout: float | None = None) -> None:
        """Let the queue drain and close the run, waiting `timeout` seconds at most (END_TIMEOUT)."""
        timeout = END_TIMEOUT if timeout is None else timeout
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            warn(f"SwanLab did not finish within {timeout:.0f} s; leaving it behind")
