"""Distillation on the student's own answers as runs: they resume bit for bit, and an update is the same however
it is split; flags that make no sense are one line."""

import signal

import pytest

from common.arguments import parse_args
from common.errors import UserError
from tests.stage_process import Faults, run
from tests.trainer.rollout_runs import IN_A_ROLLOUT, assert_close_figures
from tests.trainer.stage_flags import assert_same_run, flags, write_start_weights
from trainer import train_distillation

NAMES = ("loss", "aux_loss", "grad_norm", "cross_entropy", "divergence", "reverse_divergence", "eval_loss")
NAMES += ("eval_divergence", "completion_length", "cut_share")


def argv(corpus, folder, **extra) -> list[str]:
    """A small run from random weights, with its teacher in its folder."""
    if not (folder / "out").exists():
        (folder / "out").mkdir(parents=True)
        write_start_weights(folder / "out", {"teacher_48": {"hidden_size": 48, "num_hidden_layers": 1}})
    settings = {"from_weight": "none", "from_teacher_weight": "teacher", "on_policy": 0.5, "max_gen_len": 5}
    settings |= {"epochs": 1, "eval_interval": 0, "learning_rate": 1e-3}
    return flags(corpus, folder, "sft", **settings | extra)


def test_killed_in_an_answer_and_in_an_update_it_ends_with_the_same_bits(corpus, tmp_path):
    settings = {"dropout": 0.1, "accumulation_steps": 2, "batch_size": 4, "optimizer": "muon"}
    run("distillation", argv(corpus, tmp_path / "whole", **settings))
    again = argv(corpus, tmp_path / "killed", **settings, from_resume=1)
    in_an_answer = Faults(script=IN_A_ROLLOUT.format(token=18, signal="SIGKILL"))
    run("distillation", again, in_an_answer, status=-signal.SIGKILL)
    run("distillation", again, Faults(signals={5: signal.SIGKILL}), status=-signal.SIGKILL)
    assert "resuming full_dist at epoch" in run("distillation", again).out
    assert_same_run(tmp_path / "whole", tmp_path / "killed", "full_dist_32", NAMES)


def test_accumulation_and_ranks_change_nothing(corpus, tmp_path):
    """(16) = (2 ranks x 4 x 2), of a mixture of experts."""
    for folder, batch_size, accumulation, ranks in (("one", 16, 1, 1), ("two", 4, 2, 2)):
        settings = {"batch_size": batch_size, "accumulation_steps": accumulation, "use_moe": 1}
        run("distillation", argv(corpus, tmp_path / folder, **settings), ranks=ranks)
    assert_close_figures(tmp_path / "one", tmp_path / "two", "full_dist_32_moe", NAMES)


MISTAKES = {
    "text": ({"on_policy": 1, "kind": "pretrain"}, "--on_policy needs prompts"),
    "shards": ({"on_policy": 1, "parallel": "fsdp"}, "--parallel fsdp: --on_policy samples from a whole model"),
    "no answers": ({"max_gen_len": 9}, "--max_gen_len has no effect without --on_policy"),
    "no data": ({"on_policy": 1, "alpha": 0.2}, "--alpha has no effect on the student's own answers"),
    "too long": ({"on_policy": 1, "max_gen_len": 32768}, "together exceed the 32768 positions"),
    "share": ({"on_policy": 1.5}, "--on_policy must be less than or equal to 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_flag_without_sense_is_one_line(case):
    wrong, line = MISTAKES[case]
    with pytest.raises(UserError) as error:
        parse_args(
            train_distillation.Args, None, [word for k, v in wrong.items() for word in (f"--{k}", str(v))]
        )
    assert line in str(error.value) and "\n" not in str(error.value)


def test_the_run_ends_with_status_2(corpus, tmp_path):
    line = run("distillation", argv(corpus, tmp_path, kind="pretrain"), status=2).err
    assert line.startswith("error: --on_policy needs prompts") and line.count("\n") == 1
