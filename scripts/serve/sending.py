"""POST /api/page: a model as a page to send (scripts/convert_model.py --to page), for the server's own page.

Each page is made by a separate process. Only one runs at a time, and a page is made again only after the
weights have changed. This bounds what clients can cost.
"""

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from urllib.parse import quote

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse, Response

from common.settings import ROOT
from scripts.serve.jobs import SECRETS
from scripts.serve.models import Models, Weights
from scripts.serve.protocol import ApiError
from scripts.serve.training import NOT_SHOWN, Body, own_page_only, read

CONVERT = ROOT / "scripts" / "convert_model.py"
MOST_BYTES = 500 << 20  # of weights; a browser can load a page of half that size
SECONDS = 1800
KEPT = 4  # pages
PATIENCE = 10  # the conversion is this much nicer than the server


class Wanted(Body):
    """The body of the request: the name of a model."""

    model: str


class Pages:
    """The newest pages, in a temporary folder that is removed when the server ends."""

    def __init__(self, models: Models):
        self.models = models
        self.folder = TemporaryDirectory(prefix="minimind_pages_")
        self.made: dict[Weights, Path] = {}

    def page(self, name: str) -> Path:
        """The file of a model's page. Calls must not overlap. Raises ApiError if there is no such model, or
        if it cannot become a page."""
        _, path = self.models.find(name)
        weights = Weights(path, self.models.version(path))
        if weights not in self.made:
            if sum(size for _, size, _ in weights.version or ()) > MOST_BYTES:
                raise ApiError(f"{name} is too large for a page.", 409, code="no_page")
            title = re.sub(r"[^\w.-]+", " ", name).strip()[:80] or "model"
            page = Path(mkdtemp(dir=self.folder.name)) / f"{title}.html"
            self.convert(path, page)
            self.made[weights] = page
        for oldest in list(self.made)[:-KEPT]:
            with suppress(OSError):
                self.made.pop(oldest).unlink()
        return self.made[weights]

    def convert(self, path: Path, page: Path) -> None:
        """Make a page file. Raises ApiError."""
        argv = [sys.executable, str(CONVERT), "--to", "page", "--model", str(path), "--output", str(page)]
        argv += self.models.flags
        if path == self.models.path:
            argv += [argument for part in self.models.parts for argument in ("--lora", str(part))]
        environment = {key: value for key, value in os.environ.items() if key not in SECRETS}
        try:
            done = subprocess.run(
                ["nice", "-n", str(PATIENCE), *argv], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ApiError(f"The page was not made within {SECONDS} s.", 409, code="no_page") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
            raise ApiError(lines[-1].removeprefix("error: ")[:500], 409, code="no_page")


def sending_routes(models: Models) -> APIRouter:
    """The route that makes pages to send."""
    routes = APIRouter(prefix="/api", dependencies=[Depends(own_page_only)])
    pages, one_at_a_time = Pages(models), CapacityLimiter(1)

    @routes.post("/page")
    async def page(request: Request) -> Response:
        wanted = await read(request, Wanted)
        path = await run_sync(pages.page, wanted.model, limiter=one_at_a_time)
        disposition = f"attachment; filename*=utf-8''{quote(path.name)}"
        headers = NOT_SHOWN | {"Content-Disposition": disposition}
        return FileResponse(path, media_type="text/html", headers=headers)

    return routes
