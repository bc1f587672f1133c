"""The feed-forward half of a layer: SwiGLU, or a mixture of experts (MoE): a router and several SwiGLUs.

Shape legend: N all tokens, C hidden size, E experts, K experts per token, R rows of all experts.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from model.linear import LoRALinear, is_plain, is_plain_product

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# each expert's rows are padded to a multiple: CUDA's grouped_mm needs 8, and oneDNN caches few shapes
GROUP = 16
# the rank of adapters is padded to a multiple: CUDA's grouped_mm wants rows that are multiples of 16 bytes
RANK = 8


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class JoinedLinear(torch.autograd.Function):
    """Linear layers of x [..., in] side by side -> [..., sum of out]: one product, one cast of all weights
    and one of their gradients. The weights are joined again for the backward pass, so no copy of them is
    kept."""

    @staticmethod
    def join(weights: tuple[Tensor, ...] | list[Tensor], dtype: torch.dtype) -> Tensor:
        rows = [len(weight) for weight in weights]
        joined = weights[0].new_empty(sum(rows), weights[0].shape[1], dtype=dtype)
        torch._foreach_copy_(joined.split(rows), weights)
        return joined

    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return F.linear(x, JoinedLinear.join(weights, x.dtype))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,), (x, *weights) = grads, ctx.saved_tensors
        of_weights = (grad.flatten(0, -2).T @ x.flatten(0, -2)).to(weights[0].dtype)
        return grad @ JoinedLinear.join(weights, x.dtype), *of_weights.split(
            [len(weight) for weight in weights]
        )


def has_launches(x: Tensor) -> bool:
    """Whether an operator on x is a kernel that is launched, which takes longer than small copies do."""
    return x.device.type != "cpu"


def can_join(x: Tensor, *layers: Any) -> bool:
    """Whether to compute linear layers of x as one product: in training in half precision, where most weights
    must be cast anyway, and only layers that are a plain product. A compiler fuses by itself."""
    if (
        not has_launches(x)
        or x.dtype == torch.float32
        or not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
    ):
        return False
    return all(map(is_plain_product, layers))


def linear_outputs(x: Tensor, *layers: Any) -> Sequence[Tensor]:
    """What several linear layers of the same x [..., in] give: of each [..., out]."""
    if can_join(x, *layers):
        sizes = [layer.out_features for layer in layers]
        return JoinedLinear.apply(x, *(layer.weight for layer in layers)).split(sizes, dim=-1)
    return [layer(x) for layer in layers]


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202). In a mixture its forward runs for all experts at once, see `AllExperts`."""

    def __init__(self, config: "PretrainedConfig", intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., C]."""
        gate, up = linear_outputs(x.to(product_dtype(x)), self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


def has_grouped_mm(x: Tensor) -> bool:
    """Whether torch multiplies groups of rows of x without a host sync: on a CPU, and in bfloat16 on Hopper
    and Blackwell data-centre GPUs. On other GPUs its grouped_mm is a loop that reads the groups on the
    host."""
    if x.is_cuda:
        return product_dtype(x) == torch.bfloat16 and torch.cuda.get_device_capability()[0] in (9, 10)
    return x.device.type == "cpu"


def group_size(rows: int, experts: int) -> int:
    """Rows per group without grouped_mm: multiples of 16 so large that there are at most 5 groups for each
    expert."""
    return GROUP * (rows // (4 * GROUP * experts) + 1)


class Stacked(torch.autograd.Function):
    """Matrices of one shape as one tensor [E, out, in]; without a copy where they lie so in memory."""

    @staticmethod
    def forward(ctx, *weights: Tensor) -> Tensor:
        if not lie_together(weights):
            return torch.stack(weights)
        first = weights[0].detach()
        return first.as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return grads[0].unbind()


def lie_together(weights: Sequence[Tensor]) -> bool:
    """Whether matrices of one shape lie one behind the other in one storage."""
    places = [
        (each.untyped_storage()._cdata, each.storage_offset(), each.is_contiguous()) for each in weights
    ]
    storage, begin, _ = places[0]
    return places == [(storage, begin + i * weights[0].numel(), True) for i in range(len(weights))]


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor, group: int) -> Tensor:
    """The product of rows [ends[i-1], ends[i]) of x [R, in] with weights[i] of [E, out, in] -> [R, out].

    `ends` [E] and R are multiples of `group`. `ends` stays on the device (no host sync). Rows behind the last
    end are
    undefined, and so are their gradients: grouped_mm leaves them unwritten. Whoever calls this must not read
    them."""
    dtype = product_dtype(x)
    weights = weights.to(dtype).transpose(1, 2)  # [E, in, out]
    if not has_grouped_mm(x):
        starts = torch.arange(0, len(x), group, dtype=ends.dtype, device=x.device)
        # spare groups: rows of zeros
        owner = torch.bucketize(starts, ends, right=True).clamp(max=len(weights) - 1)
        return GroupedProduct.apply(x.to(dtype).view(-1, group, x.shape[-1]), weights, owner).flatten(0, 1)
    if torch.compiler.is_compiling() and dtype != torch.bfloat16:
        return untraced_grouped_mm(x.to(dtype), weights, ends)
    return F.grouped_mm(x.to(dtype), weights, offs=ends)


@torch.compiler.disable
def untraced_grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """grouped_mm in float32, which torch computes but cannot trace: a compiled graph breaks here."""
    return F.grouped_mm(x, weights, offs=ends)


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
        (grad,), (x, weights, owner) = grads, ctx.saved_tensors
        of_groups = x.transpose(1, 2).bmm(grad)  # [B, in, out]
        # summed by a product: always in the same order
        owners = F.one_hot(owner, len(weights)).to(grad.dtype)
        of_weights = (owners.T @ of_groups.flatten(1)).view_as(weights)
        return grad.bmm(weights.index_select(0, owner).transpose(1, 2)), of_weights, None


def operands(layers: Sequence[Any], name: str) -> tuple[list[Tensor], list[LoRALinear]]:
    """The weights [out, in] of the same layer of all experts and their adapters, none or one for each: all
    that a product needs which never calls the layers.

    Raises UserError if a layer computes something else than these say."""
    weights: list[Tensor] = []
    adapters: list[LoRALinear] = []
    for layer in layers:
        parts = [layer]
        if is_plain(layer, LoRALinear):
            adapters.append(layer)
            parts = [layer.base, layer.lora_A, layer.lora_B]
        if not all(map(is_plain_product, parts)):
            raise UserError(
                f"{name} of an expert is {unknown_layer(parts[0])}, which a mixture of experts cannot compute: it "
                "multiplies by the weights of all experts at once and calls none of their layers. It knows nn.Linear "
                "without bias or hooks, also parametrized, and LoRALinear around one (`operands` in "
                "model/feed_forward.py)"
            )
        weights.append(parts[0].weight)
    kinds = {(adapter.scale, adapter.dropout.p, adapter.lora_A.out_features) for adapter in adapters}
    if len(kinds) > 1 or len(adapters) not in (0, len(layers)):
        raise UserError(f"{name}: all experts of a mixture, or none, must have an adapter, and of one kind")
    return weights, adapters


def unknown_layer(layer: nn.Module) -> str:
    """What a layer is that is not known, for an error."""
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__name__}"
    return "an nn.Linear with " + ("a bias" if layer.bias is not None else "hooks or a forward of its own")


class AllExperts:
    """Takes the place of `self` in an expert's forward method, which then computes all experts at once: each
    linear layer is one grouped product of the rows [R, in] of all experts, those of each expert with its own
    weight.

    So a mixture computes what the `forward` of its experts says, as long as that treats each row by itself.
    What has parameters and is not known to `operands` is refused. For `ends` and `group` see
    `grouped_linear`."""

    def __init__(self, experts: Sequence[nn.Module], ends: Tensor, group: int):
        kind = type(experts[0])
        if not all(is_plain(expert, kind) for expert in experts):
            raise UserError(
                f"the experts of a mixture must all be of one class ({kind.__name__}) and without hooks"
            )
        self.experts, self.ends, self.group = experts, ends, group

    def __getattr__(self, name: str) -> Any:
        parts = [getattr(expert, name) for expert in self.experts]
        if is_stateless(parts[0]):
            return parts[0]
        return partial(self.product, *operands(parts, name))

    def product(self, weights: list[Tensor], adapters: list[LoRALinear], x: Tensor) -> Tensor:
        """A linear layer of all experts: x [R, in] -> [R, out]."""
        joined = (
            torch.stack(weights) if torch.compiler.is_compiling() else cast(Tensor, Stacked.apply(*weights))
        )
        out = grouped_linear(x, joined, self.ends, self.group)
        if not adapters:
            return out
        extra = -adapters[0].lora_A.out_features % RANK  # zeros
        # [E, rank, in]
        into = F.pad(torch.stack([adapter.lora_A.weight for adapter in adapters]), (0, 0, 0, extra))
        # [E, out, rank]
        out_of = F.pad(torch.stack([adapter.lora_B.weight for adapter in adapters]), (0, extra))
        low = grouped_linear(adapters[0].dropout(x), into, self.ends, self.group)
        return out + grouped_linear(low, out_of, self.ends, self.group) * adapters[0].scale


def is_stateless(value: Any) -> bool:
    """Whether it is a layer without parameters, such as a dropout, or a number or text."""
    if isinstance(value, nn.Module):
        return not (value._parameters or value._buffers or value._modules)
    return isinstance(value, (int, float, str))


class MOEFeedForward(nn.Module):
    """Top-k routed experts (Qwen3-MoE's arithmetic): softmax over the experts, the best K of them, weighted
    sum."""

    def __init__(self, config: "PretrainedConfig"):
        super().__init__()
        self.num_experts, self.top_k, self.norm = (
            config.num_experts,
            config.num_experts_per_tok,
            config.norm_topk_prob,
        )
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        experts = [FeedForward(config, config.moe_intermediate_size) for _ in range(config.num_experts)]
        self.experts = nn.ModuleList(experts)
        self.lay_together()
        self.tokens_per_expert: Tensor
        self.register_buffer(
            "tokens_per_expert", torch.zeros(self.num_experts, dtype=torch.int64), persistent=False
        )

    def lay_together(self) -> None:
        """Put the experts' matrices into one tensor for each layer: gate and up [E, I, C], down [E, C, I].
        Each matrix stays a parameter of its own, so files, optimizers, adapters and shards do not notice."""
        for name, layer in self.experts[0].named_children():
            if is_stateless(layer):
                continue
            weights, _ = operands([getattr(expert, name) for expert in self.experts], name)
            if isinstance(weights[0], nn.Parameter) and not lie_together(weights):
                for weight, part in zip(
                    weights, torch.stack([weight.data for weight in weights]), strict=True
                ):
                    weight.data = part

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # shards lie where FSDP puts them
        if not any(hasattr(weight, "device_mesh") for weight in self.parameters()):
            self.lay_together()  # to another device or dtype each went alone
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [..., C] -> the mixed output [..., C], and the routing (probabilities [N, E], chosen experts [N,
        K])."""
        flat = x.reshape(-1, x.shape[-1]).to(product_dtype(x))  # [N, C]
        probs = F.softmax(self.gate(flat), dim=-1, dtype=torch.float32)
        weight, chosen = probs.topk(self.top_k, dim=-1)  # [N, K]
        weight = weight / weight.sum(dim=-1, keepdim=True) if self.norm else weight
        # Sort the rows by expert; each expert's rows are padded to a multiple of `group`. Say group = 4, and
        # the chosen experts of five rows are 1 0 1 1 0: then ends = [4, 8], and the rows go to the places 4 0
        # 5 6 1.
        count, expert = chosen.numel(), chosen.flatten()
        group = GROUP if has_grouped_mm(flat) else group_size(count, self.num_experts)
        # [E, N * K]: scanned by row
        picked = expert == torch.arange(self.num_experts, device=expert.device)[:, None]
        # In training an expert without rows gets a group of zeros: on sm_100 grouped_mm leaves the gradient
        # of a matrix without rows unwritten (pytorch issue 172439).
        loads = picked.sum(dim=1).clamp(min=int(torch.is_grad_enabled()))  # [E]
        ends = ((loads + group - 1) // group * group).cumsum(0)  # [E]
        begin = F.pad(ends[:-1], (1, 0))
        place = (picked.cumsum(1) - 1 + begin[:, None]).gather(0, expert[None])[0]  # [N * K]
        size = (count // group + self.num_experts) * group  # R, the largest possible: no host sync
        rows = flat.new_zeros(size, flat.shape[-1])
        rows = rows.index_copy(0, place, flat.repeat_interleave(self.top_k, dim=0))
        ends = ends.to(torch.int32)
        experts = AllExperts(cast(Sequence[nn.Module], self.experts), ends, group)
        out = type(self.experts[0]).forward(experts, rows)
        out = out.index_select(0, place).view(*weight.shape, flat.shape[-1]) * weight[..., None].to(out.dtype)
        return out.sum(dim=1).view(x.shape), (probs, chosen)


def load_balancing_loss(
    probs: Tensor, chosen: Tensor, sample: Tensor, num_samples: int, tokens_per_expert: Tensor | None = None
) -> Tensor:
    """Sum over samples of (tokens of the sample) * E * sum_e f_e * P_e, for one layer.

    f_e is the share of a sample's tokens routed to expert e, P_e its mean probability (Switch Transformer,
    arXiv:2101.03961, eq. 4). Taken per sample (DeepSeek-V3, arXiv:2412.19437, eq. 17) it is a sum that does
    not depend on how samples are cut into micro-batches and ranks. `probs` [N, E], `chosen` [N, K], `sample`
    [N]; sample number `num_samples` marks padding.
    `tokens_per_expert` [E] grows by the tokens that each expert got."""
    picked = F.one_hot(chosen, probs.shape[-1]).sum(dim=1).to(probs.dtype)  # [N, E]
    totals = probs.new_zeros(num_samples + 1, probs.shape[-1])
    counts = totals.index_add(0, sample, picked)[:num_samples]
    masses = totals.index_add(0, sample, probs)[:num_samples]
    if tokens_per_expert is not None:
        tokens_per_expert += counts.sum(dim=0).to(tokens_per_expert.dtype)
    lengths = (counts.sum(dim=-1) / chosen.shape[-1]).clamp(min=1)
    return probs.shape[-1] * ((counts * masses).sum(dim=-1) / lengths).sum()
