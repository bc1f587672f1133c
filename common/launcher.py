"""Which of a run's processes this is: what torchrun, srun or mpirun wrote into the environment; and ending
with torchrun."""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A process among those of its run. The local numbers count the processes of its machine; `problem` says
    why the environment does not tell (the place is then that of a single process)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    problem: str = ""


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = "OMPI_COMM_WORLD_"
# srun sets SLURM_STEP_NUM_TASKS; SLURM_NTASKS stands in the batch script, too, which is one process.
LAUNCHERS = {
    "mpirun": (f"{MPI}RANK", f"{MPI}SIZE", f"{MPI}LOCAL_RANK", f"{MPI}LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}
RANK_VARIABLES = set(TORCHRUN).union(*LAUNCHERS.values())
REQUIRED_FIELDS = {"rank", "world_size", "local_rank"}
MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
HOW_TO_START = (
    "start with torchrun --nproc_per_node N, which sets them all, or with WORLD_SIZE=1 to "
    "train in one process"
)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """The place of this process, for everything that depends on it: printing, files, data, the process group.

    It is what torchrun's variables say if they are complete, else what another launcher's say if both agree.
    WORLD_SIZE=1 is a single process, whoever started it.
    """
    if RANK_VARIABLES.isdisjoint(environ):
        return Launch()
    try:
        place = _place(environ)
        return place if place.world_size == 1 else _checked(place, environ)
    except ValueError as error:
        return Launch(problem=f"{error}; {HOW_TO_START}")


def _place(environ: Mapping[str, str]) -> Launch:
    unreadable = [
        f"{name}={environ[name]}" for name in TORCHRUN if environ.get(name) and not environ[name].isdecimal()
    ]
    if unreadable:
        raise ValueError(f"{', '.join(unreadable)}: not a number")
    given = _numbers(TORCHRUN, environ)
    if given.get("world_size") == 1:
        return Launch()
    if given.keys() >= REQUIRED_FIELDS:
        return Launch(**given)
    for names in LAUNCHERS.values():
        theirs = _numbers(names, environ)
        agree = all(theirs.get(field) == number for field, number in given.items())
        if theirs.keys() >= REQUIRED_FIELDS and theirs["world_size"] > 1 and agree:
            return Launch(**theirs)
    if not given.keys() & REQUIRED_FIELDS:
        return Launch()
    known = [f"{name}={environ[name]}" for name in TORCHRUN if environ.get(name)]
    missing = [name for name in (*TORCHRUN[:3], *MASTER_VARIABLES) if not environ.get(name)]
    raise ValueError(f"{', '.join(known)} without {', '.join(missing)}")


def _numbers(names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, Any]:
    """The variables that are set, by the field of Launch."""
    values = zip(Launch._fields, (environ.get(name, "") for name in names), strict=False)
    return {field: int(value) for field, value in values if value.isdecimal()}


def _checked(place: Launch, environ: Mapping[str, str]) -> Launch:
    rank, world_size, local_rank, *_ = place
    if not local_rank <= rank < world_size:
        raise ValueError(f"rank {rank} with local rank {local_rank} of {world_size} processes is impossible")
    missing = [name for name in MASTER_VARIABLES if not environ.get(name)]
    if missing:
        names = ", ".join(missing)
        raise ValueError(
            f"{world_size} processes without {names}; export the name of rank 0's machine and a free port"
        )
    if not environ["MASTER_PORT"].isdecimal() or int(environ["MASTER_PORT"]) > 65535:
        raise ValueError(f"MASTER_PORT={environ['MASTER_PORT']} is no port")
    return place


def end_with_torchrun() -> None:
    """In a rank that torchrun started, have the kernel send SIGTERM when torchrun ends, kill -9 included
    (Linux): before training the rank then ends, in training it saves and ends. Where torchrun has ended
    already, the rank ends here.

    Called by the first import, since the ranks take seconds to load torch. A rank leads a session; the
    processes that it starts do not, and end with it.
    """
    if sys.platform != "linux" or os.getsid(0) != os.getpid():
        return
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if _torchrun_has_ended():  # asked after the prctl: between the two no end is missed
        print("error: the torchrun that started this process has ended", file=sys.stderr)
        sys.exit(2)


def _torchrun_has_ended() -> bool:
    """Whether nobody listens at the port of the store that torchrun keeps for its ranks."""
    import socket

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # then rank 0 opens the store, later
        return False
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=10).close()
    except ConnectionRefusedError:
        return True
    # a network that is slow, for instance, says nothing about torchrun
    except (OSError, KeyError, ValueError):
        return False
    return False
