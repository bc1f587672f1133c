"""Faster forms of the model's arithmetic, most of them for training on a GPU in half precision. Each equals
the plain form beside which it is called in model_minimind.py and losses.py.

ENABLED = False computes everything in the plain forms, also attention and experts;
tests/model/test_fused.py compares the two. A form that multiplies by weights without calling their layers is
taken only where calls would do the same (`is_plain_product` in linear.py). Other layers are called.

Shape legend: N tokens of a flat batch, C hidden size, H query heads, G key/value heads, D head size, R rows,
M targets, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.linear import JoinedLinear, Split, is_plain, is_plain_product

ENABLED = True

# The type of device where operators are calls. On others each is a kernel that is launched, and launches, or
# waiting for the device, cost more than small copies do. Tests set it to take the branch of a GPU on a CPU.
HOST = "cpu"

# Whether torch's compiler turns the functions that are given to `in_one_kernel` into kernels. The trainer
# switches it on where a run is long enough to gain from it (trainer/devices/wrapping.py).
KERNELS: bool = False

Rotary = Callable[[Tensor, Tensor, Tensor], Tensor]


def is_training() -> bool:
    """Whether gradients are computed, operator by operator: a compiler fuses by itself."""
    return ENABLED and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def is_half_training(x: Tensor) -> bool:
    """Whether to take the forms of this file for x on a GPU: in training in half precision."""
    return is_training() and x.dtype != torch.float32


def own_attributes(layer: nn.Module) -> tuple[tuple[str, Any], ...] | None:
    """What a layer holds beside its parameters, such as an epsilon, or a field of the config; None if these
    are not numbers and texts alone."""
    attributes = tuple((name, value) for name, value in vars(layer).items() if not name.startswith("_"))
    is_plain_data = all(isinstance(value, bool | int | float | str | None) for _, value in attributes)
    return attributes if is_plain_data else None


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def has_varlen_kernel(values: Tensor) -> bool:
    """Whether torch has a variable-length attention kernel: in half precision, on GPUs from Ampere on."""
    half, head_dim = values.dtype in (torch.float16, torch.bfloat16), values.shape[-1]
    if not (ENABLED and values.is_cuda and half and head_dim % 8 == 0 and head_dim <= 256):
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


def has_grouped_mm(x: Tensor) -> bool:
    """Whether torch multiplies groups of rows of x without a host sync: on a CPU, and in bfloat16 on Hopper
    and Blackwell data-centre GPUs. On other GPUs its grouped_mm reads the groups on the host."""
    if x.is_cuda:
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in (9, 10)
    return x.device.type == "cpu"


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


# --- on a CPU


class NormWithDerivative(torch.autograd.Function):
    """RMSNorm of x [..., C] with the derivative written out, for a CPU: torch has no kernel for it there, and
    autograd's takes twice the time. Kept for the backward pass: x, and one number for each row."""

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


def pad_to_multiple(x: Tensor, value: int = 0) -> Tensor:
    """x [N] filled up to a multiple of 64, on a CPU and on MPS: oneDNN compiles and keeps a product for each
    new number of rows (docs/dev/LOG.md, "Few kernel shapes on the CPU"), and MPS a graph."""
    extra = -len(x) % 64
    if not (ENABLED and extra and x.device.type in (HOST, "mps")):
        return x
    return F.pad(x, (0, extra), value=value)


# --- SwiGLU: gate and up in one product, then one kernel for each pass


def gated(x: Tensor, gate_proj: Any, up_proj: Any) -> Tensor:
    """silu(gate_proj(x)) * up_proj(x) of x [..., in]; with one product if calls would compute no more. The
    layers are those of one MLP, or of all experts (`GroupedLinear`)."""
    if not isinstance(gate_proj, nn.Module):
        gate, up = gate_proj.with_same_input(up_proj, x)
    elif is_plain_product(gate_proj) and is_plain_product(up_proj):
        weights = [cast(Tensor, gate_proj.weight), cast(Tensor, up_proj.weight)]
        gate, up = Split.apply(JoinedLinear.apply(x, *weights), [len(weight) for weight in weights])
    else:
        gate, up = gate_proj(x), up_proj(x)
    if KERNELS:
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


# --- norm and rotation of query and key heads in one pass


def can_rotate_heads(attention: Any, x: Tensor, norm: type[nn.Module], rotary: Rotary) -> bool:
    """Whether to take `rotated_heads`, as it computes what the layers of an `Attention` do; norm: `RMSNorm`,
    rotary: `apply_rotary`."""
    if not is_half_training(x) or x.device.type == "mps":  # torch's norm there needs a weight
        return False
    if not all(is_plain_product(layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)):
        return False
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if not (is_plain(q_norm, norm) and is_plain(k_norm, norm)) or q_norm.weight.dtype != torch.float32:
        return False
    attributes = own_attributes(q_norm)
    if attributes is None or attributes != own_attributes(k_norm):
        return False
    return is_norm_and_rotary(norm, norm.forward, attributes, rotary)


@lru_cache(maxsize=8)
def is_norm_and_rotary(
    norm: type[nn.Module], forward: object, attributes: tuple[tuple[str, Any], ...], rotary: Rotary
) -> bool:
    """Whether norms of a class, with this forward and these attributes, and a rotation compute what
    `NormAndRotary` does. Any of them may have been edited, so one example is computed, on the host, the first
    time."""
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
        weight, qkv = torch.linspace(0.5, 1.5, 8), torch.linspace(-1, 2, 5 * 3 * 8).view(5, 3, 8)
        cos, sin = torch.linspace(-1, 1, 40).view(5, 8), torch.linspace(1, 0, 40).view(5, 8)
        try:
            layer = norm.__new__(norm)
            nn.Module.__init__(layer)
            for name, value in attributes:
                setattr(layer, name, value)
            layer.weight = nn.Parameter(weight)
            rotated, eps = rotary(layer(qkv[:, :1]), cos, sin), cast(float, layer.eps)
        except (AttributeError, RuntimeError, TypeError):  # an edited one may want something else
            return False
        angles = cos.unsqueeze(-2), sin.unsqueeze(-2)
        heads, _ = norm_and_rotate(qkv, weight, weight, *angles, eps, (1, 1), torch.float32)
    q = heads[:, :1]
    return rotated.shape == q.shape and torch.allclose(rotated, q, atol=1e-5)


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
        gradients = in_one_kernel(norm_and_rotate_backward, *ctx.saved_tensors, *grads)
        return *gradients, None, None, None, None, None


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


# --- cross entropy


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


# --- the head in decoding

MIN_ROWS_FOR_ONEDNN_HEAD = 8  # rows from which oneDNN multiplies by a vocabulary faster than MKL does
ONEDNN_PRODUCT = "_linear_pointwise"


def head_logits(head: nn.Module, hidden: Tensor) -> Tensor:
    """Float32 logits [R, V] of hidden states [R, C] in decoding; of several rows on a CPU by oneDNN."""
    product = getattr(torch.ops.mkldnn, ONEDNN_PRODUCT, None)
    if not ENABLED or product is None or hidden.device.type != "cpu" or not is_plain_product(head):
        return head(hidden).float()
    is_float32 = hidden.dtype == head.weight.dtype == torch.float32
    if not is_float32 or len(hidden) < MIN_ROWS_FOR_ONEDNN_HEAD:
        return head(hidden).float()
    return product(hidden, head.weight, None, "none", [], "")
