"""The tour: what it runs is possible, what is done is not repeated, what is in the way is one line."""

import json
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from common.config_sources import parse_args
from dataset.demo_corpus import make_corpus
from dataset.demo_sums import make_sums
from dataset.demo_tour import make_tour
from scripts import tour
from tests.conftest import ROOT
from trainer import train_agent, train_distillation, train_dpo, train_full_sft, train_grpo, train_lora

STAGES = (train_lora, train_dpo, train_distillation, train_full_sft, train_grpo, train_agent)
ARGS = {f"trainer/{stage.__name__.split('.')[1]}.py": stage.Args for stage in STAGES}
RUNS = ["persona", "terse", "alone", "student", "sums", "sums_grpo", "calls", "calculator"]
RECORD = {
    "update": 1,
    "seconds": 2.0,
    "memory_mb": 30.0,
    "eval_accuracy": 1.0,
    "eval_reward_margin": 0.5,
    "eval_reward_chosen": 0.2,
}
RECORD |= {"eval_log_prob_chosen": -10.0, "eval_divergence": 0.25, "eval_loss": 0.5, "reward_numeric_answer": 0.7}
RECORD |= {"eval_reward_numeric_answer": 0.9}


@pytest.fixture
def started(tmp_path, monkeypatch) -> list[dict]:
    """The settings of the runs that a tour starts; each leaves metrics, none trains."""

    class Started(list):
        fails = ""  # a run that is stopped

    runs, sizes = Started(), dict.fromkeys(RUNS, 256) | {"alone": 128, "student": 128}

    def run(command, cwd, check):
        args = parse_args(ARGS[command[1]], None, command[2:])
        runs.append(args)
        metrics = tmp_path / "out" / f"{args.save_weight}_{sizes[args.save_weight]}_metrics.jsonl"
        metrics.parent.mkdir(exist_ok=True)
        metrics.write_text(json.dumps(RECORD) + "\n")
        return SimpleNamespace(returncode=130 * (args.save_weight == runs.fails))

    monkeypatch.setattr(tour, "subprocess", SimpleNamespace(run=run))
    (tmp_path / "full_sft_256.pth").write_bytes(b"weights")
    places = {"MODEL": "full_sft_256.pth", "DATA": "", "SAVE_DIR": "out", "CHECKPOINT_DIR": "checkpoints"}
    for name, place in places.items():
        monkeypatch.setattr(tour, name, tmp_path / place)
    monkeypatch.setattr(tour, "exam", lambda model, questions, lora=None: tour.Exam(0.9 if lora else 0.8, 20.0))
    monkeypatch.setattr(tour, "sums_right", lambda model, questions: 0.4)
    return runs


def test_each_chapter_once_and_a_report(started, tmp_path, call):
    done = call(tour)
    assert done.returncode == 0, done.stderr
    files = make_corpus(0) | make_tour(0) | {f"sums/{name}": records for name, records in make_sums(0).items()}
    for settings in started:
        named = [settings.data_path, settings.eval_data_path]
        assert all(os.path.relpath(path, tmp_path) in files for path in named if path)
        assert settings.from_resume and str(settings.save_dir) == str(tmp_path / "out")
    assert [settings.save_weight for settings in started] == RUNS
    alone, student = (vars(settings) for settings in started[2:4])
    differing = {name for name in alone if alone[name] != student[name]}
    assert differing == {"save_weight", "alpha"} and alone["alpha"] == 1  # but for the teacher the same run

    report = json.loads((tmp_path / "out" / "report.json").read_text())["chapters"]
    assert (
        list(report) == [chapter.__name__ for chapter in tour.CHAPTERS] and report["distillation"]["train_seconds"] == 4
    )
    assert ["log-probability of the chosen answers", pytest.approx(-12.0), -10.0] in report["terse"]["rows"]
    shown = [line.split() for line in done.stdout.splitlines()]
    for chapter in report.values():
        for measure, before, after in chapter["rows"]:
            wanted = ["-" if value is None else f"{value:.3f}" for value in (before, after)]
            assert [*measure.split(), *wanted] in shown

    again = call(tour)
    assert len(started) == len(RUNS) and again.stdout.splitlines()[-5:] == done.stdout.splitlines()[-5:]


def test_a_tour_that_was_stopped_goes_on(started, call):
    started.fails = "alone"
    assert call(tour).returncode == 130
    started.fails = ""
    assert call(tour).returncode == 0
    assert [settings.save_weight for settings in started] == ["persona", "terse", "alone", *RUNS[2:]]


def test_what_is_in_the_way_is_one_line(started, tmp_path, call):
    assert call(tour).returncode == 0
    for change, message in ((b"others", "bash scripts/tour.sh --fresh"), (None, "bash scripts/quickstart.sh")):
        if change:
            tour.MODEL.write_bytes(change)
        else:
            tour.MODEL.unlink()
        done = call(tour)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr


@pytest.mark.parametrize(("flag", "told"), [([], "bash scripts/quickstart.sh"), (["--again"], "--fresh")])
def test_without_the_quickstarts_model(tmp_path, flag, told):
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "tour.sh", tmp_path / "scripts")
    done = subprocess.run(["bash", script, *flag], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and told in done.stderr
