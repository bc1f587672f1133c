"""An update is the same however it is cut into micro-batches and ranks; what is due; what a loss may show."""

import signal

import numpy as np
import pytest
import torch

from common.errors import UserError
from tests.conftest import write_jsonl
from tests.stage_process import Faults, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, flags
from tests.trainer.test_skipped_updates import batch, make_state
from trainer import loop
from trainer.loop import count_update, evaluate, make_record, train_update, update_size
from trainer.objectives.next_token import NextToken, next_token_loss
from trainer.report.metrics import describe, read_metrics


def test_the_end_of_an_epoch_is_evaluated_once(corpus, tmp_path):
    """Not a second time within half an interval before it; a skipped update is evaluated like others."""
    ten = write_jsonl(tmp_path / "ten.jsonl", [{"text": f"text {number}"} for number in range(10)])
    for interval, at_steps in ((3, [3, 6, 10]), (9, [10])):
        folder = tmp_path / str(interval)
        settings = {"eval_interval": interval, "save_interval": 1, "epochs": 1, "batch_size": 1}
        run("pretrain", flags(corpus, folder, "pretrain", **settings, data_path=ten), Faults(nan=(10,)))
        written = read_metrics(folder / "out/pretrain_32_metrics.jsonl")
        assert [record["step"] for record in written if "eval_loss" in record] == at_steps


class Shows(NextToken):
    """Its metrics: a sum over the targets, and one of some samples with their number."""

    names = ("twice", "of_three")

    def loss(self, model, flat, args):
        loss, aux_loss, _ = next_token_loss(model, flat)
        is_three = (flat.target_samples() == 3).sum()
        values = (2 * loss, (3.0 * is_three, is_three))
        broken = loss * float("nan") if 9 in flat["sample_ids"] else loss
        return broken, aux_loss, dict(zip(self.names, values, strict=True))

    def held_out(self, model, flat, args):
        loss, _, metrics = self.loss(model, flat, args)
        return {"loss": loss, **metrics}


def update(state, ids: tuple[int, ...]) -> dict:
    micro_batches = [batch(i) for i in ids]
    sizes = [state.objective.size(each, state.lm_config) for each in micro_batches]
    targets, tokens, *_ = update_size(state, sizes, missing=0)
    figures = train_update(state, micro_batches, targets, tokens)
    count_update(state, micro_batches, figures, targets)
    return figures


def test_what_a_loss_shows_is_a_mean_since_the_last_record():
    """Of all micro-batches of an update, then of the updates; an update that is not finite does not count, nor
    does one without a sample of the source."""
    state = make_state()
    state.objective = Shows()
    losses = [update(state, ids)["loss"][0] for ids in ((1, 3), (9, 4), (5, 5))]
    figures = update(state, (5, 6))
    losses.append(figures["loss"][0])
    record = make_record(state, figures, iters=3)
    mean = (losses[0] + losses[2] + losses[3]) / 3
    assert record["mean_loss"] == pytest.approx(mean) and record["twice"] == pytest.approx(2 * mean)
    assert record["of_three"] == 3.0 and not state.progress.sums
    assert "twice: " in describe(record, "", ("twice",))[0]
    update(state, (5, 6))
    assert make_record(state, figures, iters=3)["of_three"] is None
    for name in ("learning_rate", "aux_loss"):
        state.objective.names = ("twice", name)
        with pytest.raises(UserError, match=f"a metric of the loss is named '{name}', a field of each"):
            update(state, (1,))


class BeforeTheStep(NextToken):
    """Leaves a layer alone, halves the other gradients, and measures them after each micro-batch and at the
    end."""

    def __init__(self):
        self.norms = []

    def after_micro_batch(self, state, number):
        self.norms.append((number, grad_norm(state.model)))

    def before_step(self, state, micro_batches):
        whole = grad_norm(state.model)
        for name, parameter in state.model.named_parameters():
            parameter.grad = None if "layers.0" in name else parameter.grad / 2
        return {"twice": (2 * whole, 1), "of_windows": (len(micro_batches), 1)}


def grad_norm(model) -> torch.Tensor:
    return torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()


def test_gradients_may_be_changed_before_the_step():
    """They are whole, and not clipped; what is measured stands in the record."""
    state, plain = make_state(), make_state()
    state.objective = BeforeTheStep()
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    found, usual = update(state, (1, 3, 5)), update(plain, (1, 3, 5))
    first, second, whole = (norm for _, norm in state.objective.norms)
    assert [number for number, _ in state.objective.norms] == [0, 1, 2] and first != second
    assert found["twice"][0] == pytest.approx(2 * float(whole), rel=1e-6)
    assert float(whole) == pytest.approx(usual["grad_norm"][0], rel=1e-3)
    assert found["of_windows"] == (3.0, 1.0) and 0 < found["grad_norm"][0] < usual["grad_norm"][0] / 1.9
    changed = {name for name, p in state.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and not any("layers.0" in name for name in changed)


def test_an_evaluation_divides_by_the_targets_or_by_the_count():
    state = make_state()
    state.objective = Shows()
    metrics = evaluate(state, [batch(1), batch(3)])
    assert metrics["eval_of_three"] == 3.0
    assert metrics["eval_twice"] == pytest.approx(2 * metrics["eval_loss"])
    assert evaluate(state, [batch(1)])["eval_of_three"] is None


@pytest.mark.parametrize("rate", [np.float64(0.01), torch.tensor(0.01)])
def test_a_rate_of_numpy_or_torch_is_a_number(rate):
    state = make_state()
    state.schedule = lambda *_: rate
    loop.set_learning_rate(state)
    assert {type(group["lr"]) for group in state.optimizer.param_groups} == {float}


AUGMENTED = """
import numpy, torch
from dataset import lm_dataset
get = lm_dataset.SFTDataset.__getitem__
def changed(self, item):
    samples = get(self, item)
    for sample in samples:
        drop = torch.rand(len(sample["loss_weight"])).numpy() < 0.2 + 0.1 * numpy.random.rand()
        sample["loss_weight"] = sample["loss_weight"] * ~drop
    return samples
lm_dataset.SFTDataset.__getitem__ = changed
"""


def test_a_data_set_that_draws_random_numbers_is_resumed_bit_for_bit(corpus, tmp_path):
    settings = {"epochs": 1, "num_hidden_layers": 1, "from_weight": "none", "accumulation_steps": 2}
    run("sft", flags(corpus, tmp_path / "whole", "sft", **settings), Faults(script=AUGMENTED))
    argv = flags(corpus, tmp_path / "killed", "sft", **settings, from_resume=1)
    killed = Faults(script=AUGMENTED, signals={8: signal.SIGKILL})
    run("sft", argv, killed, status=-9)
    run("sft", argv, Faults(script=AUGMENTED))
    assert_same_run(tmp_path / "whole", tmp_path / "killed", "full_sft_32")


SHORT = """
from trainer import loop
islice, calls = loop.islice, []
def short(batches, number):
    calls.append(number)
    return islice(batches, number if len(calls) < 3 else 0)
loop.islice = short
"""


def test_a_loader_that_gives_too_little_on_one_rank_ends_the_epoch_on_all(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, batch_size=4, accumulation_steps=2)
    ranks = start_ranks(2, "pretrain", argv, {1: Faults(script=SHORT)})
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[1].err
    assert "gave only" in ranks[0].err and "the epoch ends here" in ranks[0].err


def test_a_call_without_the_run_is_one_line():
    """With MiniMind's arguments alone."""
    with pytest.raises(UserError, match=r"train_epoch\(state, epoch, loader, iters, start_step, wandb\)"):
        loop.train_epoch(0, [], 500, 0, None)
