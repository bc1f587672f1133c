"""A user's own code: classes and functions of modules that are named on the command line, and calls of it."""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import Interrupted, UserError, reason


def import_named(flag: str, name: str) -> Any:
    """What `package.module:Name` or `path/file.py:Name` names, given to `flag`. An exception raised inside
    the module keeps its traceback. Raises UserError if there is no such module, its syntax is wrong, or it
    has no such name."""
    module, _, class_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # spawned processes and torchrun do not search it
    try:
        imported = _import_file(module) if module.endswith(".py") else importlib.import_module(module)
    except (ModuleNotFoundError, ValueError, TypeError) as error:  # not found, or not a module name: "", ".x"
        if isinstance(error, ModuleNotFoundError) and error.name not in (module, module.partition(".")[0]):
            raise
        raise UserError(
            f"{flag} {name} cannot be imported ({reason(error)}); start from its folder"
        ) from error
    except SystemExit as error:
        raise UserError(
            f"{flag} {name} cannot be imported: the module calls sys.exit({reason(error)})"
        ) from error
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg} ({flag} {name})") from error
    if not hasattr(imported, class_name):
        raise UserError(f"{flag} {name}: {getattr(imported, '__file__', module)} has no {class_name!r}")
    return getattr(imported, class_name)


def _import_file(path: str) -> ModuleType:
    """The module in a file, under its path as its name; what lies beside it can be imported, too."""
    if path not in sys.modules:
        spec = importlib.util.spec_from_file_location(path, os.path.expanduser(path))
        if not os.path.isfile(os.path.expanduser(path)) or spec is None or spec.loader is None:
            raise ModuleNotFoundError("no such file", name=path)
        sys.path.append(str(Path(path).expanduser().resolve().parent))  # last: it hides nothing
        sys.modules[path] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[path])
        except BaseException:
            del sys.modules[path]
            raise
    return sys.modules[path]


def source_files(name: str) -> list[Path]:
    """The files of the module that `package.module:Name`, which is imported, names, and of the one that
    defines it."""
    module, _, attribute = name.partition(":")
    definition = getattr(getattr(sys.modules[module], attribute), "__module__", None)
    files = (getattr(sys.modules.get(each or ""), "__file__", None) for each in (module, definition))
    return sorted({Path(file) for file in files if file})


class OutOfTime(BaseException):
    """A user's code took too long. No `Exception`, so that the code's own `except Exception` does not catch
    it."""


@contextmanager
def user_code(what: str, where: str, limit: float) -> Iterator[None]:
    """Around a call of a user's code, in the main thread: whatever it raises, also `SystemExit`, becomes a
    UserError.

    what: which code. where: FILE:LINE of the record. limit: seconds that it may take; code that does not
    return to Python, as in an extension, is not interrupted.
    """

    def interrupt(number: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        raise
    except OutOfTime:
        raise UserError(f"{where}: {what} took longer than --reward_timeout {limit:g} s") from None
    except BaseException as error:
        raised = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"{where}: {what} failed ({raised})") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
