"""How every command starts and ends: the argument parser, and one line on stderr instead of a traceback. And
the console of a process: it may go away, lines below a level are hidden, a log file receives all others.
"""

import argparse
import difflib
import errno
import io
import json
import os
import re
import resource
import select
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from common.errors import Interrupted, LostRank, UserError, printable
from common.launcher import launch

LEVELS = ["debug", "info", "warning", "error"]
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
# MiniMind's flags that do not exist here -> what to use; the others are flags, or `aliases` of a setting
ANSWERS_ARE_SHOWN = "leave it out: two completions with their rewards are shown at every --log_interval"
NO_CLIENT = "leave it out: here the model itself is run; any OpenAI client talks to serve_openai_api.py"
USE_INSTEAD = {
    "mini_batch_size": "use --batch_size: an update takes --batch_size x --accumulation_steps completions",
    "debug_mode": ANSWERS_ARE_SHOWN,
    "debug_interval": ANSWERS_ARE_SHOWN,
    "debug_log_ratio": "leave it out: approx_kl and clip_ratio stand in the metrics file",
    "rollout_engine": "leave it out: the trainer samples, so that a resumed run has the same completions",
    "sglang_base_url": "leave it out, too",
    "sglang_model_path": "leave it out, too",
    "sglang_shared_path": "leave it out, too",
    "load_from": "use --model PATH (a .pth or a Hugging Face folder), for a stage --from_weight PATH",
    "lora_weight": "use --lora PATH, such as --lora out/lora_medical_768.pth",
    "historys": "leave it out: the chat keeps what fits into --max_seq_len, and /reset begins anew",
    "backend": NO_CLIENT,
    "api_base_url": NO_CLIENT,
    "api_key": NO_CLIENT,
    "api_model": NO_CLIENT,
    "stream": NO_CLIENT,
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each flag that has one, unless its help does so."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_shown = action.default is None or action.required or "(default: " in (action.help or "")
        return action.help if is_shown else super()._get_help_string(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        # keeps paths in one piece
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError and accepts no abbreviated flags."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise UserError; argparse would print the usage and exit."""
        if not message.startswith("unrecognized arguments: "):
            raise UserError(f"{message}; see --help")
        words = message.split()[2:]
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        known = self._option_string_actions
        raise UserError("; ".join(f"{word} is unknown; {hint(word, known)}" for word in flags or words))


def hint(name: str, known: Iterable[str]) -> str:
    """What to use instead of an unknown setting or flag."""
    instead = USE_INSTEAD.get(name.lstrip("-"))
    if instead is not None:
        return instead
    near = difflib.get_close_matches(name.lower(), known, 1)
    return f"did you mean {near[0]}" if near else "see --help"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Wrap a command's `main()`: a UserError becomes one line on stderr and exit status 2, a signal 128 + its
    number.

    Under torchrun all ranks usually raise the same UserError: local rank 0 prints first, and torchrun then
    terminates the others before they repeat it. Each rank leaves its message where torchrun's closing report
    finds it.

    Within, stdout takes any text: characters that its encoding lacks become escapes. When nobody reads it any
    more, as behind `| head -1`, the command ends silently. Standard streams that are closed are opened, and
    many open files are allowed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # `>&-`: print would fail, and the next file would get its number
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, so usually this one
            stream = open(null, mode, closefd=False, encoding="utf-8")  # noqa: SIM115 (it stays open)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # a file whose descriptor has become a pipe cannot be repositioned
            sys.stdout.reconfigure(errors="backslashreplace")
    # each data loader process, each client of the server, and, where the ranks meet, each rank takes some
    with suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _end_with_reader()
        raise
    except (UserError, OSError, RuntimeError) as error:
        line = _about_limits(error) or (str(error) if isinstance(error, UserError) else "")
        if not line:
            raise
        _exit(f"error: {line}", 2, error)
    except Interrupted as error:
        _exit(f"stopped: {error}", 128 + error.number, error)
    except KeyboardInterrupt as error:
        _exit("stopped: by Ctrl-C", 128 + signal.SIGINT, error)


def _end_with_reader() -> None:
    """End the process silently if the other end of the pipe that is stdout was closed."""
    poll = select.poll()  # other pipes can break, too
    poll.register(1, 0)
    if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at its end
        sys.exit(128 + signal.SIGPIPE)


def _about_limits(error: BaseException | None) -> str:
    """What to do about an error that comes from the limit on open files, or of a stream on a full disk; empty
    for others."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return "no space left on the disk that the output goes to; free some"
    while error is not None:
        # torch's, of its loaders
        if any(phrase in str(error) for phrase in (os.strerror(errno.EMFILE), "ancdata")):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"too many open files: a process here may have {limit}; raise the hard "
                "limit (ulimit -Hn), or use fewer processes (--num_workers)"
            )
        error = error.__cause__ or error.__context__
    return ""


def _exit(line: str, status: int, error: BaseException) -> NoReturn:
    place, is_lost = launch(), isinstance(error, LostRank)
    is_distributed = place.world_size > 1
    if is_distributed:
        # from here on torchrun may terminate this rank at any moment
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
    if is_distributed and not is_lost:
        _write_torchrun_error_file(line)
    if place.local_rank > 0:
        time.sleep(2)  # local rank 0 prints first
    try:
        sys.stdout.flush()
    except OSError:  # the terminal is gone, or the disk full; Python flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # at a signal the ranks stop together, and one of them says so
    if place.local_rank == 0 or not isinstance(error, Interrupted):
        with suppress(OSError):
            print(printable(" ".join(line.splitlines())), file=sys.stderr, flush=True)
    if is_distributed and is_lost:
        # torchrun reports the rank that exits first, which must be the one that caused the failure
        time.sleep(2)
    if is_distributed:
        os._exit(status)  # destroying a process group whose peers are gone can hang
    sys.exit(status)


def _write_torchrun_error_file(line: str) -> None:
    """torchrun quotes this file in its closing report; the format is torch.distributed.elastic's."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)


# --- the console
#
# `sys.stdout` and `sys.stderr` are replaced: the lines of progress bars, warnings, libraries and of a `print`
# in a user's task belong into the log as well.


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

    def line(self, level: str, text: str) -> None:
        """Write one line; when the disk is full, say so once and go on without the file."""
        if self.path is None:
            return
        try:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {level.upper():7} {text}\n"
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

    def __init__(self, stream: TextIO, usual: str):
        self.stream, self.usual, self.threshold = stream, usual, "info"
        self.file: LogFile | None = None
        self.level, self.text, self.lock = usual, "", threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, of which only complete lines reach the file."""
        with self.lock:
            for part in re.findall(r"[^\n]*\n|[^\n]+", text):
                if not self.text:  # a line begins
                    self.level = "warning" if "Warning: " in part else self.usual
                    for level in LEVELS:
                        if part.startswith(f"{level}: "):
                            self.level = level
                is_shown = LEVELS.index(self.level) >= LEVELS.index(self.threshold)
                if is_shown:
                    with suppress(OSError, ValueError):
                        self.stream.write(part)
                self.text += part
                last_state = self.text.rstrip("\r\n").rfind("\r") + 1  # of a progress bar
                self.text = self.text[last_state:]
                if part.endswith("\n"):
                    if is_shown and self.file is not None:
                        self.file.line(self.level, self.text.rstrip("\r\n"))
                    self.text = ""
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
        sys.stdout = cast(Any, ConsoleStream(sys.stdout, "info"))
    if not isinstance(sys.stderr, ConsoleStream):
        sys.stderr = cast(Any, ConsoleStream(sys.stderr, "error"))
    out, err = cast(list[ConsoleStream], [sys.stdout, sys.stderr])
    if out.file is None or out.file.path != path:
        if out.file is not None:
            os.close(out.file.descriptor)
            out.file.path = None
        out.file = err.file = LogFile(path) if path is not None else None
    out.threshold = err.threshold = level


def write_now(text: str) -> None:
    """Write a line to stderr and the log file without Python's buffers, as a signal handler must."""
    with suppress(OSError):  # the terminal may be what went away
        os.write(2, f"{text}\n".encode())
    if isinstance(sys.stderr, ConsoleStream) and sys.stderr.file is not None:
        sys.stderr.file.line("warning", text)
