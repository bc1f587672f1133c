"""How long a session of training may last (--stop_after).

A script that runs several stages, such as run.sh, is one session. It sets two variables for its stages: when
the session began, and a file that a stage creates if the time is over before the stage has ended.
"""

import math
import os
import re
import time

from common.errors import UserError

START = "TRAINING_SESSION_START"  # seconds since 1970, as `date +%s` prints them
STOPPED = "TRAINING_SESSION_STOPPED"  # path of the file
DURATION = re.compile(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", re.ASCII)
imported_at = time.monotonic()  # this is one of the first imports of a process


def seconds_in(text: str) -> float:
    """The seconds in a text such as 11h, 30m, 90s or 1h30m. Raises ValueError."""
    parts = DURATION.fullmatch(text)
    seconds = 0.0
    try:
        for number, unit in zip(parts.groups() if parts else (), (3600, 60, 1), strict=False):
            seconds += float(number or 0) * unit
    except ValueError:  # two points
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"must be a time such as 11h, 30m, 90s or 1h30m, not {text!r}")
    return seconds


def session_seconds() -> float:
    """Seconds since the session began; without a script, since this process began. Raises UserError if the
    variable of the script is not a number."""
    start = os.environ.get(START)
    if start is None:
        return time.monotonic() - imported_at
    try:
        return time.time() - float(start)
    except ValueError:
        raise UserError(f"variable {START}={start} must be seconds since 1970 (date +%s)") from None
