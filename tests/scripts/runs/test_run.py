"""What a run came to, from records of any kind."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.runs.run import (
    ANSWERS,
    AXES,
    LATEST,
    PROMPTS,
    RESULTS,
    WARNINGS,
    Run,
    differing,
    read_settings,
    shown,
)

NUMBERS = [0, -1, 1.5, 1e308, 10**400, -(10**400), float("nan"), float("inf")]
SAMPLES = [{"prompt": "p", "answer": "a"}, {"prompt": ["x"]}, {"prompt": "\ud800", "completion": "x" * 999}]
ODD = st.sampled_from([*NUMBERS, None, True, "text", [], {}, [None, 1, "a"], [*SAMPLES, 3], [{"answer": 1}]])
RECORD = st.dictionaries(st.sampled_from(["update", *LATEST, "mean_loss", "warnings", "samples"]), ODD)


def run_of(*records: dict) -> Run:
    run = Run()
    for record in records:
        run.add(dict.fromkeys(AXES, 1) | record)
    return run


@settings(max_examples=25, deadline=None)
@given(st.lists(RECORD.map(lambda record: {"update": 1, **record}), max_size=5))
def test_any_record_gives_a_summary_of_bounded_size(records):
    run = run_of(*records)
    assert all(shown(run.figures, name) for name in (*RESULTS, *AXES))
    assert len(run.samples) <= PROMPTS and len(run.warnings) <= WARNINGS
    json.dumps([run.figures, run.warnings, run.samples, run.columns(2)], allow_nan=False)


def test_curves_are_thinned_to_means():
    run = run_of(*({"update": i, "loss": value} for i, value in enumerate([1.0, 3.0, None, 5.0, 7.0], 1)))
    columns = run.columns(3)
    assert columns["update"] == [2.0, 4.0, 5.0] and columns["loss"] == [2.0, 5.0, 7.0]


def test_samples_show_how_answers_changed_and_stay_beside_the_last_rollout():
    answers = ["a", "a", "b", "c", "c", "d", "e", "f", "f"]
    records = [{"update": i, "samples": [{"prompt": "p", "answer": a}]} for i, a in enumerate(answers, 1)]
    rollouts = [{"update": i, "samples": [{"prompt": f"r{i}", "answer": "x", "reward": 1}]} for i in range(3)]
    run = run_of(*records, *rollouts)
    assert run.samples == {"p": [(1, "a"), (4, "c"), (6, "d"), (7, "e"), (8, "f")]} and ANSWERS == 5
    assert run.rollout == {"r2": [(2, "x")]}


def test_settings_that_differ_and_files_that_are_damaged(tmp_path):
    metrics = tmp_path / "a_64_metrics.jsonl"
    assert read_settings(metrics) == ({}, {})
    for text in ("", "{", "[]", "{}", '{"settings": 1}', '{"settings": null}', "\0"):
        (tmp_path / "a_64_run.json").write_text(text)
        assert read_settings(metrics) == ({}, {})
    content = {"settings": {"x": True, "y": None}, "stage": "s", "run": 1}
    (tmp_path / "a_64_run.json").write_text(json.dumps(content))
    assert read_settings(metrics) == ({"stage": "s", "x": "1", "y": "none"}, {"run": 1})
    runs = [{"a": "1", "b": "2", "save_dir": "x"}, {}, {"a": "1", "b": "3", "c": "4", "save_dir": "y"}]
    assert differing(runs) == ["b", "c"] and differing(runs[:2]) == differing([]) == []
