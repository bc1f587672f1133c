"""The one way a user's mistake ends: a single `error: ...` line on stderr and exit status 2."""

import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake that the user can mend. The message names the file and line or the flag, and the way out."""


def run_main(main: Callable[[], None]) -> None:
    """Run a script's `main()`; a UserError becomes one line on stderr and exit status 2, without a traceback.

    Under torchrun every rank meets the same mistake; only local rank 0 prints it.
    """
    try:
        main()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
