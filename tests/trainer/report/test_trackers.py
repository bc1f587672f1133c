"""Whatever SwanLab does, training goes on: a stub module takes its place and misbehaves."""

import signal
import sys
import time
import types

import pytest

from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_run, flags, saved_state
from trainer.report.trackers import Tracker


class Stub(types.ModuleType):
    """Records what it is given; `fail` names the call that raises, `hang` the one that sleeps."""

    def __init__(self, fail="", hang=""):
        super().__init__("swanlab")
        self.points, self.settings, self.finished = [], None, False
        self._fail, self._hang = fail, hang
        self.id = "run7"

    def _act(self, name):
        if self._hang == name:
            time.sleep(60)
        if self._fail == name:
            raise RuntimeError(f"{name} failed")

    def init(self, **settings):
        self.settings = settings
        self._act("init")
        return self

    def log(self, metrics, step):
        self._act("log")
        self.points.append((step, metrics))

    def finish(self):
        self._act("finish")
        self.finished = True


def track(monkeypatch, stub, **kwargs) -> Tracker:
    monkeypatch.setitem(sys.modules, "swanlab", stub)
    return Tracker("project", "name", "offline", {"a": 1}, **kwargs)


def test_one_point_per_update(monkeypatch):
    stub = Stub()
    tracker = track(monkeypatch, stub, last_step=3)
    for step in (2, 3, 4, 4, 5, 3, 6):  # a resumed run comes by its last updates again
        tracker.log({"loss": 1.0}, step)
    tracker.finish()
    assert [step for step, _ in stub.points] == [4, 5, 6] and stub.finished
    assert tracker.id == "run7"


def test_a_resumed_run_goes_on_under_its_id(monkeypatch):
    stub = Stub()
    monkeypatch.setitem(sys.modules, "swanlab", stub)
    Tracker("project", "name", "cloud", {}, run_id="run3").finish()
    assert (
        stub.settings["id"] == "run3"
        and stub.settings["resume"] == "allow"
        and stub.settings["mode"] == "online"
    )


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
