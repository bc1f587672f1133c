"""PPO as runs: they resume bit for bit, also between the passes of a rollout, however they are
distributed."""

import signal

import pytest
import torch

from common.arguments import parse_args
from common.errors import UserError
from tests.stage_process import Faults, run
from tests.trainer.rollout_runs import (
    IN_A_ROLLOUT,
    SAMPLED,
    assert_close_figures,
    rollout_flags,
    write_prompts,
)
from tests.trainer.stage_flags import assert_same_run, records, saved_state
from trainer import train_ppo
from trainer.report.metrics import read_metrics
from trainer.weights.for_tools import load_path

PPO = (*SAMPLED, "value_loss", "approx_kl", "stopped")
NAME = "ppo_actor_32"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts"))


def test_a_killed_run_ends_with_the_same_bits(prompts, tmp_path):
    """Stopped in a rollout, then killed between the passes of one, of which some are not made."""
    settings = {"num_iterations": 3, "early_stop_kl": 5e-3, "beta": 0.1, "critic_learning_rate": 2e-2}
    settings |= {"batch_size": 8, "save_interval": 1}
    run("ppo", rollout_flags(prompts, tmp_path / "whole", **settings))
    stopped = [record["stopped"] for record in read_metrics(tmp_path / f"whole/out/{NAME}_metrics.jsonl")]
    # of three rollouts, the first pass of which is always made
    assert len(stopped) == 9 and 0 < sum(stopped) < 6
    again = rollout_flags(prompts, tmp_path / "killed", from_resume=1, **settings)
    stopped_in_it = Faults(script=IN_A_ROLLOUT.format(token=3, signal="SIGTERM"))
    run("ppo", again, stopped_in_it, status=128 + signal.SIGTERM)
    run("ppo", again, Faults(signals={3: signal.SIGKILL}), status=-signal.SIGKILL)
    run("ppo", again)
    assert_same_run(tmp_path / "whole", tmp_path / "killed", NAME, PPO)


def test_accumulation_and_ranks_change_nothing(prompts, tmp_path):
    """(1 x 8) = (2 ranks x 2 micro-batches x 2)."""
    for ranks, batch, steps in ((1, 8, 1), (2, 2, 2)):
        own = {"batch_size": batch, "accumulation_steps": steps, "beta": 0.05, "num_iterations": 2}
        own |= {"eval_interval": 0}
        run("ppo", rollout_flags(prompts, tmp_path / f"{ranks}", **own), ranks=ranks)
    assert len(records(tmp_path / "1", NAME)) == 6
    assert_close_figures(tmp_path / "1", tmp_path / "2", NAME, PPO)


def test_passes_that_the_limit_stops_are_not_made(prompts, tmp_path):
    """No step of the optimizer, not even one without a gradient; the weights for use are the policy's
    alone."""
    settings = {"num_iterations": 3, "early_stop_kl": 1e-12, "num_attention_heads": 8, "max_steps": 6}
    run("ppo", rollout_flags(prompts, tmp_path, **settings))
    state, weights = saved_state(tmp_path, NAME), torch.load(tmp_path / f"out/{NAME}.pth")
    assert state["update"] == 6
    assert {int(each["step"]) for each in state["optimizer"]["state"].values()} == {2}
    losses, rewards, stopped = zip(*records(tmp_path, NAME, ("loss", "reward", "stopped")), strict=True)
    assert stopped == (0.0, 1.0, 1.0) * 2
    for told in (losses, rewards):  # None of a pass that was not made, or made without a rollout
        assert [value is None for value in told] == [False, True, True] * 2
    policy = {
        key.removeprefix("actor."): value for key, value in state["model"].items() if key.startswith("actor.")
    }
    assert weights.keys() == policy.keys() and all(
        torch.equal(weights[key], policy[key].half()) for key in weights
    )
    assert state["model"]["critic.lm_head.weight"].shape == (1, 32)
    path = tmp_path / f"checkpoints/{NAME}_resume.pth"
    with pytest.raises(
        UserError, match=r"is a checkpoint to resume from, of a policy and its critic \(PPO\)"
    ):
        load_path(path)


def test_flags_of_minimind():
    names = {"clip_epsilon": 0.1, "kl_coef": 0.02, "ppo_update_iters": 3, "cliprange_value": 0.3}
    typed = [part for name, value in names.items() for part in (f"--{name}", str(value))]
    args = parse_args(train_ppo.Args, "", typed)
    assert (args.epsilon, args.beta, args.num_iterations, args.cliprange_value) == (0.1, 0.02, 3, 0.3)


def test_shards_are_refused(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_ppo.py", *rollout_flags(prompts, tmp_path, parallel="fsdp")])
    with pytest.raises(UserError, match=r"^--parallel fsdp: completions are sampled from a whole model"):
        train_ppo.main()
