"""SwanLab or Weights & Biases behind a queue: if it is missing, not logged in, raises or hangs, training goes
on unchanged."""

import math
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from common.errors import reason, warn
from common.settings import StageArgs
from trainer.devices.process_group import is_main_process

START_TIMEOUT, END_TIMEOUT = 30.0, 60.0  # seconds


def start_tracker(
    args: StageArgs, fingerprint: Mapping[str, Any], checkpoint: Mapping[str, Any] | None = None
) -> "Tracker | None":
    """The tracker on rank 0, if one is asked for. A resumed run continues the curves of its first part; a new
    branch begins new curves."""
    service = "swanlab" if args.use_wandb and args.tracker == "none" else args.tracker
    if service == "none" or not is_main_process():
        return None
    name = (
        f"{args.save_weight}-epochs-{args.epochs}-batch-{fingerprint['global_batch']}-lr-{args.learning_rate}"
    )
    tracker_id, last_step = None, 0
    if checkpoint is not None:
        tracker_id, last_step = checkpoint["wandb_id"], checkpoint["update"]
    return Tracker(
        args.wandb_project, name, args.swanlab_mode, dict(fingerprint), tracker_id, last_step, service
    )


def drawable(record: dict[str, Any], leave_out: Iterable[str] = ()) -> dict[str, float]:
    """The finite numbers of a log record, which a tracker can draw. Those of a list are called `name/0`,
    `name/1` ..."""
    points = {}
    for key in record.keys() - {"skipped", *leave_out}:
        value = record[key]
        points |= (
            {f"{key}/{i}": item for i, item in enumerate(value)} if isinstance(value, list) else {key: value}
        )
    return {key: v for key, v in sorted(points.items()) if isinstance(v, int | float) and math.isfinite(v)}


class Service(NamedTuple):
    """A run that a tracker has opened."""

    id: str | None
    log: Callable[[dict[str, float], dict[str, list[str]], int], Any]  # numbers, texts, update
    finish: Callable[[], Any]


def open_swanlab(project: str, name: str, mode: str, config: dict, tracker_id: str | None) -> Service:
    """A run of SwanLab. Only its cloud can continue an earlier run."""
    import swanlab

    mode = "online" if mode == "cloud" else mode
    settings: dict[str, Any] = {"project": project, "name": name, "mode": mode, "config": config}
    if tracker_id and mode == "online":
        settings |= {"id": tracker_id, "resume": "allow"}
    tracker_run = swanlab.init(**settings)

    def log(numbers: dict[str, float], texts: dict[str, list[str]], step: int) -> None:
        swanlab_texts = {name: [swanlab.Text(each) for each in several] for name, several in texts.items()}
        tracker_run.log(numbers | swanlab_texts, step=step)

    return Service(getattr(tracker_run, "id", None), log, swanlab.finish)


def open_wandb(project: str, name: str, mode: str, config: dict, tracker_id: str | None) -> Service:
    """A run of Weights & Biases. In the mode `cloud`, WANDB_MODE says where the run is kept; the mode `local`
    is called `offline` there."""
    import wandb  # type: ignore[import-not-found]

    modes = {"cloud": None, "local": "offline"}
    settings: dict[str, Any] = {"project": project, "name": name, "mode": modes.get(mode, mode)}
    if tracker_id:
        settings |= {"id": tracker_id, "resume": "allow"}
    tracker_run = wandb.init(**settings, config=config, allow_val_change=True)

    def log(numbers: dict[str, float], texts: dict[str, list[str]], step: int) -> None:
        tables = {
            name: wandb.Table(columns=[name], data=[[each] for each in several])
            for name, several in texts.items()
        }
        tracker_run.log(numbers | tables, step=step)

    return Service(tracker_run.id, log, tracker_run.finish)


SERVICES = {"swanlab": ("SwanLab", open_swanlab), "wandb": ("Weights & Biases", open_wandb)}


class Tracker:
    """One run of a tracker, fed by a thread of its own; its first failure is a warning and ends the tracking.

    Args:
        project, name, mode: as --wandb_project and --swanlab_mode.
        config: the run's settings, shown beside its curves.
        tracker_id: id of an earlier run to continue (from the checkpoint).
        last_step: updates up to this one are already in that run and are not drawn again.
        service: a name of SERVICES.
    """

    def __init__(
        self,
        project: str,
        name: str,
        mode: str,
        config: dict,
        tracker_id: str | None = None,
        last_step: int = 0,
        service: str = "swanlab",
    ):
        self.service, open_service = SERVICES[service]
        self.id = tracker_id
        self.last_step = last_step
        self._queue: queue.Queue = queue.Queue(maxsize=10_000)
        self._ready = threading.Event()
        opened = partial(open_service, project, name, mode, config, tracker_id)
        self._thread = threading.Thread(target=self._work, args=(opened,), daemon=True, name="tracker")
        self._thread.start()
        self._ready.wait(
            START_TIMEOUT
        )  # time to learn the run's id; training does not wait for a slower network

    def _work(self, open_service: Callable[[], Service]) -> None:
        try:
            tracker_run = open_service()
            self.id = tracker_run.id
            self._ready.set()
            while (item := self._queue.get()) is not None:
                metrics, step = item
                texts = {name: value for name, value in metrics.items() if isinstance(value, list)}
                numbers = {name: value for name, value in metrics.items() if name not in texts}
                tracker_run.log(numbers, texts, step)
            tracker_run.finish()
        except BaseException as error:  # also SystemExit and KeyboardInterrupt raised inside the tracker
            why = f"{type(error).__name__}: {reason(error)}"
            if isinstance(error, ModuleNotFoundError):
                why = f"{error.name} is not installed: pip install {error.name}"
            warn(f"{self.service} stopped ({why}); training continues, the metrics file is complete")
        finally:
            self._ready.set()

    def log(self, metrics: Mapping[str, float | list[str]], step: int) -> None:
        """Queue the points of update `step`, and lists of texts. It never waits, and draws an update at most
        once."""
        if step <= self.last_step or not self._thread.is_alive():
            return
        self.last_step = step
        try:
            self._queue.put_nowait((dict(metrics), step))
        except queue.Full:
            warn(f"{self.service} is far behind; a point was dropped")

    def finish(self, timeout: float | None = None) -> None:
        """Let the queue drain and close the run, waiting `timeout` seconds at most (END_TIMEOUT)."""
        timeout = END_TIMEOUT if timeout is None else timeout
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            warn(f"{self.service} did not finish within {timeout:.0f} s; leaving it behind")
