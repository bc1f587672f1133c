"""Setting the files of an earlier run aside: whatever happens in between, nothing is lost."""

import os
import shutil
from pathlib import Path

import pytest

from common.settings import StageArgs
from trainer.report.metrics import MetricsLog
from trainer.run import saving
from trainer.run.saving import set_earlier_run_aside

STATES = (
    "w_512_resume.pth",
    "w_512_resume_previous.pth",
    "w_512_update_00000002.pth",
    "w_512_best_resume.pth",
)
OUT = ("w_512_metrics.jsonl", "w_512_run.json", "w_512.pth", "w_best_512.pth")


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


@pytest.mark.parametrize("is_branch", [False, True])
@pytest.mark.parametrize("step", range(32))  # all that it makes
def test_killed_at_any_step_nothing_is_lost(tmp_path, monkeypatch, step, is_branch):
    """The metrics, too, which the new run would write over: after a second start each file is in some
    `earlier_<n>`, also the state with which a branch begins, and which it will write over."""
    args = earlier_run(tmp_path)
    start = tmp_path / "checkpoints/w_512_update_00000002.pth" if is_branch else None
    left = [step]

    def counted(do):
        def step_or_kill(*given, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return do(*given, **options)

        return step_or_kill

    for owner, name in (
        (os, "replace"),
        (saving, "link"),
        (Path, "unlink"),
        (Path, "mkdir"),
        (saving, "sync_folder"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    with pytest.raises(Killed):
        set_earlier_run_aside(args, args, start)
    monkeypatch.undo()
    set_earlier_run_aside(args, args, start)
    MetricsLog(tmp_path / "out/w_512_metrics.jsonl", 9).close()  # that of the new run
    assert list((tmp_path / "checkpoints").glob("*.pth")) == ([start] if is_branch else [])
    kept = {path.name: path.read_text() for path in sorted(tmp_path.glob("*/earlier_*/*"))}
    assert kept == {name: name for name in STATES + OUT}


def test_a_name_with_characters_of_patterns(tmp_path):
    args = earlier_run(tmp_path, "a[1]*")
    set_earlier_run_aside(args, args)
    assert len(list((tmp_path / "checkpoints/earlier_1").iterdir())) == len(STATES)


def everything(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*.*"))
        if path.is_file()
    }


@pytest.mark.parametrize("checkpoint_dir", ["emptied", "another"])
def test_an_earlier_run_is_kept_wherever_its_checkpoints_lie(tmp_path, checkpoint_dir):
    """Its weights move away: beside a run that has saved nothing they would look like its own."""
    args = earlier_run(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints") if checkpoint_dir == "emptied" else None
    args.checkpoint_dir = str(tmp_path / checkpoint_dir)
    for _ in range(2):  # the second run was killed before it saved anything
        set_earlier_run_aside(args, args)
        kept = {f"earlier_1/{name}": name for name in OUT}
        left = {name: text for name, text in everything(tmp_path / "out").items() if text}
        logs = [name for name in left if name.endswith(("metrics.jsonl", "run.json")) and "/" not in name]
        # the new run replaces the logs
        assert {name: text for name, text in left.items() if name not in logs} == kept
        assert checkpoint_dir == "emptied" or len(everything(tmp_path / "checkpoints")) == len(STATES)
        MetricsLog(tmp_path / "out/w_512_metrics.jsonl", 9).close()


@pytest.mark.parametrize("start", ["w_best", "path", "link"])
def test_best_weights_from_which_a_run_starts_stay(tmp_path, start):
    args = earlier_run(tmp_path)
    (tmp_path / "link.pth").symlink_to(tmp_path / "out/w_best_512.pth")
    paths = {"path": str(tmp_path / "out/../out/w_best_512.pth"), "link": str(tmp_path / "link.pth")}
    args.from_weight = paths.get(start, start)
    set_earlier_run_aside(args, args)
    assert (tmp_path / "out/w_best_512.pth").exists() and (tmp_path / "out/earlier_1/w_best_512.pth").exists()


def test_the_states_of_a_run_with_a_longer_name_stay(tmp_path):
    args = earlier_run(tmp_path)
    others = [
        tmp_path / "checkpoints" / f"w_512_{name}_512_resume.pth" for name in ("resume", "update", "updates")
    ]
    for path in others:
        path.touch()
    set_earlier_run_aside(args, args)
    assert sorted((tmp_path / "checkpoints").glob("*.pth")) == others


def test_an_earlier_adapter_is_kept(tmp_path):
    args = earlier_run(tmp_path)
    for folder in ("w_512", "w_best_512"):
        (tmp_path / "out" / folder).mkdir()
        (tmp_path / "out" / folder / "adapter_model.safetensors").write_text(folder)
    set_earlier_run_aside(args, args)
    names = [f"{folder}/adapter_model.safetensors" for folder in ("w_512", "w_best_512")]
    assert not any((tmp_path / "out" / name).exists() for name in names)
    assert all((tmp_path / "out/earlier_1" / name).exists() for name in names)
