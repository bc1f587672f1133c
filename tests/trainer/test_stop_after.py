"""--stop_after: sessions of a few updates each, which together are the run that was never stopped."""

import shlex

import pytest

from common.session import START, STOPPED
from tests.stage_process import Faults, run
from tests.trainer.rollout_runs import SAMPLED, rollout_flags, write_prompts
from tests.trainer.stage_flags import assert_same_run, flags, saved_state

# The clock shows the number of updates that this process has made. A second rank's clock is far ahead.
UPDATES_AS_SECONDS = """
from itertools import count
from trainer.callbacks import train_state
calls = count(1000 * int(os.environ.get("RANK", 0)) + 1)
train_state.session_seconds = lambda: next(calls)
"""
SETTINGS = {"epochs": 3, "accumulation_steps": 2, "batch_size": 4, "dropout": 0.1, "from_resume": 1}
OVER = {START: "0"}  # the session began in 1970


def in_sessions(stage: str, argv: list[str], updates: int, ranks: int = 1) -> list[str]:
    """Run sessions of so many updates until the run is done. Returns what each printed."""
    said = []
    while not said or "done: " not in said[-1]:
        again = [*argv, "--stop_after", f"{updates}s"]
        said.append(run(stage, again, Faults(script=UPDATES_AS_SECONDS), ranks=ranks).out)
        assert len(said) < 20
    return said


@pytest.mark.parametrize(("ranks", "updates", "epochs"), [(1, 5, 2), (2, 3, 1)])
def test_sessions_are_the_uninterrupted_run(corpus, tmp_path, ranks, updates, epochs):
    """Eight updates an epoch, in sessions that end in the middle of an epoch, of the accumulated micro-batches of a log
    record, and at a checkpoint. Only the clock of rank 0 counts."""
    total = 8 * epochs
    settings = SETTINGS | {"log_interval": 5, "batch_size": 4 // ranks, "epochs": epochs}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings), ranks=ranks)
    argv = flags(corpus, tmp_path / "sessions", "pretrain", **settings)
    *stopped, last = in_sessions("pretrain", argv, updates, ranks)
    for i, each in enumerate(stopped):
        where = f"update {updates * (i + 1)} of {total}"
        assert f"stopped: by --stop_after {updates}s after {where}, which is saved" in each
        assert f", {where}, from" in [*stopped, last][i + 1] and "verdict: " not in each
    assert len(stopped) == (total - 1) // updates and "--stop_after" not in last
    assert_same_run(tmp_path / "whole", tmp_path / "sessions")


def test_a_time_that_is_over_at_once_still_makes_an_update(corpus, tmp_path):
    """Or short sessions would never come to an end; the first update of a run is evaluated before."""
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", max_steps=3))
    argv = flags(corpus, tmp_path / "sessions", "pretrain", max_steps=3, stop_after="1s")
    first = run("pretrain", argv, **OVER).out
    assert saved_state(tmp_path / "sessions")["update"] == 1
    # the command that it prints goes on, for this session and the next
    command = shlex.split(first.rpartition("; to continue: ")[2])
    assert command[:2] == ["python", "train_pretrain.py"] and command[2:-2] == argv
    assert run("pretrain", command[2:], **OVER).out.endswith(shlex.join(command) + "\n")
    assert "done: 3 updates" in run("pretrain", command[2:], **OVER).out
    assert_same_run(tmp_path / "whole", tmp_path / "sessions")


def test_a_run_that_ends_first_and_one_that_has_ended(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, stop_after="8s", from_resume=1)
    assert "done: 8 updates" in run("pretrain", argv, Faults(script=UPDATES_AS_SECONDS)).out
    assert "nothing to do" in run("pretrain", argv, **OVER).out


def test_the_script_that_runs_the_stages_is_told_by_a_file(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1, stop_after="1s")
    note = {STOPPED: str(tmp_path / "stopped")}
    assert "to continue" not in run("pretrain", argv, **OVER, **note).out
    assert (tmp_path / "stopped").exists()
    (tmp_path / "stopped").unlink()
    run("pretrain", [*argv, "--stop_after", "1000h"], **note)
    assert not (tmp_path / "stopped").exists()
    wrong = run("pretrain", [*argv, "--epochs", "2", "--extend_epochs", "1"], status=2, **{START: "x"})
    assert wrong.error_lines[-1].startswith("error: variable TRAINING_SESSION_START=x must be seconds")


def test_early_stopping_counts_over_the_sessions(corpus, tmp_path):
    settings = {"epochs": 4, "patience": 2, "min_delta": 0.05, "eval_interval": 3, "learning_rate": 1e-7}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings))
    assert saved_state(tmp_path / "whole")["finished"] and saved_state(tmp_path / "whole")["update"] < 32
    argv = flags(corpus, tmp_path / "sessions", "pretrain", **settings, from_resume=1)
    assert len(in_sessions("pretrain", argv, 3)) > 2
    assert_same_run(tmp_path / "whole", tmp_path / "sessions")


# that GRPO and PPO resume in the middle of them: test_grpo.py, test_ppo.py
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_in_the_middle_of_the_updates_on_a_rollout(tmp_path, stage):
    prompts = write_prompts(tmp_path)
    more = {"grpo": {"num_generations": 4, "epsilon": 0.1}, "ppo": {}}[stage]
    settings = {"num_iterations": 3, "max_steps": 9, "from_resume": 1, "sample_prompts": "auto", **more}
    run(stage, rollout_flags(prompts, tmp_path / "whole", **settings))
    said = in_sessions(stage, rollout_flags(prompts, tmp_path / "sessions", **settings), 4)
    assert len(said) == 3  # of nine updates, three on each rollout
    name = {"grpo": "grpo_32", "ppo": "ppo_actor_32"}[stage]
    assert_same_run(tmp_path / "whole", tmp_path / "sessions", name, SAMPLED)


@pytest.mark.slow
def test_a_sharded_run(corpus, tmp_path):
    settings = {"epochs": 1, "parallel": "fsdp", "optimizer": "adamw", "from_resume": 1, "batch_size": 4}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings), ranks=2)
    in_sessions("pretrain", flags(corpus, tmp_path / "sessions", "pretrain", **settings), 5, ranks=2)
    assert_same_run(tmp_path / "whole", tmp_path / "sessions")


@pytest.mark.slow
def test_the_engine(corpus, tmp_path):
    settings = {"epochs": 1, "from_resume": 1}
    whole, sessions = (
        ["--task", "pretrain", *flags(corpus, tmp_path / name, "pretrain", **settings)]
        for name in ("whole", "sessions")
    )
    run("engine", whole)
    assert len(in_sessions("engine", sessions, 3)) == 3
    assert_same_run(tmp_path / "whole", tmp_path / "sessions")
