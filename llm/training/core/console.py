"""The console of a process: which lines are shown, and a log file that receives every line that is."""

import logging
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from common.errors import UserError

LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}


class LogFile(logging.Handler):
    """Appends lines with time and level. Several processes may write to one file; a line is one `os.write`.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: Path):
        super().__init__()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"the log file {path} cannot be written ({why}); give another --log_file") from error
        self.path: Path | None = path
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def line(self, level: int, text: str) -> None:
        """Write one line."""
        self.handle(logging.LogRecord("console", level, "", 0, text, None, None))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; when the disk is full, say so once and go on without the file."""
        if self.path is None:
            return
        try:
            os.write(self.descriptor, f"{self.format(record)}\n".encode("utf-8", "backslashreplace"))
        except OSError as error:
            path, self.path = self.path, None
            why = error.strerror or error
            os.write(
                2, f"warning: the log file {path} cannot be written ({why}); the run goes on without it\n".encode()
            )


class ConsoleStream:
    """Stands in for `sys.stdout` or `sys.stderr`: hides lines below a level, and copies the others to the log file.

    A line's level is its beginning (`warning: ...`), else that of its stream. Of a progress bar, which returns to the
    beginning of its line, the file receives the last state.
    """

    def __init__(self, stream: TextIO, usual: int, threshold: int, file: LogFile | None):
        self.stream, self.usual, self.threshold, self.file = stream, usual, threshold, file
        self.level, self.text, self.lock = usual, "", threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, of which only complete lines reach the file."""
        with self.lock:
            for part in re.findall(r"[^\n]*\n|[^\n]+", text):
                self._write_part(part)
        return len(text)

    def _write_part(self, part: str) -> None:
        if not self.text:
            named = (level for name, level in LEVELS.items() if part.startswith(f"{name}: "))
            self.level = next(named, LEVELS["warning"] if "Warning: " in part else self.usual)
        if self.level < self.threshold:
            self.text = "" if part.endswith("\n") else "..."
            return
        self.stream.write(part)
        self.text += part
        if part.endswith("\n"):
            line, self.text = self.text.rstrip("\r\n").rpartition("\r")[2], ""
            if self.file is not None:
                self.file.line(self.level, line)
        self.text = self.text[self.text.rfind("\r", 0, -1) + 1 :]


def copy_console(path: Path | None, level: str) -> LogFile | None:
    """Show only lines of `level` and above from now on, and append them to the file, if one is given, until
    `release_console`. Calling it again replaces what an earlier call set."""
    if isinstance(sys.stdout, ConsoleStream):
        same = sys.stdout.file is not None and sys.stdout.file.path == path
        if same and sys.stdout.threshold == LEVELS[level]:
            return sys.stdout.file
    release_console()
    file = LogFile(path) if path is not None else None
    if file is not None or level != "info":
        sys.stdout = ConsoleStream(sys.stdout, LEVELS["info"], LEVELS[level], file)  # type: ignore[assignment]
        sys.stderr = ConsoleStream(sys.stderr, LEVELS["error"], LEVELS[level], file)  # type: ignore[assignment]
    return file


def release_console() -> None:
    """Undo `copy_console`."""
    if isinstance(sys.stdout, ConsoleStream):
        if sys.stdout.file is not None:
            os.close(sys.stdout.file.descriptor)
            sys.stdout.file.path = None
        sys.stdout = sys.stdout.stream
    if isinstance(sys.stderr, ConsoleStream):
        sys.stderr = sys.stderr.stream
