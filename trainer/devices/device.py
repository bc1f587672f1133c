"""The device of a rank, the precision it computes in, and its memory."""

import ctypes
import math
import os
import platform
import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache

import torch
import torch.distributed as dist

from common.containers import available_cores, cpu_quota
from common.errors import UserError, warn
from common.launcher import launch
from common.settings import StageArgs

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
# the values with which its products are reproducible
CUBLAS, CUBLAS_VALUES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def select_device(device: str) -> torch.device:
    """The device of this rank; it is not touched yet. `auto` takes CUDA, then Apple MPS (one process only),
    then the CPU.

    A rank takes the GPU with its local number, or the only one that it sees: srun --gpus-per-task=1 shows
    each task only its own. torchrun shows all GPUs to every rank, so a single GPU there belongs to the first
    rank. `init_distributed_mode` compares the GPUs of the ranks. Raises UserError if there is no such device,
    if several ranks would share one, or if the rank is unknown."""
    place = launch()
    if place.problem:
        raise UserError(place.problem)
    is_alone, local_rank = place.world_size == 1, place.local_rank
    cuda_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = automatic_device(cuda_devices, is_alone)
    if cuda_devices == 1 and not dist.is_torchelastic_launched():
        local_rank = 0
    try:
        chosen = torch.device("cuda", local_rank) if device == "cuda" else torch.device(device)
    except RuntimeError:
        chosen = torch.device("meta")  # refused below, like any other type
    if chosen.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {device} is unknown; use auto, cpu, cuda, cuda:N or mps")
    if chosen.type == "cuda" and (chosen.index or 0) >= cuda_devices:
        from trainer.devices.unusable_gpu import driver, why_unseen

        why = ""
        if not cuda_devices and driver():
            why = f", but there is one: {why_unseen()}"
        elif "CUDA_VISIBLE_DEVICES" in os.environ:
            why = f", CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}"
        raise UserError(
            f"--device {device} cannot be used (torch sees {cuda_devices} CUDA devices{why}); start fewer "
            "processes, or use another device"
        )
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            f"--device {device} cannot be used (this torch or machine has no MPS); use another device"
        )
    if not is_alone and (chosen.type == "mps" or ":" in device):
        raise UserError(
            f"--device {device} cannot be shared by several processes; with auto each takes its own"
        )
    return chosen


def automatic_device(cuda_devices: int, is_alone: bool) -> str:
    """What `--device auto` means with this number of CUDA devices, in one process or several."""
    if cuda_devices:
        return "cuda"
    if is_alone and torch.backends.mps.is_available():
        return "mps"
    if os.path.exists("/proc/driver/nvidia/version") and "CUDA_VISIBLE_DEVICES" not in os.environ:
        from trainer.devices.unusable_gpu import why_unseen

        warn(f"this machine has an NVIDIA GPU, but torch cannot use it: {why_unseen()}; using the CPU")
    return "cpu"


def use_deterministic_kernels(enabled: bool) -> None:
    """For `--deterministic`: make torch and cuBLAS use kernels that give bitwise identical runs. Torch raises
    an error for an operation without such a kernel. Call it before CUDA starts, because cuBLAS reads its
    setting once."""
    if enabled != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(enabled)
    # filling fresh memory finds bugs, and costs a pass over it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if enabled and os.environ.get(CUBLAS) not in CUBLAS_VALUES:
        os.environ[CUBLAS] = CUBLAS_VALUES[0]


def prepare_device(device: torch.device) -> None:
    """Make a GPU the current CUDA device; raises UserError if torch has no kernels for it. On a CPU, make the
    allocator keep freed memory. In a container, limit torch's threads to the CPU quota unless OMP_NUM_THREADS
    is set: with more threads, all of them wait whenever the quota is used up.

    Each update on a CPU allocates the same amount again, and page faults on fresh pages can take longer than
    the arithmetic. The limits are the largest that mallopt(3) accepts; without glibc nothing is set."""
    if cpu_quota() < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(available_cores())
    if device.type == "cuda":
        from trainer.devices.unusable_gpu import check_architecture

        check_architecture(device)
        torch.cuda.set_device(device)
        if torch.version.hip:
            from model.kernels import try_amd_kernel

            try_amd_kernel(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each shape and keeps all of them
    elif device.type == "cpu":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def seed_torch(seed: int) -> None:
    """Seed torch's random numbers. On a machine that has only a CPU, `torch.manual_seed` takes about 1 ms,
    because it formats a stack trace for each kind of accelerator; here only the CPU is seeded then."""
    if has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def has_accelerator() -> bool:
    """Whether torch can use a GPU or the like."""
    return torch.accelerator.is_available()


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices faster than float32 ones."""
    if device.type == "cuda" and torch.version.hip:
        return amd_multiplies_bfloat16(device)
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # without oneDNN (builds for a Mac), or with too low an ONEDNN_MAX_CPU_ISA, torch has no fast bfloat16
    # product
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    # oneDNN emulates it on a CPU that has only AVX512
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@cache
def amd_multiplies_bfloat16(device: torch.device) -> bool:
    """`native_bfloat16` of an AMD GPU, by measurement. With matrix units bfloat16 takes a quarter of the time
    of float32, without them the same time or more. The version number that the GPU reports does not show
    this."""
    rates = [matrix_rate(device, dtype, seconds=0.02) for dtype in (torch.bfloat16, torch.float32)]
    return rates[0] > 1.5 * rates[1]


def automatic_dtype(device: torch.device) -> str:
    """The dtype that `--dtype auto` means: bfloat16 if the device is fast at it, float16 on NVIDIA GPUs whose
    tensor cores only support that (Volta and Turing: V100, T4), otherwise float32."""
    if native_bfloat16(device):
        return "bfloat16"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0):
        return "float16"
    return "float32"


def native_float16(device: torch.device) -> bool:
    """Whether the device has float16 arithmetic. Emulation is hundreds of times slower than float32."""
    return device.type != "cpu" or torch.cpu._is_amx_fp16_supported()


def check_dtype(dtype: str, device: torch.device) -> None:
    """Refuse float16 on a CPU without arithmetic for it, with a UserError; does not touch the device."""
    if dtype == "float16" and not native_float16(device):
        raise UserError(
            f"--dtype float16: this {device.type} has no arithmetic for it; use bfloat16 or float32 (or auto)"
        )


def mixed_precision(dtype: str, device: torch.device) -> tuple[AbstractContextManager, torch.amp.GradScaler]:
    """Autocast context and gradient scaler for `--dtype`; weights and optimizer state stay float32.

    `auto` is `automatic_dtype`. On a CPU that would have to emulate it, `bfloat16` becomes float32 with a
    warning; `bfloat16_emulated` forces the emulation. Only float16 needs loss scaling. Raises UserError for
    float16 on a CPU without arithmetic for it."""
    if dtype == "auto":
        dtype = automatic_dtype(device)
    if dtype == "bfloat16" and device.type == "cpu" and not native_bfloat16(device):
        dtype = "float32"
        warn(
            "--dtype bfloat16: this CPU has to emulate it, with matrix products that take 3 to 100 times as "
            "long as in float32: training in float32 (--dtype bfloat16_emulated forces it)"
        )
    dtype = dtype.removesuffix("_emulated")
    if dtype == "float16":
        check_dtype(dtype, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")
    if dtype == "float32":
        return nullcontext(), scaler
    # autocast asks the current GPU whether it supports bfloat16, and allocates memory on an old one. So the
    # current GPU must be this rank's own.
    with torch.cuda.device(device) if device.type == "cuda" and device.index else nullcontext():
        return torch.autocast(device.type, dtype=getattr(torch, dtype)), scaler


def device_and_precision(
    args: StageArgs,
) -> tuple[torch.device, AbstractContextManager, torch.amp.GradScaler]:
    """The device of this rank, the autocast context in --dtype, and the gradient scaler, which float16
    needs."""
    if args.deterministic or torch.are_deterministic_algorithms_enabled():
        use_deterministic_kernels(args.deterministic)
    device = select_device(args.device)
    if device.type == "cuda":
        use_growing_segments()
    return device, *mixed_precision(args.dtype, device)


def use_growing_segments() -> None:
    """Make a GPU's allocator use growing segments, unless the user has set it: batches of many sizes fragment
    segments of a fixed size. Call it before CUDA starts, because CUDA reads the setting once.

    Not under Windows (WSL2) and on parts of a divided GPU (MIG), where the first allocation can fail
    (pytorch#192330, #197312)."""
    is_set = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if is_set or "microsoft" in platform.release().lower():
        return
    from trainer.devices.unusable_gpu import nvidia_smi

    if "Enabled" not in nvidia_smi("mig.mode.current"):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def autocast_dtype(autocast: AbstractContextManager, device: torch.device) -> torch.dtype:
    """The dtype of matrix products under this context."""
    with autocast:
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
    return torch.float32


def describe_device(device: torch.device, autocast: AbstractContextManager) -> str:
    """The device and the dtype that this rank computes with, as text."""
    threads = torch.get_num_threads()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif threads == 1:
        name = "1 thread"
    else:
        name = f"{threads} threads"
    return f"{device} ({name}), {str(autocast_dtype(autocast, device)).removeprefix('torch.')}"


def processor_name(device: torch.device) -> str:
    """The name of the GPU or CPU model that a device is on. Another model may round otherwise."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Floating-point operations per second that the device reaches in a square matrix product.

    It is the best of four products of each size: 128, 256 ... 8,192, until those of the next size would take
    longer than `seconds`. The numbers are random, because a GPU multiplies ones faster, with less power. They
    come from a separate random stream."""
    best, numbers = 0.0, torch.Generator(device).manual_seed(0)
    for n in (2**k for k in range(7, 14)):
        a = torch.randn(n, n, device=device, dtype=dtype, generator=numbers)
        fastest = math.inf
        for _ in range(4):
            begin = time.perf_counter()
            (a @ a)[0, 0].item()  # sync point
            fastest = min(fastest, time.perf_counter() - begin)
        best = max(best, 2.0 * n**3 / fastest)
        if 4 * 8 * fastest > seconds:  # a product of twice the size takes eight times as long
            break
    return best


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory so far in MB: allocated on the GPU, or without one resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
