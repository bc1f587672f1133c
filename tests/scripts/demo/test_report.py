"""The quickstart's report: from the results of its exam and the metrics of its runs, or one line."""

import json

import pytest

from scripts.demo import report as demo_report
from scripts.demo.report import RUNS
from tests.conftest import write_jsonl


def test_the_report_has_accuracies_and_costs(tmp_path, call):
    rows = [
        {"metric": metric, "group": group, "models": {RUNS[1]: {"value": right}, RUNS[2]: {"value": 0.1}}}
        for metric, group, right in (
            ("characters", "all", 16.0),
            ("right", "en", 0.9),
            ("right", "all", 0.97222),
        )
    ]
    exam = {"results": rows, "models": {RUNS[1]: {"parameters": 5}}}
    (tmp_path / "exam.json").write_text(json.dumps(exam))
    for seconds, run in enumerate(RUNS):
        records = [{"update": 1, "seconds": 9.0, "memory_mb": 1.0}]
        records += [{"update": 2, "seconds": seconds + 0.04, "memory_mb": 900.04 + seconds}]
        write_jsonl(tmp_path / f"{run}_metrics.jsonl", records)
    done = call(demo_report, "--save_dir", tmp_path, "--report", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    assert (
        json.loads((tmp_path / "report.json").read_text())
        == json.loads(done.stdout)
        == {
            "heldout_accuracy": 0.9722,
            "heldout_accuracy_without_pretrain": 0.1,
            "train_seconds": 3.1,
            "parameters": 5,
            "peak_memory_mb": 902.0,
        }
    )


@pytest.mark.parametrize("exam", [None, "not json", '{"results": []}'])
def test_without_results(tmp_path, call, exam):
    if exam:
        (tmp_path / "exam.json").write_text(exam)
    done = call(demo_report, "--save_dir", tmp_path, "--report", tmp_path / "report.json")
    assert (
        done.returncode == 2 and "bash scripts/quickstart.sh" in done.stderr and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "report.json").exists()
