"""Errors that a user can act on, and the lines that report them.

Lines go through `log`, a logger of the standard library: to stdout, warnings and errors to stderr, and to the
log file, if there is one (`log_to` in command_line.py). A line that cannot be written, because the terminal
is gone or the disk full, is left out: a run does not end for it.
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
    """A file cannot be read at present; whether it is damaged, nobody knows."""


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
    """Raise UserError for a text of the command line, such as a path, with bytes that are not UTF-8, or that
    a locale without UTF-8 has not read as such."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        with suppress(UnicodeDecodeError):
            os.fsencode(text).decode()
            raise UserError(f"{what} cannot be read: {not_utf8_locale()}") from error
        raise UserError(f"{what} is not UTF-8: {text!a}; rename or convert it") from error


def not_utf8_locale() -> str:
    """That this process's locale is not UTF-8, and what to do."""
    names = ("LC_ALL", "LC_CTYPE", "LANG")  # the first that is set decides
    setting = next((f"{name}={os.environ[name]}" for name in names if os.environ.get(name)), "none is set")
    return f"the locale ({setting}) is not UTF-8; put PYTHONUTF8=1 before the command"


def printable(text: str) -> str:
    """The text with escapes for what a terminal would obey or cannot show, except for blanks and line
    ends."""
    return "".join(c if c.isprintable() or c in "\n\t\u00a0\u3000" else ascii(c)[1:-1] for c in text)


# --- lines


class Console(logging.StreamHandler):
    """Shows warnings and errors on stderr, all else on stdout, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show a line on the stream that is the standard one now."""
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
    """Print a line, escaping what a terminal would obey: file names and records may hold anything."""
    for line in printable(text).split("\n"):
        log.info(line)


def warn(text: str) -> None:
    """Print one `warning: ...` line on stderr, on rank 0 only."""
    if launch().rank == 0:
        log.warning(f"warning: {printable(text)}")
