"""The bodies of requests: their type, sizes and times."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from scripts.serve.protocol import ApiError

MAX_BODY = 2 << 20  # bytes of a request; a full context of text is some 10 KB
SMALL_BODY = 1 << 14  # bytes up to which a request is turned into tokens in the event loop
BODY_SECONDS = 30  # until a body must have arrived
LARGE_BODIES = ThreadPoolExecutor(1)  # works on them one after the other


async def read_body(request: Request, most: int = MAX_BODY) -> bytes:
    """The body of a request, at most so many bytes. Raises ApiError if it is not JSON, is too large, takes
    too long, or does not arrive."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a browser lets pages of other sites send other types without asking
        raise ApiError("Send the header Content-Type: application/json.", status=415)
    message = f"The request is larger than {most >> 10} KB."
    too_large = ApiError(message, status=413, code="request_too_large")
    if int(request.headers.get("content-length", 0)) > most:  # a number: h11 checked it
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(f"The body did not arrive within {BODY_SECONDS} s.", status=408) from error
    except ClientDisconnect as error:
        raise ApiError("The client hung up.", status=499) from error
    return bytes(body)


async def work_on(body: bytes, function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function whose time grows with the size of a body; for a large one it is called in a
    thread, so that the event loop goes on."""
    if len(body) <= SMALL_BODY:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(LARGE_BODIES, function, *args)
