"""Whatever SwanLab does, training goes on: a stub module takes its place and misbehaves."""

import signal
import sys
import time
from unittest.mock import MagicMock

import pytest

from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_run, flags, saved_state
from trainer.report.trackers import Tracker


def test_a_resumed_run_goes_on_under_its_id_with_one_point_per_update(monkeypatch):
    swanlab, points, settings = MagicMock(), [], {}
    swanlab.init.side_effect = lambda **given: settings.update(given) or swanlab
    swanlab.log.side_effect = lambda metrics, step: points.append(step)
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    tracker = Tracker("project", "name", "cloud", {"a": 1}, run_id="run3", last_step=3)
    for step in (2, 3, 4, 4, 5, 3, 6):  # it comes by its last updates again
        tracker.log({"loss": 1.0}, step)
    tracker.finish()
    assert points == [4, 5, 6] and swanlab.finish.called
    assert settings.items() >= {"id": "run3", "resume": "allow", "mode": "online"}.items()


STUB = """
import types, time
from trainer.report import trackers as tracker
tracker.START_TIMEOUT, tracker.END_TIMEOUT = 0.3, 0.3
swanlab = types.ModuleType("swanlab")
def act(name):
    if kind == "raises at " + name: raise SystemExit("no network")
    if kind == "hangs at " + name: time.sleep(300)
class Run:
    id = "run1"
    def log(self, metrics, step): act("log")
def init(**settings):
    act("init")
    return Run()
swanlab.init, swanlab.finish, swanlab.Text = init, lambda: act("finish"), str
sys.modules["swanlab"] = None if kind == "is missing" else swanlab
"""


@pytest.fixture(scope="module")
def untracked(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("untracked")
    run("pretrain", flags(corpus, folder, "pretrain", epochs=1))
    return folder


@pytest.mark.parametrize("kind", ["is missing", "raises at log", "hangs at finish"])
def test_training_does_not_feel_it(corpus, tmp_path, untracked, kind):
    """A whole run with a SwanLab that misbehaves: the same bits as without one, and one warning."""
    argv = [*flags(corpus, tmp_path, "pretrain", epochs=1), "--use_wandb"]
    begin = time.perf_counter()
    process = run("pretrain", argv, Faults(script=f"kind = {kind!r}\n{STUB}"))
    assert time.perf_counter() - begin < 60
    assert_same_run(untracked, tmp_path)
    assert len(process.error_lines) == 1 and process.error_lines[0].startswith("warning: SwanLab "), (
        process.err
    )


def test_every_save_keeps_the_id_of_the_curves(corpus, tmp_path):
    """Also that of a part without SwanLab, and that at the end, which was put off while updates were skipped.
    A branch begins curves of its own."""
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1)
    works = f"kind = 'works at all'\n{STUB}"
    tracked = [*argv, "--use_wandb", "--swanlab_mode", "online"]
    run("pretrain", tracked, Faults(script=works, signals={2: signal.SIGTERM}), status=143)
    assert saved_state(tmp_path)["wandb_id"] == "run1"
    run("pretrain", argv, Faults(signals={2: signal.SIGTERM}), status=143)
    assert saved_state(tmp_path)["wandb_id"] == "run1"
    run("pretrain", tracked, Faults(script=works, nan=(4,)))
    last = saved_state(tmp_path)
    assert last["update"] == 8 and last["wandb_id"] == "run1"
    branch = [*tracked[:-4], "--resume_from", str(tmp_path / "checkpoints/pretrain_32_resume_previous.pth")]
    run("pretrain", [*branch, "--save_weight", "other"])
    assert saved_state(tmp_path, "other_32")["wandb_id"] is None


def test_the_real_swanlab_offline(tmp_path, monkeypatch):
    swanlab = pytest.importorskip("swanlab")
    assert swanlab
    monkeypatch.chdir(tmp_path)
    tracker = Tracker("project", "name", "offline", {"lr": 0.1})
    assert tracker.id
    tracker.log({"loss": 1.5}, 1)
    tracker.finish()
    assert list(tmp_path.glob("swanlog/run-*"))
