"""Whose turn it is: work is given out by what each client has had of it, not in the order of the requests."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class Shares:
    """What each client has had, such as seconds of a thread. The next turn is that of the client with the
    least; one that comes, or comes back, begins with as much as the one whose turn it was last, so nobody
    saves up turns, and nobody waits for what others have had before."""

    def __init__(self) -> None:
        self.had: dict[str, float] = {}  # of those who had more than `now`
        self.now = 0.0

    def of(self, client: str) -> float:
        """What a client has had: of those with work to do, the least comes next."""
        return max(self.had.get(client, 0.0), self.now)

    def charge(self, client: str, cost: float) -> None:
        """Add the cost of a client's turn, which was the next one."""
        self.now = self.of(client)
        self.had[client] = self.now + cost
        self.had = {each: had for each, had in self.had.items() if had > self.now}


class Turns:
    """Does pieces of work in the event loop one by one, by what each client has had; between two of them the
    loop looks at its connections, so a client that comes meanwhile may be the next one."""

    def __init__(self) -> None:
        self.shares = Shares()
        self.waiting: list[tuple[str, Callable[[], Any], asyncio.Future[Any]]] = []

    async def do(self, client: str, work: Callable[[], Result]) -> Result:
        """The result of a client's work, when its turn has come. Raises what the work raises."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self.waiting.append((client, work, result))
        if len(self.waiting) == 1:
            loop.call_soon(self.do_next, loop)
        return await result

    def do_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do the work whose turn it is."""
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
