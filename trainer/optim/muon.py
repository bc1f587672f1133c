"""Muon: an optimizer for the matrices of the layers, whose work the ranks divide."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from trainer.devices.device import native_bfloat16
from trainer.devices.process_group import gather
from trainer.devices.wrapping import local_tensor

STACKED_ELEMENTS = 1 << 24  # elements of the matrices that are orthogonalised at once: 64 MiB in float32
CPU_STACK = 1 << 22  # there: memory of more than 32 MiB at once is new each time, which costs page faults


class Muon(Optimizer):
    """torch's Muon on stacks of matrices of one shape, so that the operators of an update do not grow with
    depth.

    Several ranks share the stacks, also those of sharded parameters; how they are cut does not depend on the
    ranks, so the results are bitwise identical. The iteration is in float32 where a rank would have to
    emulate bfloat16.

    rows: m of the matrices [m, n] in each parameter; one of three dimensions holds several, one below the
    other.
    """

    def __init__(self, groups: list[dict[str, Any]], rows: Mapping[Any, int], lr: float, weight_decay: float):
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": 0.95,
            "ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7,
        }  # fmt: skip
        super().__init__(groups, defaults)  # those of torch's Muon
        self.rows = rows
        device = next(iter(rows)).device
        # of the iteration; the ranks send each other the results, so it is one for all of them
        self.dtype = torch.bfloat16 if all(gather(native_bfloat16(device))) else torch.float32

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        """Step each matrix. No closure."""
        stacks = self.stacks()
        if not stacks:
            return
        mesh = getattr(stacks[0][1][0], "device_mesh", None)  # of a DTensor
        # the last dimension of a mesh is that of the shards
        shards = mesh.get_group(mesh.ndim - 1) if mesh is not None else None
        rank, ranks = 0, 1
        if dist.is_initialized():
            rank, ranks = dist.get_rank(shards), dist.get_world_size(shards)
        for start in range(0, len(stacks), ranks):
            turn = stacks[start : start + ranks]  # a stack for each rank
            own = None
            shapes = []  # and types of what this rank has
            for owner, (group, params) in enumerate(turn):
                update = self.momentum(group, params)
                shapes.append((update.shape, update.dtype))
                whole: Tensor | None = update
                if mesh is not None:
                    whole = _gather_rows(update, len(params[0]), owner, shards)
                if owner == rank:
                    own = whole
            # all ranks have sent their shards: they compute at the same time
            if own is not None:
                own = self.directions(*turn[rank], own)
            for owner, (group, params) in enumerate(turn):
                directions = own if owner == rank else None
                shape, dtype = shapes[owner]
                if mesh is not None:
                    part = torch.empty(shape, dtype=dtype, device=params[0].device)
                    directions = _scatter_rows(directions, part, len(params[0]), owner, shards)
                elif ranks > 1:
                    if directions is None:
                        directions = torch.empty(shape, dtype=dtype, device=params[0].device)
                    dist.broadcast(directions, owner)
                self.move(group, params, cast(Tensor, directions))

    def stacks(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """The parameters with a gradient, in stacks of one group and shape, each with its group. Those with
        most work come first: ranks that take one each then end together."""
        alike: dict[tuple, list[Tensor]] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((number, self.rows[p], p.shape), []).append(p)
        stacks = []
        for (number, rows, shape), params in alike.items():
            limit = CPU_STACK if params[0].device.type == "cpu" else STACKED_ELEMENTS
            count = max(1, limit // shape.numel())
            for i in range(0, len(params), count):
                piece = params[i : i + count]
                work = len(piece) * shape.numel() * min(rows, shape[-1])
                stacks.append((work, self.param_groups[number], piece))
        stacks.sort(key=lambda stack: -stack[0])
        return [(group, piece) for _, group, piece in stacks]

    def momentum(self, group: dict[str, Any], params: list[Tensor]) -> Tensor:
        """Take the gradients into the momentum -> the update [k, rows, ...] to orthogonalise, of what this
        rank has."""
        for p in params:
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [local_tensor(self.state[p]["momentum_buffer"]) for p in params]
        grads = torch.stack([local_tensor(cast(Tensor, p.grad)) for p in params])
        torch._foreach_lerp_(buffers, grads.unbind(), 1 - group["momentum"])
        update = grads.lerp_(torch.stack(buffers), group["momentum"])  # Nesterov momentum
        return update.to(self.dtype)

    def directions(self, group: dict[str, Any], params: list[Tensor], update: Tensor) -> Tensor:
        """The update of whole parameters [k, rows, ...], its matrices orthogonalised."""
        matrices = update.reshape(-1, self.rows[params[0]], update.shape[-1])
        return orthogonalized(matrices, group).view(update.shape)

    def move(self, group: dict[str, Any], params: list[Tensor], directions: Tensor) -> None:
        """Decay the parameters, and add the directions [k, rows, ...], what this rank has of both."""
        decay = 1 - group["lr"] * group["weight_decay"]
        values = [local_tensor(p) for p in params]
        torch._foreach_mul_(values, decay)
        size = 0.2 * math.sqrt(max(self.rows[params[0]], params[0].shape[-1]))  # of AdamW's steps
        torch._foreach_add_(values, directions.to(values[0].dtype).unbind(), alpha=-size * group["lr"])


def orthogonalized(matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The semi-orthogonal matrices nearest to the given ones [k, m, n], roughly: quintic Newton-Schulz
    iterations, as in torch's Muon. group: of parameters, with `ns_coefficients`, `ns_steps` and `eps`."""
    a, b, c = group["ns_coefficients"]
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])  # spectral norm at most 1
    for _ in range(group["ns_steps"]):
        gram = torch.bmm(x.mT, x) if is_tall else torch.bmm(x, x.mT)  # the smaller of the two
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factor, beta=a) if is_tall else torch.baddbmm(x, factor, x, beta=a)
    return x


def _gather_rows(part: Tensor, rows: int, owner: int, group: Any) -> Tensor | None:
    """The shards [k, own rows, ...] of all ranks as [k, rows, ...] on the owner; None on the others."""
    ranks = dist.get_world_size(group)
    height = -(-rows // ranks)  # of all shards but the last ones
    part = _padded(part, height)
    parts = [torch.empty_like(part) for _ in range(ranks)] if dist.get_rank(group) == owner else None
    dist.gather(part, parts, group=group, group_dst=owner)
    return torch.cat(parts, dim=1)[:, :rows] if parts is not None else None


def _scatter_rows(whole: Tensor | None, part: Tensor, rows: int, owner: int, group: Any) -> Tensor:
    """The owner's [k, rows, ...] as shards [k, own rows, ...], with the shape of `part`."""
    ranks = dist.get_world_size(group)
    height = -(-rows // ranks)
    shards = _padded(whole, ranks * height).split(height, dim=1) if whole is not None else None
    received = _padded(part, height)
    parts = [shard.contiguous() for shard in shards] if shards is not None else None
    dist.scatter(received, parts, group=group, group_src=owner)
    return received[:, : part.shape[1]]


def _padded(rows: Tensor, height: int) -> Tensor:
    """[k, rows, ...] with zeros up to `height` rows."""
    padding = [0] * (2 * rows.ndim)  # of F.pad: two numbers for each dimension, the last one first
    padding[2 * rows.ndim - 3] = height - rows.shape[1]
    return F.pad(rows, padding)
