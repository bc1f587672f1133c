"""Going back to an older state: a branch is a run of its own, and a restart goes on with it."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.stage_process import Faults, run, start_ranks
from tests.trainer.stage_flags import FIELDS, assert_same_tensors, flags, records, saved_state
from trainer.report.metrics import read_metrics

SETTINGS = {"epochs": 2, "num_hidden_layers": 1, "save_interval": 3, "eval_interval": 4, "keep_every": 4}
SETTINGS |= {"keep_last": 9}


def of_run(folder: Path, name: str, below: str = "") -> dict[str, bytes]:
    """The files of a run, by name; `below`: a folder in which they are kept."""
    kept = [path for place in ("out", "checkpoints") for path in (folder / place / below).glob(f"{name}_*")]
    return {path.name: path.read_bytes() for path in kept if path.is_file()}


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """The run `a`."""
    folder = tmp_path_factory.mktemp("runs")
    run("pretrain", flags(corpus, folder, "pretrain", **SETTINGS, save_weight="a"))
    return folder


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_branch_that_is_killed(corpus, finished, tmp_path, ranks):
    """It takes a name that a run had; each start goes on; it ends with the bits of the run it left."""
    folder = tmp_path / "both"
    shutil.copytree(finished, folder)
    for place in ("out", "checkpoints"):
        for path in (folder / place).glob("a_*"):
            if "_resume" not in path.name:  # else `b` would be a run of another branch
                shutil.copy(path, path.with_name(path.name.replace("a_", "b_", 1)))
    before = {name: of_run(folder, name) for name in ("a", "b")}
    start = folder / "checkpoints/a_32_update_00000008.pth"
    argv = flags(corpus, folder, "pretrain", **SETTINGS, save_weight="b", resume_from=start)
    argv += ["--batch_size", str(8 // ranks)]
    for at in (1, 3):
        faults = {0: Faults(signals={at: signal.SIGKILL})}
        assert -9 in {process.wait() for process in start_ranks(ranks, "pretrain", argv, faults)}
    processes = start_ranks(ranks, "pretrain", argv)
    assert {process.wait() for process in processes} == {0}, processes[0].err
    assert "update 8 of" not in processes[0].out
    assert of_run(folder, "a") == before["a"] and of_run(folder, "b", "earlier_1") == before["b"]
    assert [r["update"] for r in read_metrics(folder / "out/b_32_metrics.jsonl")] == [*range(9, 17)]
    described = json.loads((folder / "out/b_32_run.json").read_text())
    assert described["branch_of"] == str(start)
    if ranks == 1:
        for part in ("model", "optimizer"):
            assert_same_tensors(saved_state(folder, "b_32")[part], saved_state(folder, "a_32")[part])
        first, *others = records(folder, "b_32")
        assert first[FIELDS.index("initial_eval_loss")] is not None  # what the branch begins with
        first[FIELDS.index("initial_eval_loss")] = None
        assert [first, *others] == records(folder, "a_32")[8:]


def test_the_best_weights_of_a_branch_are_its_own(corpus, finished, tmp_path):
    """Although none of its evaluations is as good as one of the run that it left."""
    start = tmp_path / "start.pth"
    state = saved_state(finished, "a_32") | {"epoch": 0, "step": 4, "samples_done": 32, "update": 4}
    torch.save(state | {"best_eval": 0.1, "best_update": 2}, start)
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, save_weight="b", resume_from=start)
    run("pretrain", argv)
    evaluated = {
        r["eval_loss"]: r["update"]
        for r in read_metrics(tmp_path / "out/b_32_metrics.jsonl")
        if "eval_loss" in r
    }
    assert saved_state(tmp_path, "b_32")["best_update"] == evaluated[min(evaluated)]
    assert (tmp_path / "out/b_best_32.pth").exists()


def test_a_branch_into_its_own_or_a_taken_name_is_refused(corpus, finished):
    start = finished / "checkpoints/a_32_update_00000008.pth"
    argv = flags(corpus, finished, "pretrain", **SETTINGS, save_weight="a", resume_from=start)
    before = of_run(finished, "a")
    assert "another --save_weight" in run("pretrain", argv, status=2).error_lines[-1]
    (finished / "checkpoints/a_32_resume.pth").rename(finished / "kept")
    (finished / "checkpoints/a_32_resume_previous.pth").rename(finished / "kept_previous")
    assert "another --save_weight" in run("pretrain", argv, status=2).error_lines[-1]
    (finished / "kept").rename(finished / "checkpoints/a_32_resume.pth")
    (finished / "kept_previous").rename(finished / "checkpoints/a_32_resume_previous.pth")
    assert of_run(finished, "a") == before


def test_a_finished_run_that_is_started_again_changes_no_file(corpus, finished, tmp_path):
    """A lost weights file is written once more, with the same bytes."""
    folder = tmp_path / "again"
    shutil.copytree(finished, folder)
    argv = flags(corpus, folder, "pretrain", **SETTINGS, save_weight="a", from_resume=1)
    states = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("*/a_*")}
    assert "nothing to do" in run("pretrain", argv).out
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("*/a_*")} == states
    weights = folder / "out/a_32.pth"
    whole = weights.read_bytes()
    weights.unlink()
    assert "done: 16 updates" in run("pretrain", argv).out
    assert weights.read_bytes() == whole


def test_an_early_stopped_run_is_finished_unless_it_is_extended(corpus, tmp_path):
    settings = {
        "num_hidden_layers": 1,
        "epochs": 3,
        "eval_interval": 2,
        "learning_rate": 1e-9,
        "min_delta": 1,
    }
    argv = flags(corpus, tmp_path, "pretrain", **settings, from_resume=1)
    assert "stopping: EarlyStopping" in run("pretrain", [*argv, "--patience", "1"]).out
    assert "nothing to do" in run("pretrain", argv).out
    os.unlink(tmp_path / "out/pretrain_32.pth")
    assert "done: 4 updates" in run("pretrain", argv).out
    patient = [*argv, "--patience", "1", "--extend_epochs", "1"]
    assert "done: 8 updates" in run("pretrain", patient).out
    assert "nothing to do" in run("pretrain", patient).out  # it was extended to these epochs already
    assert "done: 10 updates" in run("pretrain", [*patient, "--epochs", "4"]).out
    assert "nothing to do" in run("pretrain", [*patient, "--epochs", "4"]).out
