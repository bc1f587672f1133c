"""The losses of pairs against formulas in float64 on padded sequences, one answer at a time."""

import numpy as np
import pytest
import torch

from dataset.batch import collate_flat, collate_shared
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_dpo

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=2)


def pairs(lengths: list[tuple[int, int]], prompt: int = 5) -> list[list[dict]]:
    """Random answers of these lengths to random prompts."""
    draw, rows = np.random.RandomState(1), []
    for answers in lengths:
        begin, row = draw.randint(3, 6400, prompt), []
        for length in answers:
            ids = np.concatenate((begin, draw.randint(3, 6400, length)))
            sample = {"input_ids": ids, "loss_weight": np.arange(len(ids)) >= prompt, "target_bytes": 1}
            row.append(sample | {"sample_id": 2 * len(rows) + len(row)})
        rows.append(row)
    return rows


def plain_log_prob(model, sample: dict) -> torch.Tensor:
    """Of one answer, in the model's own precision."""
    ids = torch.from_numpy(sample["input_ids"])[None]
    log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return log_probs[torch.from_numpy(sample["loss_weight"])[1:]].sum()


@pytest.fixture(scope="module")
def models() -> tuple[MiniMindForCausalLM, MiniMindForCausalLM]:
    """The trained model, and the reference beside it."""
    torch.manual_seed(0)
    model, reference = MiniMindForCausalLM(CONFIG), MiniMindForCausalLM(CONFIG)
    reference.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, reference.requires_grad_(False)


def objective_of(reference) -> train_dpo.Objective:
    objective = train_dpo.Objective()
    objective.reference = reference
    return objective


@pytest.mark.parametrize("rpo_alpha", [0.0, 0.7])
def test_loss_and_gradients_are_those_of_the_formula(models, rpo_alpha):
    model, reference = models
    rows = pairs([(7, 12), (30, 3), (1, 9)])
    batch, args = collate_shared(rows), train_dpo.Args(beta=0.3, rpo_alpha=rpo_alpha)
    loss, aux_loss, metrics = objective_of(reference).loss(model, batch, args)
    gradients = torch.autograd.grad(loss / 3, list(model.parameters()))

    exact, exact_reference = (MiniMindForCausalLM(CONFIG).double() for _ in range(2))
    exact.load_state_dict(model.state_dict())
    exact_reference.load_state_dict(reference.state_dict())
    losses, margins, accurate = [], [], 0
    for chosen, rejected in rows:
        with torch.no_grad():
            said = [plain_log_prob(exact_reference, sample) for sample in (chosen, rejected)]
        ratios = [plain_log_prob(exact, s) - r for s, r in zip((chosen, rejected), said, strict=True)]
        margins.append(0.3 * (ratios[0] - ratios[1]))
        accurate += int(margins[-1] > 0)
        losses.append(torch.log1p(torch.exp(-margins[-1])))
        losses[-1] = losses[-1] - rpo_alpha * plain_log_prob(exact, chosen) / chosen["loss_weight"].sum()
    wanted = sum(losses) / 3
    assert loss.item() / 3 == pytest.approx(wanted.item(), abs=1e-5) and aux_loss.item() == 0
    for one, other in zip(gradients, torch.autograd.grad(wanted, list(exact.parameters())), strict=True):
        assert (one - other).norm() <= 1e-5 * max(1.0, other.norm().item())
    assert metrics["accuracy"].item() == accurate
    assert metrics["reward_margin"].item() == pytest.approx(sum(margins).item(), abs=1e-4)
    chosen = sum(plain_log_prob(exact, chosen).item() for chosen, _ in rows)
    assert metrics["log_prob_chosen"].item() == pytest.approx(chosen, abs=1e-3)


def test_an_empty_batch_of_pairs_has_no_loss_and_a_zero_gradient(models):
    batch = collate_shared([])
    assert train_dpo.Objective().size(batch, CONFIG).targets == 0
    loss, aux_loss, metrics = objective_of(models[1]).loss(models[0], batch, train_dpo.Args(rpo_alpha=1.0))
    (loss + aux_loss).backward()
    assert loss == 0 and not any(value.item() for value in metrics.values())
    assert not any(p.grad.any() for p in models[0].parameters() if p.grad is not None)


def test_a_pair_counts_once_and_its_answers_lie_side_by_side():
    rows = pairs([(3, 4), (5, 6)])
    batch = collate_shared(rows)
    assert batch["target_counts"] == [3, 4, 5, 6] and batch["sample_ids"].tolist() == [0, 1, 2, 3]
    size = train_dpo.Objective().size(batch, CONFIG)
    shared = 4 + 4  # of prompts of 5 tokens, the last of which predicts other tokens
    assert (size.targets, size.tokens, size.text_bytes, size.samples) == (2, 38 - shared, 0, 4)
    assert batch["targets"].equal(collate_flat(rows)["targets"])
