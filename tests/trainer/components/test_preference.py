"""The losses of pairs against formulas in float64 on padded sequences, one answer at a time."""

import copy
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from dataset.lm_dataset import collate_flat, collate_pairs
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_dpo
from trainer.components.preference import answer_log_probs, pair_size, reference_log_probs

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=2)


def pairs(lengths: list[tuple[int, int]], prompt: int = 5) -> list[list[dict]]:
    """Random answers of these lengths to random prompts."""
    rng = torch.Generator().manual_seed(1)
    rows = []
    for each in lengths:
        begin = torch.randint(3, 6400, (prompt,), generator=rng)
        row = []
        for length in each:
            ids = torch.cat((begin, torch.randint(3, 6400, (length,), generator=rng))).numpy()
            sample = {"input_ids": ids, "loss_mask": torch.arange(len(ids)).numpy() >= prompt, "target_bytes": 1}
            row.append(sample | {"sample_id": 2 * len(rows) + len(row), "reference": 0.0})
        rows.append(row)
    return rows


def plain_log_prob(model, sample: dict) -> torch.Tensor:
    """Of one answer, in the model's own precision."""
    ids = torch.from_numpy(sample["input_ids"])[None]
    log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return log_probs[torch.from_numpy(sample["loss_mask"])[1:]].sum()


@pytest.fixture(scope="module")
def models() -> tuple[MiniMindForCausalLM, MiniMindForCausalLM]:
    """The trained model, and the reference beside it."""
    torch.manual_seed(0)
    model, reference = MiniMindForCausalLM(CONFIG), MiniMindForCausalLM(CONFIG)
    reference.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, reference


@pytest.mark.parametrize(("loss_type", "rpo_alpha"), [("sigmoid", 0.0), ("ipo", 0.0), ("hinge", 0.0), ("sigmoid", 0.7)])
def test_loss_and_gradients_are_those_of_the_formula(models, loss_type, rpo_alpha):
    model, reference = models
    rows = pairs([(7, 12), (30, 3), (1, 9)])
    batch, args = collate_pairs(rows), train_dpo.Args(beta=0.3, loss_type=loss_type, rpo_alpha=rpo_alpha)
    with torch.no_grad():
        batch["reference"] = answer_log_probs(reference, batch)[0]
    loss, aux_loss, shown = train_dpo.loss_fn(model, batch, args)
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
        means = [r / s["loss_mask"].sum() for r, s in zip(ratios, (chosen, rejected), strict=True)]
        losses.append({
            "sigmoid": torch.log1p(torch.exp(-margins[-1])),
            "ipo": (means[0] - means[1] - 1 / 0.6) ** 2,
            "hinge": (1 - margins[-1]).clamp(min=0),
        }[loss_type])  # fmt: skip
        losses[-1] = losses[-1] - rpo_alpha * plain_log_prob(exact, chosen) / chosen["loss_mask"].sum()
    wanted = sum(losses) / 3
    assert loss.item() / 3 == pytest.approx(wanted.item(), abs=1e-5) and aux_loss.item() == 0
    for one, other in zip(gradients, torch.autograd.grad(wanted, list(exact.parameters())), strict=True):
        assert (one - other).norm() <= 1e-5 * max(1.0, other.norm().item())
    assert shown["accuracy"].item() == accurate
    assert shown["reward_margin"].item() == pytest.approx(sum(margins).item(), abs=1e-4)
    assert shown["log_prob_chosen"].item() == pytest.approx(
        sum(plain_log_prob(exact, chosen).item() for chosen, _ in rows), abs=1e-3
    )


def test_a_model_that_is_its_reference_has_the_loss_of_a_coin(models):
    batch = collate_pairs(pairs([(300, 40), (2, 2)]))
    with torch.no_grad():
        batch["reference"] = answer_log_probs(models[0], batch)[0]
        loss, _, shown = train_dpo.loss_fn(models[0], batch, train_dpo.Args())
    assert loss.item() == pytest.approx(2 * math.log(2), abs=1e-9) and shown["reward_margin"] == 0


def test_an_empty_batch_of_pairs_has_no_loss_and_a_zero_gradient(models):
    batch = collate_pairs([])
    assert pair_size(batch, CONFIG).targets == 0
    loss, aux_loss, shown = train_dpo.loss_fn(models[0], batch, train_dpo.Args(loss_type="ipo", rpo_alpha=1.0))
    (loss + aux_loss).backward()
    assert loss == 0 and not any(value.item() for value in shown.values())
    assert not any(p.grad.any() for p in models[0].parameters() if p.grad is not None)


def test_a_pair_counts_once_and_its_answers_lie_side_by_side():
    rows = pairs([(3, 4), (5, 6)])
    batch = collate_pairs(rows)
    assert batch["target_counts"] == [3, 4, 5, 6] and batch["sample_ids"].tolist() == [0, 1, 2, 3]
    size = pair_size(batch, CONFIG)
    assert (size.targets, size.tokens, size.text_bytes, size.samples) == (2, 38, 0, 4)
    assert batch["targets"].equal(collate_flat(rows)["targets"])


@pytest.fixture
def reference(tmp_path, models):
    """reference(**changes): log-probabilities of the reference with these changes of the run, and how many models were
    built for them."""
    rows, built = pairs([(7, 12), (3, 4)]), []
    data, device = Pairs(rows, tmp_path), torch.device("cpu")

    def compute(autocast=None, **changes):
        run = {"from_weight_sha256": "a" * 64, "use_moe": False, "num_experts_per_tok": 1} | changes
        return reference_log_probs(
            data, run, lambda: built.append(1) or copy.deepcopy(models[1]), 2, device, autocast or nullcontext()
        )

    return compute, built


class Pairs(list):
    """A dataset of pairs with a cache in this folder."""

    def __init__(self, rows, path):
        super().__init__(rows)
        self.cache = Cache(path)


class Cache:
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 4


DAMAGES = [lambda content: content[:-30], lambda content: content[:100], lambda content: b""]
DAMAGES.append(lambda content: content[:150] + bytes([content[150] ^ 1]) + content[151:])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_the_reference_is_computed_again(reference, tmp_path, damage):
    compute, built = reference
    values = compute()
    assert np.array_equal(compute(), values) and len(built) == 1 and values.shape == (4,) and (values < 0).all()
    (path,) = tmp_path.glob("reference_*.npz")
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert np.array_equal(compute(), values) and len(built) == 2 and path.read_bytes() == content


def test_the_reference_depends_on_weights_experts_and_precision(reference):
    compute, built = reference
    compute()
    compute(torch.autocast("cpu", torch.bfloat16))
    compute(from_weight_sha256="b" * 64)
    for experts in (1, 2, 1):
        compute(use_moe=True, num_experts_per_tok=experts)
    assert len(built) == 5
