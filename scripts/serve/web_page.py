"""Serves the web page: the few static files of `page/`, with headers that let nothing but these files run."""

from pathlib import Path

from fastapi import APIRouter, HTTPException, Response

PAGE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
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


def page_router() -> APIRouter:
    """`/` and `/page/<file>`. The page holds no secrets; it needs no key, the routes that it calls may."""
    router = APIRouter(include_in_schema=False)
    files = {path.name: path for path in PAGE.iterdir() if path.suffix in TYPES}

    @router.get("/")
    def index() -> Response:
        return static_file("index.html")

    @router.get("/page/{name}")
    def static_file(name: str) -> Response:
        path = files.get(name)  # looked up, never joined to a path
        if path is None:
            raise HTTPException(404, f"there is no file {name!r}")
        return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=HEADERS)

    return router
