"""A user's own code: imports classes and functions named on the command line, and guards calls to them."""

import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from common.errors import Interrupted, UserError, reason
from common.files import is_file


def import_named(flag: str, name: str) -> Any:
    """Import the object that `package.module:Name` or `path/file.py:Name` names; it was given to `flag`. An
    exception raised inside the module keeps its traceback. Raises UserError if the module does not exist, has
    a syntax error, or lacks the name."""
    folder = Path.cwd()  # spawned processes and torchrun do not search it
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        file = Path(module).expanduser()
        if not is_file(file):
            raise UserError(f"{flag} {name}: no such file")
        folder, module = file.resolve().parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        imported = importlib.import_module(module)
    except (ModuleNotFoundError, ValueError, TypeError) as error:  # not found, or no name of a module
        if isinstance(error, ModuleNotFoundError) and error.name not in (module, module.partition(".")[0]):
            raise
        raise UserError(
            f"{flag} {name} cannot be imported ({reason(error)}); run the command from its folder"
        ) from error
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg} ({flag} {name})") from error
    if not hasattr(imported, attribute):
        raise UserError(f"{flag} {name}: {getattr(imported, '__file__', module)} has no {attribute!r}")
    return getattr(imported, attribute)


class OutOfTime(BaseException):
    """A user's code took too long. It is not an `Exception`, so the code's own `except Exception` does not
    catch it."""


def in_main_thread() -> bool:
    """Whether this is the main thread, which receives signals and alone may set their handlers."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime if the block takes longer than `seconds`; works in the main thread only. Code that does
    not return to Python, such as an extension, is not interrupted."""

    def interrupt(number: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def user_code(what: str, where: str, limit: float) -> Iterator[None]:
    """Wrap a call of a user's code: whatever it raises, even `SystemExit`, becomes a UserError.

    what: a name for the code. where: FILE:LINE of the record. limit: seconds it may take in the main thread.
    """
    try:
        with time_limit(limit) if in_main_thread() else nullcontext():
            yield
    except (Interrupted, KeyboardInterrupt):
        raise
    except OutOfTime:
        raise UserError(f"{where}: {what} took longer than --reward_timeout {limit:g} s") from None
    except BaseException as error:
        raised = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"{where}: {what} failed ({raised})") from error
