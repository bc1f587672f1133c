"""Setting the files of an earlier run aside: whatever happens in between, nothing is lost."""

import os
from pathlib import Path

import pytest

from common.errors import UserError
from common.settings import StageArgs
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags
from trainer import train_distillation
from trainer.checkpoint.earlier import check_starts, complete_moves, set_earlier_run_aside

STATES = ("resume.pth", "resume_previous.pth", "update_00000002.pth", "best_resume.pth")
OUT = ("w_512_metrics.jsonl", "w_512_run.json", "w_512.pth", "w_512.json", "w_best_512.pth")


def earlier_run(folder: Path, weight: str = "w", kind=StageArgs, **more) -> StageArgs:
    """The settings of a run, and the files that an earlier run of its name left behind."""
    places = {"save_dir": folder / "out", "checkpoint_dir": folder / "checkpoints"}
    states = [f"w_512_{name}" for name in STATES]
    for place, names in zip(places.values(), (OUT, states), strict=True):
        place.mkdir(parents=True)
        for name in names:
            (place / name.replace("w_", f"{weight}_", 1)).write_text(name)
    return kind(save_weight=weight, **{name: str(place) for name, place in places.items()}, **more)


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("step", range(11))
def test_killed_at_any_step_the_old_run_is_either_whole_or_gone(tmp_path, monkeypatch, step):
    """A start after that completes what was begun, before it looks for a state to go on from."""
    args, left, replace = earlier_run(tmp_path), [step], os.replace

    def replace_or_kill(*given):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        replace(*given)

    monkeypatch.setattr(os, "replace", replace_or_kill)
    if step == 10:  # the list, nine files
        set_earlier_run_aside(args)
    else:
        with pytest.raises(Killed):
            set_earlier_run_aside(args)
    monkeypatch.undo()
    complete_moves(args)
    everything = {name: name for name in (*OUT, *(f"w_512_{name}" for name in STATES))}
    place = "*/w_*" if step == 0 else "*/earlier_1/*"
    assert {path.name: path.read_text() for path in tmp_path.glob(place)} == everything
    assert not list(tmp_path.glob("*/earlier_1/*" if step == 0 else "*/w_*"))
    complete_moves(args)
    assert not list(tmp_path.glob("checkpoints/.*_moves.json"))


def test_a_run_killed_while_it_sets_the_old_one_aside_does_not_go_on_with_it(corpus, tmp_path):
    """Between its newest and its previous state."""
    settings = {"epochs": 1, "num_hidden_layers": 1, "eval_interval": 0, "save_interval": 2}
    argv = flags(corpus, tmp_path, "pretrain", **settings)
    run("pretrain", argv)
    script = """
import trainer.checkpoint.earlier
replace = os.replace
def killed(source, kept):
    if "earlier_1" in str(kept) and "previous" in str(kept):
        os._exit(9)
    replace(source, kept)
os.replace = killed
"""
    run("pretrain", argv, Faults(script=script), status=9)
    assert [path.name for path in tmp_path.glob("checkpoints/*.pth")] == ["pretrain_32_resume_previous.pth"]
    begun = run("pretrain", [*argv, "--from_resume", "1"])
    assert "new run: " in begun.out and "run: 8 updates" in begun.out
    assert len(list((tmp_path / "checkpoints/earlier_1").iterdir())) == 3


def test_other_runs_stay_and_adapters_and_odd_names_do_not(tmp_path):
    args = earlier_run(tmp_path, "a[1]*")
    others = [tmp_path / "checkpoints" / f"a[1]*_512_{name}_512_resume.pth" for name in ("resume", "update")]
    for path in others:
        path.touch()
    (tmp_path / "out/a[1]*_512").mkdir()
    set_earlier_run_aside(args)
    assert len(list((tmp_path / "checkpoints/earlier_1").iterdir())) == len(STATES)
    assert (tmp_path / "out/earlier_1/a[1]*_512").is_dir()
    assert sorted((tmp_path / "checkpoints").glob("*.pth")) == others


STARTS = {"name": "w", "best": "w_best", "path": "out/w_512.pth", "link": "link.pth", "hard link": "hard.pth"}
STARTS |= {
    "state": "checkpoints/w_512_resume.pth",
    "numbered": "other/../checkpoints/w_512_update_00000002.pth",
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
@pytest.mark.parametrize("flag", ["from_weight", "resume_from", "from_teacher_weight"])
def test_a_start_from_a_file_of_its_own_name_is_refused(tmp_path, monkeypatch, flag, start):
    kind = train_distillation.Args if flag == "from_teacher_weight" else StageArgs
    if flag == "resume_from" and start in ("w", "w_best"):
        start = f"out/{start}_512.pth"
    args = earlier_run(tmp_path, kind=kind, **{"from_weight": "none"} | {flag: start})
    (tmp_path / "link.pth").symlink_to("out/w_512.pth")
    (tmp_path / "other").mkdir()
    os.link(tmp_path / "out/w_512.pth", tmp_path / "hard.pth")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"--{flag} .*another --save_weight"):
        check_starts(args)
    (tmp_path / "out/x_512.pth").touch()
    for path in ("out/x_512.pth", "gone.pth"):
        setattr(args, flag, path)
        if path.startswith("out") or flag != "from_teacher_weight":
            check_starts(args)
