"""Turns for clients: the next turn depends on what each client has had, not on the order of the requests."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class Shares:
    """What each client has had of something, such as seconds of a thread. The client with the least has the
    next turn. A client that is new, or comes back, starts at the level of the latest turn. So nobody saves up
    turns, and nobody waits for what others had earlier."""

    def __init__(self) -> None:
        self.had: dict[str, float] = {}  # the clients that had more than `now`
        self.now = 0.0

    def of(self, client: str) -> float:
        """What a client has had. Of the clients with work to do, the one with the least comes next."""
        return max(self.had.get(client, 0.0), self.now)

    def charge(self, client: str, cost: float) -> None:
        """Add the cost of a client's turn. It must be the client whose turn it was."""
        self.now = self.of(client)
        self.had[client] = self.now + cost
        self.had = {each: had for each, had in self.had.items() if had > self.now}


class Turns:
    """Does pieces of work in the event loop, one at a time, in the order that `Shares` gives. Between two
    pieces the loop handles its connections, so a client that arrives meanwhile may have the next turn."""

    def __init__(self) -> None:
        self.shares = Shares()
        self.waiting: list[tuple[str, Callable[[], Any], asyncio.Future[Any]]] = []

    async def do(self, client: str, work: Callable[[], Result]) -> Result:
        """Do a client's work when its turn has come, and return the result. Raises what the work raises."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self.waiting.append((client, work, result))
        if len(self.waiting) == 1:
            loop.call_soon(self.do_next, loop)
        return await result

    def do_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do the work of the client whose turn it is."""
        turn = min(self.waiting, key=lambda turn: self.shares.of(turn[0]))
        self.waiting.remove(turn)
        client, work, result = turn
        start = time.monotonic()
        try:
            if not result.cancelled():
                result.set_result(work())
        except Exception as error:
            result.set_exception(error)
        self.shares.charge(client, time.monotonic() - start)
        if self.waiting:
            loop.call_soon(self.do_next, loop)
