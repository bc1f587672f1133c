"""The one way a user's mistake ends: a single `error: ...` line on stderr and exit status 2."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """A mistake that the user can mend. The message names the file and line or the flag, and the way out."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help if action.default is None or action.required else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse with this project's way of failing, and no abbreviated flags."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        """One line instead of the usage."""
        print(f"error: {message}; see --help", file=sys.stderr)
        sys.exit(2)


def run_main(main: Callable[[], None]) -> None:
    """Run a script's `main()`; a UserError becomes one line on stderr and exit status 2, without a traceback.

    Under torchrun every rank meets the same mistake; only local rank 0 prints it.
    """
    try:
        main()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # torchrun ends all ranks when one ends: let rank 0 speak first
        sys.exit(2)
