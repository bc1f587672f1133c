"""Training curves for the web page: the metrics files of a folder, thinned.

GET /api/runs lists the runs, newest first; GET /api/runs/<name>?points=512 gives the curves of one.

Files are read one at a time, with pauses, so that the thread that decodes answers and the event loop never wait long
for the interpreter.
"""

import json
import math
import os
import threading
import time
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, HTTPException, Query, Response

from scripts.runs.summary import ENDING, PLACES, Summary, finite_number, read_settings
from trainer.components.metrics import log_record
from trainer.components.run_files import settings_path

POINTS = 512  # of a curve, unless the page asks for fewer
KEPT = 128  # answers that are held in memory, each at most some 200 KB
BLOCK, PAUSE = 500, 0.001  # records that are read at a time, some four milliseconds of work; seconds behind them
LEFT_OUT = {"epoch", "step", "iters", "mfu", "memory_mb", "logits_loss"}  # no curve of the page
LAST = {"update", "tokens", "seconds", "seconds_left"}  # a point has the last record's value
COUNTED = {"skipped", "not_finite"}  # a point has the sum: updates skipped; records whose loss is no finite number
SPREAD = {"mean_loss", "loss", "reward", "grad_norm"}  # a thinned curve of these also has its lowest and highest values
LOSSES = ("loss", "mean_loss")
LOAD = "expert_load"


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record, with what the page counts and the load of each expert."""
    if isinstance(skipped := record.get("skipped"), list):
        record["skipped"] = len(skipped)
    if any(math.isnan(finite_number(record.get(name, 0))) for name in LOSSES):
        record["not_finite"] = 1
    if isinstance(load := record.get(LOAD), list):
        record |= {f"{LOAD}.{expert}": share for expert, share in enumerate(load)}
    return {name: finite_number(value) for name, value in record.items() if name not in LEFT_OUT}


def curves(path: Path, points: int) -> dict[str, Any]:
    """What the page gets of a run: columns of at most so many points, each for `stride` records, and its summary."""
    records, damaged, summary = [], 0, Summary()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # it is being written
                break
            record = log_record(line)
            if record is None:
                damaged += 1
            else:
                summary.add(record)
                records.append(_numbers(record))
            if number % BLOCK == 0:
                time.sleep(PAUSE)
    names = list(dict.fromkeys(chain.from_iterable(records)))
    stride = max(1, math.ceil(len(records) / points))
    table = np.array([[record.get(name, math.nan) for name in names] for record in records])
    table = table.reshape(len(records), len(names))
    missing = -len(table) % stride
    groups = np.pad(table, ((0, missing), (0, 0)), constant_values=np.nan).reshape(-1, stride, len(names))
    count = np.isfinite(groups).sum(axis=1)
    total = np.nansum(groups, axis=1)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)  # [points, fields]
    low, high = np.fmin.reduce(groups, axis=1), np.fmax.reduce(groups, axis=1)
    columns: dict[str, list[Any]] = {}
    for at, name in enumerate(names):
        if not count[:, at].any():
            continue
        if name in LAST:
            last = np.append(table[stride - 1 : -1 : stride, at], table[-1, at])
            columns[name] = [None if math.isnan(value) else value for value in last.tolist()]
        else:
            columns[name] = _short(np.where(count > 0, total, np.nan)[:, at] if name in COUNTED else mean[:, at])
        if name in SPREAD and stride > 1:
            columns |= {f"{name}_low": _short(low[:, at]), f"{name}_high": _short(high[:, at])}
    loads = [columns.pop(name) for name in list(columns) if name.startswith(f"{LOAD}.")]
    if loads:
        columns[LOAD] = [list(load) if None not in load else None for load in zip(*loads, strict=True)]
    sums = {"figures": summary.figures, "warnings": summary.warnings, "samples": [*summary.samples.items()]}
    sums["samples"] += [*summary.rollout.items()]
    return {"records": len(table), "stride": stride, "damaged": damaged, "columns": columns} | sums


def _short(values: np.ndarray) -> list[float | None]:
    """Values with six digits, None for NaN."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]


def metrics_files(folder: Path) -> dict[str, Path]:
    """Name of the run -> its file, in the folder and the folders in it; never outside it, whatever a link says. Bytes
    of a name that are no UTF-8 are shown as backslash escapes."""
    files = {}
    for path in [*folder.glob(f"*{ENDING}"), *folder.glob(f"*/*{ENDING}")]:
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            name = os.fsencode(path.relative_to(folder).as_posix()).decode("utf-8", "backslashreplace")
            files[name.removesuffix(ENDING)] = path
    return files


def curves_router(save_dir: str | Path) -> APIRouter:
    """The two routes over the metrics files of `save_dir`."""
    folder, router, reading = Path(save_dir), APIRouter(prefix="/api"), threading.Lock()

    @lru_cache(KEPT)
    def read_run(name: str, path: Path, points: int, *_state: int) -> bytes:
        known = read_settings(path) if settings_path(path).resolve().is_relative_to(folder.resolve()) else None
        settings = {name: value for name, value in known[0].items() if name not in PLACES} if known else {}
        return _json({"name": name, "settings": settings, **curves(path, points)})

    # plain functions: FastAPI calls them in threads

    @router.get("/runs")
    def runs() -> Response:
        found = []
        for name, path in metrics_files(folder).items():
            with suppress(OSError):  # removed this moment
                stat = path.stat()
                age = round(max(0.0, time.time() - stat.st_mtime), 1)
                found.append({"name": name, "size": stat.st_size, "age": age})
        content = _json({"runs": sorted(found, key=lambda run: (run["age"], run["name"]))})
        return Response(content, media_type="application/json")

    @router.get("/runs/{name:path}")
    def run(name: str, points: Annotated[int, Query(ge=1, le=POINTS)] = POINTS) -> Response:
        try:
            path = metrics_files(folder)[name]  # a name is looked up, never joined to a path
            stats = [file.stat() for file in (path, settings_path(path)) if file == path or file.exists()]
            state = [n for stat in stats for n in (stat.st_mtime_ns, stat.st_size, stat.st_ino)]
            with reading:
                content = read_run(name, path, points, *state)
        except (OSError, LookupError) as error:
            raise HTTPException(404, f"there is no run {name!r}") from error
        return Response(content, media_type="application/json")

    return router


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
