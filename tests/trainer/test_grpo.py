"""GRPO as runs: they resume bit for bit, also in the middle of a rollout, however they are distributed."""

import signal

import pytest

from common.errors import UserError
from tests.conftest import write_jsonl
from tests.stage_process import Faults, run
from tests.trainer.rollout_runs import (
    IN_A_ROLLOUT,
    SAMPLED,
    assert_close_figures,
    rollout_flags,
    write_prompts,
)
from tests.trainer.stage_flags import assert_same_run, records, saved_state
from trainer import train_grpo

GAP = "sampling_logp_difference"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts"))


def grpo_flags(prompts, folder, **extra) -> list[str]:
    return rollout_flags(prompts, folder, **{"num_generations": 4} | extra)


@pytest.mark.parametrize(("stage", "record", "extra", "why"), [
    ("grpo", {"answer": "1/2"}, {"reward": "numeric_answer"}, "numeric_answer: the reference answer '1/2' is not one"),
    ("agent", {"gt": ["6", "7"]}, {"reward": "numeric_answer", "max_total_len": 256}, "numeric_answer: the reference answer ['6', '7'] is not one number"),
    ("ppo", {"solution": "6"}, {"reward": "length,exact_answer"}, "exact_answer: the record has no reference"),
    ("grpo", {"answer": "6", "tools": {"add": {}}}, {"reward": "exact_answer"}, "'tools' has a schema without a name"),
])  # fmt: skip
def test_what_the_first_rollout_would_notice_ends_the_run_before_it(stage, record, extra, why, tmp_path):
    """With the line of the record, in the training data and in the held-out ones; it can be skipped."""
    good = [{"prompt": f"{i}?", "answer": "6"} for i in range(20)]
    bad = write_jsonl(tmp_path / "bad.jsonl", [*good, {"prompt": "q"} | record])
    prompts = {"rl": write_jsonl(tmp_path / "good.jsonl", good), "rl_eval": bad, "cache": tmp_path / "cache"}
    settings = {"max_seq_len": 200} | extra
    argv = rollout_flags(prompts, tmp_path / "run", **settings)
    for each in (argv, rollout_flags(prompts | {"rl": bad}, tmp_path / "run", **settings)):
        line = run(stage, each, status=2).err
        assert f"error: {bad}:21: " in line and why in line and line.count("\n") == 1
    assert not list((tmp_path / "run").glob("*.pth"))
    skipped = run(stage, [*argv, "--on_bad_data", "skip", "--max_steps", "1"]).out
    assert "bad records are skipped: 1 of 21 records (4.8%)" in skipped


def test_a_killed_run_ends_with_the_same_bits(prompts, tmp_path):
    """First stopped in the second rollout of an update, of which the first one must not count twice."""
    settings = {"num_iterations": 2, "epsilon": 0.1, "beta": 0.1, "temperature": 0.8}
    settings |= {"batch_size": 2, "accumulation_steps": 2, "max_steps": 8, "sample_prompts": "auto"}
    run("grpo", grpo_flags(prompts, tmp_path / "whole", **settings))
    assert len({tuple(record[:4]) for record in records(tmp_path / "whole", "grpo_32", SAMPLED)}) == 8
    again = grpo_flags(prompts, tmp_path / "killed", from_resume=1, **settings)
    script = IN_A_ROLLOUT.format(token=9, signal="SIGTERM")
    stopped = run("grpo", again, Faults(script=script), status=128 + signal.SIGTERM)
    assert "is saved; --from_resume 1 continues" in stopped.out + stopped.err
    run("grpo", again, Faults(signals={3: signal.SIGKILL}), status=-signal.SIGKILL)
    # between two iterations
    run("grpo", again, Faults(signals={1: signal.SIGTERM}), status=128 + signal.SIGTERM)
    run("grpo", again)
    assert_same_run(tmp_path / "whole", tmp_path / "killed", "grpo_32", SAMPLED)


def test_accumulation_and_ranks_change_nothing(prompts, tmp_path):
    """The completions and the updates are those of one process; a killed run ends with the
    same bits."""
    settings = {"num_iterations": 2, "loss_type": "grpo", "use_moe": 1, "beta": 0.05}
    settings |= {"eval_interval": 0, "max_steps": 4}
    run("grpo", grpo_flags(prompts, tmp_path / "one", **settings, batch_size=8))
    cut = settings | {"batch_size": 2, "accumulation_steps": 2}
    two = run("grpo", grpo_flags(prompts, tmp_path / "two", **cut), ranks=2)
    assert "differs from that on rank 0" not in two.err
    name = "grpo_32_moe"
    assert_close_figures(tmp_path / "one", tmp_path / "two", name)
    for folder in ("one", "two"):  # the trainer says of the sampled tokens what the sampler said
        assert all(0 <= gap < 1e-4 for (gap,) in records(tmp_path / folder, name, (GAP,)))
    again = grpo_flags(prompts, tmp_path / "killed", from_resume=1, **cut)
    stopped = Faults(signals={5: signal.SIGTERM})
    run("grpo", again, stopped, ranks=2, status=128 + signal.SIGTERM)
    run("grpo", again, ranks=2)
    assert_same_run(tmp_path / "two", tmp_path / "killed", name, SAMPLED)


def test_decoding_that_computes_something_else_is_noticed(prompts, tmp_path):
    """As where a change of the model forgets one of its forms."""
    script = "from model import cpu; one = cpu.attention_of_one_query\n"
    script += "cpu.attention_of_one_query = lambda q, k, v, mask: one(q * 30, k, v, mask) * 3"
    run("grpo", grpo_flags(prompts, tmp_path, eval_interval=0, epochs=1), Faults(script=script))
    ((gap,), *_) = records(tmp_path, "grpo_32", (GAP,))
    assert gap > 1e-3


def test_resumed_in_a_rollout_with_another_number_of_ranks(prompts, tmp_path):
    """The rest of that rollout's updates are made of new completions."""
    settings = {"num_iterations": 2, "eval_interval": 0, "save_interval": 1000}
    argv = grpo_flags(prompts, tmp_path, **settings, batch_size=2)
    at = Faults(signals={3: signal.SIGTERM})  # in the third update: it is made, and saved
    run("grpo", argv, at, ranks=2, status=128 + signal.SIGTERM)
    assert saved_state(tmp_path, "grpo_32")["update"] == 3
    run("grpo", grpo_flags(prompts, tmp_path, **settings, batch_size=4, from_resume=1))
    assert saved_state(tmp_path, "grpo_32")["update"] == 12


def test_a_setting_without_effect_is_refused(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_grpo.py", *grpo_flags(prompts, tmp_path, epsilon=0.1)])
    with pytest.raises(UserError, match=r"^--epsilon has no effect with one update per rollout"):
        train_grpo.main()


SLOW = """
import os, time
calls = 0

def slow(prompt, completion, record):
    global calls
    calls += 1
    if calls == 60 and "SLOW" in os.environ:
        time.sleep(5)
    return float(len(completion))
"""


def test_a_run_that_a_reward_held_up_goes_on_with_more_time(prompts, tmp_path):
    (tmp_path / "mine.py").write_text(SLOW)
    own = {"reward": f"{tmp_path}/mine.py:slow", "num_generations": 2, "save_interval": 1, "from_resume": 1}
    run("grpo", rollout_flags(prompts, tmp_path / "whole", **own))
    argv = rollout_flags(prompts, tmp_path / "slow", **own)
    line = run("grpo", [*argv, "--reward_timeout", "0.5"], status=2, SLOW="1").error_lines[-1]
    assert "took longer than --reward_timeout 0.5 s" in line
    done = run("grpo", [*argv, "--reward_timeout", "60"])
    assert "resuming grpo at epoch 1, update" in done.out
    assert_same_run(tmp_path / "whole", tmp_path / "slow", "grpo_32", SAMPLED)
