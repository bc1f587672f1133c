"""Runs of a stage on weighted sources of which a share is held out: resumed, on two ranks, refused."""

import signal

import pytest

from tests.stage_process import Faults, run
from tests.trainer.rollout_runs import rollout_flags, write_prompts
from tests.trainer.stage_flags import assert_same_run, flags
from trainer.report.metrics import read_metrics

SPLIT = {"eval_data_path": "none", "eval_share": 0.2, "packing": 1, "batch_size": 4}


def weighted(corpus, first: float = 0.3, second: float = 0.7) -> str:
    return f"{corpus['pretrain']}:{first},{corpus['pretrain_eval']}:{second}"


def test_a_killed_run_of_a_mixture_goes_on_to_the_bit(corpus, tmp_path):
    settings = SPLIT | {"data_path": weighted(corpus), "num_workers": 1}
    argvs = {
        n: flags(corpus, tmp_path / n, "pretrain", **settings, from_resume=1) for n in ("whole", "killed")
    }
    done = run("pretrain", argvs["whole"])
    lines = done.out.splitlines()
    for share, path in ((30, corpus["pretrain"]), (70, corpus["pretrain_eval"])):
        (line,) = [line for line in lines if line.startswith(f"{path}: ")]
        # few rows: one is a few per cent
        assert abs(float(line.split("tokens; ")[1].split("%")[0]) - share) < 10
    assert sum(line.startswith("data: ") and "; held out: " in line for line in lines) == 1
    assert "pe.jsonl:0.7" not in done.out and "pe.jsonl is passed" in done.err
    run("pretrain", argvs["killed"], Faults(signals={6: signal.SIGKILL}), status=-9)
    assert "resuming" in run("pretrain", argvs["killed"]).out
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    for change, line in (
        ({"data_path": weighted(corpus, 0.5, 0.5)}, "weights: 0.3, 0.7 -> 0.5, 0.5"),
        ({"data_path": corpus["pretrain"]}, "weights: 0.3, 0.7 -> None"),
        ({"eval_share": 0.25}, "eval_share: 0.2 -> 0.25"),
    ):
        argv = flags(corpus, tmp_path / "killed", "pretrain", **settings | change, from_resume=1)
        error = run("pretrain", argv, status=2).error_lines[-1]
        assert "the checkpoint belongs to another run" in error and line in error


def test_an_evaluation_on_two_ranks_is_that_of_one(corpus, tmp_path):
    """Before the rate has changed anything: the loss per target, the bits per byte, of all the ranks' data."""
    settings = {"epochs": 1, "num_hidden_layers": 1, "learning_rate": 1e-12, "eval_interval": 0}
    settings["from_weight"] = "none"
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        run("sft", flags(corpus, folder, "sft", **settings), ranks=ranks)
        found[ranks] = read_metrics(folder / "out/full_sft_32_metrics.jsonl")[-1]
    for name in ("eval_loss", "eval_bpb"):
        assert found[2][name] == pytest.approx(found[1][name], rel=1e-6)


def test_what_does_not_go_together_is_one_line(corpus, tmp_path):
    both = flags(corpus, tmp_path, "pretrain", eval_share=0.1)
    (error,) = run("pretrain", both, status=2).error_lines
    assert "--eval_share and --eval_data_path both give held-out data" in error
    prompts = write_prompts(tmp_path)
    prompts["rl"] = f"{prompts['rl']}:1,{prompts['rl_eval']}:1"
    (error,) = run("grpo", rollout_flags(prompts, tmp_path), status=2).error_lines
    assert "prompts are not mixed by weight" in error


def test_a_data_module_that_holds_nothing_out_refuses_the_share(tmp_path):
    script = "from llm.training.data.synthetic import SyntheticDataModule as M\nsetup = M.setup\n"
    script += "def alone(self):\n    setup(self)\n    self.val_dataset = None\nM.setup = alone\n"
    argv = ["--task", "regression", "--eval_share", "0.1", "--save_dir", str(tmp_path), "--checkpoint_dir"]
    argv += [str(tmp_path / "c")]
    (error,) = run("engine", argv, Faults(script=script), status=2).error_lines
    assert "--eval_share: SyntheticDataModule sets no val_dataset" in error
