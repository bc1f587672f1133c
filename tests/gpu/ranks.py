"""One of several processes of a check, under torchrun: `-m tests.gpu.ranks WORK FOLDER DEVICE PARALLEL`. Rank
0 writes what WORK returns to FOLDER/result."""

import sys
import time
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu import parts
from trainer.devices.device import select_device
from trainer.devices.process_group import leave_process_group, this_rank, world_size
from trainer.trainer_utils import init_distributed_mode


def all_reduce(device: torch.device, parallel: str) -> float:
    """Sum a tensor over all ranks three times; returns GB/s of the fastest time, by the size of the
    tensor."""
    megabytes = 256 if device.type == "cuda" else 4
    right, best = world_size() * (world_size() + 1) / 2, 0.0
    for _ in range(3):
        x = torch.full((megabytes << 18,), this_rank() + 1.0, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        dist.all_reduce(x)
        is_right = bool((x == right).all())  # sync point
        best = max(best, megabytes / 1e3 / (time.perf_counter() - begin))
        assert is_right, "Error: the sum over the ranks is wrong"
    return best


def gradients(device: torch.device, parallel: str) -> dict[tuple[str, str, bool], dict[str, torch.Tensor]]:
    """`parts.gradients` by shape, dtype and whether layers are recomputed: an update of which each rank has
    its micro-batches, or none."""
    found = {}
    for case in product(parts.SHAPES, parts.dtypes(device)[:2], (False, True)):
        shape, dtype, recomputed = case
        wrapping = {"parallel": parallel, "activation_checkpointing": recomputed}
        state = parts.new_state(device, dtype, parts.SHAPES[shape], **wrapping)
        found[case] = parts.gradients(state, this_rank(), world_size())
    return found


def main() -> None:
    """The work of this process."""
    work, folder, device_name, parallel = sys.argv[1:]
    device = select_device(device_name)
    init_distributed_mode(60, device)
    result = {"all_reduce": all_reduce, "gradients": gradients}[work](device, parallel)
    if this_rank() == 0:
        torch.save(result, Path(folder) / "result")
    leave_process_group()


if __name__ == "__main__":
    main()
