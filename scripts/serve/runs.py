"""Training curves for the web page: the metrics files of a folder, thinned on the way and followed while they grow.

GET /api/runs lists the runs, newest first; GET /api/runs/<name>?cursor=... gives the curves of one, or only what is new
in them since the answer that gave the cursor.
"""

import math
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException

from trainer.components.metrics import log_record

ENDING = "_metrics.jsonl"
POINTS = 2048  # of a curve, at most
KEPT = 32  # curves held in memory
TAIL = 256  # bytes before the end of what was read; the same file still has them there
LEFT_OUT = {"epoch", "step", "mfu", "memory_mb", "logits_loss", "skipped"}  # no curve of the page
SPREAD = ("mean_loss", "loss", "reward", "grad_norm")  # a thinned curve of these also has its lowest and highest values


class Bucket:
    """Some records in a row as one point: means, and of a few fields the extremes; positions are the last record's."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self.sums: dict[str, list[float]] = {}  # field: sum, count, lowest, highest
        self.loads: list[float] = []  # sum of the experts' shares
        self.load_count = 0

    def add(self, record: dict[str, Any]) -> None:
        """Take a record in; what is not a finite number has no part in it."""
        for name, value in record.items():
            if name in LEFT_OUT or not _is_number(value):
                continue
            if name in ("update", "tokens", "seconds", "seconds_left"):
                self.last[name] = value
            else:
                self._join(name, [value, 1, value, value])
        load = record.get("expert_load")
        if isinstance(load, list) and load and all(map(_is_number, load)):
            self._join_load(load, 1)

    def merge(self, other: "Bucket") -> None:
        """Take the records of the next bucket in."""
        self.last |= other.last
        for name, sums in other.sums.items():
            self._join(name, sums)
        if other.loads:
            self._join_load(other.loads, other.load_count)

    def _join(self, name: str, other: list[float]) -> None:
        mine = self.sums.setdefault(name, [0.0, 0, math.inf, -math.inf])
        low, high = min(mine[2], other[2]), max(mine[3], other[3])
        mine[:] = [mine[0] + other[0], mine[1] + other[1], low, high]

    def _join_load(self, load: list[float], count: int) -> None:
        if len(load) != len(self.loads):  # the first ones, or a damaged line
            self.loads, self.load_count = [0.0] * len(load), 0
        self.loads = [mine + other for mine, other in zip(self.loads, load, strict=True)]
        self.load_count += count

    def point(self) -> dict[str, Any]:
        """Field -> value, with six digits."""
        values: dict[str, Any] = {name: _short(value) for name, value in self.last.items()}
        for name, (total, count, low, high) in self.sums.items():
            values[name] = _short(total / count)
            if name in SPREAD and count > 1:
                values |= {f"{name}_low": _short(low), f"{name}_high": _short(high)}
        if self.loads:
            values["expert_load"] = [_short(share / self.load_count) for share in self.loads]
        return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


class Curve:
    """The buckets of one metrics file. Reading it again reads only what was appended."""

    def __init__(self) -> None:
        self.generation = time.time_ns()  # another one when the file was replaced
        self.offset = self.records = self.damaged = 0
        self.tail = b""
        self.stride = 1  # records per bucket
        self.buckets: list[Bucket] = []

    def read(self, path: Path) -> "Curve":
        """Read on; returns this curve, or a new one if the file is no longer the one that was read."""
        with open(path, "rb") as file:
            file.seek(self.offset - len(self.tail))
            if file.read(len(self.tail)) != self.tail:
                return Curve().read(path)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                self.offset += len(line)
                self.tail = (self.tail + line)[-TAIL:]
                self._take(log_record(line))
        return self

    def _take(self, record: dict[str, Any] | None) -> None:
        if record is None:
            self.damaged += 1
            return
        if self.records == self.stride * POINTS:
            pairs = zip(self.buckets[::2], self.buckets[1::2], strict=True)
            for left, right in pairs:
                left.merge(right)
            self.buckets, self.stride = self.buckets[::2], 2 * self.stride
        if self.records % self.stride == 0:
            self.buckets.append(Bucket())
        self.buckets[-1].add(record)
        self.records += 1

    def answer(self, cursor: str) -> dict[str, Any]:
        """The points from bucket `first` on: all of them, unless the cursor says that the asker has those before it."""
        known = f"{self.generation}.{self.stride}."
        asked = cursor.removeprefix(known) if cursor.startswith(known) else "0"
        seen = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 16 else 0
        first = min(seen // self.stride, len(self.buckets))  # a bucket may have grown since
        points = [bucket.point() for bucket in self.buckets[first:]]
        fields = sorted({name for point in points for name in point})
        return {
            "cursor": f"{known}{self.records}",
            "first": first,
            "records": self.records,
            "stride": self.stride,
            "damaged": self.damaged,
            "columns": {name: [point.get(name) for point in points] for name in fields},
        }


def metrics_files(folder: Path) -> dict[str, Path]:
    """Name of the run -> its file, in the folder and the folders in it; never outside it, whatever a link says."""
    root, found = folder.resolve(), {}
    for path in [*root.glob(f"*{ENDING}"), *root.glob(f"*/*{ENDING}")]:
        if path.is_file() and path.resolve().is_relative_to(root):
            found[path.relative_to(root).as_posix().removesuffix(ENDING)] = path
    return found


def runs_router(save_dir: str | Path) -> APIRouter:
    """The two routes over the metrics files of `save_dir`."""
    folder, router = Path(save_dir), APIRouter(prefix="/api")
    curves: dict[str, Curve] = {}
    lock = threading.Lock()  # routes run in several threads

    @router.get("/runs")
    def list_runs() -> dict[str, Any]:
        runs = []
        for name, path in metrics_files(folder).items():
            with suppress(OSError):  # removed this moment
                stat = path.stat()
                age = round(max(0.0, time.time() - stat.st_mtime), 1)
                runs.append({"name": name, "size": stat.st_size, "age": age})
        return {"runs": sorted(runs, key=lambda run: (run["age"], run["name"]))}

    @router.get("/runs/{name:path}")
    def read_run(name: str, cursor: str = "") -> dict[str, Any]:
        path = metrics_files(folder).get(name)  # a name is looked up, never joined to a path
        try:
            if path is None:
                raise FileNotFoundError
            with lock:
                curve = (curves.pop(name, None) or Curve()).read(path)
                curves[name] = curve  # the last one asked for stands last
                if len(curves) > KEPT:
                    del curves[next(iter(curves))]
                return {"name": name, **curve.answer(cursor)}
        except OSError as error:
            raise HTTPException(404, f"there is no run {name!r}") from error

    return router
