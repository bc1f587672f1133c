"""GRPO as runs: they resume bit for bit, also in the middle of a rollout, however they are distributed."""

import json
import re
import signal

import pytest

from tests.stage_process import Faults, run
from tests.trainer.rollout_runs import (
    IN_A_ROLLOUT,
    assert_close_figures,
    assert_goes_on_with_another_grouping,
    assert_same_run,
    figures,
    rollout_flags,
    write_prompts,
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts"))


def grpo_flags(prompts, folder, **extra) -> list[str]:
    return rollout_flags(prompts, folder, **{"num_generations": 4} | extra)


def test_a_killed_run_ends_with_the_same_bits(prompts, tmp_path):
    """First stopped in the second rollout of an update, of which the first one must not count twice."""
    settings = {"num_iterations": 2, "epsilon": 0.1, "beta": 0.1, "temperature": 0.8}
    settings |= {"batch_size": 2, "accumulation_steps": 2}
    run("grpo", grpo_flags(prompts, tmp_path / "whole", **settings))
    assert len({json.dumps(record[:4]) for record in figures(tmp_path / "whole", "grpo_32")}) == 12
    again = grpo_flags(prompts, tmp_path / "killed", from_resume=1, **settings)
    script = IN_A_ROLLOUT.format(token=9, signal="SIGTERM")
    stopped = run("grpo", again, Faults(script=script), status=128 + signal.SIGTERM)
    assert "is saved; --from_resume 1 goes on" in stopped.out + stopped.err
    for fault in (
        Faults(script=IN_A_ROLLOUT.format(token=9, signal="SIGKILL")),
        Faults(signals={3: signal.SIGKILL}),
    ):
        run("grpo", again, fault, status=-signal.SIGKILL)
    # between two iterations
    run("grpo", again, Faults(signals={1: signal.SIGTERM}), status=128 + signal.SIGTERM)
    run("grpo", again)
    assert_same_run(tmp_path / "whole", tmp_path / "killed", "grpo_32")


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_accumulation_and_ranks_change_nothing(prompts, tmp_path, loss_type):
    for ranks, batch, steps in ((1, 8, 1), (2, 2, 2)):
        own = {"batch_size": batch, "accumulation_steps": steps, "loss_type": loss_type, "beta": 0.05}
        run("grpo", grpo_flags(prompts, tmp_path / f"{ranks}x{batch}", **own, eval_interval=0), ranks=ranks)
    assert_close_figures(tmp_path / "1x8", tmp_path / "2x2", "grpo_32")


def test_sharded_weights_change_nothing(prompts, tmp_path):
    """The completions, of whole weights, and the updates are those of DDP; a killed run ends with the same
    bits."""
    settings = {"num_iterations": 2, "loss_type": "grpo", "use_moe": 1}
    settings |= {"batch_size": 2, "accumulation_steps": 2, "beta": 0.05, "sample_prompts": "none"}
    run("grpo", grpo_flags(prompts, tmp_path / "ddp", **settings), ranks=2)
    sharded = settings | {"parallel": "fsdp"}
    run("grpo", grpo_flags(prompts, tmp_path / "fsdp", **sharded), ranks=2)
    name = "grpo_32_moe"
    assert_close_figures(tmp_path / "ddp", tmp_path / "fsdp", name)
    again = grpo_flags(prompts, tmp_path / "killed", from_resume=1, **sharded)
    stopped = Faults(signals={5: signal.SIGTERM})
    run("grpo", again, stopped, ranks=2, status=128 + signal.SIGTERM)
    run("grpo", again, ranks=2)
    assert_same_run(tmp_path / "fsdp", tmp_path / "killed", name)


def test_resumed_in_a_rollout_with_another_number_of_ranks(prompts, tmp_path):
    """The rest of that rollout's updates are made of new completions."""
    assert_goes_on_with_another_grouping(
        "grpo", prompts, tmp_path, "grpo_32", (2, 1, 2), (4, 1, 1), num_generations=4
    )


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"epsilon": 0.1}, "error: --epsilon has no effect with one update per rollout"),
        ({"packing": 1}, "error: --packing 1 has no effect"),
        ({"batch_size": 40}, "error: an epoch has 24 prompts, and an update takes 40"),
        (
            {"reward": "exact_answer"},
            r"rl.jsonl:\d+: reward exact_answer failed \(ValueError: .*no reference answer",
        ),
    ],
)
def test_a_mistake_is_one_line(prompts, tmp_path, settings, line):
    done = run("grpo", grpo_flags(prompts, tmp_path, **settings), status=2)
    assert len(done.error_lines) == 1
    assert re.search(line, done.err), done.err
