"""Setting the files of an earlier run aside: whatever happens in between, nothing is lost."""

import os
import shutil
from pathlib import Path

import pytest

from common.errors import UserError
from common.settings import StageArgs
from trainer.components import saving
from trainer.components.metrics import MetricsLog
from trainer.components.saving import set_earlier_run_aside

STATES = ("w_512_resume.pth", "w_512_resume_previous.pth", "w_512_update_00000002.pth", "w_512_best_resume.pth")
OUT = ("w_512_metrics.jsonl", "w_512.pth", "w_best_512.pth")


def earlier_run(folder: Path, weight: str = "w") -> StageArgs:
    """The settings of a run, and the files that an earlier run of its name left behind."""
    places = {"save_dir": folder / "out", "checkpoint_dir": folder / "checkpoints"}
    for place, names in zip(places.values(), (OUT, STATES), strict=True):
        place.mkdir(parents=True)
        for name in names:
            (place / name.replace("w_", f"{weight}_", 1)).write_text(name)
    return StageArgs(save_weight=weight, **{name: str(place) for name, place in places.items()})


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("step", range(16))
def test_killed_at_any_step_nothing_is_lost(tmp_path, monkeypatch, step):
    """The metrics, too, which the new run would write over: after a second start each file is in some `earlier_<n>`."""
    args = earlier_run(tmp_path)
    left = [step]

    def counted(do):
        def step_or_kill(*given, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return do(*given, **options)

        return step_or_kill

    for owner, name in ((os, "replace"), (saving, "link"), (Path, "unlink"), (Path, "mkdir"), (saving, "sync_folder")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    with pytest.raises(Killed):
        set_earlier_run_aside(args, args)
    monkeypatch.undo()
    set_earlier_run_aside(args, args)
    MetricsLog(tmp_path / "out/w_512_metrics.jsonl", 10).close()  # that of the new run
    assert not list((tmp_path / "checkpoints").glob("*.pth"))
    kept = {path.name: path.read_text() for path in sorted(tmp_path.glob("*/earlier_*/*"))}
    assert kept == {name: name for name in STATES + OUT}


def test_a_name_with_characters_of_patterns(tmp_path):
    args = earlier_run(tmp_path, "a[1]*")
    set_earlier_run_aside(args, args)
    assert len(list((tmp_path / "checkpoints/earlier_1").iterdir())) == len(STATES)


def test_no_room_for_a_copy_is_one_line(tmp_path, monkeypatch):
    """Where the file system has no links, the weights are copied."""
    args = earlier_run(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match=r"earlier_1 cannot be written \(No space left on device\)"):
        set_earlier_run_aside(args, args)
    assert len(list((tmp_path / "checkpoints").glob("*.pth"))) == len(STATES)
