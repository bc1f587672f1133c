"""Runs a script's `main` in this process, as its command line would: starting Python and torch anew takes
seconds."""

import sys
from collections.abc import Callable
from subprocess import CompletedProcess
from types import ModuleType

import pytest

from common.command_line import one_line_errors


@pytest.fixture
def call(monkeypatch, capsys) -> Callable[..., CompletedProcess]:
    """call(module, *args) gives what the command prints and its exit status."""

    def run(module: ModuleType, *args) -> CompletedProcess:
        monkeypatch.setattr(sys, "argv", [str(module.__file__), *map(str, args)])
        status = 0
        capsys.readouterr()
        try:
            with one_line_errors():
                module.main()
        except SystemExit as end:
            status = end.code
        return CompletedProcess(sys.argv, status, *capsys.readouterr())

    return run
