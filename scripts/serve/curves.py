"""Training curves for the web page: the metrics files of a folder, thinned, and followed while they grow.

GET /api/runs lists the runs, newest first; GET /api/runs/<name>?points=512 gives the curves of one.

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
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, HTTPException, Query, Response
from pydantic_core import from_json

ENDING = "_metrics.jsonl"
POINTS = 512  # of a curve, unless the page asks for fewer
KEPT = 128  # files whose numbers are held in memory: each some 8 bytes for 25 of the file
BLOCK = 1 << 18  # bytes of lines that are read at a time, some four milliseconds of work
PAUSE = 0.001  # seconds behind a block
LEFT_OUT = {"epoch", "step", "iters", "mfu", "memory_mb", "logits_loss"}  # no curve of the page
LAST = {"update", "tokens", "seconds", "seconds_left"}  # a point has the last record's value
COUNTED = {"skipped", "not_finite"}  # a point has the sum: updates skipped; records whose loss is no finite number
SPREAD = {"mean_loss", "loss", "reward", "grad_norm"}  # a thinned curve of these also has its lowest and highest values
LOSSES = ("loss", "mean_loss")
LOAD = "expert_load"


def _number(value: Any) -> float:
    """A finite number of sensible size, else NaN."""
    return float(value) if type(value) in (float, int) and -1e300 <= value <= 1e300 else math.nan


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line with what the page counts and the load of each expert; None for a line that is no record."""
    try:
        record = from_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("update")) is not int:
        return None
    if isinstance(skipped := record.get("skipped"), list):
        record["skipped"] = len(skipped)
    if any(math.isnan(_number(record.get(name, 0))) for name in LOSSES):
        record["not_finite"] = 1
    if isinstance(load := record.get(LOAD), list):
        record |= {f"{LOAD}.{expert}": share for expert, share in enumerate(load)}
        del record[LOAD]
    return record


class MetricsFile:
    """The numbers of a metrics file. Reading it again reads only what was appended.

    columns: name -> column of a field in the table. blocks: parts of that table, float64 [records, fields known when it
    was read]; NaN where a record has no such number.
    """

    def __init__(self) -> None:
        self.offset = self.damaged = 0
        self.tail = b""  # the last line that was read; the same file still has it there
        self.columns: dict[str, int] = {}
        self.blocks: list[np.ndarray] = []

    def read(self, path: Path, pause: Callable[[], None] = lambda: None) -> None:
        """Read on, or all if the file is no longer the one that was read."""
        with open(path, "rb") as file:
            file.seek(self.offset - len(self.tail))
            if file.read(len(self.tail)) != self.tail:
                self.__init__()
                file.seek(0)
            while lines := file.readlines(BLOCK):
                is_partial = not lines[-1].endswith(b"\n")  # the last one is still being written
                if is_partial:
                    lines.pop()
                self.offset += sum(map(len, lines))
                self.tail = lines[-1] if lines else self.tail
                records = [record for record in map(_record, lines) if record is not None]
                self.damaged += len(lines) - len(records)
                self._add(records)
                pause()
                if is_partial:
                    break

    def _add(self, records: list[dict[str, Any]]) -> None:
        for name in dict.fromkeys(chain.from_iterable(records)):
            if name not in LEFT_OUT:
                self.columns.setdefault(name, len(self.columns))
        rows = [[record.get(name) for name in self.columns] for record in records]
        try:
            block = np.array(rows, np.float64)  # None becomes NaN
        except (ValueError, TypeError, OverflowError):  # a text, a list, an integer of hundreds of digits
            block = np.array([[_number(value) for value in row] for row in rows])
        block = block.reshape(len(rows), len(self.columns))
        self.blocks.append(np.where(np.abs(block) <= 1e300, block, np.nan))

    def table(self) -> np.ndarray:
        """All numbers, [records, fields]."""
        fields, none = len(self.columns), np.nan
        padded = [np.pad(block, ((0, 0), (0, fields - block.shape[1])), constant_values=none) for block in self.blocks]
        self.blocks = [np.concatenate([np.empty((0, fields)), *padded])]
        return self.blocks[0]

    def curves(self, points: int) -> dict[str, Any]:
        """The columns that the page gets, each of at most so many points; a point stands for `stride` records."""
        table = self.table()
        stride = max(1, math.ceil(len(table) / points))
        missing = -len(table) % stride
        groups = np.pad(table, ((0, missing), (0, 0)), constant_values=np.nan).reshape(-1, stride, len(self.columns))
        count = np.isfinite(groups).sum(axis=1)
        mean = np.where(count > 0, np.nansum(groups, axis=1) / np.maximum(count, 1), np.nan)  # [points, fields]
        low, high = np.fmin.reduce(groups, axis=1), np.fmax.reduce(groups, axis=1)
        columns: dict[str, list[Any]] = {}
        for name, at in self.columns.items():
            if not count[:, at].any():
                continue
            if name in LAST:
                last = np.append(table[stride - 1 : -1 : stride, at], table[-1, at])
                columns[name] = [None if math.isnan(value) else value for value in last.tolist()]
            else:
                columns[name] = _short(mean[:, at] * count[:, at] if name in COUNTED else mean[:, at])
            if name in SPREAD and stride > 1:
                columns |= {f"{name}_low": _short(low[:, at]), f"{name}_high": _short(high[:, at])}
        loads = [columns.pop(name) for name in list(columns) if name.startswith(f"{LOAD}.")]
        if loads:
            columns[LOAD] = [list(load) if None not in load else None for load in zip(*loads, strict=True)]
        return {"records": len(table), "stride": stride, "damaged": self.damaged, "columns": columns}


def _short(values: np.ndarray) -> list[float | None]:
    """Values with six digits, None for NaN."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]


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


def curves_router(save_dir: str | Path) -> APIRouter:
    """The two routes over the metrics files of `save_dir`."""
    folder, router = Path(save_dir), APIRouter(prefix="/api")
    files: dict[str, Path] = {}  # as of the last look at the folder
    kept: dict[str, MetricsFile] = {}
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

    def read_run(name: str, points: int) -> bytes:
        if name not in files:
            look()
        path = files.get(name)  # a name is looked up, never joined to a path
        if path is None or not _is_inside(path, folder):
            raise FileNotFoundError
        kept[name] = metrics = kept.pop(name, None) or MetricsFile()  # the last one asked for stands last
        metrics.read(path, lambda: time.sleep(PAUSE))
        if len(kept) > KEPT:
            del kept[next(iter(kept))]
        return _json({"name": name, **metrics.curves(points)})

    async def answered(work: Callable[..., bytes], *args: Any) -> Response:
        content = await asyncio.get_running_loop().run_in_executor(reader, work, *args)
        return Response(content, media_type="application/json")

    @router.get("/runs")
    async def runs() -> Response:
        return await answered(list_runs)

    @router.get("/runs/{name:path}")
    async def run(name: str, points: Annotated[int, Query(ge=1, le=POINTS)] = POINTS) -> Response:
        try:
            return await answered(read_run, name, points)
        except OSError as error:
            raise HTTPException(404, f"there is no run {name!r}") from error

    return router


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
