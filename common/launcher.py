"""Tells which of a run's processes this is, from torchrun's environment variables, and makes a rank end with
torchrun."""

import os
import signal
import sys
from collections.abc import Mapping
from typing import NamedTuple


class Launch(NamedTuple):
    """The place of a process in its run. The local numbers count the processes of its machine. `problem` says
    why the environment is not usable; the place is then that of a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    problem: str = ""


RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """The place of this process, used for printing, files, data and the process group. WORLD_SIZE=1 means a
    single process, whoever started it."""
    given = [f"{name}={environ[name]}" for name in RANKS if environ.get(name)]
    if not given or environ.get("WORLD_SIZE") == "1":
        return Launch()
    missing = [name for name in (*RANKS, *MASTER) if not environ.get(name)]
    if missing:
        advice = (
            "start with torchrun --nproc_per_node N, which sets them all, or with WORLD_SIZE=1 to train in "
        )
        return Launch(problem=f"{', '.join(given)} without {', '.join(missing)}; {advice}one process")
    rank, world_size, local_rank, local_world_size = (int(environ[name]) for name in RANKS)
    return Launch(rank, world_size, local_rank, local_world_size)


def end_with_torchrun() -> None:
    """In a rank started by torchrun, have the kernel send SIGTERM when torchrun ends, even by kill -9
    (Linux). Before training the rank then simply ends; during training it saves first.

    Called by the first import, because ranks take seconds to load torch. A rank leads a session. The
    processes that it starts do not, and end with it.
    """
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
