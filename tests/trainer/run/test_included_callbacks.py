"""The checkpoints that are kept besides the latest: when, and which of them are deleted."""

import signal
from pathlib import Path

import torch

from common.settings import StageArgs
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_run, flags, saved_state
from trainer.report.metrics import read_metrics
from trainer.run.included_callbacks import CheckpointManager


def kept(folder: Path, keep_last: int = 2) -> CheckpointManager:
    """The hook of a run that has states of the updates 2, 4 ... 12; its name has characters of patterns."""
    for update in range(2, 14, 2):
        (folder / f"w[1].5_512_update_{update:08d}.pth").write_text("")
    args = StageArgs(save_weight="w[1].5", checkpoint_dir=str(folder), keep_every=2, keep_last=keep_last)
    return CheckpointManager(args)


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem[-8:]) for path in folder.glob("*_update_*.pth"))


def test_later_ones_than_the_present_update_stay(tmp_path):
    """Of a run that went back to an older state."""
    kept(tmp_path).prune(now=6, best=None)
    assert numbers(tmp_path) == [4, 6, 8, 10, 12]


def test_the_best_one_stays(tmp_path):
    kept(tmp_path).prune(now=12, best=4)
    assert numbers(tmp_path) == [4, 10, 12]


def test_one_stays_in_any_case(tmp_path):
    kept(tmp_path, keep_last=0).prune(now=12, best=None)
    assert numbers(tmp_path) == [12]


def test_what_is_due_waits_while_updates_are_skipped(corpus, tmp_path):
    """The evaluation and the numbered checkpoint come with the postponed save, after the next good update: the
    best state is that of the best weights. A run that was stopped in between does the same."""
    settings = {
        "num_hidden_layers": 1,
        "epochs": 1,
        "eval_interval": 2,
        "keep_every": 2,
        "save_interval": 100,
    }
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings, keep_last=9), Faults(nan=(4,)))
    found = read_metrics(tmp_path / "whole/out/pretrain_32_metrics.jsonl")
    assert [record["update"] for record in found if "eval_loss" in record] == [2, 5, 6, 8]
    assert numbers(tmp_path / "whole/checkpoints") == [2, 5, 6, 8]
    best = torch.load(tmp_path / "whole/checkpoints/pretrain_32_best_resume.pth", weights_only=True)
    weights = torch.load(tmp_path / "whole/out/pretrain_best_32.pth", weights_only=True)
    evaluated = {record["eval_loss"]: record["update"] for record in found if "eval_loss" in record}
    assert best["update"] == evaluated[min(evaluated)]
    assert torch.equal(best["model"]["model.norm.weight"].half(), weights["model.norm.weight"])

    argv = flags(corpus, tmp_path / "stopped", "pretrain", **settings, from_resume=1)
    run("pretrain", argv, Faults(nan=(4,), signals={4: signal.SIGTERM}), status=143)
    assert saved_state(tmp_path / "stopped")["evaluate_due"]
    run("pretrain", argv)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_the_last_update_is_evaluated_even_if_it_is_skipped(corpus, tmp_path):
    settings = {"num_hidden_layers": 1, "epochs": 1, "eval_interval": 0}
    run("pretrain", flags(corpus, tmp_path, "pretrain", **settings), Faults(nan=(8,)))
    assert "eval_loss" in read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")[-1]
    assert saved_state(tmp_path)["update"] == 8


STOPPING = """
from trainer import trainer_utils
from trainer.run.callbacks import Callback
class Stops(Callback):
    def on_batch_end(self, engine, update, record):
        if update == 3:
            engine.stop("asked")
begin_run = trainer_utils.begin_run
def with_callback(state, *others, **named):
    state.callbacks.append(Stops())
    begin_run(state, *others, **named)
trainer_utils.begin_run = with_callback
"""


def test_a_callback_stops_a_stage_script_which_then_goes_on(corpus, tmp_path):
    settings = {"num_hidden_layers": 1, "epochs": 1, "save_interval": 100}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings))
    argv = flags(corpus, tmp_path / "stopped", "pretrain", **settings, from_resume=1)
    assert "stopping: asked" in run("pretrain", argv, Faults(script=STOPPING)).out
    assert saved_state(tmp_path / "stopped")["update"] == 3
    assert "done: 8 updates" in run("pretrain", argv).out
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
