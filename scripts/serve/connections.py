"""uvicorn, so that nobody can take its connections away by keeping them open without a request: by itself it
closes a connection that is silent after an answer, but waits without end for the first request."""

import asyncio
import resource
import signal
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import say

if TYPE_CHECKING:
    from fastapi import FastAPI

IDLE_SECONDS = 30  # that a connection lasts without a request
GRACE = 30  # seconds that answers have when the server ends
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MOST = FILES // 2 if FILES > 0 else 512  # connections; -1: no limit of open files


class Connection(H11Protocol):
    """A connection to a client. Where there would be too many, the oldest one that is not being answered is
    closed."""

    all: "dict[Connection, None]" = {}  # noqa: RUF012 - the oldest first
    deadline: asyncio.TimerHandle | None = None

    @property
    def is_answered(self) -> bool:
        """Whether its request has arrived and is being answered."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.all[self] = None
        if len(self.all) > MOST:
            oldest = next((one for one in self.all if not one.is_answered), self)
            self.all.pop(oldest)  # it is lost a little later
            oldest.transport.abort()
        self.expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.all.pop(self, None)
        if self.deadline:
            self.deadline.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.expect_request()

    def expect_request(self) -> None:
        """Close the connection after IDLE_SECONDS unless the head of another request comes."""
        if self.deadline:
            self.deadline.cancel()
        self.deadline = self.loop.call_later(IDLE_SECONDS, self.close_if_silent, self.cycle)

    def close_if_silent(self, last_cycle: Any) -> None:
        """Close the connection if there was no request behind the last one, which was answered."""
        if self.cycle is last_cycle and (last_cycle is None or last_cycle.response_complete):
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
        backlog=MOST // 2,  # so many are accepted before the oldest can be closed
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit())  # uvicorn raises it again when it has ended
    Server(config).run(sockets=[listener])
