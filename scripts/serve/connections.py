"""uvicorn, which by itself waits without end for the first request of a connection."""

import asyncio
import signal
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import say

if TYPE_CHECKING:
    from fastapi import FastAPI

IDLE_SECONDS = 30  # that a connection lasts without a request
GRACE = 30  # seconds that answers have when the server ends


class Connection(H11Protocol):
    """A connection to a client, which is closed if it sends no request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(IDLE_SECONDS, self.close_if_silent)

    def close_if_silent(self) -> None:
        """Close the connection if the head of its first request has not arrived."""
        if self.cycle is None:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server, which says that it ends."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            say("finishing what is being answered; Ctrl-C ends it at once")
        super().handle_exit(sig, frame)


def run(app: "FastAPI", listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C, and then until every request is answered, GRACE seconds at most; ends
    with SystemExit."""
    config = uvicorn.Config(
        app,
        http=Connection,
        log_level="error",
        access_log=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit())  # uvicorn raises it again when it has ended
    Server(config).run(sockets=[listener])
