"""Muon: an optimizer for the matrices of the layers."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.devices.device import native_bfloat16
from trainer.devices.process_group import all_gather

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the iteration, torch's
ITERATIONS = 5
# short runs learn more with less momentum at first (docs/dev/LOG.md, "More from the same tokens")
FIRST_MOMENTUM, MOMENTUM, MOMENTUM_UPDATES = 0.85, 0.95, 300
DECAY_PER_PASS, MOST_DECAY = 0.7, 2.0  # docs/dev/LOG.md, "Decay in each pass"
STACKED_ELEMENTS = 1 << 24  # elements of the matrices that are orthogonalised at once: 64 MiB in float32
CPU_STACK = 1 << 22  # there: memory of more than 32 MiB at once is new each time, which costs page faults


def momentum_of(update: int) -> float:
    """Muon's momentum at an update, from 1."""
    return FIRST_MOMENTUM + (MOMENTUM - FIRST_MOMENTUM) * min(1.0, (update - 1) / MOMENTUM_UPDATES)


def decay_of(rate: float, updates: float) -> float:
    """The weight decay for pretraining with Muon. rate: peak learning rate of Muon's steps (not of the flag).
    updates: number of updates in a pass over the data. The decay shrinks the weights by the same factor in
    each pass, so that what a pass teaches fades at the same rate for any length of a pass
    (arXiv:2405.13698)."""
    return min(DECAY_PER_PASS / (rate * updates), MOST_DECAY)


class Muon(Optimizer):
    """torch's Muon (K. Jordan, 2024), scaled as in arXiv:2502.16982. It works on stacks of matrices of one
    shape, so the number of operators in an update does not grow with depth. Each rank computes all of it from
    the same gradients.

    rows: the number m of rows of the matrices [m, n] in each parameter. A parameter of three dimensions holds
    several matrices, one below the other.
    """

    def __init__(self, groups: list[dict[str, Any]], rows: Mapping[Any, int], lr: float, weight_decay: float):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": MOMENTUM})
        self.rows = rows
        device = next(iter(rows)).device
        # of the iteration; float32 if one of the ranks would have to emulate bfloat16
        self.dtype = torch.bfloat16 if all(all_gather(native_bfloat16(device))) else torch.float32

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        """Step each matrix; a closure is not supported."""
        for group in self.param_groups:
            for params in self.stacks(group["params"]):
                self.step_stack(params, group)

    def stacks(self, params: list[Tensor]) -> list[list[Tensor]]:
        """The parameters with a gradient, in groups of one shape that are computed at once."""
        alike: dict[tuple, list[Tensor]] = {}
        for p in params:
            if p.grad is not None:
                alike.setdefault((self.rows[p], p.shape), []).append(p)
        stacks = []
        for same in alike.values():
            limit = CPU_STACK if same[0].device.type == "cpu" else STACKED_ELEMENTS
            count = max(1, limit // same[0].numel())
            stacks += [same[i : i + count] for i in range(0, len(same), count)]
        return stacks

    def step_stack(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Decay parameters of one shape, and move each by its orthogonalised update."""
        for p in params:
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        grads = torch.stack([cast(Tensor, p.grad) for p in params])
        torch._foreach_lerp_(buffers, grads.unbind(), 1 - group["momentum"])
        update = grads.lerp_(torch.stack(buffers), group["momentum"])  # Nesterov momentum
        rows, columns = self.rows[params[0]], params[0].shape[-1]
        matrices = update.to(self.dtype).reshape(-1, rows, columns)
        directions = orthogonalized(matrices).view(update.shape).to(params[0].dtype)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        size = 0.2 * math.sqrt(max(rows, columns))  # of AdamW's steps
        torch._foreach_add_(params, directions.unbind(), alpha=-size * group["lr"])


def orthogonalized(matrices: Tensor) -> Tensor:
    """Approximately the nearest semi-orthogonal matrices to the given ones [k, m, n], by quintic
    Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # spectral norm at most 1
    for _ in range(ITERATIONS):
        gram = torch.bmm(x.mT, x) if is_tall else torch.bmm(x, x.mT)  # the smaller of the two
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factor, beta=a) if is_tall else torch.baddbmm(x, factor, x, beta=a)
    return x
