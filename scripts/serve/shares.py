"""Whose turn it is: work is given out by what each client has had of it, not in the order of the requests."""


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
