"""The faster forms against the plain ones: the same model with `fused.ENABLED` switched off."""

import pytest
import torch

from model import fused
from tests.model.test_model_minimind import SHAPES, build, flat_batch, gradients, ragged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "branch of a GPU"])
def test_losses_and_gradients_are_those_of_the_plain_forms(shape, dtype, on_gpu, monkeypatch):
    model, batch, found = build(shape).train(), flat_batch(ragged([5, 33, 12, 1, 70])), []
    if on_gpu:
        monkeypatch.setattr(fused, "has_launches", lambda x: True)
        monkeypatch.setattr(fused, "has_grouped_mm", lambda x: False)
    monkeypatch.setattr(fused, "MAX_LOGITS", 50 * 300)
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


@torch.no_grad()
def test_experts_whose_weights_are_one_tensor_compute_the_same(monkeypatch):
    """Their matrices are not copied; one that is put in another's place later is not passed over."""
    monkeypatch.setattr(fused, "has_launches", lambda x: True)
    monkeypatch.setattr(fused, "has_grouped_mm", lambda x: False)
    joins, join = [], fused.join
    monkeypatch.setattr(fused, "join", lambda *given: joins.append(1) or join(*given))
    model, batch = build("moe_top2").eval(), flat_batch(ragged([5, 33]))
    experts = model.model.layers[0].mlp.experts
    before = {name: value.clone() for name, value in model.state_dict().items()}
    want = model(**batch).loss
    copies = len(joins)
    fused.stack_experts(model)
    assert torch.equal(model(**batch).loss, want) and len(joins) == copies == 2 * 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    experts[0].up_proj.weight.copy_(experts[1].up_proj.weight)
    edited = model(**batch).loss
    model.load_state_dict(before)
    assert torch.equal(model(**batch).loss, want)
    experts[0].up_proj = experts[1].up_proj
    assert torch.equal(model(**batch).loss, edited) and not torch.equal(edited, want)
    assert len(joins) == copies + 1
