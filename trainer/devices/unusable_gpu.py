"""Why torch cannot use an NVIDIA GPU that this machine has, and what to do. Asked only when that is so, by
training and by scripts/gpu_check.sh."""

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

from common.errors import UserError

DRIVER = Path("/proc/driver/nvidia/version")  # of a loaded driver, Linux
PCI = Path("/sys/bus/pci/devices")


def nvidia_smi(fields: str) -> str:
    """What nvidia-smi says of these fields, one line per GPU; empty without it."""
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def driver() -> str:
    """What this machine says of an NVIDIA GPU and its driver; empty without one."""
    with suppress(OSError):
        return DRIVER.read_text(encoding="utf-8").splitlines()[0]
    gpus = nvidia_smi("name,driver_version") or ", ".join(map(str, Path("/dev").glob("nvidia[0-9]*")))
    return gpus or ", ".join(f"no driver, {path.name}" for path in sorted(PCI.glob("*")) if is_gpu(path))


def is_gpu(path: Path) -> bool:
    """Whether a PCI device is a display or 3D controller by NVIDIA."""
    with suppress(OSError):
        is_nvidia = (path / "vendor").read_text().strip() == "0x10de"
        return is_nvidia and (path / "class").read_text().startswith("0x03")
    return False


def why_unseen() -> str:
    """Why torch sees no GPU where there is one, and what to do."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        return f"CUDA_VISIBLE_DEVICES={value!r} may hide it: unset it, or name the GPU"
    if torch.version.cuda is None:
        return (
            "this torch is built without CUDA: install one with it (https://pytorch.org/get-started/locally)"
        )
    reason = "torch gives no reason"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    return (
        f"{reason}; update the driver to one for CUDA {torch.version.cuda}, or install a torch for an older "
        "CUDA (https://pytorch.org/get-started/previous-versions)"
    )


def check_architecture(device: torch.device) -> None:
    """Raise UserError for a GPU for which this torch holds no kernels: the first one would fail.

    A binary (sm_86) runs on its own generation from its minor version on, an intermediate form (compute_90)
    on all later GPUs."""
    capability = torch.cuda.get_device_capability(device)
    built = re.findall(r"(sm|compute)_(\d+)", " ".join(torch.cuda.get_arch_list()))
    for kind, number in built:
        major, minor = divmod(int(number), 10)
        if kind == "compute" and (major, minor) <= capability:
            return
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return
    if not built:  # not a torch for NVIDIA
        return
    name, (major, minor) = torch.cuda.get_device_name(device), capability
    advice = "update torch"
    if capability < min(divmod(int(number), 10) for _, number in built):
        advice = "install an older torch (https://pytorch.org/get-started/previous-versions)"
    raise UserError(
        f"--device {device}: torch {torch.__version__} has no kernels for the {name} (sm_{major}{minor}; it "
        f"has {', '.join(torch.cuda.get_arch_list())}); {advice}, or use --device cpu"
    )
