"""Bad records: counted, listed in a file, and skipped or the end of the run."""

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

    def add(self, block: Block, bad: list[tuple[int, str]]) -> None:
        """Add (line, reason) of the bad records of a block."""
        if bad and self.file is None:
            self.first = (block.file, *bad[0])
            self.file = open(self.path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        if self.file is not None:
            self.file.writelines(f"{block.path}:{line}: {reason}\n" for line, reason in bad)
        self.count += len(bad)

    def close(self) -> None:
        """Close the list."""
        if self.file:
            self.file.close()


def first_bad_record(report: dict, paths: list[str]) -> str:
    """FILE:LINE: reason of the first bad record that a report counts."""
    file, line, reason = report["first_bad_record"]
    return f"{paths[file]}:{line}: {reason}"


def judge_bad_records(
    first: str, count: int, records: int, listed: str, on_bad_data: str, max_share: float = 1.0
) -> None:
    """Report how many bad records are skipped.

    Args:
        first: FILE:LINE: reason of the first one. count: how many there are. records: how many records there are.
        listed: where all of them stand.
        on_bad_data: "stop" or "skip". max_share: the largest share that may be skipped.

    Raises:
        UserError: bad records, or so many of them, are not allowed.
    """
    if on_bad_data == "stop":
        more = count - 1
        follow = f"; {more} more bad record{'s' * (more > 1)} follow{'s' * (more == 1)}" if more else ""
        raise UserError(f"{first}{follow} (with --on_bad_data skip they are skipped and listed)")
    share = f"{count:,} of {records:,} records ({count / records:.1%})"
    if count > max_share * records:
        raise UserError(
            f"{first}; {share} are bad, more than --max_bad_share {max_share:g} allows; {listed}; "
            f"fix them or raise --max_bad_share"
        )
    if launch().local_rank == 0:
        say(f"bad records are skipped: {share}; {listed}")
