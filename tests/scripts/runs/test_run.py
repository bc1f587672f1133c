"""What a run came to, from its records."""

import json

from scripts.runs.run import AXES, MAX_ANSWERS, Run, differing_settings, read_settings


def run_of(*records: dict) -> Run:
    run = Run()
    for record in records:
        run.add(dict.fromkeys(AXES, 1) | record)
    return run


def test_curves_are_thinned_to_means():
    run = run_of(*({"update": i, "loss": value} for i, value in enumerate([1.0, 3.0, None, 5.0, 7.0], 1)))
    columns = run.columns(3)
    assert columns["update"] == [2.0, 4.0, 5.0] and columns["loss"] == [2.0, 5.0, 7.0]


def test_samples_show_how_answers_changed_and_stay_beside_the_last_rollout():
    answers = ["a", "a", "b", "c", "c", "d", "e", "f", "f"]
    records = [{"update": i, "samples": [{"prompt": "p", "answer": a}]} for i, a in enumerate(answers, 1)]
    rollouts = [{"update": i, "samples": [{"prompt": f"r{i}", "answer": "x", "reward": 1}]} for i in range(3)]
    run = run_of(*records, *rollouts)
    assert run.samples == {"p": [(1, "a"), (4, "c"), (6, "d"), (7, "e"), (8, "f")]} and MAX_ANSWERS == 5
    assert run.rollout == {"r2": [(2, "x")]}


def test_settings_that_differ_and_a_file_that_is_not_there(tmp_path):
    metrics = tmp_path / "a_64_metrics.jsonl"
    assert read_settings(metrics) == ({}, {})
    (tmp_path / "a_64_run.json").write_text('{"settings": {')
    assert read_settings(metrics) == ({}, {})
    content = {"settings": {"x": True, "y": None}, "stage": "s", "run": 1}
    (tmp_path / "a_64_run.json").write_text(json.dumps(content))
    assert read_settings(metrics) == ({"stage": "s", "x": "1", "y": "none"}, {"run": 1})
    runs = [{"a": "1", "b": "2", "save_dir": "x"}, {}, {"a": "1", "b": "3", "c": "4", "save_dir": "y"}]
    assert (
        differing_settings(runs) == ["b", "c"]
        and differing_settings(runs[:2]) == differing_settings([]) == []
    )
