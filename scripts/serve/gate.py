"""Who may send what, looked at before any route: names of this machine, web pages of other sites, sizes of bodies."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from scripts.serve.protocol import ApiError

MAX_BODY = 2 << 20  # bytes of a request; a full context of text is some 10 KB
SMALL_BODY = 1 << 14  # bytes up to which a request is turned into tokens in the event loop, and always read
MAX_BODIES = 64 << 20  # bytes of all bodies that are being read
BODY_SECONDS = 30  # until a body must have arrived


class Gate:
    """ASGI middleware. HEAD is answered as GET is, by the server without the body.

    local_only: answer only requests that name this machine. A page from elsewhere whose name is made to point here (DNS
    rebinding) would be taken for the server's own. origins: other web pages that may use the API; "*": all.
    """

    def __init__(self, app: ASGIApp, local_only: bool, origins: Collection[str]):
        self.app, self.local_only, self.origins = app, local_only, frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope, Headers(scope=scope))
            except ApiError as error:
                await JSONResponse(error.body(), error.status)(scope, receive, send)
                return
            scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        await self.app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        if self.local_only and not is_this_machine(host):
            message = f"This server answers at localhost only, not at '{host[:100]}'; start it with an --api_key."
            raise ApiError(message, status=403)
        if scope["path"].startswith(("/v1/", "/api/")) and not self._is_own(headers, host):
            origin = headers.get("origin", "another site")
            message = f"A web page of {origin[:100]} may not use this server; start it with --allow_origin."
            raise ApiError(message, status=403, code="origin_not_allowed")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":  # a page may send other types without asking
            raise ApiError("Send the header Content-Type: application/json.", status=415)

    def _is_own(self, headers: Headers, host: str) -> bool:
        """True unless the browser's headers name another site."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and ("*" in self.origins or origin in self.origins):
            return True
        if site is not None:
            return site in ("same-origin", "none")
        return origin is None or origin.partition("://")[2] == host


def is_this_machine(host: str) -> bool:
    """Whether a Host header names this machine."""
    name = ""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        if ip_address(name).is_loopback:
            return True
    return name == "localhost" or name.endswith(".localhost")


class Bodies:
    """The bodies that are being read and decoded; together they stay below MAX_BODIES, whoever sends them."""

    def __init__(self) -> None:
        self.held = 0
        self.large = asyncio.Semaphore(1)  # large ones are decoded one after the other, off the event loop

    @asynccontextmanager
    async def read(self, request: Request, most: int = MAX_BODY) -> AsyncIterator[bytes]:
        """The body of a request, at most so many bytes; it counts as held within.

        Raises:
            ApiError: it is too large, takes too long, or does not arrive.
        """
        length = request.headers.get("content-length", "")
        too_large = ApiError(f"The request is larger than {most >> 10} KB.", status=413, code="request_too_large")
        if len(length) > 12 or (length.isdecimal() and int(length) > most):
            raise too_large
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    async for part in request.stream():
                        body += part
                        self.held += len(part)
                        if len(body) > most:
                            raise too_large
                        if len(body) > SMALL_BODY and self.held > MAX_BODIES:
                            raise ApiError("Too many large requests at once; try again later.", 503, "server_error")
            except TimeoutError as error:
                raise ApiError(f"The body did not arrive within {BODY_SECONDS} s.", status=408) from error
            except ClientDisconnect as error:
                raise ApiError("The client hung up.", status=499) from error
            yield bytes(body)
        finally:
            self.held -= len(body)
