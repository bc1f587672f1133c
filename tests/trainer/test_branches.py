"""Going back to an older state: a branch never writes over another run's files, and a restart goes on with
it."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.stage_process import Faults, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, assert_same_tensors, flags, records, saved_state
from trainer.report.metrics import read_metrics

SETTINGS = {"epochs": 2, "num_hidden_layers": 1, "save_interval": 3, "eval_interval": 4, "keep_every": 4}
SETTINGS |= {"keep_last": 9}
LAST = 16  # updates of such a run


def of_run(folder: Path, name: str, below: str = "") -> dict[str, bytes]:
    """The files of a run, by name; `below`: a folder in which they are kept."""
    kept = [path for place in ("out", "checkpoints") for path in (folder / place / below).glob(f"{name}_*")]
    return {path.name: path.read_bytes() for path in kept if path.is_file()}


def branch(folder: Path, corpus, name: str, start: Path, **extra) -> list[str]:
    return flags(corpus, folder, "pretrain", **SETTINGS, save_weight=name, resume_from=start, **extra)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> Path:
    """Two finished runs, `a` and `b`, which differ in nothing but their name."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        run("pretrain", flags(corpus, folder, "pretrain", **SETTINGS, save_weight=name))
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_branch_under_another_runs_name_that_is_killed(corpus, runs, tmp_path, ranks):
    """`b` goes on from a numbered state of `a`: the old files of both are all there, and each start goes
    on."""
    folder = tmp_path / "both"
    shutil.copytree(runs, folder)
    before = {name: of_run(folder, name) for name in ("a", "b")}
    assert len(before["b"]) == len(before["a"]) > 10
    start = folder / "checkpoints/a_32_update_00000008.pth"
    argv = branch(folder, corpus, "b", start, **({"batch_size": 4} if ranks == 2 else {}))
    for at in (1, 4) if ranks == 1 else (3,):
        faults = {0: Faults(signals={at: signal.SIGKILL})}
        status = {process.wait() for process in start_ranks(ranks, "pretrain", argv, faults)}
        assert -9 in status, at
    processes = start_ranks(ranks, "pretrain", argv)
    assert {process.wait() for process in processes} == {0}, processes[0].err
    assert "going on from the newest state, which continues it" in processes[0].out
    assert of_run(folder, "a") == before["a"]
    assert of_run(folder, "b", "earlier_1") == before["b"]
    assert not list(folder.glob("*/earlier_2"))
    updates = [record["update"] for record in read_metrics(folder / "out/b_32_metrics.jsonl")]
    assert updates == [*range(1, LAST + 1)]  # its head is that of `a`
    numbered = sorted(path.name for path in (folder / "checkpoints").glob("b_32_update_*"))
    assert numbered == [f"b_32_update_000000{number}.pth" for number in ("08", "12", "16")]
    described = json.loads((folder / "out/b_32_run.json").read_text())
    assert described["branch_of"]["update"] == 8 and described["branch_of"]["run_name"] == "a_32"
    if ranks == 1:
        for part in ("model", "optimizer"):
            assert_same_tensors(saved_state(folder, "b_32")[part], saved_state(folder, "a_32")[part])
        assert records(folder, "b_32") == records(folder, "a_32")


def test_back_to_an_older_state_of_the_same_run(corpus, runs, tmp_path):
    """To its best one, which the branch writes over. Its later files are set aside; killed and started again
    with the same command, the branch goes on."""
    shutil.copytree(runs, tmp_path / "back")
    folder = tmp_path / "back"
    start = folder / "checkpoints/a_32_best_resume.pth"
    os.replace(folder / "checkpoints/a_32_update_00000008.pth", start)  # a best one that is not the newest
    before = of_run(folder, "a")
    argv = branch(folder, corpus, "a", start)
    run("pretrain", argv, Faults(signals={1: signal.SIGKILL}), status=-9)
    assert of_run(folder, "a", "earlier_1") == before
    stopped = run("pretrain", argv, Faults(signals={2: signal.SIGTERM}), status=143)
    assert "--from_resume 1 goes on from there" in stopped.err
    resumed = run("pretrain", [*argv, "--from_resume", "1"])  # as that line says
    assert "a new branch" not in resumed.out and "done: 16 updates" in resumed.out
    assert_same_run(runs, folder, "a_32")
    assert of_run(folder, "a", "earlier_1") == before and not list(folder.glob("*/earlier_2"))
    after = of_run(folder, "a")
    assert "nothing to do" in run("pretrain", argv).out and of_run(folder, "a") == after


def test_a_restart_goes_on_where_the_state_was_the_newest(corpus, runs, tmp_path):
    """Then it is the same run, and no branch, also when the command is given again and there are newer
    states."""
    folder = tmp_path / "newest"
    shutil.copytree(runs, folder)
    start = folder / "checkpoints/a_32_update_00000008.pth"
    shutil.copy(start, folder / "checkpoints/a_32_resume.pth")
    argv = branch(folder, corpus, "a", start)
    run("pretrain", argv, Faults(signals={6: signal.SIGKILL}), status=-9)
    again = run("pretrain", argv)
    assert "going on from the newest state" in again.out and "update 8 of" not in again.out
    assert not list(folder.glob("*/earlier_*"))
    assert_same_run(runs, folder, "a_32")


def test_a_state_that_was_set_aside_begins_a_branch(corpus, runs, tmp_path):
    """Also where it was moved to, beside the metrics of a later run of the name, which are not its past."""
    folder = tmp_path / "aside"
    shutil.copytree(runs, folder)
    whole = flags(corpus, folder, "pretrain", **SETTINGS, save_weight="a")
    # without --from_resume: a new run
    run("pretrain", whole, Faults(signals={6: signal.SIGTERM}), status=143)
    second = of_run(folder, "a")
    start = folder / "checkpoints/earlier_1/a_32_update_00000008.pth"
    moved = shutil.copy(start, folder / "checkpoints/mine.pth")
    run("pretrain", branch(folder, corpus, "c", moved))
    updates = [record["update"] for record in read_metrics(folder / "out/c_32_metrics.jsonl")]
    assert updates == [*range(8, LAST + 1)]
    run("pretrain", branch(folder, corpus, "a", start))
    assert of_run(folder, "a", "earlier_2") == second
    assert_same_run(runs, folder, "a_32")


def test_a_finished_run_that_is_started_again_changes_no_file(corpus, runs, tmp_path):
    """Also where the code has changed since; a lost weights file is written once more, with the same
    bytes."""
    shutil.copytree(runs, tmp_path / "again")
    folder = tmp_path / "again"
    argv = flags(corpus, folder, "pretrain", **SETTINGS, save_weight="a", from_resume=1)
    states = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("*/a_*")}
    other_version = Faults(script="import platform; platform.python_version = lambda: '3.99'")
    assert "nothing to do" in run("pretrain", argv, other_version).out
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("*/a_*")}
    assert after == states
    weights = folder / "out/a_32.pth"
    whole = weights.read_bytes()
    weights.unlink()
    assert "nothing to do" not in run("pretrain", argv, other_version).out
    assert weights.read_bytes() == whole


def test_an_early_stopped_run_goes_on_under_other_settings_only(corpus, tmp_path):
    settings = {"num_hidden_layers": 1, "epochs": 3, "eval_interval": 2, "learning_rate": 1e-9, "patience": 1}
    settings |= {"min_delta": 1}
    argv = flags(corpus, tmp_path, "pretrain", **settings, from_resume=1)
    assert "stopping: EarlyStopping" in run("pretrain", argv).out
    assert "nothing to do" in run("pretrain", argv).out
    argv = flags(corpus, tmp_path, "pretrain", **(settings | {"patience": 0}), from_resume=1)
    assert "done: 24 updates" in run("pretrain", argv).out
