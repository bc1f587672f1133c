"""Errors that a user can act on, and the lines that report them.

Lines go through `log`, a logger of the standard library: to stdout, warnings and errors to stderr, and to the
log file, if there is one (`log_to` in command_line.py). If a line cannot be written, because the terminal is
gone or the disk is full, it is dropped and the run goes on.
"""

import logging
import os
import sys
from contextlib import nullcontext, suppress

from common.launcher import launch


class UserError(Exception):
    """A mistake that the user can correct. The message names the file and line or the flag, and what to
    do."""


class WriteError(UserError):
    """A file cannot be written."""


class ReadError(UserError):
    """A file cannot be read at present; it is unknown whether it is damaged."""


class LostRank(UserError):
    """A collective failed because another rank ended; that rank's own message or torchrun's report tells
    why."""


class LoaderFailure(RuntimeError):
    """A data loader process ended while it handed over a micro-batch."""


class Interrupted(BaseException):
    """A signal ended the run. The message says how to go on."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.number = number


def reason(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def check_utf8(what: str, text: str) -> None:
    """Raise UserError if a text from the command line, such as a path, contains bytes that are not UTF-8, or
    was not decoded as UTF-8 because of the locale."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        with suppress(UnicodeDecodeError):
            os.fsencode(text).decode()
            raise UserError(f"{what} cannot be read: {not_utf8_locale()}") from error
        raise UserError(f"{what} is not UTF-8: {text!a}; rename or convert it") from error


def not_utf8_locale() -> str:
    """The message that this process's locale is not UTF-8, and what to do."""
    names = ("LC_ALL", "LC_CTYPE", "LANG")  # the first that is set decides
    setting = next((f"{name}={os.environ[name]}" for name in names if os.environ.get(name)), "none is set")
    return f"the locale ({setting}) is not UTF-8; put PYTHONUTF8=1 before the command"


def printable(text: str) -> str:
    """The text with control and unprintable characters escaped, except for white space."""
    return "".join(c if c.isprintable() or c in "\n\t\u00a0\u3000" else ascii(c)[1:-1] for c in text)


# --- lines


class Console(logging.StreamHandler):
    """Shows warnings and errors on stderr and everything else on stdout, above a progress bar if there is
    one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line to the current sys.stdout or sys.stderr."""
        self.stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        tqdm = sys.modules.get("tqdm")  # without it there is no bar
        with tqdm.tqdm.external_write_mode(file=self.stream) if tqdm else nullcontext():
            super().emit(record)


logging.raiseExceptions = False
log = logging.getLogger("minimind")
log.setLevel(logging.INFO)
log.propagate = False
if not log.handlers:
    log.addHandler(Console())


def say(text: str) -> None:
    """Print a line with control characters escaped, because file names and records may contain anything."""
    for line in printable(text).split("\n"):
        log.info(line)


def warn(text: str) -> None:
    """Print one `warning: ...` line on stderr, on rank 0 only."""
    if launch().rank == 0:
        log.warning(f"warning: {printable(text)}")
