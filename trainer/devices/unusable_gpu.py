"""Why torch cannot use an NVIDIA GPU of this machine, and what to do. Training and scripts/gpu_check.sh ask
this only if torch sees no usable GPU."""

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

from common.errors import UserError, reason

DRIVER = Path("/proc/driver/nvidia/version")  # of a loaded driver, Linux
INSTALL = "https://pytorch.org/get-started"


def nvidia_smi(fields: str) -> str:
    """The values of these fields from nvidia-smi, one line per GPU; empty without nvidia-smi."""
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def driver() -> str:
    """The description of this machine's NVIDIA GPU and driver; empty without one."""
    with suppress(OSError):
        return DRIVER.read_text(encoding="utf-8").splitlines()[0]
    return nvidia_smi("name,driver_version")


def why_unseen() -> str:
    """Why torch does not see a GPU of this machine, and what to do."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        return f"CUDA_VISIBLE_DEVICES={value!r} may hide it: unset it, or name the GPU"
    if torch.version.cuda is None:
        return f"this torch is built without CUDA: install one with it ({INSTALL}/locally)"
    why = "torch gives no reason"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
    return (
        f"{why}; update the driver to one for CUDA {torch.version.cuda}, or install a torch for an older "
        f"CUDA ({INSTALL}/previous-versions)"
    )


def check_architecture(device: torch.device) -> None:
    """Raise UserError for a GPU for which this torch has no kernels: the first call of a kernel would fail.

    A binary (sm_86) runs on GPUs of its own generation from its minor version on; an intermediate form
    (compute_90) runs on all later GPUs. On AMD GPUs a kernel is tried."""
    if torch.version.hip:
        check_amd_kernels(device)
        return
    own = torch.cuda.get_device_capability(device)
    built = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    for kind, major, minor in built:
        version = int(major), int(minor)
        if version <= own and (kind == "compute" or version[0] == own[0]):
            return
    if not built:  # not a torch for NVIDIA
        return
    oldest = min((int(major), int(minor)) for _, major, minor in built)
    advice = f"install an older torch ({INSTALL}/previous-versions)" if own < oldest else "update torch"
    raise UserError(
        f"--device {device}: torch {torch.__version__} has no kernels for the "
        f"{torch.cuda.get_device_name(device)} (sm_{own[0]}{own[1]}; it has "
        f"{', '.join(torch.cuda.get_arch_list())}); {advice}, or use --device cpu"
    )


def check_amd_kernels(device: torch.device) -> None:
    """Raise UserError for an AMD GPU on which a kernel of this torch fails."""
    try:
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        raise UserError(
            f"--device {device}: torch {torch.__version__} has no kernels for the "
            f"{torch.cuda.get_device_name(device)} ({reason(error)}); set HSA_OVERRIDE_GFX_VERSION to a "
            "relative that it has some for, or use --device cpu"
        ) from error
