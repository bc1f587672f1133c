"""The machine of a run, and what training a model costs there: seconds and bytes of an update, measured on
the user's data, or of a GPU that is not here by its data sheet."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import psutil
import torch
from torch import Tensor, nn

from trainer.devices.device import describe_device, mixed_precision, prepare_device, select_device
from trainer.objectives.next_token import Batch, next_token_loss, to_device
from trainer.optim import rules
from trainer.optim.build import build_optimizer
from trainer.report.speed import GPUS, training_flops

if TYPE_CHECKING:
    from model.model_minimind import MiniMindConfig

USABLE = 0.8  # share of the free memory
SHARE_OF_SHEET = 0.2  # of a data sheet's rate (GPUS), assumed
STATE = 16  # bytes per parameter: weight, gradient and two moments of AdamW, in float32
LIBRARIES = 0.6e9  # bytes of a process without a model
MEASURED = 3  # updates of a model, at least; other programs make single ones slow
MORE, MORE_SECONDS = 20, 1.0  # updates of a small model, as far as they take no longer
MEASURING = 40.0  # seconds after which no larger model is measured
COUNTED = 4  # layers of the largest model of which the bytes are counted for a GPU that is not here


@dataclass(frozen=True)
class Machine:
    """Where the run will be: here, or with a GPU that is not here."""

    device: torch.device  # on which updates are measured; for a GPU that is not here, counted
    dtype: str
    gpu: str | None  # of GPUS, if it is not here
    free_memory: float  # bytes, of a rank
    ranks: int

    @classmethod
    def find(cls, device_name: str, dtype: str, gpu: str | None) -> "Machine":
        """This machine, or with `gpu` one by its data sheet."""
        if gpu:
            return cls(select_device("cpu"), dtype, gpu, GPUS[gpu][1] * 1e9, 1)
        device = select_device(device_name)
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            return cls(device, dtype, None, free, torch.cuda.device_count())
        return cls(device, dtype, None, psutil.virtual_memory().available, 1)

    @property
    def memory(self) -> float:
        """Bytes that a rank may use."""
        return USABLE * self.free_memory

    def describe(self) -> str:
        """The machine as a line."""
        if self.gpu:
            rate = GPUS[self.gpu][0]
            what = f"arithmetic for {self.gpu}: {SHARE_OF_SHEET:.0%} of {rate} TFLOP/s, its data sheet"
        else:
            what = describe_device(self.device, mixed_precision(self.dtype, self.device)[0])
        return f"{what}; {self.free_memory / 1e9:.0f} GB of memory"


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
        flops, parameters = batch_flops(config, host), count_parameters(config)
        token = self.token * flops / self.flops
        update = self.update * parameters / self.parameters
        return Cost(parameters, flops, token, update, self.kept * times**2)


def measure(
    machine: Machine, shape: Callable[[int], "MiniMindConfig"], depths: Iterable[int], batch: Batch
) -> dict[int, Cost]:
    """Depth -> what training costs, from the smallest model on; what would take too long or too much memory
    is extrapolated from the largest that was measured. shape: the model of a depth."""
    tokens = len(batch["input_ids"])
    costs: dict[int, Cost] = {}
    begin = time.monotonic()
    for depth in depths:
        if costs:
            largest = max(costs)
            guess = costs[largest].extrapolate(shape(depth), batch, depth / largest)
            end = time.monotonic() + (MEASURED + 2) * tokens * guess.token
            if machine.gpu:
                is_measured = depth <= COUNTED
            else:
                fits = end - begin <= MEASURING and guess.memory(tokens) <= machine.memory
                is_measured = costs[largest].measured and fits
            if not is_measured:
                costs[depth] = guess
                continue
        costs[depth] = training_cost(machine, shape(depth), batch)
    return costs


def training_cost(machine: Machine, config: "MiniMindConfig", host: Batch) -> Cost:
    """The cost of an update on this flat batch. For a GPU that is not here the bytes are counted in bfloat16,
    and the seconds are arithmetic."""
    from model.model_minimind import MiniMindForCausalLM

    dtype = "bfloat16_emulated" if machine.gpu else machine.dtype
    autocast = mixed_precision(dtype, machine.device)[0]
    prepare_device(machine.device)
    model = cast(nn.Module, MiniMindForCausalLM(config)).to(machine.device)
    batch = to_device(host, machine.device)
    tokens, parameters = len(host["input_ids"]), count_parameters(config)
    flops = batch_flops(config, host)
    kept = kept_bytes(model, batch, autocast) / tokens
    if machine.gpu:
        rate = GPUS[machine.gpu][0] * 1e12 * SHARE_OF_SHEET
        return Cost(parameters, flops, flops / rate, kept=kept)
    passes, step = update_seconds(model, batch, autocast, machine.device)
    return Cost(parameters, flops, passes / tokens, step, kept, True)


def kept_bytes(model: nn.Module, batch: Batch, autocast: AbstractContextManager) -> int:
    """Bytes that a forward pass keeps for the backward pass, without the parameters."""
    # of each memory its size, once, however many tensors look into it
    sizes = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with autocast, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        next_token_loss(model, batch)
    return sum(sizes.values())


def update_seconds(
    model: nn.Module, batch: Batch, autocast: AbstractContextManager, device: torch.device
) -> tuple[float, float]:
    """Seconds of forward and backward, and of the optimizer: of the fastest of MEASURED to MORE updates."""
    optimizer = build_optimizer(model, 1e-4, 0.0, rules.OPTIMIZER)
    passes: list[float] = []
    steps: list[float] = []
    while len(passes) < MEASURED or (len(passes) < MORE and sum(passes) + sum(steps) < MORE_SECONDS):
        begin = clock(device)
        with autocast:
            loss = next_token_loss(model, batch)[0]
        (loss / len(batch["targets"])).backward()
        middle = clock(device)
        optimizer.step()
        optimizer.zero_grad()
        passes.append(middle - begin)
        steps.append(clock(device) - middle)
    return min(passes), min(steps)


def batch_flops(config: "MiniMindConfig", host: Batch) -> float:
    """Floating-point operations per token of a flat batch."""
    tokens = len(host["input_ids"])
    return training_flops(config, tokens, len(host["targets"]), host["host_cu_seqlens"]) / tokens


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
