"""Experts computed together: the rows of all of them, sorted by expert, in one grouped product for each
linear layer. `MOEFeedForward.called_experts` in model_minimind.py is the plain form.

Shape legend: N tokens of a flat batch, C hidden size, E experts, K experts per token, R rows of all experts.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import fused
from model.linear import LoRALinear, Split, is_plain, is_plain_product, join, whole_of

# each expert's rows are padded to a multiple: CUDA's grouped_mm needs 8, and oneDNN caches few shapes
GROUP = 16
# ranks of adapters are padded to a multiple: CUDA's grouped_mm wants rows that are multiples of 16 bytes
RANK = 8


def can_group(experts: Any, x: Tensor) -> bool:
    """Whether `grouped_experts` computes what calls of the experts do, and pays: on a GPU, where calls would
    wait for the device, and in half precision on a CPU, where oneDNN would compile a product for each number
    of rows; but not in decoding there, which reads only the weights that it needs.

    Only experts of one class with nothing but plain linear layers in them, or adapters of one kind around
    these, can be computed without calls; one with an attribute beside them may obey it."""
    if not fused.ENABLED:
        return False
    if x.device.type == fused.HOST:
        must_cast = next(experts[0].parameters()).dtype != x.dtype
        if x.dtype == torch.float32 or not (must_cast or torch.is_grad_enabled()):
            return False
    for expert in experts:
        if not is_plain(expert, type(experts[0])) or expert._parameters or expert._buffers:
            return False
        if fused.own_attributes(expert) != (("training", expert.training),):
            return False
        if expert._modules.keys() != experts[0]._modules.keys():
            return False
    return all(are_alike([expert._modules[name] for expert in experts]) for name in experts[0]._modules)


def are_alike(layers: Sequence[Any]) -> bool:
    """Whether all layers are a plain product, or all have an adapter of one kind around one."""
    if not is_plain(layers[0], LoRALinear):
        return all(is_plain_product(layer) for layer in layers)
    first = layers[0]
    for layer in layers:
        if not is_plain(layer, LoRALinear):
            return False
        if not all(is_plain_product(part) for part in (layer.base, layer.lora_A, layer.lora_B)):
            return False
        if (layer.scale, layer.dropout.p) != (first.scale, first.dropout.p):
            return False
        if layer.lora_A.out_features != first.lora_A.out_features:
            return False
    return True


def grouped_experts(experts: Any, x: Tensor, weight: Tensor, chosen: Tensor, is_one: bool) -> Tensor:
    """`MOEFeedForward.called_experts`: of x [N, C] the outputs of the chosen experts [N, K], weighted and
    summed; `is_one`: the weight is to be taken for 1, as that of a single expert.

    The forward of the experts' class runs once, for all of them. Sizes depend on shapes alone, so no token
    is dropped and the host waits for nothing."""
    # Sort the rows by expert, the last one first; zeros before them make their number a multiple of
    # `group`. Say group = 4, and the chosen experts of five rows are 1 0 1 1 0: then ends = [4, 8], and the
    # rows go to the places 7 3 6 5 2.
    count, number, expert = chosen.numel(), len(experts), chosen.flatten()
    group = GROUP if fused.has_grouped_mm(x) else group_size(count, number)
    picked = expert == torch.arange(number, device=expert.device)[:, None]  # [E, N * K]: scanned by row
    # In training an expert without rows gets a group of zeros: on sm_100 grouped_mm leaves the gradient of
    # a matrix without rows unwritten (pytorch issue 172439).
    spare = group if torch.is_grad_enabled() else group - 1
    ends = ((picked.sum(dim=1) + spare) // group * group).cumsum(0, dtype=torch.int32)  # [E]
    place = (ends[:, None] - picked.cumsum(1)).gather(0, expert[None]).view(chosen.shape)  # [N, K]
    size = (count // group + number) * group  # R, the largest possible
    rows = cast(Tensor, SortedRows.apply(x, place, size))
    all_experts = AllExperts()
    for name in experts[0]._modules:
        layers = [expert._modules[name] for expert in experts]
        setattr(all_experts, name, GroupedLinear(layers, ends, group, x.dtype))
    out = type(experts[0]).forward(all_experts, rows)  # [R, C]
    return cast(Tensor, MixedRows.apply(out, weight, place, is_one))


class SortedRows(torch.autograd.Function):
    """Each row of x [N, C] at its K places [N, K] among R rows; the others are zeros."""

    @staticmethod
    def forward(ctx, x: Tensor, place: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(place)
        return at_places(x, place, size)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (place,) = ctx.saved_tensors
        grad = grads[0].index_select(0, place.flatten())
        if place.shape[1] > 1:
            grad = grad.view(*place.shape, grad.shape[-1]).sum(1)
        return grad, None, None


class MixedRows(torch.autograd.Function):
    """The rows of x [R, C] at the places [N, K], weighted by weight [N, K] and summed in its dtype, float32;
    `is_one`: K is 1, and they are what they are."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, place: Tensor, is_one: bool) -> Tensor:
        rows = x.index_select(0, place.flatten())
        ctx.size, ctx.is_one = len(x), is_one
        if is_one:
            ctx.save_for_backward(weight, place)
            return rows
        rows = rows.view(*place.shape, x.shape[-1])  # [N, K, C]
        ctx.save_for_backward(weight, place, rows)
        out = rows[:, 0] * weight[:, :1]
        for k in range(1, place.shape[1]):
            out = torch.addcmul(out, rows[:, k], weight[:, k : k + 1])
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,), (weight, place, *rest) = grads, ctx.saved_tensors
        if ctx.is_one:  # no dependence, but distributed wrappers want a gradient
            return at_places(grad, place, ctx.size), torch.zeros_like(weight), None, None
        rows = rest[0]
        grad_rows = (grad[:, None] * weight[..., None]).to(rows.dtype)
        grad_weight = (rows * grad[:, None]).sum(-1)
        return at_places(grad_rows, place, ctx.size), grad_weight, None, None


def at_places(x: Tensor, place: Tensor, size: int) -> Tensor:
    """`size` rows with those of x at their places [N, K] and zeros elsewhere; x holds a row [N, C] for all K
    places, or one for each [N, K, C]."""
    rows = x.new_zeros(size, x.shape[-1])
    rows[place] = x if x.ndim == 3 else x[:, None]
    return rows


class AllExperts:
    """Takes the place of `self` in the forward of an expert's class, with its layers, each of all experts."""


class GroupedLinear:
    """The same linear layer of all experts, called with the rows of them all; see `grouped_linear`. Products
    are of `dtype`."""

    def __init__(self, layers: Sequence[Any], ends: Tensor, group: int, dtype: torch.dtype):
        self.layers, self.ends, self.group, self.dtype = layers, ends, group, dtype

    def __call__(self, x: Tensor) -> Tensor:
        if not isinstance(self.layers[0], LoRALinear):
            return self.product(x, stacked([layer.weight for layer in self.layers], self.dtype))
        first = self.layers[0]
        extra = -first.lora_A.out_features % RANK
        out = self.product(x, stacked([layer.base.weight for layer in self.layers], self.dtype))
        a = torch.stack([layer.lora_A.weight for layer in self.layers])  # [E, rank, in]
        b = torch.stack([layer.lora_B.weight for layer in self.layers])  # [E, out, rank]
        low = self.product(first.dropout(x), F.pad(a, (0, 0, 0, extra)))
        return out + self.product(low, F.pad(b, (0, extra))) * first.scale

    def with_same_input(self, other: "GroupedLinear", x: Tensor) -> tuple[Tensor, Tensor]:
        """self(x) and other(x), which give as many columns; in one product if the layers have no adapters."""
        if isinstance(self.layers[0], LoRALinear) or isinstance(other.layers[0], LoRALinear):
            return self(x), other(x)
        pairs = zip(self.layers, other.layers, strict=True)
        weights = stacked([layer.weight for pair in pairs for layer in pair], self.dtype)
        weights = weights.view(len(self.layers), -1, weights.shape[-1])  # [E, 2 * out, in]
        return cast(tuple[Tensor, Tensor], Split.apply(self.product(x, weights), [weights.shape[1] // 2] * 2))

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        return grouped_linear(x.to(self.dtype), weights, self.ends, self.group)


@torch.no_grad()
def stack_experts(model: nn.Module) -> None:
    """Move the same weight of all experts of a layer into one tensor [E, ...], in place, of which each
    expert's is a part. `stacked` then has nothing to copy. For a model that is not trained."""
    for module in model.modules():
        experts = getattr(module, "experts", None)
        if not isinstance(experts, nn.ModuleList):
            continue
        parameters = [dict(expert.named_parameters()) for expert in experts]
        for name, first in parameters[0].items():
            alike = (each[name] for each in parameters if name in each and each[name].shape == first.shape)
            weights: list[Any] = list(alike)
            if len(weights) < len(experts):  # they are not alike
                continue
            stack = torch.stack(weights)
            for weight, part in zip(weights, stack, strict=True):
                weight.data = part


def stacked(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices of one shape as one tensor [E, out, in] of a dtype, where they lie if `stack_experts` has made
    them the parts of one."""
    if torch.compiler.is_compiling():  # which fuses by itself
        return torch.stack(list(weights))
    if weights[0].dtype == dtype and not torch.is_grad_enabled():
        whole = whole_of(weights)
        if whole is not None:
            return whole.view(len(weights), *weights[0].shape)
    return cast(Tensor, Stacked.apply(dtype, *weights))


class Stacked(torch.autograd.Function):
    """`torch.stack` with one cast of all matrices, and one of their gradients."""

    @staticmethod
    def forward(ctx, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.dtype = weights[0].dtype
        return join(weights, dtype).view(len(weights), *weights[0].shape)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, *grads[0].to(ctx.dtype).unbind()


def group_size(rows: int, experts: int) -> int:
    """Rows per group without grouped_mm: multiples of 16 so large that there are at most 5 groups for each
    expert."""
    return GROUP * (rows // (4 * GROUP * experts) + 1)


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor, group: int) -> Tensor:
    """The product of rows [ends[i-1], ends[i]) of x [R, in] with weights[i] of [E, out, in] -> [R, out].

    `ends` [E] and R are multiples of `group`. `ends` stays on the device. Rows behind the last end are
    undefined, and so are their gradients: grouped_mm leaves them unwritten. Nothing may read them."""
    weights = weights.to(x.dtype).transpose(1, 2)  # [E, in, out]
    if fused.has_grouped_mm(x):
        return F.grouped_mm(x, weights, offs=ends)
    starts = torch.arange(0, len(x), group, dtype=ends.dtype, device=x.device)
    # spare groups: rows of zeros
    owner = torch.bucketize(starts, ends, right=True).clamp(max=len(weights) - 1)
    blocks = x.view(-1, group, x.shape[-1])
    return cast(Tensor, GroupedProduct.apply(blocks, weights, owner)).flatten(0, 1)


class GroupedProduct(torch.autograd.Function):
    """x [B, group, in] times the matrices weights [E, in, out], of which group b takes number owner[b].

    As batched products, with a copy of its matrix for each group; the copies are not kept for the backward
    pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, owner: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, owner)
        return x.bmm(weights.index_select(0, owner))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        grad, (x, weights, owner) = grads[0], ctx.saved_tensors
        by_group = x.transpose(1, 2).bmm(grad)  # [B, in, out]
        # summed by a product: always in the same order
        owners = F.one_hot(owner, len(weights)).to(grad.dtype)
        grad_weights = (owners.T @ by_group.flatten(1)).view_as(weights)
        return grad.bmm(weights.index_select(0, owner).transpose(1, 2)), grad_weights, None
