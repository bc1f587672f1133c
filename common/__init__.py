"""What every package uses.

Each command imports this package before torch, which reads GOMP_SPINCOUNT when it is loaded: threads that wait for
others then sleep early instead of spinning, which is several times faster where other programs want the cores, and
hardly slower where none do (docs/dev/LOG.md, "Waiting CPU threads"). What the user set stays.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
