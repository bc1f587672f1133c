"""--max_steps: the run has so many updates, its schedule ends there, and it is resumed like any other."""

import signal

import pytest

from common.settings import StageArgs
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_run, flags, saved_state
from trainer.callbacks.train_state import total_updates
from trainer.checkpoint.same_run import with_enough_epochs
from trainer.report.metrics import read_metrics
from trainer.stage import warmup_cosine

SETTINGS = {"batch_size": 4, "accumulation_steps": 2, "num_hidden_layers": 1, "optimizer": "adamw"}


@pytest.mark.parametrize("max_steps", [4, 6, 15])  # an epoch has 6 updates; 2 epochs are asked for
def test_the_run_has_so_many_updates_and_its_schedule_ends_there(corpus, tmp_path, max_steps):
    done = run("pretrain", flags(corpus, tmp_path, "pretrain", **SETTINGS, max_steps=max_steps))
    found = read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")
    assert [record["update"] for record in found] == list(range(1, max_steps + 1))
    args = StageArgs(learning_rate=1e-2)
    for record in found:
        assert record["learning_rate"] == pytest.approx(warmup_cosine(record["update"], max_steps, args))
    assert found[-1]["eval_loss"] is not None and f"run: {max_steps} updates" in done.out
    assert saved_state(tmp_path)["update"] == max_steps


def test_killed_resumed_refused_and_extended(corpus, tmp_path):
    whole = flags(corpus, tmp_path / "whole", "pretrain", **SETTINGS, max_steps=8)
    run("pretrain", whole)
    broken = flags(corpus, tmp_path / "broken", "pretrain", **SETTINGS, max_steps=8, from_resume=1)
    for micro_batch in (5, 9):
        run("pretrain", broken, Faults(signals={micro_batch: signal.SIGKILL}), status=-signal.SIGKILL)
    assert "resuming" in run("pretrain", broken).out
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    assert "nothing to do" in run("pretrain", broken).out
    longer = [*broken, "--max_steps", "10"]
    longer.remove("8")
    longer.remove("--max_steps")
    (line,) = run("pretrain", longer, status=2).error_lines
    assert "max_steps: 8 -> 10" in line and "--extend_epochs 1" in line
    run("pretrain", [*longer, "--extend_epochs", "1"])
    assert saved_state(tmp_path / "broken")["update"] == 10


def test_epochs_are_as_many_as_the_updates_take():
    args = StageArgs(batch_size=4, accumulation_steps=2, epochs=2)
    assert with_enough_epochs(args, 45) is args
    for max_steps, epochs in ((1, 1), (6, 1), (7, 2), (60, 10)):
        enough = with_enough_epochs(args.model_copy(update={"max_steps": max_steps}), 45)
        assert enough.epochs == epochs
        run_of = {"samples": 45, "global_batch": 8, "epochs": epochs, "max_steps": max_steps}
        assert total_updates(run_of) == max_steps


def test_data_that_have_grown_are_refused_with_the_two_ways_on(corpus, tmp_path):
    data = tmp_path / "grows.jsonl"
    lines = corpus["pretrain"].read_text().splitlines(keepends=True)
    data.write_text("".join(lines[:30]))
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, data_path=data, epochs=1, from_resume=1)
    run("pretrain", argv, Faults(signals={3: signal.SIGTERM}), status=143)
    data.write_text("".join(lines))
    (line,) = run("pretrain", argv, status=2).error_lines
    assert "belongs to another run: " in line and "; data: " in line
    assert (
        "Either give the old data" in line
        and "--from_weight pretrain --save_weight NEW --from_resume 0" in line
    )


def test_the_engine_counts_them_alike(tmp_path):
    argv = [
        "--task",
        "regression",
        "--save_dir",
        tmp_path / "out",
        "--checkpoint_dir",
        tmp_path / "checkpoints",
    ]
    argv += ["--num_samples", 320, "--batch_size", 32, "--epochs", 1, "--max_steps", 13, "--log_interval", 1]
    done = run("engine", [*map(str, argv), "--device", "cpu"])
    found = read_metrics(tmp_path / "out/regression_64_metrics.jsonl")
    assert [record["update"] for record in found] == list(range(1, 14)) and "done: 13 updates" in done.out
