"""The bodies of requests: their type, sizes and times."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from scripts.serve.protocol import ApiError

MAX_BODY = 2 << 20  # bytes of a request; a full context of text is some 10 KB
SMALL_BODY = 1 << 14  # bytes up to which a request is turned into tokens in the event loop, and always read
MAX_BODIES = 64 << 20  # bytes of all bodies that are being read
BODY_SECONDS = 30  # until a body must have arrived


class Bodies:
    """The bodies that are being read and decoded; together they stay below MAX_BODIES, whoever sends them."""

    def __init__(self) -> None:
        self.held = 0
        self.one_at_a_time = asyncio.Semaphore(1)

    @asynccontextmanager
    async def read(self, request: Request, most: int = MAX_BODY) -> AsyncIterator[bytes]:
        """The body of a request, at most so many bytes; it counts as held within. Raises ApiError if it is
        not JSON, is too large, takes too long, or does not arrive."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a browser lets pages of other sites send other types without asking
            raise ApiError("Send the header Content-Type: application/json.", status=415)
        too_large = ApiError(
            f"The request is larger than {most >> 10} KB.", status=413, code="request_too_large"
        )
        if int(request.headers.get("content-length", 0)) > most:  # a number: h11 checked it
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
                            raise ApiError(
                                "Too many large requests at once; try again later.", 503, "server_error"
                            )
            except TimeoutError as error:
                raise ApiError(f"The body did not arrive within {BODY_SECONDS} s.", status=408) from error
            except ClientDisconnect as error:
                raise ApiError("The client hung up.", status=499) from error
            yield bytes(body)
        finally:
            self.held -= len(body)

    async def work(self, body: bytes, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function whose time grows with the size of a body. That of large ones is called in
        a thread, one after the other, so the event loop goes on."""
        if len(body) <= SMALL_BODY:
            return function(*args)
        async with self.one_at_a_time:
            return await asyncio.to_thread(function, *args)
