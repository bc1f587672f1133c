"""Updates that are not finite, seen from inside: with several optimizers, and with a gradient scaler."""

import math
from contextlib import nullcontext

import pytest
import torch

from common.errors import UserError
from common.settings import StageArgs
from dataset.batch import collate_flat
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.callbacks.train_state import TrainState
from trainer.loop import count_update, make_record, train_update, update_size
from trainer.objectives.next_token import NextToken, next_token_loss
from trainer.optim.build import build_optimizer

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=1)


class Bad(NextToken):
    """Samples from 100 on have no finite loss."""

    def loss(self, model, batch, args):
        loss, aux_loss, metrics = next_token_loss(model, batch)
        return (loss * float("nan") if batch["sample_ids"].sum() >= 100 else loss), aux_loss, metrics


def batch(seed: int, trained: bool = True) -> dict:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 6400, (12,), generator=rng).numpy()
    sample = {"input_ids": tokens, "loss_weight": tokens > (0 if trained else 9999), "sample_id": seed}
    return collate_flat([[sample | {"target_bytes": 9}]])


def make_state(kind: str = "adamw", scale: float = 0.0, limit: int = 5) -> TrainState:
    torch.manual_seed(0)
    model = MiniMindForCausalLM(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    if kind != "sgd":
        optimizer = build_optimizer(model, 1e-2, 0.1, kind)
    return TrainState(
        args=StageArgs(seed=0, grad_clip=1.0, max_bad_updates=limit),
        lm_config=CONFIG,
        model=model,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler("cpu", enabled=scale > 0, init_scale=scale or 1.0),
        autocast=nullcontext(),
        device=torch.device("cpu"),
        objective=Bad(),
        schedule=lambda *_: 1e-2,
        fingerprint={"samples": 9, "global_batch": 3, "epochs": 1},
        source=lambda i: f"data.jsonl:{i}",
    )


class Steep(NextToken):
    """A finite loss, whose gradient is infinite."""

    def loss(self, model, batch, args):
        loss, aux_loss, metrics = next_token_loss(model, batch)
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss, aux_loss, metrics


def train(state: TrainState, micro_batches: list[dict]) -> dict:
    sizes = [state.objective.size(batch, state.lm_config) for batch in micro_batches]
    targets, tokens, *_ = update_size(state, sizes, missing=0)
    figures = train_update(state, micro_batches, targets, tokens)
    state.progress.update += 1
    count_update(state, micro_batches, figures, targets)
    return figures


def weights(state: TrainState) -> list[torch.Tensor]:
    return [p.detach().clone() for p in state.model.parameters()]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor], are: bool = True) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) is are


def test_a_micro_batch_without_targets_contributes_nothing():
    """One that has tokens, and one that is empty."""
    states = [make_state() for _ in range(2)]
    for state, others in zip(states, ([], [batch(2, trained=False), collate_flat([])]), strict=True):
        train(state, [batch(1), *others, batch(3)])
    assert_equal(*map(weights, states))


def test_an_update_without_any_target_makes_no_step_and_is_no_bad_one():
    state = make_state(limit=1)
    train(state, [batch(1)])
    before, sums = weights(state), dict(state.progress.sums)
    train(state, [batch(4, trained=False)])
    assert_equal(before, weights(state))
    assert state.progress.skipped == [] and state.progress.sums == sums
    assert {int(each["step"]) for each in state.optimizer.state.values()} == {1}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_skipped_update_is_as_if_it_had_not_been(optimizer, capsys):
    good, mixed = (make_state(optimizer) for _ in range(2))
    for number in (100, 1, 101, 2):
        good.progress.update = mixed.progress.update  # rate and momentum follow the skipped updates, too
        train(mixed, [batch(number)])
        if number < 100:
            train(good, [batch(number)])
    assert_equal(weights(good), weights(mixed))
    assert [each["sample_ids"] for each in mixed.progress.skipped] == [[100], [101]]
    assert mixed.progress.sums["loss"][1] == 2
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and "its samples: 100 (data.jsonl:100)" in warnings[0]
    mixed.meter.count([])
    figures = train(mixed, [batch(3)])
    assert [each["update"] for each in make_record(mixed, figures, 9)["skipped"]] == [1, 3]
    figures = train(mixed, [batch(4)])
    assert "skipped" not in make_record(mixed, figures, 9)  # each stands in one record


def test_in_float16_an_overflow_lowers_the_scale_and_is_no_bad_update():
    """2 ** 40 times the gradient is more than float16 holds; halved some times it fits."""
    state = make_state(scale=2.0**40, limit=1)
    state.autocast = torch.autocast("cpu", dtype=torch.float16)
    before = weights(state)
    train(state, [batch(1)])
    assert_equal(before, weights(state))
    for _ in range(40):
        train(state, [batch(1)])
    assert state.progress.overflows == round(40 - math.log2(state.scaler.get_scale())) > 2
    assert_equal(before, weights(state), are=False)
    assert state.progress.bad_updates == 0


def test_in_float16_a_loss_that_is_not_finite_is_a_bad_update():
    state = make_state(scale=1024.0, limit=2)
    for number, bad in ((100, 1), (1, 0), (101, 1)):
        train(state, [batch(number)])
        assert state.progress.bad_updates == bad
    with pytest.raises(UserError, match="--max_bad_updates 2: "):
        train(state, [batch(102)])


def test_in_float16_a_gradient_that_is_not_finite_at_the_smallest_scale_is_a_bad_update():
    """Lowering the scale further would not help."""
    state = make_state(scale=4.0, limit=1)
    state.objective = Steep()
    train(state, [batch(1)])
    assert (state.progress.overflows, state.scaler.get_scale()) == (1, 2.0)
    with pytest.raises(UserError, match="--max_bad_updates 1: "):
        train(state, [batch(1)])
