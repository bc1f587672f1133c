"""Bad records: counted, and listed in a file."""

from pathlib import Path
from typing import TextIO

from common.errors import UserError, say
from common.launcher import launch
from dataset.blocks import Block


class BadRecords:
    """Counts bad records and lists each of them in a file, which the first one creates."""

    def __init__(self, path: Path):
        self.path = path
        self.file: TextIO | None = None
        self.count = 0
        self.first: tuple[int, int, str] | None = None  # index of the file, line, reason
        self.first_text = ""  # FILE:LINE: reason

    def add(self, block: Block, bad: list[tuple[int, str]]) -> None:
        """Add (line, reason) of each bad record of a block."""
        if not bad:
            return
        if self.file is None:
            line, reason = bad[0]
            self.first, self.first_text = (block.file, line, reason), f"{block.path}:{line}: {reason}"
            self.file = open(self.path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self.file.writelines(f"{block.path}:{line}: {reason}\n" for line, reason in bad)
        self.count += len(bad)

    def close(self) -> None:
        """Close the list."""
        if self.file:
            self.file.close()


def bad_records_message(first: str, count: int) -> str:
    """The error for `count` bad records: the first one, how many follow, and what to do."""
    more = count - 1
    follow = f"; {more} more bad record{'s' * (more > 1)} follow{'s' * (more == 1)}" if more else ""
    return f"{first}{follow} (with --on_bad_data skip they are skipped and listed)"


def judge_bad_records(first: str, count: int, records: int, listed: str, on_bad_data: str, max_share: float) -> None:
    """Report how many bad records are skipped.

    Args:
        first: FILE:LINE: reason of the first one. count: how many there are. records: how many records there are.
        listed: where the others are told.
        on_bad_data: "stop" or "skip". max_share: the largest share that may be skipped.

    Raises:
        UserError: bad records, or so many of them, are not allowed.
    """
    if on_bad_data == "stop":
        raise UserError(bad_records_message(first, count))
    share = f"{count:,} of {records:,} records ({count / records:.1%})"
    if count > max_share * records:
        raise UserError(
            f"{first}; {share} are bad, more than --max_bad_share {max_share:g} allows; {listed}; "
            f"fix them or raise --max_bad_share"
        )
    if launch().local_rank == 0:
        say(f"bad records are skipped: {share}; {listed}")
