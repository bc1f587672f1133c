"""Whatever SwanLab or Weights & Biases do, training goes on: a stub module takes their place and misbehaves."""

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
    tracker = Tracker("project", "name", "cloud", {"a": 1}, tracker_id="run3", last_step=3)
    for step in (2, 3, 4, 4, 5, 3, 6):  # it comes by its last updates again
        tracker.log({"loss": 1.0}, step)
    tracker.finish()
    assert points == [4, 5, 6] and swanlab.finish.called
    assert settings.items() >= {"id": "run3", "resume": "allow", "mode": "online"}.items()


def test_weights_and_biases_get_one_point_per_update_through_a_resume(monkeypatch):
    wandb, points, settings = MagicMock(), [], {}
    wandb.init.side_effect = lambda **given: settings.update(given) or wandb
    wandb.log.side_effect = lambda metrics, step: points.append((step, metrics))
    wandb.Table.side_effect = lambda columns, data: (columns, data)
    wandb.id = "run7"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracker = Tracker("project", "name", "cloud", {"a": 1}, service="wandb")
    assert tracker.id == "run7" and not settings.keys() & {"id", "resume"}
    assert (
        settings.items() >= {"project": "project", "name": "name", "mode": None, "config": {"a": 1}}.items()
    )
    tracker.log({"loss": 1.0, "samples": ["q\n-> a"]}, 1)
    tracker.finish()
    resumed = Tracker("project", "name", "offline", {"a": 1}, "run7", 1, "wandb")
    for step in (1, 2):
        resumed.log({"loss": 0.5}, step)
    resumed.finish()
    assert settings.items() >= {"id": "run7", "resume": "allow", "mode": "offline"}.items()
    assert points == [(1, {"loss": 1.0, "samples": (["samples"], [["q\n-> a"]])}), (2, {"loss": 0.5})]
    assert wandb.finish.call_count == 2


STUB = """
import types, time
from trainer.report import trackers as tracker
tracker.START_TIMEOUT, tracker.END_TIMEOUT = 0.3, 0.3
swanlab = types.ModuleType(name)
def act(name):
    if kind == "raises at " + name: raise SystemExit("no network")
    if kind == "hangs at " + name: time.sleep(300)
class Run:
    id = "run1"
    def log(self, metrics, step): act("log")
    def finish(self): act("finish")
def init(**settings):
    act("init")
    return Run()
swanlab.init, swanlab.finish, swanlab.Text = init, lambda: act("finish"), str
sys.modules[name] = None if kind == "is missing" else swanlab
"""


@pytest.fixture(scope="module")
def untracked(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("untracked")
    run("pretrain", flags(corpus, folder, "pretrain", epochs=1))
    return folder


@pytest.mark.parametrize(
    ("name", "kind"),
    [("swanlab", "is missing"), ("swanlab", "raises at log"), ("swanlab", "hangs at finish"),
     ("wandb", "is missing"), ("wandb", "hangs at init")],
)  # fmt: skip
def test_training_does_not_feel_it(corpus, tmp_path, untracked, name, kind):
    """A whole run with a tracker that misbehaves: the same bits as without one, and one warning."""
    asked = ["--use_wandb"] if name == "swanlab" else ["--use_wandb", "1", "--tracker", "wandb"]
    argv = [*flags(corpus, tmp_path, "pretrain", epochs=1), *asked]
    begin = time.perf_counter()
    process = run("pretrain", argv, Faults(script=f"name, kind = {name!r}, {kind!r}\n{STUB}"))
    called = {"swanlab": "SwanLab", "wandb": "Weights & Biases"}[name]
    assert time.perf_counter() - begin < 60
    assert_same_run(untracked, tmp_path)
    assert len(process.error_lines) == 1 and process.error_lines[0].startswith(f"warning: {called} "), (
        process.err
    )
    assert kind != "is missing" or f"{name} is not installed: pip install {name})" in process.err


def test_every_save_keeps_the_id_of_the_curves(corpus, tmp_path):
    """Also that of a part without SwanLab, and that at the end, which was put off while updates were skipped.
    A branch begins curves of its own."""
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1)
    works = f"name, kind = 'swanlab', 'works at all'\n{STUB}"
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
