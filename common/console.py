"""The console of a process: it may go away, lines below a level are hidden, and a log file receives all
others.

`sys.stdout` and `sys.stderr` are replaced: the lines of progress bars, warnings, libraries
and of a `print` in a user's task belong into the log as well.
"""

import os
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from common.errors import UserError

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class LogFile:
    """Appends lines with time and level. Several processes may write to one file; a line is one `os.write`.
    Raises UserError if the file cannot be opened."""

    def __init__(self, path: Path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            why = error.strerror or error
            raise UserError(
                f"the log file {path} cannot be written ({why}); give another --log_file"
            ) from error
        self.path: Path | None = path

    def line(self, level: int, text: str) -> None:
        """Write one line; when the disk is full, say so once and go on without the file."""
        if self.path is None:
            return
        name = next(name.upper() for name, number in LEVELS.items() if number == level)
        try:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {name:7} {text}\n"
            os.write(self.descriptor, line.encode("utf-8", "backslashreplace"))
        except OSError as error:
            warning = f"warning: the log file {self.path} cannot be written ({error.strerror or error})"
            self.path = None
            os.write(2, f"{warning}; the run goes on without it\n".encode())


class ConsoleStream:
    """Stands in for `sys.stdout` or `sys.stderr`.

    A write that fails (a closed terminal, a `tee` that ended, a full disk behind a log) raises nothing; what
    the disk cannot take now is written with the next line that it can. A line's level is its beginning
    (`warning: ...`), else that of its stream; lines below `threshold` are hidden. Of a progress bar, which
    returns to the beginning of its line, the file receives the last state.
    """

    def __init__(self, stream: TextIO, usual: int):
        self.stream, self.usual = stream, usual
        self.threshold, self.file = LEVELS["info"], cast(LogFile | None, None)
        self.level, self.text, self.lock = usual, "", threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, of which only complete lines reach the file."""
        with self.lock:
            for part in re.findall(r"[^\n]*\n|[^\n]+", text):
                if not self.text:
                    self.level = LEVELS["warning"] if "Warning: " in part else self.usual
                    for name, level in LEVELS.items():
                        if part.startswith(f"{name}: "):
                            self.level = level
                if self.level < self.threshold:
                    self.text = "" if part.endswith("\n") else "..."
                    continue
                with suppress(OSError, ValueError):
                    self.stream.write(part)
                self.text += part
                if part.endswith("\n"):
                    line, self.text = self.text.rstrip("\r\n").rpartition("\r")[2], ""
                    if self.file is not None:
                        self.file.line(self.level, line)
                self.text = self.text[self.text.rfind("\r", 0, -1) + 1 :]
        return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with suppress(OSError, ValueError):  # ValueError: the stream was closed
            self.stream.flush()


def copy_console(path: Path | None = None, level: str = "info") -> None:
    """From now on nothing that happens to stdout or stderr ends this process: training outlives its terminal.
    Only lines of `level` and above are shown, and appended to the file, if one is given. Calling it again
    replaces what an earlier call set."""
    if not isinstance(sys.stdout, ConsoleStream):
        sys.stdout = cast(Any, ConsoleStream(sys.stdout, LEVELS["info"]))
    if not isinstance(sys.stderr, ConsoleStream):
        sys.stderr = cast(Any, ConsoleStream(sys.stderr, LEVELS["error"]))
    out, err = cast(list[ConsoleStream], [sys.stdout, sys.stderr])
    if out.file is None or out.file.path != path:
        if out.file is not None:
            os.close(out.file.descriptor)
            out.file.path = None
        out.file = err.file = LogFile(path) if path is not None else None
    out.threshold = err.threshold = LEVELS[level]


def write_now(text: str) -> None:
    """Write a line to stderr and the log file without Python's buffers, as a signal handler must."""
    with suppress(OSError):  # the terminal may be what went away
        os.write(2, f"{text}\n".encode())
    if isinstance(sys.stderr, ConsoleStream) and sys.stderr.file is not None:
        sys.stderr.file.line(LEVELS["warning"], text)


def release_console() -> None:
    """Undo `copy_console`."""
    if isinstance(sys.stdout, ConsoleStream):
        copy_console(None, "info")
        sys.stdout, sys.stderr = cast(Any, (sys.stdout.stream, getattr(sys.stderr, "stream", sys.stderr)))
