"""What every package uses.

Each command imports this package before torch, because torch reads GOMP_SPINCOUNT when it is loaded. With our
value, waiting threads soon sleep instead of spinning. That is several times faster when other programs use
the same cores (docs/dev/LOG.md, "Waiting CPU threads"). A value set by the user stays. A rank started by
torchrun arranges here to end with torchrun, before the seconds that loading torch takes.

An old Python gets its error message first, so this file and the first lines of each script must run in Python
3.8.
"""

import importlib.util
import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    version = ".".join(map(str, sys.version_info[:3]))
    advice = "activate an environment of Python 3.11 or newer (source .venv/bin/activate), or make one"
    print(f"error: {sys.executable} is Python {version}, which is too old: {advice}", file=sys.stderr)
    sys.exit(2)

from common.launcher import end_with_torchrun

if "TORCHELASTIC_RUN_ID" in os.environ:
    end_with_torchrun()
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

REQUIRED = ("torch", "transformers", "numpy", "pydantic", "yaml")
missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
if missing:  # as in a virtual environment that was not activated
    advice = "activate the environment (source .venv/bin/activate), or pip install -r requirements.txt"
    print(f"error: {sys.executable} has no {', '.join(missing)}: {advice}", file=sys.stderr)
    sys.exit(2)
