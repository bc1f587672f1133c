"""Classes and functions of a user's own modules, named on the command line."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from common.errors import UserError, reason


def import_named(flag: str, name: str) -> Any:
    """What `package.module:Name` names, given to `flag`. An exception raised inside the module keeps its traceback.

    Raises:
        UserError: there is no such module, its syntax is wrong, or it has no such name.
    """
    module, _, class_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # spawned processes and torchrun do not search it
    try:
        imported = importlib.import_module(module)
    except (ModuleNotFoundError, ValueError, TypeError) as error:  # not found, or not a module name: "", ".x"
        if isinstance(error, ModuleNotFoundError) and error.name not in (module, module.partition(".")[0]):
            raise
        raise UserError(f"{flag} {name} cannot be imported ({reason(error)}); start from its folder") from error
    except SystemExit as error:
        raise UserError(f"{flag} {name} cannot be imported: the module calls sys.exit({reason(error)})") from error
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg} ({flag} {name})") from error
    if not hasattr(imported, class_name):
        raise UserError(f"{flag} {name}: {getattr(imported, '__file__', module)} has no {class_name!r}")
    return getattr(imported, class_name)


def source_files(name: str) -> list[Path]:
    """The files of the module that `package.module:Name`, which is imported, names, and of the one that defines it."""
    module, _, attribute = name.partition(":")
    definition = getattr(getattr(sys.modules[module], attribute), "__module__", None)
    files = (getattr(sys.modules.get(each or ""), "__file__", None) for each in (module, definition))
    return sorted({Path(file) for file in files if file})
