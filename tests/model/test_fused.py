"""The faster forms against the plain ones: the same model with `fused.ENABLED` switched off."""

from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from model import experts, fused, losses
from model.experts import stack_experts
from model.linear import Split
from model.model_minimind import apply_rotary
from tests.model.test_model_minimind import SHAPES, build, flat_batch, gradients, ragged, take_gpu_branch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("branch", ["cpu", "gpu", "gpu with kernels"])
def test_losses_and_gradients_are_those_of_the_plain_forms(shape, dtype, branch, monkeypatch):
    model, batch, found = build(shape).train(), flat_batch(ragged([5, 33, 12, 1, 70])), []
    if branch != "cpu":
        take_gpu_branch(monkeypatch)
    monkeypatch.setattr(fused, "KERNELS", branch == "gpu with kernels")
    monkeypatch.setattr(fused, "compiled", lambda function: function)
    monkeypatch.setattr(losses, "MAX_LOGITS", 50 * 300)
    for enabled in (True, False):
        monkeypatch.setattr(fused, "ENABLED", enabled)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = model(**batch)
        (out.loss + out.aux_loss).backward()
        found.append((out.loss.detach(), torch.cat([g.flatten() for g in gradients(model).values()])))
    (loss, grads), (plain_loss, plain_grads) = found
    tolerance = 1e-5 if dtype == torch.float32 else 0.08  # in bfloat16 as rounding does
    assert abs(loss - plain_loss) <= tolerance * plain_loss
    assert (grads - plain_grads).norm() <= tolerance * plain_grads.norm()


def gradients_of(function, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The result of a function, and the gradients of a weighted sum of it."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def test_derivatives_that_are_written_out_are_torchs():
    torch.manual_seed(0)
    gate, up, logits = torch.randn(7, 12), torch.randn(7, 12), 4 * torch.randn(9, 30)
    targets = torch.tensor([0, 29, 3, -100, 5, 5, 7, -100, 1])
    cos, sin = torch.rand(7, 4), torch.rand(7, 4)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)  # as RotaryEmbedding's

    def in_kernels(qkv, q_weight, k_weight):
        angles = cos[:, None], sin[:, None]
        q, k, v = fused.NormAndRotary.apply(qkv, q_weight, k_weight, *angles, 0.1, (2, 1), torch.float32)
        return torch.cat((q, k, v), dim=1)

    def plain(qkv, q_weight, k_weight):
        q, k, v = qkv.split((2, 1, 1), dim=1)
        q, k = F.rms_norm(q, (8,), q_weight, 0.1), F.rms_norm(k, (8,), k_weight, 0.1)
        return torch.cat((apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v), dim=1)

    def losses(x):
        return F.cross_entropy(x, targets, reduction="none")

    cases = [
        (fused.SiluProduct.apply, lambda a, b: F.silu(a) * b, (gate, up)),
        (lambda x: fused.CrossEntropy.apply(x, targets), losses, (logits,)),
        (in_kernels, plain, (torch.randn(7, 4, 8), torch.rand(8), torch.rand(8))),
    ]
    for kernels, torchs, tensors in cases:
        found, want = gradients_of(kernels, *tensors), gradients_of(torchs, *tensors)
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_a_split_copies_no_gradient_that_is_whole():
    """And takes parts of other tensors, or in another order, for what they are."""
    whole = torch.randn(3, 10)
    parts = whole.split((4, 6), dim=-1)
    found = Split.backward(None, *parts)[0]
    assert torch.equal(found, whole) and found.data_ptr() == whole.data_ptr()
    for grads in ((parts[0], parts[1] + 0), (whole[:, 4:8], whole[:, :6]), (parts[0].clone(), parts[1])):
        found = Split.backward(None, *grads)[0]
        assert found.data_ptr() != whole.data_ptr() and torch.equal(found, torch.cat(grads, dim=-1))


def test_kernels_are_compiled_once_for_all_sizes(monkeypatch):
    """Two for each of norm and rotation, SwiGLU and loss; also where a batch has as many tokens as a head has
    dimensions."""
    take_gpu_branch(monkeypatch)
    monkeypatch.setattr(fused, "KERNELS", True)
    counter = CompileCounter()
    monkeypatch.setattr(fused, "compiled", lru_cache(lambda f: torch.compile(f, backend=counter)))
    torch.compiler.reset()
    model = build("dense").train()
    for lengths in ([5, 33, 12, 1, 70], [7, 9], [8], [40, 3, 3, 3], [1, 2]):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**flat_batch(ragged(lengths))).loss
        loss.backward()
    assert counter.frame_count == 6


@torch.no_grad()
def test_experts_whose_weights_are_one_tensor_compute_the_same(monkeypatch):
    """Their matrices are not copied; one that is put in another's place later is not passed over."""
    take_gpu_branch(monkeypatch)
    joins, join = [], experts.join
    monkeypatch.setattr(experts, "join", lambda *given: joins.append(1) or join(*given))
    model, batch = build("moe_top2").eval(), flat_batch(ragged([5, 33]))
    layer = model.model.layers[0].mlp
    before = {name: value.clone() for name, value in model.state_dict().items()}
    want = model(**batch).loss
    copies = len(joins)
    stack_experts(model)
    assert torch.equal(model(**batch).loss, want) and len(joins) == copies == 2 * 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    layer.experts[0].up_proj.weight.copy_(layer.experts[1].up_proj.weight)
    edited = model(**batch).loss
    model.load_state_dict(before)
    assert torch.equal(model(**batch).loss, want)
    layer.experts[0].up_proj = layer.experts[1].up_proj
    assert torch.equal(model(**batch).loss, edited) and not torch.equal(edited, want)
    assert len(joins) == copies + 1
