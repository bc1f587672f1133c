"""Training curves for the web page: the metrics files of a folder, thinned on the way and followed while they grow.

GET /api/runs lists the runs, newest first; GET /api/runs/<name>?cursor=... gives the curves of one, or only what is new
in them since the answer that gave the cursor.

Files are read by one thread, a block at a time with a pause behind each, so that the thread that decodes answers and
the event loop never wait long for the interpreter.
"""

import asyncio
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from fastapi import APIRouter, HTTPException, Response

from trainer.components.metrics import log_record

ENDING = "_metrics.jsonl"
POINTS = 1024  # of a curve, at most
KEPT = 128  # curves held in memory; with twenty fields each takes 0.7 MB
BLOCK = 1 << 18  # bytes of lines that are read at a time, some four milliseconds of work
PAUSE = 0.001  # seconds behind a block
TAIL = 256  # bytes before the end of what was read; the same file still has them there
LEFT_OUT = {"epoch", "step", "iters", "mfu", "memory_mb", "logits_loss"}  # no curve of the page
LAST = {"update", "tokens", "seconds", "seconds_left"}  # a point has the last record's value
COUNTED = {"skipped", "not_finite"}  # a point has the sum: updates skipped; records whose loss is no finite number
SPREAD = {"mean_loss", "loss", "reward", "grad_norm"}  # a thinned curve of these also has its lowest and highest values
LOSSES = ("loss", "mean_loss")
LOAD = "expert_load"
SUM, COUNT, LOW, HIGH = range(4)  # what is kept of the records of a point
NOTHING = np.array([0.0, 0.0, math.inf, -math.inf]).reshape(4, 1, 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300


def _records(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """The record of each line, None for a damaged one. Parsed as one array, which is faster than line by line."""
    try:
        values = json.loads(b"[%b]" % b",".join(lines))
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines) or not all(
        isinstance(each, dict) and type(each.get("update")) is int for each in values
    ):
        return [log_record(line) for line in lines]
    return values


def _count(record: dict[str, Any]) -> dict[str, Any]:
    """The record with what the page counts: `skipped` as a number, `not_finite`, and the load of each expert."""
    if isinstance(record.get("skipped"), list):
        record["skipped"] = len(record["skipped"])
    if not all(_is_number(record[name]) for name in LOSSES if name in record):
        record["not_finite"] = 1
    load = record.get(LOAD)
    if isinstance(load, list) and all(map(_is_number, load)):
        record |= {f"{LOAD}.{expert}": share for expert, share in enumerate(load)}
    return record


def _table(records: list[dict[str, Any]], names: list[str]) -> np.ndarray:
    """Fields of records, float64 [fields, records]; NaN where a value is no finite number."""
    rows = [[record.get(name) for name in names] for record in records]
    if not {*map(type, chain.from_iterable(rows))} <= {float, int, NoneType}:
        rows = [[value if _is_number(value) else None for value in row] for row in rows]
    try:
        table = np.array(rows, dtype=np.float64).T  # None becomes NaN
    except OverflowError:  # an integer of hundreds of digits
        table = np.array([[value if _is_number(value) else None for value in row] for row in rows], np.float64).T
    return np.where(np.abs(table) <= 1e300, table, np.nan)


class Curve:
    """The points of one metrics file, each of `stride` records. Reading it again reads only what was appended.

    rows: name -> row of a field in `points`, [4, fields, POINTS]: sum (of a field in LAST, the last value), count,
    lowest and highest value of the records of each point.
    """

    def __init__(self) -> None:
        self.generation = time.time_ns()  # another one when the file was replaced
        self.offset = self.records = self.damaged = 0
        self.tail = b""
        self.stride = 1
        self.rows: dict[str, int] = {}
        self.points = np.empty((4, 0, POINTS))

    def read(self, path: Path, pause: Callable[[], None] = lambda: None) -> "Curve":
        """Read on; returns this curve, or a new one if the file is no longer the one that was read."""
        with open(path, "rb") as file:
            file.seek(self.offset - len(self.tail))
            if file.read(len(self.tail)) != self.tail:
                return Curve().read(path, pause)
            while lines := file.readlines(BLOCK):
                is_partial = not lines[-1].endswith(b"\n")  # the last one is still being written
                if is_partial:
                    lines.pop()
                self.offset += sum(map(len, lines))
                self.tail = (self.tail + b"".join(lines[-TAIL:]))[-TAIL:]
                records = [_count(record) for record in _records(lines) if record is not None]
                self.damaged += len(lines) - len(records)
                for start in range(0, len(records), POINTS):
                    self._take(records[start : start + POINTS])
                pause()
                if is_partial:
                    break
        return self

    def _take(self, records: list[dict[str, Any]]) -> None:
        """Add up to POINTS records to the points."""
        while self.records + len(records) > self.stride * POINTS:
            self._halve()
        names = sorted(set[str]().union(*records) - LEFT_OUT)
        values = _table(records, names)  # [fields, records]
        kept = np.flatnonzero(~np.isnan(values).all(axis=1))
        names, values = [names[row] for row in kept], values[kept]
        places = (self.records + np.arange(len(records))) // self.stride
        self.records += len(records)
        for name in names:
            self.rows.setdefault(name, len(self.rows))
        missing = len(self.rows) - self.points.shape[1]
        self.points = np.concatenate((self.points, np.tile(NOTHING, (1, missing, POINTS))), axis=1)
        rows, starts = [self.rows[name] for name in names], np.flatnonzero(np.diff(places, prepend=-1))
        at, there = np.ix_(np.array(rows), places[starts]), ~np.isnan(values)
        self.points[SUM][at] += np.add.reduceat(np.where(there, values, 0.0), starts, axis=1)
        self.points[COUNT][at] += np.add.reduceat(there, starts, axis=1, dtype=np.float64)
        low = np.minimum.reduceat(np.where(there, values, math.inf), starts, axis=1)
        high = np.maximum.reduceat(np.where(there, values, -math.inf), starts, axis=1)
        self.points[LOW][at] = np.minimum(self.points[LOW][at], low)
        self.points[HIGH][at] = np.maximum(self.points[HIGH][at], high)
        for name in LAST.intersection(names):
            row, known = names.index(name), there[names.index(name)]
            self.points[SUM, self.rows[name], places[known]] = values[row, known]  # the last of several stays

    def _halve(self) -> None:
        """Make one point of every two."""
        left, right = self.points[..., ::2], self.points[..., 1::2]
        self.points = np.tile(NOTHING, (1, len(self.rows), POINTS))
        half = self.points[..., : POINTS // 2]
        half[[SUM, COUNT]] = left[[SUM, COUNT]] + right[[SUM, COUNT]]
        half[LOW], half[HIGH] = np.minimum(left[LOW], right[LOW]), np.maximum(left[HIGH], right[HIGH])
        for name in LAST.intersection(self.rows):
            row = self.rows[name]
            half[SUM, row] = np.where(right[COUNT, row] > 0, right[SUM, row], left[SUM, row])
        self.stride *= 2

    def answer(self, cursor: str) -> dict[str, Any]:
        """The points from point `first` on: all of them, unless the cursor says that the asker has those before it."""
        known = f"{self.generation}.{self.stride}."
        asked = cursor.removeprefix(known) if cursor.startswith(known) else "0"
        seen = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 16 else 0
        points = -(-self.records // self.stride)
        first = min(seen // self.stride, points)  # a point may have grown since
        columns = {}
        for name in sorted(self.rows):
            columns |= _columns(name, self.points[:, self.rows[name], first:points])
        loads = [columns.pop(name) for name in list(columns) if name.startswith(f"{LOAD}.")]
        if loads:
            columns[LOAD] = [list(load) if None not in load else None for load in zip(*loads, strict=True)]
        head = {"cursor": f"{known}{self.records}", "first": first, "records": self.records, "stride": self.stride}
        return head | {"damaged": self.damaged, "columns": columns}


def _columns(name: str, field: np.ndarray) -> dict[str, list[float | None]]:
    """What the page gets of a field [4, n]: columns by name, None where no record has a value."""
    there = field[COUNT] > 0
    if not there.any():
        return {}
    whole = name in LAST or name in COUNTED
    columns = {name: _short(field[SUM] if whole else field[SUM] / np.maximum(field[COUNT], 1), there)}
    if name in SPREAD and (several := field[COUNT] > 1).any():
        columns |= {f"{name}_low": _short(field[LOW], several), f"{name}_high": _short(field[HIGH], several)}
    return columns


def _short(values: np.ndarray, there: np.ndarray) -> list[float | None]:
    """Values with six digits, unless all are whole numbers; None where there is none."""
    values = np.where(there, values, 0.0)
    if (values == np.trunc(values)).all() and (np.abs(values) < 2**53).all():
        short: list[Any] = values.astype(np.int64).tolist()
    else:
        digits = 5 - np.floor(np.log10(np.maximum(np.abs(values), 1e-300)))
        up, down = 10.0 ** np.clip(digits, 0, 300), 10.0 ** np.clip(-digits, 0, 300)
        short = (np.round(values * up / down) / up * down).tolist()
    return short if there.all() else [value if known else None for value, known in zip(short, there, strict=True)]


def metrics_files(folder: Path) -> dict[str, Path]:
    """Name of the run -> its file, in the folder and the folders in it; never outside it, whatever a link says. Bytes
    of a name that are no UTF-8 are shown as backslash escapes."""
    files = {}
    for path in [*folder.glob(f"*{ENDING}"), *folder.glob(f"*/*{ENDING}")]:
        if path.is_file() and _is_inside(path, folder):
            name = os.fsencode(path.relative_to(folder).as_posix()).decode("utf-8", "backslashreplace")
            files[name.removesuffix(ENDING)] = path
    return files


def _is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def runs_router(save_dir: str | Path) -> APIRouter:
    """The two routes over the metrics files of `save_dir`."""
    folder, router = Path(save_dir), APIRouter(prefix="/api")
    files: dict[str, Path] = {}  # as of the last look at the folder
    curves: dict[str, Curve] = {}
    reader = ThreadPoolExecutor(1, thread_name_prefix="curves")  # the only one that touches these two

    def look() -> None:
        files.clear()
        files.update(metrics_files(folder))

    def list_runs() -> bytes:
        look()
        runs = []
        for name, path in files.items():
            with suppress(OSError):  # removed this moment
                stat = path.stat()
                age = round(max(0.0, time.time() - stat.st_mtime), 1)
                runs.append({"name": name, "size": stat.st_size, "age": age})
        return _json({"runs": sorted(runs, key=lambda run: (run["age"], run["name"]))})

    def read_run(name: str, cursor: str) -> bytes:
        if name not in files:
            look()
        path = files.get(name)  # a name is looked up, never joined to a path
        if path is None or not _is_inside(path, folder):
            raise FileNotFoundError
        curve = (curves.pop(name, None) or Curve()).read(path, lambda: time.sleep(PAUSE))
        curves[name] = curve  # the last one asked for stands last
        if len(curves) > KEPT:
            del curves[next(iter(curves))]
        return _json({"name": name, **curve.answer(cursor)})

    async def answered(work: Callable[..., bytes], *args: str) -> Response:
        content = await asyncio.get_running_loop().run_in_executor(reader, work, *args)
        return Response(content, media_type="application/json")

    @router.get("/runs")
    async def runs() -> Response:
        return await answered(list_runs)

    @router.get("/runs/{name:path}")
    async def run(name: str, cursor: str = "") -> Response:
        try:
            return await answered(read_run, name, cursor)
        except OSError as error:
            raise HTTPException(404, f"there is no run {name!r}") from error

    return router


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
