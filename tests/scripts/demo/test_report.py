"""The quickstart's report: from the results of its quiz and the metrics of its runs, or one line."""

import json

import pytest

from scripts.demo import report as demo_report
from scripts.demo.report import RUNS
from tests.conftest import write_jsonl


def test_the_report_has_accuracies_and_costs(tmp_path, call):
    models = {}
    for run, right in ((RUNS[1], 0.97222), (RUNS[2], 0.1)):
        models[run] = {"parameters": 5, "figures": {"contains_answer": {"value": right}}}
    (tmp_path / "quiz.json").write_text(json.dumps({"models": models}))
    models[RUNS[1]]["figures"] = {"contains_answer": {"value": 0.9}}
    (tmp_path / "quiz_second.json").write_text(json.dumps({"models": models}))
    for seconds, run in enumerate(RUNS):
        records = [{"update": 1, "seconds": 9.0, "memory_mb": 1.0}]
        records += [{"update": 2, "seconds": seconds + 0.04, "memory_mb": 900.04 + seconds}]
        write_jsonl(tmp_path / f"{run}_metrics.jsonl", records)
    done = call(demo_report, "--save_dir", tmp_path, "--report", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == json.loads(done.stdout)
    assert report == {
        "heldout_accuracy": 0.9722,
        "heldout_accuracy_second_question": 0.9,
        "heldout_accuracy_without_pretrain": 0.1,
        "train_seconds": 3.1,
        "parameters": 5,
        "peak_memory_mb": 902.0,
    }


@pytest.mark.parametrize("quiz", [None, "not json", '{"models": []}'])
def test_without_results(tmp_path, error_line, quiz):
    if quiz:
        (tmp_path / "quiz.json").write_text(quiz)
    line = error_line(demo_report, "--save_dir", tmp_path, "--report", tmp_path / "report.json")
    assert "bash scripts/quickstart.sh" in line
    assert not (tmp_path / "report.json").exists()
