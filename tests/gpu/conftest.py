"""Where the checks compute: under scripts/gpu_check.sh on the GPUs of this machine, if it has any; else, and
in the test suite, on the CPU."""

import os

import pytest
import torch

from trainer.devices.device import prepare_device

FREE_GPU_BYTES = 6e9  # that a check needs, of each GPU
FREE_SHM_BYTES = 64 << 20  # in /dev/shm, of each process of several

is_gpu_check = "GPU_CHECK" in os.environ  # set by tests/gpu/run_checks.py


@pytest.fixture
def gpus() -> int:
    """The number of GPUs to check; skips where one has too little free memory."""
    count = torch.cuda.device_count() if is_gpu_check else 0
    for number in range(count):
        if (free := torch.cuda.mem_get_info(number)[0]) < FREE_GPU_BYTES:
            needed = f"{FREE_GPU_BYTES / 1e9:.0f} GB of free GPU memory"
            pytest.skip(f"needs {needed}; GPU {number} has {free / 1e9:.1f}")
    return count


@pytest.fixture
def device(gpus) -> torch.device:
    """Where a check of one process computes."""
    if gpus:
        prepare_device(torch.device("cuda:0"))  # as a run does: it chooses among torch's kernels
        return torch.device("cuda:0")
    return torch.device("mps" if is_gpu_check and torch.backends.mps.is_available() else "cpu")


@pytest.fixture
def ranks(gpus, device) -> int:
    """How many processes a check of several has: one for each GPU, or two on a CPU. Skips where there cannot
    be several."""
    if device.type == "mps":
        pytest.skip("a Mac has one GPU (MPS), which several processes cannot share")
    if gpus == 1:
        pytest.skip("needs 2 GPUs: several processes cannot share the one that torch sees")
    if any("MIG" in torch.cuda.get_device_name(number) for number in range(gpus)):
        pytest.skip("NCCL does not connect the parts of a GPU that is divided (MIG)")
    if gpus and os.path.isdir("/dev/shm"):
        shm, needed = os.statvfs("/dev/shm"), gpus * FREE_SHM_BYTES
        if (free := shm.f_bavail * shm.f_frsize) < needed:
            reason = f"needs {needed >> 20} MB in /dev/shm for NCCL; it has {free >> 20}"
            pytest.skip(f"{reason} (docker run --shm-size 1g, or --ipc host)")
    return gpus or 2
