"""The web page: its files, with headers that allow no other code to run, and the data of the runs that it
draws."""

import json
import time
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from common.errors import printable, reason
from common.files import is_running
from scripts.runs.run import AXES, LOCATION_SETTINGS, Run
from scripts.serve.folders import Entry, scan
from trainer.weights.paths import METRICS_SUFFIX

PAGE = Path(__file__).parent / "page"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
POINTS = 512  # of a curve
INITIAL = "initial_"  # prefix of the metrics before the first update
RUNS_KEPT = 16  # with 200,000 records, each takes about 25 MB
LEFT_OUT = {"epoch", "step", "iters", "mfu", "mfu_of_sheet", "memory_mb", "reserved_mb", "logits_loss"}


class PageFiles(StaticFiles):
    """The page's files with their headers. They hold no secrets and need no key."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """A file."""
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """`/` and `/page/<file>`."""
    app.mount("/page", PageFiles(directory=PAGE))

    @app.api_route("/", methods=["GET", "HEAD"])
    def index() -> Response:
        return FileResponse(PAGE / "index.html", headers=HEADERS)


def metrics_files(folder: Path) -> dict[str, tuple[Path, Entry]]:
    """Name of the run -> its metrics file, in the folder and in the folders in it."""
    found = {}
    for place, files in scan(folder).items():
        for name, file in files.items():
            if name.endswith(METRICS_SUFFIX):
                path = place / name
                run = path.relative_to(folder).as_posix().removesuffix(METRICS_SUFFIX)
                found[printable(run)] = path, file  # the name need not be UTF-8
    return found


class RunFiles:
    """The runs that were read last. Reading one again costs only what was added to its file since."""

    def __init__(self) -> None:
        self.runs: dict[Path, Run] = {}

    def read(self, path: Path) -> Run:
        """The run of a metrics file. Calls must not overlap. Raises OSError."""
        run = self.runs.pop(path, None)
        if run is None or not run.read_on():
            run = Run(path)
            run.read_on()
        self.runs[path] = run
        for oldest in list(self.runs)[:-RUNS_KEPT]:
            del self.runs[oldest]
        return run


def runs_router(folder: Path, trains: bool = False) -> APIRouter:
    """GET /api/runs lists the runs of a folder, the last changed first, and says whether this server trains.
    GET /api/runs/<name> returns the curves and figures of one run."""
    router, files = APIRouter(prefix="/api"), RunFiles()
    one_at_a_time = CapacityLimiter(1)  # reading many records keeps a core busy and delays decoding

    def listing() -> Response:
        now, listed = time.time(), []
        for name, (path, file) in metrics_files(folder).items():
            age = max(0.0, now - file.mtime)  # seconds since its last change
            alive = is_running(path.name.removesuffix(METRICS_SUFFIX), path.parent)
            listed.append({"name": name, "size": file.size, "age": round(age, 1), "alive": alive})
        listed.sort(key=lambda run: (run["age"], run["name"]))
        return json_response({"runs": listed, "train": trains})

    def curves(name: str) -> Response:
        path, _ = metrics_files(folder).get(name, (None, None))  # looked up, never joined to a path
        if path is None:
            raise HTTPException(404, f"there is no run {name!r}")
        try:
            run = files.read(path)
        except OSError as error:
            raise HTTPException(404, f"the run {name!r} cannot be read ({reason(error)})") from error
        settings = {
            setting: value for setting, value in run.settings.items() if setting not in LOCATION_SETTINGS
        }
        columns = with_start(run.columns(POINTS))
        answer = {"name": name, "columns": columns, "figures": run.figures, "settings": settings}
        samples = [*run.samples.items(), *run.rollout.items()]
        answer |= {"skipped": run.skipped, "diverged": run.diverged}
        return json_response(answer | {"warnings": run.warnings, "samples": samples})

    @router.api_route("/runs", methods=["GET", "HEAD"])
    async def runs() -> Response:
        return await run_sync(listing)

    @router.api_route("/runs/{name:path}", methods=["GET", "HEAD"])
    async def run(name: str) -> Response:
        return await run_sync(curves, name, limiter=one_at_a_time)

    return router


def with_start(columns: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    """The columns that are drawn. They begin at update 0 if the model was evaluated before the first
    update."""
    drawn = {field: values for field, values in columns.items() if field not in LEFT_OUT}
    initial = {field: drawn.pop(field)[0] for field in list(drawn) if field.startswith(INITIAL)}
    if not initial:
        return drawn
    start = dict.fromkeys(AXES, 0.0) | {f.removeprefix(INITIAL): value for f, value in initial.items()}
    return {field: [start.get(field), *values] for field, values in drawn.items()}


def json_response(content: Any) -> Response:
    """A JSON response in ASCII: a text of a metrics file may contain half a surrogate pair, which UTF-8
    cannot encode."""
    return Response(json.dumps(content, default=str), media_type="application/json")
