"""Bad records: skipped, or the end of the run."""

from common.errors import UserError, say
from common.launcher import launch


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
