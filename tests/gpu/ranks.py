"""Several processes of a check. `python -m tests.gpu.ranks WORK RESULT OPTIONS` is one of them."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.devices.device import select_device
from trainer.devices.process_group import leave_process_group, this_rank, world_size
from trainer.trainer_utils import init_distributed_mode

ROOT = Path(__file__).resolve().parents[2]
# environment variable: a function MODULE:NAME that a test has called first in each process
BREAK = "GPU_CHECK_BREAK"


def run(work: str, count: int, folder: Path, limit: float, **options: Any) -> list[Any]:
    """What the function `work` of this module returns in each of so many processes.

    Raises:
        RuntimeError: they failed, or were not done within `limit` seconds; with what NCCL says.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(probe.getsockname()[1]),
            "WORLD_SIZE": str(count),
        }
    place |= {"LOCAL_WORLD_SIZE": str(count), "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "INFO")}
    started, end = [], time.monotonic() + limit
    for rank in range(count):
        env = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [
            sys.executable,
            "-m",
            "tests.gpu.ranks",
            work,
            str(folder / f"result_{rank}"),
            json.dumps(options),
        ]
        with open(folder / f"{work}_{rank}.log", "wb") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            if any(process.poll() for process in started):  # the others wait for it in vain
                end = min(end, time.monotonic() + 10)
            time.sleep(0.05)
        statuses = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(statuses) or None in statuses:
        late = [str(rank) for rank, status in enumerate(statuses) if status is None]
        what = f"no end within {limit:.0f} s on rank {', '.join(late)}" if late else f"statuses {statuses}"
        logs = [(folder / f"{work}_{rank}.log").read_text("utf-8", "replace") for rank in range(count)]
        raise RuntimeError(f"{work}: {what}; {said(logs)}")
    return [torch.load(folder / f"result_{rank}") for rank in range(count)]


def said(logs: list[str]) -> str:
    """The lines that tell the cause: NCCL's warnings and errors, else the last one of each rank."""
    lines = [log.strip().splitlines() for log in logs]
    causes = [line for of_rank in lines for line in of_rank if re.search(r"NCCL WARN|Error: |^error: ", line)]
    return " | ".join(list(dict.fromkeys(causes))[:4] or [of_rank[-1] for of_rank in lines if of_rank])


# --- what they do


def all_reduce(device: torch.device, megabytes: int) -> float:
    """Sum a tensor over all ranks three times; returns GB/s of the fastest one, by the size of the tensor."""
    best, ranks = 0.0, world_size()
    for _ in range(3):
        x = torch.full((megabytes << 18,), this_rank() + 1.0, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        dist.all_reduce(x)
        right = bool((x == ranks * (ranks + 1) / 2).all())  # sync point
        best = max(best, megabytes / 1e3 / (time.perf_counter() - begin))
        assert right, "the sum over the ranks is wrong"
    return best


def gradients(
    device: torch.device, cases: list[tuple[str, bool]], **wrapping: Any
) -> list[dict[str, torch.Tensor]]:
    """`parts.gradients` of models (dtype, use_moe) that are wrapped so."""
    from tests.gpu import parts  # brings in transformers

    states = (parts.new_state(device, *case, **wrapping) for case in cases)
    return [parts.gradients(state, this_rank(), world_size()) for state in states]


def main() -> None:
    """The work of one process."""
    if BREAK in os.environ:
        module, _, name = os.environ[BREAK].partition(":")
        getattr(import_module(module), name)()
    work, result, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    device = select_device(options.pop("device"))
    init_distributed_mode(60, device)
    found = {each.__name__: each for each in (all_reduce, gradients)}[work](device, **options)
    torch.save(found, result)
    leave_process_group()


if __name__ == "__main__":
    main()
