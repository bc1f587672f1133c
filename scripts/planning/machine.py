"""What training costs: seconds and bytes of an update, measured on the user's data, or of a GPU that is not
here by its data sheet."""

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import psutil
import torch
from torch import nn

from trainer.devices.device import mixed_precision, prepare_device
from trainer.objectives.next_token import Batch, next_token_loss, to_device
from trainer.optim.build import build_optimizer
from trainer.report.speed import GPUS, training_flops

if TYPE_CHECKING:
    from model.model_minimind import MiniMindConfig

SHARE_OF_SHEET = 0.2  # of a data sheet's rate (GPUS), assumed
STATE = 16  # bytes per parameter: weight, gradient and two moments of AdamW, in float32
MEASURED = 3  # updates of a model, at least; other programs make single ones slow
LIBRARIES = 0.6e9  # bytes of a process without a model


@dataclass(frozen=True)
class Cost:
    """What training a model costs a rank."""

    parameters: int = 0
    flops: float = 0.0  # per token
    token: float = 0.0  # seconds of forward and backward
    update: float = 0.0  # seconds of the optimizer
    kept: float = 0.0  # bytes per token of a micro-batch, for the backward pass
    measured: bool = False  # else arithmetic

    def memory(self, tokens: float) -> float:
        """Bytes with micro-batches of so many tokens."""
        return LIBRARIES + STATE * self.parameters + self.kept * tokens

    def extrapolate(self, config: "MiniMindConfig", host: Batch, times: float) -> "Cost":
        """The cost of a model that is `times` as wide and as deep, at the same rate on this batch."""
        flops = batch_flops(config, host)
        rate, size = self.flops / self.token, count_parameters(config)
        return Cost(size, flops, flops / rate, self.update * size / self.parameters, self.kept * times**2)


def batch_flops(config: "MiniMindConfig", host: Batch) -> float:
    """Floating-point operations per token of a flat batch."""
    tokens = len(host["input_ids"])
    return training_flops(config, tokens, len(host["targets"]), host["host_cu_seqlens"]) / tokens


def free_memory(device: torch.device, gpu: str | None) -> float:
    """Bytes that a rank may use."""
    if gpu:
        return GPUS[gpu][1] * 1e9
    return float(
        torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    )


def training_cost(
    config: "MiniMindConfig",
    host: Batch,
    device: torch.device,
    dtype: str,
    optimizer: str,
    gpu: str | None = None,
) -> Cost:
    """The cost of an update on this flat batch: the fastest of at least MEASURED, after one to warm up; of a
    small model of more, within a second. With `gpu`, one of GPUS, the bytes are counted in bfloat16 on
    `device`, and the seconds are arithmetic."""
    from model.model_minimind import MiniMindForCausalLM

    autocast = mixed_precision("bfloat16_emulated" if gpu else dtype, device)[0]
    prepare_device(device)
    model = cast(nn.Module, MiniMindForCausalLM(config)).to(device)
    stepping, batch = build_optimizer(model, 1e-4, 0.0, optimizer), to_device(host, device)
    tokens, targets, size = len(host["input_ids"]), len(host["targets"]), count_parameters(config)
    storages = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}  # these are counted in STATE

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with autocast, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = next_token_loss(model, batch)[0]
    kept = sum(storages.values()) / tokens
    flops = batch_flops(config, host)
    if gpu:
        return Cost(size, flops, flops / (GPUS[gpu][0] * 1e12 * SHARE_OF_SHEET), kept=kept)
    times: list[tuple[float, float]] = []
    while len(times) < MEASURED or (len(times) < 20 and sum(map(sum, times)) < 1):
        begin = clock(device)
        with autocast:
            loss = next_token_loss(model, batch)[0]
        (loss / targets).backward()
        middle = clock(device)
        stepping.step()
        stepping.zero_grad()
        times.append((middle - begin, clock(device) - middle))
    passes, step = (min(column) for column in zip(*times, strict=True))
    return Cost(size, flops, passes / tokens, step, kept, True)


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def cpu_seconds_of_others() -> float:
    """CPU seconds that all other programs have used since the machine was started."""
    times, own = psutil.cpu_times(), os.times()
    busy = [getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")]
    return sum(busy) - own.user - own.system


def count_parameters(config: "MiniMindConfig") -> int:
    """Parameters of a model, without making it."""
    from model.model_minimind import MiniMindForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in MiniMindForCausalLM(config).parameters())
