"""The losses of a language model on flat batches."""

import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.trainer.devices.test_wrapping import flat_batch
from trainer.objectives.base import frozen_model
from trainer.objectives.next_token import next_token_loss, target_logits


@pytest.mark.parametrize("with_targets", [True, False])
def test_a_head_of_ones_own_gets_the_hidden_states_of_the_same_forward_pass(with_targets):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2))
    batch = flat_batch(3, [9, 30, 5])
    out = model(**batch.model_inputs(), targets=batch["targets"] if with_targets else None)
    (hidden,) = out.hidden_states
    assert hidden.shape == (len(batch["input_ids"]), 32) and hidden.requires_grad
    logits = model.lm_head(hidden.index_select(0, batch["target_index"]))
    torch.testing.assert_close(logits, target_logits(model, batch)[0])
    loss = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum")
    torch.testing.assert_close(loss, next_token_loss(model, batch)[0])


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
