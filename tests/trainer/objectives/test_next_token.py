"""The losses of a language model on flat batches."""

import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.trainer.devices.test_wrapping import flat_batch
from trainer.objectives.next_token import (
    frozen_model,
    held_out_loss,
    model_inputs,
    next_token_loss,
    target_log_probs,
    target_logits,
)


@pytest.mark.parametrize("use_moe", [False, True])
def test_the_logits_at_the_targets_are_those_of_the_loss(use_moe):
    """One row per target, without padding rows; torch's cross entropy of them is the loss, with the same
    gradients."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2, use_moe=use_moe))
    batch = flat_batch(3, [9, 30, 5])
    logits, aux_loss = target_logits(model, batch)
    assert logits.shape == (len(batch["targets"]), 6400)
    own = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum")
    gradients = [torch.autograd.grad(own + aux_loss, list(model.parameters()))]
    loss, same_aux_loss, _ = next_token_loss(model, batch)
    gradients.append(torch.autograd.grad(loss + same_aux_loss, list(model.parameters())))
    assert own.item() == pytest.approx(loss.item(), rel=1e-6) and torch.equal(aux_loss, same_aux_loss)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert held_out_loss(model, batch)["loss"].item() == loss.item()
    everywhere = model(
        **{k: batch[k] for k in ("input_ids", "position_ids", "cu_seqlens", "max_seqlen")}
    ).logits
    torch.testing.assert_close(logits, everywhere[batch["target_index"]])


@pytest.mark.parametrize("with_targets", [True, False])
def test_a_head_of_ones_own_gets_the_hidden_states_of_the_same_forward_pass(with_targets):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2))
    batch = flat_batch(3, [9, 30, 5])
    out = model(**model_inputs(batch), targets=batch["targets"] if with_targets else None)
    (hidden,) = out.hidden_states
    assert hidden.shape == (len(batch["input_ids"]), 32) and hidden.requires_grad
    logits = model.lm_head(hidden.index_select(0, batch["target_index"]))
    torch.testing.assert_close(logits, target_logits(model, batch)[0])
    loss = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum")
    torch.testing.assert_close(loss, next_token_loss(model, batch)[0])


@pytest.mark.parametrize("use_moe", [False, True])
def test_log_probabilities_of_the_targets_come_from_one_forward_pass(use_moe):
    """One for each target, torch's own; an empty batch has none, and a gradient of zero."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2, use_moe=use_moe))
    batch = flat_batch(3, [600, 30])
    log_probs, aux_loss = target_log_probs(model, batch)
    logits, same_aux_loss = target_logits(model, batch)
    expected = logits.log_softmax(-1).gather(1, batch["targets"][:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(aux_loss, same_aux_loss)
    assert -log_probs.sum().item() == pytest.approx(next_token_loss(model, batch)[0].item(), rel=1e-6)
    nothing, _ = target_log_probs(model, flat_batch(3, []))
    assert nothing.shape == (0,)
    nothing.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_frozen_model_is_only_read():
    torch.manual_seed(0)
    model = MiniMindForCausalLM(
        MiniMindConfig(hidden_size=32, num_hidden_layers=2, dropout=0.5, use_moe=True)
    )
    batch = flat_batch(3, [9, 30, 5])
    teacher = frozen_model(model, torch.device("cpu"))
    logits, _ = target_logits(teacher, batch)
    assert len(logits) == len(batch["targets"]) and not logits.requires_grad
    assert torch.equal(logits, target_logits(teacher, batch)[0])  # no dropout
    assert not any(layer.mlp.tokens_per_expert.any() for layer in teacher.model.layers)
