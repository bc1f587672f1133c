"""Serves the web page: the few static files of `page/`, with headers that let nothing but these files run."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'self'",
    "object-src 'none'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # the browser refuses text as HTML or code
    "trusted-types 'none'",
)
HEADERS = {
    "Content-Security-Policy": "; ".join(POLICY),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",
}


class Page(StaticFiles):
    """The files with their headers. The page holds no secrets; it needs no key, the routes that it calls
    may."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """A file."""
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """`/` and `/page/<file>`."""
    app.mount("/page", Page(directory=PAGE))

    @app.get("/")
    def index() -> Response:
        return FileResponse(PAGE / "index.html", headers=HEADERS)
