"""Updates that are not finite, seen from inside: with and without a fused optimizer, with a gradient
scaler."""

import math
from contextlib import nullcontext

import pytest
import torch

from common.errors import UserError
from common.settings import StageArgs
from dataset.lm_dataset import collate_flat
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.loop import train_update, update_size
from trainer.objectives.next_token import next_token_loss
from trainer.optim.build import SkippedUpdates, build_optimizer
from trainer.run.state import TrainState

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=1)


def batch(seed: int, trained: bool = True) -> dict:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 6400, (12,), generator=rng).numpy()
    sample = {"input_ids": tokens, "loss_mask": tokens > (0 if trained else 9999), "sample_id": seed}
    sample |= {"target_bytes": 9}
    return collate_flat([[sample]])


def make_state(optimizer=None, scale: float = 0.0, loss_fn=next_token_loss, limit: int = 5) -> TrainState:
    torch.manual_seed(0)
    model = MiniMindForCausalLM(CONFIG)
    scaler = torch.amp.GradScaler("cpu", enabled=scale > 0, init_scale=scale or 1.0)
    args = StageArgs(seed=0, grad_clip=1.0)
    optimizer = optimizer(model.parameters()) if optimizer else build_optimizer(model, 1e-2, 0.1)
    autocast = nullcontext()
    return TrainState(
        args=args,
        lm_config=CONFIG,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        autocast=autocast,
        device=torch.device("cpu"),
        loss_fn=loss_fn,
        schedule=lambda *_: 1e-2,
        run={"samples": 9, "global_batch": 3, "epochs": 1},
        skipped_updates=SkippedUpdates(limit, lambda i: f"data.jsonl:{i}"),
    )


def train(state: TrainState, window: list[dict]) -> None:
    targets, tokens, _ = update_size(state, [state.size_fn(batch, state.lm_config) for batch in window])
    train_update(state, window, targets, tokens)
    state.update += 1
    state.skipped_updates.read_and_warn()


def weights(state: TrainState) -> list[torch.Tensor]:
    return [p.detach().clone() for p in state.model.parameters()]


def update_with(empty: bool) -> list[torch.Tensor]:
    """The weights after an update, with a micro-batch in it that has tokens but no targets, and one that is
    empty."""
    state = make_state()
    train(state, [batch(1), *([batch(2, trained=False), collate_flat([])] if empty else []), batch(3)])
    return weights(state)


def test_a_micro_batch_without_targets_contributes_nothing():
    with_empty, without = update_with(empty=True), update_with(empty=False)
    assert all(torch.equal(a, b) for a, b in zip(with_empty, without, strict=True))


def test_an_update_without_any_target_makes_no_step_and_is_no_bad_one():
    state = make_state(limit=1)
    train(state, [batch(1)])
    before, mean_loss = weights(state), state.losses.clone()
    train(state, [batch(4, trained=False)])
    assert state.skipped_updates.pop_record_fields() == {}
    assert all(torch.equal(a, b) for a, b in zip(before, weights(state), strict=True))
    assert {int(each["step"]) for each in state.optimizer.state.values()} == {1}
    assert torch.equal(state.losses, mean_loss)


def bad_loss(model, flat, args):
    loss, aux_loss, _ = next_token_loss(model, flat)
    return (loss * float("nan") if flat["sample_ids"][0] >= 100 else loss), aux_loss


OPTIMIZERS = {"fused AdamW": None, "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)}
OPTIMIZERS |= {"SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_skipped_update_is_as_if_it_had_not_been(optimizer, capsys):
    good, mixed = (make_state(optimizer, loss_fn=bad_loss) for _ in range(2))
    for number in (100, 1, 101, 2):
        train(mixed, [batch(number)])
        if number < 100:
            train(good, [batch(number)])
    assert all(torch.equal(a, b) for a, b in zip(weights(good), weights(mixed), strict=True))
    for a, b in zip(good.optimizer.state.values(), mixed.optimizer.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)
    assert mixed.skipped_updates.skipped == [
        {"update": 1, "sample_ids": [100]},
        {"update": 3, "sample_ids": [101]},
    ]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and "its samples: 100 (data.jsonl:100)" in warnings[0]


def test_muon_reads_on_the_device_whether_to_skip():
    """As it does on a GPU: with the bits that the host's reading gives, and as if the bad updates had not
    been."""
    states = [make_state(loss_fn=bad_loss) for _ in range(3)]
    for state, on_device in zip(states, (False, False, True), strict=True):
        state.optimizer = build_optimizer(state.model, 1e-2, 0.1, "muon")
        state.optimizer._step_supports_amp_scaling = on_device
    for number in (100, 1, 101, 2):
        for state in states[number >= 100 :]:
            train(state, [batch(number)])
    good, by_host, on_device = (
        [*weights(state), *(part["momentum_buffer"] for part in state.optimizer.muon.state.values())]
        for state in states
    )
    assert len(good) == len(list(states[0].model.parameters())) + 7
    for a, b, c in zip(good, by_host, on_device, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert len(states[2].optimizer.muon.param_groups[0]["params"]) == 7


def test_in_float16_an_overflow_lowers_the_scale_and_is_no_bad_update():
    """2 ** 40 times the gradient is more than float16 holds; halved some times it fits, and training goes
    on."""
    state = make_state(scale=2.0**40, limit=1)
    state.autocast = torch.autocast("cpu", dtype=torch.float16)
    before = weights(state)
    train(state, [batch(1)])
    assert all(torch.equal(a, b) for a, b in zip(before, weights(state), strict=True))
    assert state.scaler.get_scale() == 2.0**39 and state.skipped_updates.in_a_row == 0
    assert state.skipped_updates.pop_record_fields() == {"overflows": 1}
    for _ in range(40):
        train(state, [batch(1)])
    halved = round(39 - math.log2(state.scaler.get_scale()))
    assert (
        state.skipped_updates.pop_record_fields() == {"overflows": halved}
        and state.skipped_updates.pop_record_fields() == {}
    )
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(state), strict=True))
    assert 1 < state.scaler.get_scale() < 2.0**38


def test_in_float16_a_loss_that_is_not_finite_is_one():
    state = make_state(scale=1024.0, loss_fn=bad_loss, limit=2)
    train(state, [batch(100)])
    assert state.skipped_updates.in_a_row == 1
    train(state, [batch(1)])
    assert state.skipped_updates.in_a_row == state.skipped_updates.overflows == 0
    train(state, [batch(101)])
    with pytest.raises(UserError, match=r"--max_bad_updates 2: .* the last of them update 4"):
        train(state, [batch(102)])


def test_the_count_survives_a_checkpoint():
    state = make_state(loss_fn=bad_loss)
    train(state, [batch(100)])
    again = SkippedUpdates()
    again.load_state_dict(state.skipped_updates.state_dict() | {"overflows": 2})
    assert again.in_a_row == 1
    assert again.pop_record_fields() == {"skipped": [{"update": 1, "sample_ids": [100]}], "overflows": 2}
