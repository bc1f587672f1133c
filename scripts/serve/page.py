"""The web page: its files, with headers that let nothing but these run, and the runs that it draws."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from scripts.runs.run import ENDING, PLACES, read_run

PAGE = Path(__file__).parent / "page"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
POINTS = 512  # of a curve
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

    @app.get("/")
    def index() -> Response:
        return FileResponse(PAGE / "index.html", headers=HEADERS)


def metrics_files(folder: Path) -> dict[str, Path]:
    """Name of the run -> its file, in the folder and the folders in it."""
    paths = [*folder.glob(f"*{ENDING}"), *folder.glob(f"*/*{ENDING}")]
    return {path.relative_to(folder).as_posix().removesuffix(ENDING): path for path in paths}


def runs_router(folder: Path) -> APIRouter:
    """GET /api/runs lists the runs of a folder, the last changed first; GET /api/runs/<name> gives the curves
    and figures of one."""
    router = APIRouter(prefix="/api")

    # plain functions: FastAPI calls them in threads

    @router.get("/runs")
    def runs() -> Response:
        now, listed = time.time(), []
        for name, path in metrics_files(folder).items():
            with suppress(OSError):  # removed this moment
                stat = path.stat()
                age = max(0.0, now - stat.st_mtime)  # seconds since its last change
                listed.append({"name": name, "size": stat.st_size, "age": round(age, 1)})
        listed.sort(key=lambda run: (run["age"], run["name"]))
        return JSONResponse({"runs": listed})

    @router.get("/runs/{name:path}")
    def run(name: str) -> Response:
        path = metrics_files(folder).get(name)  # looked up, never joined to a path
        if path is None:
            raise HTTPException(404, f"there is no run {name!r}")
        run = read_run(path)
        settings = {setting: value for setting, value in run.settings.items() if setting not in PLACES}
        columns = {
            field: values
            for field, values in run.columns(POINTS).items()
            if field not in LEFT_OUT and not field.startswith("initial_")
        }
        answer = {"name": name, "columns": columns, "figures": run.figures, "settings": settings}
        samples = [*run.samples.items(), *run.rollout.items()]
        answer |= {"skipped": run.skipped, "diverged": run.diverged}
        return JSONResponse(answer | {"warnings": run.warnings, "samples": samples})

    return router
