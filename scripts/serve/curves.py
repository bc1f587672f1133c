"""Training curves for the web page: the metrics files of a folder, thinned.

GET /api/runs lists the runs, newest first; GET /api/runs/<name>?points=512 gives the curves of one.

Files are read one at a time, with pauses, so that the thread that decodes answers and the event loop never
wait long for the interpreter.
"""

import json
import os
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Response

from scripts.runs.run import ENDING, PLACES, read_run
from trainer.run.paths import settings_path

POINTS = 512  # of a curve, unless the page asks for fewer
KEPT = 128  # answers that are held in memory, each at most some 200 KB
# no curve
LEFT_OUT = {"epoch", "step", "iters", "mfu", "mfu_of_sheet", "memory_mb", "reserved_mb", "logits_loss"}


def curves(path: Path, points: int) -> dict[str, Any]:
    """What the page gets of a run: columns of at most so many points, each for `stride` records, and what it
    came to. The loads of the experts are one column of lists."""
    run = read_run(path)
    columns: dict[str, list[Any]] = {
        name: v for name, v in run.columns(points).items() if name not in LEFT_OUT
    }
    experts = [name for name in columns if name.startswith("expert_load.")]
    if experts:
        loads = zip(*(columns.pop(name) for name in experts), strict=True)
        columns["expert_load"] = [None if None in load else list(load) for load in loads]
    about = {"settings": {name: value for name, value in run.settings.items() if name not in PLACES}}
    about |= {
        "records": len(run.records),
        "stride": run.stride(points),
        "damaged": run.damaged,
        "columns": columns,
    }
    samples = [*run.samples.items(), *run.rollout.items()]
    return about | {"figures": run.figures, "warnings": run.warnings, "samples": samples}


def metrics_files(folder: Path) -> dict[str, Path]:
    """Name of the run -> its file, in the folder and the folders in it; never outside it, whatever a link
    says. Bytes of a name that are no UTF-8 are shown as backslash escapes."""
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
    def answer(name: str, path: Path, points: int, *_state: int) -> bytes:
        return _json({"name": name, **curves(path, points)})

    # plain functions: FastAPI calls them in threads

    @router.get("/runs")
    def runs() -> Response:
        stats: dict[str, os.stat_result] = {}
        for name, path in metrics_files(folder).items():
            with suppress(OSError):  # removed this moment
                stats[name] = path.stat()
        now, listed = time.time(), []
        for name, stat in sorted(stats.items(), key=lambda item: (-item[1].st_mtime_ns, item[0])):
            listed.append(
                {"name": name, "size": stat.st_size, "age": round(max(0.0, now - stat.st_mtime), 1)}
            )
        content = _json({"runs": listed})
        return Response(content, media_type="application/json")

    @router.get("/runs/{name:path}")
    def run(name: str, points: Annotated[int, Query(ge=1, le=POINTS)] = POINTS) -> Response:
        try:
            path = metrics_files(folder)[name]  # a name is looked up, never joined to a path
            stats = [file.stat() for file in (path, settings_path(path)) if file == path or file.exists()]
            state = [n for stat in stats for n in (stat.st_mtime_ns, stat.st_size, stat.st_ino)]
            with reading:
                content = answer(name, path, points, *state)
        except (OSError, LookupError) as error:
            raise HTTPException(404, f"there is no run {name!r}") from error
        return Response(content, media_type="application/json")

    return router


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
