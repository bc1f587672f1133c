"""Faster forms of the model's arithmetic, each beside the plain form that it equals.

ENABLED = False computes everything in the plain forms; tests/model/test_fused.py compares the two.
A form that multiplies by weights without calling their layers is taken only where calls would do the
same (`is_plain_product` in linear.py). Other layers are called.

Shape legend: N tokens of a flat batch, S samples, B batch, T padded length, C hidden size, H query
heads, G key/value heads, D head size, E experts, K experts per token, R rows, M targets, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.linear import LoRALinear, is_plain, is_plain_product, product_dtype

ENABLED = True

Rotary = Callable[[Tensor, Tensor, Tensor], Tensor]


def pad_rows(rows: Tensor) -> int:
    """Rows to pad a flat batch with, up to a multiple of 64, on a CPU and on MPS.

    oneDNN compiles and keeps a product for each new number of rows (docs/dev/LOG.md, "Few kernel shapes
    on the CPU"), and MPS a graph. The plain form pads nothing."""
    if not ENABLED or rows.device.type not in ("cpu", "mps"):
        return 0
    return -len(rows) % 64


def has_launches(x: Tensor) -> bool:
    """Whether launches, or waiting for the device, cost more than small copies do: here where each operator
    is a kernel. Tests set it to take the branch of a GPU on a CPU."""
    return x.device.type != "cpu"


# --- arithmetic between the products, one kernel for each pass

# Whether torch's compiler turns the functions that are given to `in_one_kernel` into kernels. The trainer
# switches it on where a run is long enough to gain from it (trainer/devices/wrapping.py).
KERNELS: bool = False


def in_one_kernel(function: Callable[..., Any], rows: Tensor, *rest: Any) -> Any:
    """function(rows, *rest), compiled where KERNELS is on: operator by operator, each would read and write
    all of its tensors. rows [N, ...]: the first tensor of many with as many rows, whose number changes from
    batch to batch."""
    if not KERNELS or len(rows) < 2:  # the compiler takes 0 and 1 for constants, and compiles again
        return function(rows, *rest)
    for tensor in (rows, *rest):
        if not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter):
            continue
        if tensor.ndim and len(tensor) == len(rows):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one kernel for all numbers of rows
    return compiled(function)(rows, *rest)


@lru_cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled; no measured times decide how it sums, so a resumed run computes the same."""
    return torch.compile(function, options={"deterministic": True})


def has_kernels(x: Tensor) -> bool:
    """Whether to take the forms with kernels: in eager training in half precision on a GPU."""
    return ENABLED and KERNELS and is_eager_training() and has_launches(x) and x.dtype != torch.float32


def is_eager_training() -> bool:
    """Whether derivatives are recorded, operator by operator: a compiler fuses by itself."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


# --- linear layers of the same input as one product


def can_join(x: Tensor, *layers: nn.Module) -> bool:
    """Whether to compute linear layers of x as one product.

    It pays on a GPU, in training in half precision, where all weights must be cast."""
    if not ENABLED or not has_launches(x) or x.dtype == torch.float32 or not is_eager_training():
        return False
    return all(is_plain_product(layer) for layer in layers)


def products(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """The outputs of several linear layers of x [..., in]: of each [..., out]."""
    if not can_join(x, *layers):
        return [layer(x) for layer in layers]
    weights = [cast(Tensor, layer.weight) for layer in layers]
    joined = cast(Tensor, JoinedLinear.apply(x, *weights))
    return cast(Sequence[Tensor], Split.apply(joined, [len(weight) for weight in weights]))


def join(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices [out, in] below each other in another dtype: one cast of them all."""
    rows = [len(weight) for weight in weights]
    joined = weights[0].new_empty(sum(rows), weights[0].shape[1], dtype=dtype)
    torch._foreach_copy_(joined.split(rows), list(weights))
    return joined


class JoinedLinear(torch.autograd.Function):
    """Linear layers side by side: x [..., in] -> [..., sum of out].

    One product, one cast of all weights and one of their gradients. The weights are joined again for the
    backward pass, so no copy of them is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return F.linear(x, join(weights, x.dtype))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        grad = grads[0]
        grad_weights = (grad.flatten(0, -2).T @ x.flatten(0, -2)).to(weights[0].dtype)
        rows = [len(weight) for weight in weights]
        return grad @ join(weights, x.dtype), *grad_weights.split(rows)


class Split(torch.autograd.Function):
    """`x.split(sizes, dim=-1)`. The gradients of the parts are not copied where they are the parts of one
    tensor already, as `SiluProduct` leaves them."""

    @staticmethod
    def forward(ctx, x: Tensor, sizes: list[int]):
        ctx.sizes = sizes
        return x.split(sizes, dim=-1)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        whole = grads[0]._base
        if whole is not None and whole.shape[-1] == sum(ctx.sizes):
            parts = whole.split(ctx.sizes, dim=-1)
            if all(is_same_view(*pair) for pair in zip(parts, grads, strict=True)):
                return whole, None
        return torch.cat(grads, dim=-1), None


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Whether two views show the same part of the same tensor."""
    is_same_place = a.storage_offset() == b.storage_offset() and a.stride() == b.stride()
    return a._base is b._base and is_same_place and a.shape == b.shape


# --- SwiGLU's activation


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if has_kernels(gate):
        return cast(Tensor, SiluProduct.apply(gate, up))
    return F.silu(gate) * up


class SiluProduct(torch.autograd.Function):
    """silu(gate) * up with one kernel for each pass."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return in_one_kernel(silu_product_forward, gate, up)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        gate, up = ctx.saved_tensors
        both = in_one_kernel(silu_product_backward, gate, up, grads[0])
        return both.split(gate.shape[-1], dim=-1)


def silu_product_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32."""
    return (F.silu(gate.float()) * up).to(gate.dtype)


def silu_product_backward(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    """The gradients of gate and up [..., I] side by side: [..., 2I]."""
    x, out_dtype = gate.float(), gate.dtype
    sigmoid = x.sigmoid()
    grad_gate = grad * up * sigmoid * (1 + x * (1 - sigmoid))
    grad_up = grad * x * sigmoid
    return torch.cat((grad_gate.to(out_dtype), grad_up.to(out_dtype)), dim=-1)


# --- RMSNorm with its derivative written out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`F.rms_norm` of float32 x over the last dimension; in training on a CPU with the derivative written
    out, since autograd's takes twice the time there (torch has no kernel for it on a CPU)."""
    if ENABLED and x.device.type == "cpu" and is_eager_training():
        return cast(Tensor, WrittenOutNorm.apply(x, weight, eps))
    return F.rms_norm(x, weight.shape, weight, eps)


class WrittenOutNorm(torch.autograd.Function):
    """RMSNorm of x [..., C]. Kept for the backward pass: x, and one number for each row."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,), (x, weight, scale) = grads, ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        mean = product.mul_(weight).mean(-1, keepdim=True)
        return torch.addcmul(grad * weight, normed, mean, value=-1).mul_(scale), grad_weight, None


# --- norm and rotation of query and key heads in one pass


def can_fuse_heads(attention: Any, x: Tensor, norm: type[nn.Module], rotary: Rotary) -> bool:
    """Whether `rotated_heads` computes what the layers of an `Attention` do, and pays; norm: `RMSNorm`,
    rotary: `apply_rotary`."""
    if not can_join(x, attention.q_proj, attention.k_proj, attention.v_proj):
        return False
    if x.device.type == "mps":  # torch's norm there needs a weight
        return False
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if not (is_plain(q_norm, norm) and is_plain(k_norm, norm)):
        return False
    if q_norm.eps != k_norm.eps or q_norm.weight.dtype != torch.float32:
        return False
    return is_norm_and_rotary(norm, norm.forward, rotary)


@lru_cache(maxsize=8)
def is_norm_and_rotary(norm: type[nn.Module], forward: object, rotary: Rotary) -> bool:
    """Whether a class of norms, with this forward, and a rotation compute what `NormAndRotary` does. Either
    may have been edited, so one example is computed, on the host, the first time."""
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
        weight, qkv = torch.linspace(0.5, 1.5, 8), torch.linspace(-1, 2, 5 * 3 * 8).view(5, 3, 8)
        cos, sin = torch.linspace(-1, 1, 40).view(5, 8), torch.linspace(1, 0, 40).view(5, 8)
        try:
            layer = norm(8, 0.1)
            layer.weight.copy_(weight)  # type: ignore[operator]
            found = rotary(layer(qkv[:, :1]), cos, sin)
        except (AttributeError, RuntimeError, TypeError):  # an edited one may want something else
            return False
        angles = cos.unsqueeze(-2), sin.unsqueeze(-2)
        heads, _ = norm_and_rotate(qkv, weight, weight, *angles, 0.1, (1, 1), torch.float32)
    q = heads[:, :1]
    return found.shape == q.shape and torch.allclose(found, q, atol=1e-5)


def rotated_heads(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`Attention.heads`: rotated queries [..., H, D] and keys, and values [..., G, D] of x [..., C]."""
    layers, head_dim = (attention.q_proj, attention.k_proj, attention.v_proj), attention.head_dim
    qkv = cast(Tensor, JoinedLinear.apply(x, *(layer.weight for layer in layers)))
    qkv = qkv.unflatten(-1, (-1, head_dim))
    heads = [len(layer.weight) // head_dim for layer in layers]
    dtype = qkv.dtype if has_varlen_kernel(qkv) else torch.float32
    weights = attention.q_norm.weight, attention.k_norm.weight
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return NormAndRotary.apply(qkv, *weights, cos, sin, attention.q_norm.eps, heads[:2], dtype)


class NormAndRotary(torch.autograd.Function):
    """`RMSNorm` and `apply_rotary` of query and key heads side by side, with the derivative written out.

    From qkv [..., H + 2G, D], the norms' weights [D], and cos, sin [..., 1, D]: q [..., H, D] and k [..., G,
    D] in `dtype`, v [..., G, D] as it is. heads: (H, G). Kept for the backward pass: qkv, and one number
    for each head."""

    @staticmethod
    def forward(ctx, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos, sin, eps, heads, dtype):
        tensors = qkv, q_weight, k_weight, cos, sin
        out, scale = in_one_kernel(norm_and_rotate, *tensors, eps, heads, dtype)
        ctx.save_for_backward(*tensors, scale)
        ctx.heads = heads
        q, k = out.split(heads, dim=-2)
        return q, k, qkv[..., sum(heads) :, :]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        found = in_one_kernel(norm_and_rotate_backward, *ctx.saved_tensors, *grads)
        return *found, None, None, None, None, None


def norm_and_rotate(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, heads, dtype
) -> tuple[Tensor, Tensor]:
    """The query and key heads [..., H + G, D] of qkv, normed and rotated, in `dtype`; and the factor of each
    head's norm, [..., H + G, 1]."""
    weight = weights_of_heads(q_weight, k_weight, heads)
    qk = qkv[..., : len(weight), :].float()
    # as an operator it can be compiled; by itself one kernel on CUDA
    normed, scale = torch.ops.aten._fused_rms_norm(qk, qk.shape[-1:], None, eps)
    normed.mul_(weight)
    rotated = torch.empty_like(normed, dtype=dtype)
    torch.addcmul(normed * cos, normed.roll(normed.shape[-1] // 2, dims=-1), sin, out=rotated)
    return rotated, scale


def norm_and_rotate_backward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, scale: Tensor, *grads: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv and of both weights, from those of q, k and v."""
    grad_q, grad_k, grad_v = grads
    heads = grad_q.shape[-2], grad_k.shape[-2]
    weight = weights_of_heads(q_weight, k_weight, heads)
    grad = torch.cat((grad_q, grad_k), dim=-2)
    grad = torch.addcmul(grad * cos, grad.roll(grad.shape[-1] // 2, dims=-1), sin, value=-1)  # rotated back
    normed = qkv[..., : len(weight), :] * scale
    product = grad * normed
    grad_weight = product.flatten(0, -3).sum(dim=0)  # [H + G, D]
    mean = product.mul_(weight).mean(-1, keepdim=True)
    grad_qk = grad.mul_(weight).addcmul_(normed, mean, value=-1).mul_(scale)
    grad_qkv = torch.cat((grad_qk.to(qkv.dtype), grad_v.to(qkv.dtype)), dim=-2)
    of_q, of_k = grad_weight.split(heads)
    return grad_qkv, of_q.sum(dim=0), of_k.sum(dim=0)


def weights_of_heads(q_weight: Tensor, k_weight: Tensor, heads: Sequence[int]) -> Tensor:
    """The norm's weight of each head [H + G, D]."""
    return torch.cat((q_weight.expand(heads[0], -1), k_weight.expand(heads[1], -1)))


# --- attention


class Spans(NamedTuple):
    """Where the samples of a flat batch begin and end.

    shared_prefix: where samples begin alike, each also sees keys of that beginning. It holds the rows [R]
    of the keys that each sample sees, one sample behind the other, and where those of each begin and end."""

    cu_seqlens: Tensor  # [S + 1] on the device
    max_seqlen: int
    host_cu_seqlens: Tensor  # [S + 1] on the host
    shared_prefix: "tuple[Tensor, Spans] | None" = None


def has_varlen_kernel(values: Tensor) -> bool:
    """Whether torch has a variable-length attention kernel: in half precision, on GPUs from Ampere on."""
    half, head_dim = values.dtype in (torch.float16, torch.bfloat16), values.shape[-1]
    if not (ENABLED and values.is_cuda and half and head_dim % 8 == 0 and head_dim <= 256):
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


def flat_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Causal attention within each sample of a flat batch: q [N, H, D], k and v [N, G, D] -> [N, H, D].

    One variable-length FlashAttention kernel where torch has one, else one call for each sample. Which
    tokens see which is said in three places, one for each form of input: here for training, in
    `MiniMindForCausalLM.forward` for padded batches, and in `MiniMindModel.visible` for decoding."""
    if not len(q):  # an empty micro-batch: DDP wants zero gradients, not None
        return (q + 0 * (k.sum() + v.sum())).to(v.dtype)
    seen = spans
    if spans.shared_prefix is not None:
        rows, seen = spans.shared_prefix
        k, v = take_rows(k, rows), take_rows(v, rows)
    if not has_varlen_kernel(v):
        return attention_by_sample(q, k, v, spans.host_cu_seqlens, seen.host_cu_seqlens)
    from torch.nn.attention.varlen import varlen_attn  # takes long, and no other device needs it

    borders = (spans.cu_seqlens, seen.cu_seqlens, spans.max_seqlen, seen.max_seqlen)
    q, k = q.to(v.dtype), k.to(v.dtype)
    return cast(Tensor, varlen_attn(q, k, v, *borders, window_size=(-1, 0), enable_gqa=True))  # causal


@torch.compiler.disable
def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows [R] of x [N, ...], some of them several times.

    The gradients of a row must be summed in the same order each time. On CUDA indexing does so, but not
    index_select, which uses atomic additions; nor do the compiler's kernels."""
    if x.device.type != "cpu":
        return x[rows]
    return x.index_select(0, rows)


@torch.compiler.disable
def attention_by_sample(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """The plain form of `flat_attention`: one call for each sample, whose queries are the last of its keys.

    It reads `cu_seqlens` and `cu_seqlens_k` on the host. On a CPU it computes in float32: the bfloat16
    kernel would be compiled for every new length."""
    lengths, lengths_k = cu_seqlens.diff().tolist(), cu_seqlens_k.diff().tolist()
    lengths.append(len(q) - sum(lengths))  # the padding rows
    lengths_k.append(len(k) - sum(lengths_k))
    out_dtype = v.dtype
    if q.device.type != "cpu":  # there grouped queries would be computed without a kernel
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        q, k = q.to(v.dtype), k.to(v.dtype)
    else:
        q, k, v = q.float(), k.float(), v.float()
    samples = zip(q.split(lengths), k.split(lengths_k), v.split(lengths_k), strict=True)
    with torch.autocast(q.device.type, enabled=False):
        out = torch.cat([sample_attention(*sample) for sample in samples])
    return out.to(out_dtype)


def sample_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the queries q [T, H, D] of a sample, the last of its keys [T', G, D]."""
    before, mask = len(k) - len(q), None
    if len(q) > 1 and before >= len(q):
        mask = q.new_ones(len(q), len(k), dtype=torch.bool).tril(before)
    elif len(q) > 1 and before:
        # pad the queries: the causal kernel skips the future, with a mask it computes all
        q = F.pad(q, (0, 0, 0, 0, before, 0))
        return padded_attention(q[None], k[None], v[None], None)[0, before:]
    return padded_attention(q[None], k[None], v[None], mask)[0]


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key or value heads [N, G, D], each as often as query heads share it -> [N, H, D]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of q [B, T, H, D] over k, v [B, T', G, D]; a mask [B, 1, T, T'] replaces the causal
    one."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if q.shape[1] == 1 and ENABLED:
        return attention_of_one_query(q, k, v, mask)
    q = q.transpose(1, 2)
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True).transpose(1, 2)


def attention_of_one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention in decoding: q [B, 1, H, D] over k, v [B, G, T', D] -> [B, 1, H, D].

    The heads that share a key take the place of queries, so no key is repeated."""
    grouped = q.reshape(len(q), k.shape[1], q.shape[2] // k.shape[1], q.shape[-1])  # [B, G, H / G, D]
    if q.device.type == "cpu" and len(q) > 1 and mask is not None and mask.is_floating_point():
        # three operators: the kernel is made for longer queries
        scores = torch.matmul(grouped * q.shape[-1] ** -0.5, k.transpose(-1, -2)) + mask
        return torch.matmul(scores.softmax(dim=-1), v).reshape(q.shape)
    return F.scaled_dot_product_attention(grouped, k, v, mask).reshape(q.shape)


# --- experts: the rows of all of them in one grouped product for each linear layer

# each expert's rows are padded to a multiple: CUDA's grouped_mm needs 8, and oneDNN caches few shapes
GROUP = 16
# ranks of adapters are padded to a multiple: CUDA's grouped_mm wants rows that are multiples of 16 bytes
RANK = 8


def can_group(experts: Any, x: Tensor) -> bool:
    """Whether `grouped_experts` computes what calls of the experts do, and pays: on a GPU, where calls would
    wait for the device, and in half precision on a CPU, where oneDNN would compile a product for each number
    of rows; but not in decoding there, which reads only the weights that it needs.

    Only experts of one class with nothing but plain linear layers in them, or adapters of one kind around
    these, can be computed without calls."""
    if not ENABLED:
        return False
    if not has_launches(x):
        must_cast = next(experts[0].parameters()).dtype != x.dtype
        if x.dtype == torch.float32 or not (must_cast or torch.is_grad_enabled()):
            return False
    for expert in experts:
        if not is_plain(expert, type(experts[0])) or expert._parameters or expert._buffers:
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
    group = GROUP if has_grouped_mm(x) else group_size(count, number)
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
        setattr(all_experts, name, GroupedLinear(layers, ends, group))
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
    """The same linear layer of all experts, called with the rows of them all; see `grouped_linear`."""

    def __init__(self, layers: Sequence[Any], ends: Tensor, group: int):
        self.layers, self.ends, self.group = layers, ends, group

    def __call__(self, x: Tensor) -> Tensor:
        if not isinstance(self.layers[0], LoRALinear):
            return self.product(x, stacked([layer.weight for layer in self.layers], x))
        first = self.layers[0]
        extra = -first.lora_A.out_features % RANK
        out = self.product(x, stacked([layer.base.weight for layer in self.layers], x))
        a = torch.stack([layer.lora_A.weight for layer in self.layers])  # [E, rank, in]
        b = torch.stack([layer.lora_B.weight for layer in self.layers])  # [E, out, rank]
        low = self.product(first.dropout(x), F.pad(a, (0, 0, 0, extra)))
        return out + self.product(low, F.pad(b, (0, extra))) * first.scale

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        return grouped_linear(x, weights, self.ends, self.group)


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
            for place, weight in enumerate(weights):
                weight.data = stack[place]
                weight.in_stack = (stack, place)


def stacked(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """Matrices of one shape as one tensor [E, out, in], in the dtype of products of x."""
    stack, _ = getattr(weights[0], "in_stack", (None, 0))  # of `stack_experts`
    is_stacked = stack is not None and are_in_order(weights, stack)
    if is_stacked and stack.dtype == product_dtype(x) and stack.device == x.device:
        return stack
    if torch.compiler.is_compiling():  # which fuses by itself
        return torch.stack(list(weights))
    return cast(Tensor, Stacked.apply(product_dtype(x), *weights))


def are_in_order(weights: Sequence[Tensor], stack: Tensor) -> bool:
    """Whether these weights are the parts of a stack, none of them replaced by another since."""
    for place, weight in enumerate(weights):
        own_stack, own_place = getattr(weight, "in_stack", (None, 0))
        if own_stack is not stack or own_place != place:
            return False
    return True


class Stacked(torch.autograd.Function):
    """`torch.stack` with one cast of all matrices, and one of their gradients."""

    @staticmethod
    def forward(ctx, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.dtype = weights[0].dtype
        return join(weights, dtype).view(len(weights), *weights[0].shape)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, *grads[0].to(ctx.dtype).unbind()


def has_grouped_mm(x: Tensor) -> bool:
    """Whether torch multiplies groups of rows of x without a host sync: on a CPU, and in bfloat16 on Hopper
    and Blackwell data-centre GPUs. On other GPUs its grouped_mm reads the groups on the host."""
    if x.is_cuda:
        return product_dtype(x) == torch.bfloat16 and torch.cuda.get_device_capability()[0] in (9, 10)
    return x.device.type == "cpu"


def group_size(rows: int, experts: int) -> int:
    """Rows per group without grouped_mm: multiples of 16 so large that there are at most 5 groups for each
    expert."""
    return GROUP * (rows // (4 * GROUP * experts) + 1)


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor, group: int) -> Tensor:
    """The product of rows [ends[i-1], ends[i]) of x [R, in] with weights[i] of [E, out, in] -> [R, out].

    `ends` [E] and R are multiples of `group`. `ends` stays on the device. Rows behind the last end are
    undefined, and so are their gradients: grouped_mm leaves them unwritten. Nothing may read them."""
    x = x.to(product_dtype(x))
    weights = weights.to(x.dtype).transpose(1, 2)  # [E, in, out]
    if has_grouped_mm(x):
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


# --- head and cross entropy

MAX_LOGITS = 2**27  # of a head at once: 0.5 GB in float32
MIN_ROWS_FOR_ONEDNN_HEAD = 8  # rows from which oneDNN multiplies by a vocabulary faster than MKL does
ONEDNN_PRODUCT = "_linear_pointwise"


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    """Cross entropies of logits [M, V] in float32, their sum or (`none`) each [M].

    On a CPU 512 rows at a time, whose float32 copies fit its cache; on a GPU with one kernel for each pass,
    without a float32 copy. Plain is all at once."""
    if has_kernels(logits):
        losses = cast(Tensor, CrossEntropy.apply(logits, targets))
        return losses.sum() if reduction == "sum" else losses
    rows = len(logits)
    if ENABLED and logits.device.type == "cpu":
        rows = 512
    losses = []
    for x, y in zip(logits.split(rows), targets.split(rows), strict=True):
        losses.append(F.cross_entropy(x.float(), y, reduction=reduction))
    return torch.stack(losses).sum() if reduction == "sum" else torch.cat(losses)


class CrossEntropy(torch.autograd.Function):
    """The cross entropies [M] of logits [M, V]. Kept for the backward pass: the logits, and one number for
    each row."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        losses, logsumexp = in_one_kernel(cross_entropy_forward, logits, targets)
        ctx.save_for_backward(logits, targets, logsumexp)
        return losses

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return in_one_kernel(cross_entropy_backward, *ctx.saved_tensors, grads[0]), None


def cross_entropy_forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The cross entropies [M], 0 where the target is negative, and log(sum(exp(logits))) [M]."""
    logsumexp = logits.float().logsumexp(dim=-1)
    chosen = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].float()
    return torch.where(targets >= 0, logsumexp - chosen, 0.0), logsumexp


def cross_entropy_backward(logits: Tensor, targets: Tensor, logsumexp: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits, (probabilities - one at the target) times the loss's [M]."""
    probabilities = (logits.float() - logsumexp[:, None]).exp()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    grad = torch.where(targets >= 0, grad, 0.0)
    return ((probabilities - is_target.float()) * grad[:, None]).to(logits.dtype)


def head_cross_entropy(head: nn.Module, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """`cross_entropy` of the logits head(hidden [M, C]).

    More logits than MAX_LOGITS are computed in pieces, and again in the backward pass, so that memory does
    not grow with the vocabulary times the targets."""

    rows = max(1, MAX_LOGITS // cast(int, head.out_features))
    if len(hidden) <= rows or not ENABLED:
        return cross_entropy(head(hidden), targets, reduction)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(head(x), y, reduction)

    losses = []
    for x, y in zip(hidden.split(rows), targets.split(rows), strict=True):
        losses.append(checkpoint(loss_of, x, y, use_reentrant=False, preserve_rng_state=False))
    return torch.stack(losses).sum() if reduction == "sum" else torch.cat(losses)


def head_logits(head: nn.Module, hidden: Tensor) -> Tensor:
    """Float32 logits [R, V] of hidden states [R, C] in decoding; of several rows on a CPU by oneDNN."""
    product = getattr(torch.ops.mkldnn, ONEDNN_PRODUCT, None)
    if not ENABLED or product is None or hidden.device.type != "cpu" or not is_plain_product(head):
        return head(hidden).float()
    is_float32 = hidden.dtype == head.weight.dtype == torch.float32
    if not is_float32 or len(hidden) < MIN_ROWS_FOR_ONEDNN_HEAD:
        return head(hidden).float()
    return product(hidden, head.weight, None, "none", [], "")
