"""Why a run is slow: at its 50th update the console says where the time goes, and which settings would help."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from common.launcher import launch
from common.machine import available_cores
from trainer.components.device import autocast_dtype, native_bfloat16
from trainer.components.distributed import is_main_process, world_size
from trainer.components.meter import seconds_left
from trainer.components.metrics import duration
from trainer.components.state import TrainState

WARM, DUE = 10, 50  # updates of this process: the figures are those of the updates between them
FULL_BATCH = {"cpu": 512, "cuda": 8192}  # tokens of a micro-batch from which on a larger one gains little


@dataclass(frozen=True)
class Figures:
    """The figures of a run's speed. Shares are of the time, over all ranks."""

    # what was measured
    tokens_per_second: float
    mfu: float | None  # share of `peak`; None: the task does not count its arithmetic
    peak: float  # measured matrix rate of all ranks, in operations per second
    seconds_left: float
    batch_tokens: float  # of a micro-batch of one rank
    batch_samples: float  # 0: not known
    padding: float  # share of padding that padded batches would have
    pad_rows: float  # share of rows that the model adds on a CPU
    data: float  # waiting for data
    sync: float  # waiting for other ranks before each update
    exchange: float  # gradient all-reduce not overlapped with the backward pass
    save: float
    evaluate: float
    # settings
    dtype: str
    num_workers: int
    use_compile: bool
    packing: bool
    max_seq_len: int
    # the machine
    device: str  # type
    bfloat16: bool  # the device has arithmetic for it
    ranks: int
    local_ranks: int  # on this machine
    gpus: int  # visible to torch
    cuda_build: bool
    nvidia: bool  # the system has a driver of NVIDIA's
    cores: int  # that this process may use
    threads: int  # of each rank
    load: float  # processes that want a core, mean of the last minute; 0: not known


def explain(f: Figures) -> list[str]:
    """The block of lines for the console: figures, then one line per likely cause of slowness."""
    rate = (
        "" if f.mfu is None else f", mfu {f.mfu:.0%} of the {f.peak / 1e12:,.2f} TFLOP/s of a {f.dtype} matrix product"
    )
    waits = {"waiting for data": f.data, "evaluating": f.evaluate, "saving": f.save}
    if f.ranks > 1:
        waits |= {"waiting for other ranks": f.sync, "exchanging gradients": f.exchange}
    batch = f"a micro-batch is {f.batch_tokens:,.0f} tokens"
    if f.batch_samples:
        batch += f" in {f.batch_samples:,.1f} samples, padded to {f.max_seq_len} it would be {f.padding:.0%} padding"
    if f.device == "cpu" and f.pad_rows:
        batch += f"; {f.pad_rows:.1%} of the rows computed are padding rows"
    lines = [
        f"speed of updates {WARM + 1} to {DUE}: {f.tokens_per_second:,.0f} tokens/s{rate}",
        f"  time: {', '.join(f'{share:.1%} {what}' for what, share in waits.items())}; left: "
        f"{duration(f.seconds_left)}",
        f"  {batch}",
    ]
    found = causes(f)
    if not found and f.mfu is not None and f.mfu < 0.3:
        found = ["none of the usual causes: a small model has little arithmetic per step; torch.profiler shows more"]
    return lines + [f"  slow? {cause}" for cause in found]


def causes(f: Figures) -> list[str]:
    """The likely causes of slowness, each with what helps."""
    return waiting(f) + hardware(f) + threads(f) + batches(f)


def waiting(f: Figures) -> list[str]:
    """Time in which nothing is trained."""
    found = []
    if f.data > 0.1:
        more = 2 if f.num_workers == 0 else 2 * f.num_workers
        found.append(f"{f.data:.0%} of the time waits for data: --num_workers {more}")
    if f.sync > 0.1:
        text = f"{f.sync:.0%} of the time waits for slower ranks: equal machines, or larger micro-batches"
        found.append(f"{text} (--batch_size, --packing 1), which differ less")
    if f.exchange > 0.1:
        text = f"{f.exchange:.0%} of the time exchanges gradients"
        found.append(f"{text}: larger or fewer updates (--batch_size, --accumulation_steps), a faster network")
    if f.save > 0.05:
        found.append(f"{f.save:.0%} of the time saves: a larger --save_interval")
    if f.evaluate > 0.2:
        found.append(f"{f.evaluate:.0%} of the time evaluates: a larger --eval_interval, fewer held-out data")
    return found


def hardware(f: Figures) -> list[str]:
    """Unused devices, and a dtype that the device has no fast arithmetic for."""
    found = []
    if f.device == "cpu" and f.gpus:
        found.append("a GPU is visible but not used: --device auto")
    elif f.device == "cpu" and f.nvidia and f.cuda_build:
        found.append("torch cannot use the NVIDIA GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    elif f.device == "cpu" and f.nvidia:
        found.append("this torch is built for the CPU only, yet there is an NVIDIA GPU: install a CUDA build of torch")
    if f.device == "cuda" and f.gpus > f.local_ranks:
        text = f"{f.local_ranks} of {f.gpus} visible GPUs used"
        found.append(f"{text}: torchrun --nproc_per_node {f.gpus}")
    if f.bfloat16 and f.dtype != "bfloat16":
        found.append(f"--dtype {f.dtype}, where the device is good at bfloat16: --dtype auto")
    elif not f.bfloat16 and f.dtype == "bfloat16":
        found.append("--dtype bfloat16, which this device has to emulate: --dtype auto")
    elif f.device == "cuda" and f.dtype == "float32":
        found.append("--dtype float32, where the GPU is faster in half precision: --dtype float16")
    return found


def threads(f: Figures) -> list[str]:
    """Idle or oversubscribed cores."""
    wanted, found = f.threads * f.local_ranks, []
    if f.device == "cpu" and wanted > f.cores:
        text = f"{wanted} threads ({f.threads} in each process) share {f.cores} cores"
        found.append(f"{text}: OMP_NUM_THREADS={max(1, f.cores // f.local_ranks)}, or fewer processes")
    elif f.device == "cpu" and f.threads < f.cores // f.local_ranks:
        text = f"{wanted} of {f.cores} cores used"
        found.append(f"{text}: OMP_NUM_THREADS={f.cores // f.local_ranks}")
    others = f.load - (wanted if f.device == "cpu" else f.local_ranks) - f.num_workers * f.local_ranks
    if f.load > 1.25 * f.cores and others > 0.5:
        found.append(f"other programs use this machine: {f.load:.1f} processes want its {f.cores} cores")
    return found


def batches(f: Figures) -> list[str]:
    """Too little arithmetic per kernel."""
    found, idle = [], f.mfu is not None and f.mfu < 0.4
    if idle and f.batch_tokens < FULL_BATCH.get(f.device, 2048):
        more = "--batch_size" if f.packing else "--batch_size, --packing 1"
        found.append(f"only {f.batch_tokens:,.0f} tokens in a micro-batch: a larger one ({more})")
    if f.device == "cuda" and idle and not f.use_compile:
        found.append("many small kernels: --use_compile 1")
    return found


# --- measuring -----------------------------------------------------------------------------------------------------


def explain_speed(state: TrainState) -> None:
    """Called after each update: at this process's 50th, print the block. That and the tenth update are sync points."""
    meter = state.meter
    if meter.updates == WARM:
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        meter.warmed()
    if meter.updates != DUE:
        return
    figures = measure(state)
    if is_main_process():
        tqdm.write("\n".join(explain(figures)), file=sys.stdout)  # above a live bar, if there is one
        sys.stdout.flush()


def measure(state: TrainState) -> Figures:
    """The figures of the updates after the warm-up. All ranks take part."""
    args, device, ranks = state.args, state.device, world_size()
    total = state.meter.totals(device, state.meter.warm)
    training = total["clock"] - (total["save"] + total["evaluate"]) / ranks
    shares = {kind: total[kind] / ranks / total["clock"] for kind in ("wait", "comm", "save", "evaluate")}
    dtype = str(autocast_dtype(state.autocast, device)).removeprefix("torch.")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return Figures(
        tokens_per_second=total["tokens"] / training,
        mfu=total["flops"] / training / state.peak_flops if total["flops"] else None,
        peak=state.peak_flops,
        seconds_left=seconds_left(state),
        batch_tokens=total["tokens"] / total["micro_batches"],
        batch_samples=total["samples"] / total["micro_batches"],
        padding=1 - total["tokens"] / max(1.0, total["samples"] * args.max_seq_len),
        pad_rows=total["pad_rows"] / max(1.0, total["tokens"] + total["pad_rows"]),
        data=shares["wait"],
        sync=shares["comm"],
        exchange=exposed_exchange(state.model) * (DUE - WARM) / total["clock"],
        save=shares["save"],
        evaluate=shares["evaluate"],
        dtype=dtype,
        num_workers=args.num_workers,
        use_compile=args.use_compile is True,
        packing=bool(args.packing),
        max_seq_len=args.max_seq_len,
        device=device.type,
        bfloat16=native_bfloat16(device),
        ranks=ranks,
        local_ranks=launch().local_world_size,
        gpus=torch.cuda.device_count(),
        cuda_build=torch.version.cuda is not None,
        nvidia=Path("/proc/driver/nvidia/version").exists(),
        cores=available_cores(),
        threads=torch.get_num_threads(),
        load=load,
    )


def exposed_exchange(model: nn.Module) -> float:
    """Seconds per update of gradient all-reduce that the backward pass does not overlap, by DDP's own timers of the
    first ten updates: the smaller of their mean and the last, since the first ones compile. 0 without DDP."""
    if not isinstance(model, DistributedDataParallel):
        return 0.0
    data = model._get_ddp_logging_data()
    names = ("backward_comm_time", "backward_compute_comm_overlap_time")
    times = [int(data.get(p + names[0], 0)) - int(data.get(p + names[1], 0)) for p in ("", "avg_")]
    return max(0.0, min(times)) / 1e9
