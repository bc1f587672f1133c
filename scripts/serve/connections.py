"""uvicorn with deadlines and an orderly end.

uvicorn 0.54 waits without a limit for the rest of a request head, for a body, and for a client to read its
answer. With `limit_concurrency` it refuses new connections, so clients that hold the old ones keep everybody
else out. hypercorn 0.18 has a deadline for each read: a byte now and then extends it, and a long answer
exceeds it. granian 2.8 has a deadline for heads, but none for bodies. Therefore this file gives uvicorn's
protocol one timer.
"""

import asyncio
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import reason, say, warn
from scripts.serve import limits
from scripts.serve.decoding import DecodingThread

if TYPE_CHECKING:
    from fastapi import FastAPI

ACCEPTED_AT_ONCE = 16  # connections accepted in one go, before the first of them is handled
BACKLOG = 1024  # connections that the system keeps until they are accepted
END_SECONDS = 1  # time to send the last responses


class Connection(H11Protocol):
    """A connection that is closed if its client is too slow. If there are too many connections, the one that
    has waited for its client longest is closed.

    deadline: timer by which the client must have sent the rest of a head or body, or must have read on; None
    while the server does not wait for the client. drained: bytes of a body that arrived after its response
    was sent. most: limit of simultaneous connections.
    """

    drained = 0
    deadline: asyncio.TimerHandle | None = None
    most = limits.MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.most:
            self.make_room()
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        self.expect(limits.IDLE_SECONDS)

    def make_room(self) -> None:
        """Close the connection that has waited for its client longest. A connection with an answer in
        progress is never closed."""
        ours = [each for each in self.connections if isinstance(each, Connection)]
        timers = {each: each.deadline or each.timeout_keep_alive_task for each in ours}
        waiting = {each: timer.when() for each, timer in timers.items() if timer is not None}
        if waiting:
            oldest = min(waiting, key=lambda each: waiting[each])
            oldest.transport.abort()
            self.connections.discard(oldest)

    def data_received(self, data: bytes) -> None:
        request = self.cycle
        super().data_received(data)
        state = self.conn.their_state
        is_answered = self.cycle is not None and self.cycle.response_complete
        # an upload is read to its end: otherwise a browser does not show why it was refused
        if state is h11.SEND_BODY and is_answered and not self.cycle.scope.get("is_upload"):
            self.drained += len(data)
            if self.drained > limits.MAX_DRAINED:
                self.transport.abort()
        else:
            self.drained = 0
        if state is h11.SEND_BODY and self.cycle is not request:
            self.expect(limits.BODY_SECONDS + END_SECONDS)  # the application answers a little earlier
        elif state is h11.SEND_BODY and self.cycle.scope.get("is_upload"):
            self.expect(limits.BODY_SECONDS)  # from now on: a large file may take long
        elif state in (h11.IDLE, h11.SEND_BODY):
            if self.deadline is None:
                self.expect(limits.IDLE_SECONDS)
        else:
            self.expect(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.expect(limits.READ_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.expect(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.expect(None)
        super().connection_lost(exc)

    def expect(self, seconds: float | None) -> None:
        """Close the connection unless the client acts within so many seconds. None: stop waiting for the
        client."""
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class Server(uvicorn.Server):
    """uvicorn's server with an orderly end. It says that it ends. After the grace period it answers the
    remaining requests with an error. It also ends if the decoding thread has died."""

    def __init__(self, config: uvicorn.Config, decoding: DecodingThread):
        super().__init__(config)
        self.decoding = decoding

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(LoopErrors())
        await super().startup(sockets)
        # asyncio accepts as many connections in one go as its backlog allows, and each needs a
        # descriptor; connections that wait in the system need none
        for listener in sockets or []:
            listener.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.decoding.failure() is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        is_dead = self.decoding.failure() is not None
        self.loop.call_later(0 if is_dead else limits.GRACE, self.end_requests)
        await super().shutdown(sockets)

    def end_requests(self) -> None:
        """Answer every remaining request with an error, and then close the connections that are left."""
        self.decoding.end("The server has ended.")
        self.loop.call_later(END_SECONDS, self.close_connections)

    def close_connections(self) -> None:
        """Close all connections: their clients do not read their response, or are still sending their
        request."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            say("finishing the current answers; Ctrl-C ends them at once")
            super().handle_exit(sig, frame)
        else:
            self.loop.call_soon_threadsafe(self.end_requests)


class LoopErrors:
    """Logs errors of the event loop that reach no caller, such as a connection that cannot be accepted. Each
    is logged at most once a minute."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = context["message"] + (f": {reason(error)}" if error else "")
        if loop.time() - self.last.get(text, -60) >= 60:
            self.last[text] = loop.time()
            warn(text)


def most_connections() -> int:
    """How many connections the process may have at once. Each needs a file descriptor, and a second one while
    it sends a file of the page."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits.MAX_CONNECTIONS
    if soft != resource.RLIM_INFINITY:
        most = min(most, (soft - limits.RESERVED_DESCRIPTORS) // 2)
    return max(1, most)


def make_server(
    app: "FastAPI", decoding: DecodingThread, proxies: Sequence[str] = (), **options: Any
) -> Server:
    """The server of an application. proxies: addresses whose X-Forwarded-For is trusted. options: passed on
    to uvicorn's Config."""
    Connection.most = most_connections()
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="error",
        access_log=False,
        backlog=ACCEPTED_AT_ONCE,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        timeout_keep_alive=limits.IDLE_SECONDS,
        timeout_graceful_shutdown=limits.GRACE + 10 * END_SECONDS,  # end_requests closes all
        **options,
    )
    return Server(config, decoding)


def run(
    app: "FastAPI", listener: socket.socket, decoding: DecodingThread, proxies: Sequence[str] = ()
) -> None:
    """Serve until SIGTERM or Ctrl-C. Then finish the requests, for GRACE seconds at most, and end with
    SystemExit. Returns if the decoding thread has died."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit())  # uvicorn raises the signal again at its end
    make_server(app, decoding, proxies).run(sockets=[listener])
