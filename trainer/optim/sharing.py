"""Work on whole parameters, divided between the ranks that have the same parameters, or shards of them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def divide_work(
    stacks: Sequence[list[Tensor]],
    part_of: Callable[[int], Tensor],
    work: Callable[[int, Tensor], Tensor],
    use: Callable[[int, Tensor], None],
) -> None:
    """Work on whole stacks of parameters, each on one of the ranks that have the same parameters, or shards
    of them.

    Args:
        stacks: parameters of one shape [rows, ...], alike on all ranks or sharded along their rows (FSDP).
        part_of: number of a stack -> what this rank has of the input [k, own rows, ...]; called on all ranks.
        work: number of a stack, its whole input [k, rows, ...] -> result of this shape and dtype; called on
            one rank.
        use: number of a stack, what this rank needs of the result [k, own rows, ...]; called on all ranks.
    """
    mesh = getattr(stacks[0][0], "device_mesh", None) if stacks else None  # of a DTensor
    # its last dimension is that of the shards
    group = mesh.get_group(mesh.ndim - 1) if mesh is not None else None
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    for start in range(0, len(stacks), ranks):
        turn, own, empty = range(start, min(start + ranks, len(stacks))), None, []
        for i in turn:
            part = part_of(i)
            whole = part if mesh is None else _gather_rows(part, len(stacks[i][0]), i - start, group)
            own = whole if i - start == rank else own
            empty.append(partial(torch.empty, part.shape, dtype=part.dtype, device=part.device))
        own = work(start + rank, own) if own is not None else None
        for i, part in zip(turn, empty, strict=True):
            result = own if i - start == rank else None
            if mesh is not None:
                result = _scatter_rows(result, part(), len(stacks[i][0]), i - start, group)
            elif ranks > 1:
                result = result if result is not None else part()
                dist.broadcast(result, i - start)
            use(i, cast(Tensor, result))


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
    return F.pad(rows, (0, 0) * (rows.ndim - 2) + (0, height - rows.shape[1]))
