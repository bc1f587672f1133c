"""Errors that a user can act on, and the lines that report them."""

import sys

from common.launcher import launch


class UserError(Exception):
    """A mistake that the user can correct. The message names the file and line or the flag, and what to
    do."""


class WriteError(UserError):
    """A file cannot be written."""


class LostRank(UserError):
    """A collective failed because another rank ended; that rank's own message or torchrun's report tells
    why."""


class Interrupted(BaseException):
    """A signal ended the run. The message says how to go on."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.number = number


def reason(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def printable(text: str) -> str:
    """The text with escapes for what a terminal would obey or cannot show, except for blanks and line
    ends."""
    return "".join(c if c.isprintable() or c in "\n\t\u00a0\u3000" else ascii(c)[1:-1] for c in text)


def say(text: str) -> None:
    """Print a line, escaping what a terminal would obey: file names and records may hold anything."""
    print(printable(text), flush=True)


def warn(text: str) -> None:
    """Print one `warning: ...` line on stderr, on rank 0 only."""
    if launch().rank == 0:
        print(f"warning: {printable(text)}", file=sys.stderr, flush=True)
