"""What every package uses.

Each command imports this package before torch, which reads GOMP_SPINCOUNT when it is loaded: threads that
wait for others then sleep early instead of spinning, which is several times faster where other programs want
the cores (docs/dev/LOG.md, "Waiting CPU threads"). What the user set stays. A rank that torchrun started asks
here, before it loads torch for seconds, to end with it.

An old Python is told first, so this much, and the first lines of each script, must run in Python 3.8.
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
