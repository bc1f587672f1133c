"""Packages that only some tools need."""

import importlib
from types import ModuleType

from common.errors import UserError


def optional_package(name: str) -> ModuleType:
    """Import a package of requirements-serve.txt.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"the package {name} is not installed; pip install -r requirements-serve.txt") from error
