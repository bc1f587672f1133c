"""Runs a program with limits of memory and time, so it cannot harm the server."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from scripts.serve.jobs import SECRETS

IS_LIMITED = sys.platform == "linux"  # whether the system enforces RLIMIT_AS; macOS does not
BETWEEN_LOOKS = 0.1  # seconds between two looks at a program's memory, where the system enforces no limit
MOST_SAID = 1 << 18  # bytes of output that are read
# one thread, and no memory that is reserved but not used
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}


def run_limited(program: Path, *arguments: str, memory: int, seconds: int) -> bytes | None:
    """The output of a Python program. It gets the limits as its last two arguments and sets them itself. None
    if it exceeds them or fails."""
    argv = [sys.executable, str(program), *arguments, str(memory), str(seconds)]
    environment = {name: value for name, value in os.environ.items() if name not in SECRETS} | ENVIRONMENT
    end = time.monotonic() + seconds
    with TemporaryFile() as said:
        process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.DEVNULL
        )
        try:
            while process.poll() is None:
                if time.monotonic() > end or (not IS_LIMITED and memory_of(process.pid) > memory):
                    return None
                with suppress(subprocess.TimeoutExpired):
                    process.wait(BETWEEN_LOOKS)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        return said.read(MOST_SAID) if process.returncode == 0 else None


def memory_of(process: int) -> int:
    """Bytes of memory that a process uses now."""
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(process)], capture_output=True, check=False)
    return 1024 * int(done.stdout or 0)
