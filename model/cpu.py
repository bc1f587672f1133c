"""Forms of the model's arithmetic that were measured to be faster on a CPU. On other devices, and under
torch's compiler, each is torch's own operator. Measurements: docs/dev/LOG.md.

Shape legend: N tokens of a flat batch, C hidden size, R rows, B batch, T keys, H query heads, G key/value
heads, D head size, V vocabulary.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

# from this number of rows on, oneDNN multiplies by a vocabulary faster than MKL
MIN_ROWS_FOR_ONEDNN = 8
ONEDNN_PRODUCT = "_linear_pointwise"


def is_eager_cpu(x: Tensor) -> bool:
    """Whether operators on x run one by one on a CPU, without the compiler."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`F.rms_norm` over the last dimension of float32 x [..., C]."""
    if torch.is_grad_enabled() and is_eager_cpu(x):
        return cast(Tensor, NormWithDerivative.apply(x, weight, eps))
    return F.rms_norm(x, weight.shape, weight, eps)


class NormWithDerivative(torch.autograd.Function):
    """RMSNorm of x [..., C] with the derivative written out: torch has no kernel for it on a CPU, and
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
        grad_x = torch.addcmul(grad * weight, normed, mean, value=-1).mul_(scale)
        return grad_x, grad_weight, None


def pad_to_multiple(x: Tensor, multiple: int, value: int = 0) -> Tensor:
    """Pad x [N, ...] to a multiple of rows, because for each new number of rows oneDNN compiles and keeps a
    product, and Metal a graph."""
    extra = -len(x) % multiple
    if not extra or x.device.type not in ("cpu", "mps"):
        return x
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, extra), value=value)


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear(x, weight)` of x [..., C] and the head's weight [V, C]; in decoding by oneDNN."""
    product = getattr(torch.ops.mkldnn, ONEDNN_PRODUCT, None)
    is_float32 = x.dtype == weight.dtype == torch.float32
    if product is None or torch.is_grad_enabled() or not (is_float32 and is_eager_cpu(x)):
        return F.linear(x, weight)
    if x.numel() < MIN_ROWS_FOR_ONEDNN * x.shape[-1]:
        return F.linear(x, weight)
    return product(x, weight, None, "none", [], "")


def attention_of_one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention in decoding: q [B, G, H / G, D] over k, v [B, G, T, D] -> [B, G, H / G, D]; the mask
    [B, 1, 1, T] is bool. It uses three operators, because the kernel is made for longer queries."""
    if len(q) == 1 or not is_eager_cpu(q):
        return F.scaled_dot_product_attention(q, k, v, mask)
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    return torch.matmul(scores.masked_fill_(~mask, -torch.inf).softmax(dim=-1), v)
