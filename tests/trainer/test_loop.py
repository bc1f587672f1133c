"""An update is the same however it is cut into micro-batches and ranks, at the tail of an epoch too."""

import re
import shlex
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from common.errors import UserError
from scripts import plan
from tests.conftest import write_jsonl
from tests.stage_process import Faults, run
from tests.trainer.run.test_skipped_updates import batch, make_state
from tests.trainer.stage_flags import assert_same_tensors, flags, records, saved_state
from trainer import loop
from trainer.loop import make_record, train_epoch, train_update, trial_pass, update_size
from trainer.objectives.next_token import next_token_loss
from trainer.report.metrics import describe, read_metrics


def test_the_end_of_an_epoch_is_evaluated_once(corpus, tmp_path):
    """Not a second time within half an interval before it."""
    ten = write_jsonl(tmp_path / "ten.jsonl", [{"text": f"text {number}"} for number in range(10)])
    for interval, at_steps in ((3, [3, 6, 10]), (9, [10])):
        folder = tmp_path / str(interval)
        settings = {"eval_interval": interval, "save_interval": 1, "epochs": 1, "batch_size": 1}
        settings |= {"data_path": ten}
        run("pretrain", flags(corpus, folder, "pretrain", **settings))
        written = read_metrics(folder / "out/pretrain_32_metrics.jsonl")
        assert [record["step"] for record in written if "eval_loss" in record] == at_steps


def test_a_metric_that_is_not_named_is_one_line():
    """It would be in no record, and nothing would say so."""

    def loss_fn(model, batch, args):
        loss, aux_loss, _ = next_token_loss(model, batch)
        return loss, aux_loss, {"twice": 2 * loss}

    with pytest.raises(
        UserError, match="loss_fn gives twice beside the loss, but TrainState's metric_names are empty"
    ):
        train_update(make_state(loss_fn=loss_fn), [batch(1)], 1.0, 1.0)
    state = make_state()
    state.metric_names = ("twice",)
    with pytest.raises(UserError, match=r"loss_fn gives cross_entropy beside the loss, but .* are twice"):
        train_update(state, [batch(1)], 1.0, 1.0)


def test_the_loss_that_is_judged_is_the_plain_cross_entropy_where_loss_fn_gives_it():
    """Per target over the micro-batches, not the loss that is trained; it needs no name among the metrics."""

    def with_term(model, batch, args):
        loss, aux_loss, metrics = next_token_loss(model, batch)
        return 3 * loss, aux_loss + 1, metrics

    def without_metrics(model, batch, args):
        return with_term(model, batch, args)[:2]

    found = {}
    for loss_fn in (next_token_loss, with_term, without_metrics):
        state = make_state(loss_fn=loss_fn)
        window = [batch(1), batch(3)]
        targets, tokens, _ = update_size(state, [state.size_fn(each, state.lm_config) for each in window])
        losses, _ = train_update(state, window, targets, tokens)
        assert len(losses) == 2
        found[loss_fn] = float(losses[0]), float(state.update_loss), state.loss_is_cross_entropy
    plain, judged, is_known = found[next_token_loss]
    assert judged == plain and is_known
    assert found[with_term] == (pytest.approx(3 * plain, rel=1e-6), plain, True)
    trained, judged, is_known = found[without_metrics]
    assert judged == trained == found[with_term][0] and not is_known


def test_what_a_loss_shows_is_a_mean_over_the_targets_since_the_last_record():
    """Of all micro-batches of an update, then of the updates; an update that is not finite does not count."""

    def loss_fn(model, batch, args):
        loss, aux_loss, _ = next_token_loss(model, batch)
        broken = loss * float("nan") if 9 in batch["sample_ids"] else loss
        return broken, aux_loss, {"twice": 2 * loss, "ids": batch["sample_ids"].sum() * len(batch["targets"])}

    state = make_state(loss_fn=loss_fn)
    state.metric_names = ("ids", "twice")
    state.__post_init__()
    state.iters = 3
    losses = []
    for ids in ((1, 3), (9, 4), (5, 5)):
        window = [batch(i) for i in ids]
        targets, tokens, _ = update_size(state, [state.size_fn(batch, state.lm_config) for batch in window])
        means, norm = train_update(state, window, targets, tokens)
        losses.append(means[0].item())
        state.skipped_updates.read_and_warn()
    record = make_record(state, means, norm, False)
    assert record["ids"] == (2 + 5) / 2 and record["mean_loss"] == (losses[0] + losses[2]) / 2
    assert abs(record["twice"] - losses[0] - losses[2]) < 1e-5
    assert "ids: 3.500, twice: " in describe(record, "", state.metric_names)[0]
    assert not state.losses.any() and len(state.losses) == 4


RUN_LINE = r"^run: \d+ updates of about [\d,]+ tokens, [\d,]+ tokens in all, 1 pass over the data, about "
RUN_LINE += r"[\d.]+ (s|min); cpu \(\d+ threads?\), float32$"
TIMELESS = Faults(script="import trainer.loop; trainer.loop.describe_run = lambda *_: 'run: nothing'")


def test_timing_a_micro_batch_changes_no_bit(corpus, tmp_path):
    """Weights, optimizer, records, counts of experts are those of a run in which nothing is timed."""
    settings = {"epochs": 1, "dropout": 0.1, "use_moe": 1, "parallel": "fsdp", "accumulation_steps": 2}
    found = []
    for name, faults in (("timed", None), ("not", TIMELESS)):
        done = run("pretrain", flags(corpus, tmp_path / name, "pretrain", **settings), faults, ranks=2)
        found.append([line for line in done.out.splitlines() if line.startswith("run: ")])
    (timed_line,), untimed_lines = found
    assert re.search(RUN_LINE, timed_line) and untimed_lines == ["run: nothing"]
    name = "pretrain_32_moe"
    assert records(tmp_path / "timed", name) == records(tmp_path / "not", name)
    timed, untimed = (saved_state(tmp_path / each, name) for each in ("timed", "not"))
    for part in ("model", "optimizer", "callbacks"):
        assert_same_tensors(timed[part], untimed[part])


def test_a_trial_leaves_the_model_and_the_random_streams_as_they_were():
    """Batch normalisation, dropout: whatever a model of one's own keeps while it trains."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    before, seed = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    state = SimpleNamespace(
        model=model, device=torch.device("cpu"), autocast=nullcontext(), args=None,
        loss_fn=lambda model, batch, args: (model(batch["x"]).square().sum(), torch.zeros(())),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )  # fmt: skip
    assert trial_pass(state, {"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(1))}) > 0
    assert_same_tensors(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), seed) and all(p.grad is None for p in model.parameters())


def test_a_call_without_the_run_is_one_line():
    """With MiniMind's arguments alone."""
    with pytest.raises(UserError, match=r"train_epoch\(state, epoch, loader, iters, start_step, wandb\)"):
        train_epoch(0, [], 500, 0, None)  # pyrefly: ignore[bad-argument-type]


def test_a_long_run_of_few_updates_names_the_plan(corpus, tmp_path, monkeypatch):
    """With the share of a mixture left out; the command is one that the planner takes."""
    data = f"{corpus['pretrain']}:0.5,{corpus['pretrain_eval']}:0.5"
    argv = flags(corpus, tmp_path, "pretrain", batch_size=16, epochs=1, data_path=data)
    long = Faults(script="import trainer.loop; trainer.loop.SECONDS_TO_ADVISE = 0")
    out = run("pretrain", argv, long).out
    (line,) = [line for line in out.splitlines() if "plan.py" in line]
    script, *advised = shlex.split(line.partition(": python ")[2])
    assert advised[:3] == ["--pretrain_data", f"{corpus['pretrain']},{corpus['pretrain_eval']}", "--hours"]
    monkeypatch.setattr(sys, "argv", [script, *advised[:-1], "1"])  # hours
    plan.parse_args()
    assert "--sft_data" in loop.plan_advice("a.jsonl", "sft", 9.0) and not loop.plan_advice("a", "dpo", 9.0)
