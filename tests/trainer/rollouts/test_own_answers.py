"""The student's own answers: which samples get one, and what is learned from it."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from dataset.batch import FlatBatch
from tests.model.test_model_minimind import VOCAB, build, ragged, stock
from trainer import train_distillation
from trainer.objectives import distillation
from trainer.rollouts.own_answers import OwnAnswers

TEMPERATURE, ALPHA, LONGEST = 1.5, 0.3, 7
END = SimpleNamespace(eos_token_id=2)


def sample(number: int, tokens: torch.Tensor, weight: float = 1.0) -> dict:
    """A conversation with two answers: targets are its second third and its last tokens."""
    third = len(tokens) // 3
    loss_weight = np.zeros(len(tokens), np.float32)
    loss_weight[third : 2 * third] = loss_weight[-third + 1 :] = weight
    return {"input_ids": tokens.numpy(), "loss_weight": loss_weight, "sample_id": number, "target_bytes": 9}


def conversations(weight: float = 1.0) -> list[dict]:
    tokens = ragged([9, 14, 23, 12, 30, 17, 11, 20])
    return [sample(number, each, weight if number % 2 else 1.0) for number, each in enumerate(tokens)]


def prepared(objective, student, micro_batches, update: int = 0):
    progress = SimpleNamespace(update=update)
    state = SimpleNamespace(model=student, autocast=nullcontext(), progress=progress, args=objective.args)
    return objective.prepare(state, micro_batches)


def answered(batch: FlatBatch) -> int:
    """How many answers the student wrote."""
    return int(batch["own_counts"][2])


def make_objective(on_policy: float, teachers=()):
    objective = train_distillation.Objective()
    objective.args = train_distillation.Args(
        on_policy=on_policy, max_gen_len=LONGEST, alpha=ALPHA, temperature=TEMPERATURE, seed=3
    )
    objective.teachers, objective.own_answers = list(teachers), OwnAnswers(objective.args, END)
    return objective


def stock_loss(batch: FlatBatch, student, teachers, first_own: int) -> torch.Tensor:
    """The loss by stock Qwen3 and torch.distributions, one sample at a time."""
    total = torch.zeros(())
    for number, each in enumerate(batch.samples()):
        tokens, weights = torch.tensor(each["input_ids"])[None], torch.tensor(each["loss_weight"])[1:]
        logits = student(tokens).logits[0, :-1]
        with torch.no_grad():
            p = sum((teacher(tokens).logits[0, :-1] / TEMPERATURE).softmax(-1) for teacher in teachers)
        p, q = Categorical(probs=p / len(teachers)), Categorical(logits=logits / TEMPERATURE)
        if number >= first_own:
            losses = TEMPERATURE**2 * kl_divergence(q, p)
        else:
            losses = (1 - ALPHA) * TEMPERATURE**2 * kl_divergence(p, q)
            losses = losses - ALPHA * Categorical(logits=logits).log_prob(tokens[0, 1:])
        total = total + (losses * weights).sum()
    return total


@pytest.mark.parametrize(("share", "weight", "teachers"), [(0.5, 1.0, 1), (0.5, 2.5, 2), (1.0, 1.0, 1)])
def test_loss_and_gradient_are_those_of_stock_qwen3_and_torch(share, weight, teachers, monkeypatch):
    """In pieces of 8 targets; with the student's answers to a half of the conversations, and to all."""
    monkeypatch.setattr(distillation, "TARGETS_AT_ONCE", 8)
    student, judges = build("dense"), [build("dense", seed) for seed in range(1, 1 + teachers)]
    objective = make_objective(share, judges)
    data = FlatBatch.from_samples(conversations(weight))
    (batch,) = prepared(objective, student.train(), [data])
    assert student.training
    kept = 8 - answered(batch)
    assert kept == 0 if share == 1 else 0 < kept < 8
    loss, _, metrics = objective.loss(student, batch, objective.args)
    reference = stock(student)
    expected = stock_loss(batch, reference, [stock(judge) for judge in judges], kept)
    torch.testing.assert_close(loss, expected, rtol=2e-5, atol=0)
    loss.backward()
    expected.backward()
    for (name, one), other in zip(student.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)
    parts = {name: value.item() for name, (value, _) in list(metrics.items())[:3]}
    rest = ALPHA * parts["cross_entropy"] + (1 - ALPHA) * TEMPERATURE**2 * parts["divergence"]
    assert rest + TEMPERATURE**2 * parts["reverse_divergence"] == pytest.approx(loss.item(), rel=1e-5)
    counts = [count for _, count in metrics.values()]
    assert counts[0] + counts[2] == pytest.approx(batch.weight_sum) and counts[3] == 8 - kept


def test_an_answer_takes_the_place_of_the_last_one_however_the_samples_are_split():
    """The tokens before it stay. Other updates choose other samples."""
    student, data = build("dense"), conversations(2.5)
    objective = make_objective(0.5)
    chosen = []
    for update in range(3):
        (whole,) = prepared(objective, student, [FlatBatch.from_samples(data)], update)
        parts = [FlatBatch.from_samples(part) for part in (data[:3], data[3:4], data[4:], [])]
        split = prepared(objective, student, parts, update)
        found = {each["sample_id"]: each for batch in split for each in batch.samples()}
        assert len(found) == 8 and sum(map(answered, split)) == answered(whole)
        for number, each in enumerate(whole.samples()):
            same, before = found[each["sample_id"]], data[each["sample_id"]]
            assert all(np.array_equal(each[key], same[key]) for key in ("input_ids", "loss_weight"))
            if number < 8 - answered(whole):
                assert np.array_equal(each["input_ids"], before["input_ids"])
                assert np.array_equal(each["loss_weight"], before["loss_weight"])
                continue
            end = len(before["input_ids"]) - len(before["input_ids"]) // 3 + 1  # of the prompt
            assert np.array_equal(each["input_ids"][:end], before["input_ids"][:end])
            weight = 2.5 if each["sample_id"] % 2 else 1.0
            assert set(each["loss_weight"][:end]) == {0.0} and set(each["loss_weight"][end:]) == {weight}
            answer = each["input_ids"][end:].tolist()
            assert len(answer) == LONGEST or answer[-1] == END.eos_token_id
        chosen.append(tuple(whole.sample_ids[8 - answered(whole) :].tolist()))
    assert len(set(chosen)) == 3


def test_an_answer_is_drawn_from_the_student():
    """First tokens of 300 prompts that are the same, against the student's probabilities."""
    student = build("dense")
    tokens = ragged([4])[0]
    data = [sample(number, torch.cat((tokens, tokens[:2]))) for number in range(300)]
    objective = make_objective(1.0)
    objective.args.max_gen_len = 1
    (batch,) = prepared(objective, student, [FlatBatch.from_samples(data)])
    probs = stock(student)(torch.tensor(data[0]["input_ids"][:5])[None]).logits[0, -1].softmax(-1)
    drawn = torch.bincount(batch.targets, minlength=VOCAB) / 300
    assert (drawn - probs).abs().max() < 0.08 and batch["own_counts"][4] + drawn[2] * 300 == 300


def test_without_own_answers_the_bits_are_those_of_the_data():
    """A share of 0 gives the loader's batches; one that chooses nobody, batches with the same loss."""
    student, data = build("moe"), FlatBatch.from_samples(conversations(2.5))
    none, nobody = (make_objective(share, [build("dense", 1)]) for share in (0.0, 1e-9))
    assert prepared(none, student, [data])[0] is data
    (batch,) = prepared(nobody, student, [data])
    results = []
    for objective, each in ((none, data), (nobody, batch)):
        loss, aux_loss, metrics = objective.loss(student, each, objective.args)
        gradients = torch.autograd.grad(loss + aux_loss, list(student.parameters()))
        results.append([loss, aux_loss, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert metrics["reverse_divergence"] == (0, 0) and metrics["cross_entropy"][1] == data.weight_sum
    (empty,) = prepared(nobody, student, [FlatBatch.from_samples([])])
    loss, aux_loss, _ = nobody.loss(student, empty, nobody.args)
    (loss + aux_loss).backward()
    assert loss == 0 and not any(parameter.grad.any() for parameter in student.parameters())
