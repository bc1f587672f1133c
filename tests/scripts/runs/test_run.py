"""What a run came to, from records of any kind."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.runs.run import (
    ANSWERS,
    AXES,
    FIGURES,
    LATEST,
    PROMPTS,
    WARNINGS,
    Run,
    differing,
    read_settings,
    shown,
)

NUMBERS = [0, -1, 1.5, 1e308, 10**400, -(10**400), float("nan"), float("inf")]
SAMPLES = [{"prompt": "p", "answer": "a"}, {"prompt": ["x"]}, {"prompt": "\ud800", "completion": "x" * 999}]
SAMPLES += [{"answer": 1}]
ODD = st.sampled_from(
    [*NUMBERS, None, True, "text", [], {}, [None, 1, "a"], [*SAMPLES, 3], [{"prompt": 1, "reward": 2}]]
)
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
    assert all(shown(run.figures, name) for name in FIGURES)
    assert len(run.samples) <= PROMPTS and len(run.warnings) <= WARNINGS
    json.dumps([run.figures, run.warnings, run.samples, run.rollout], allow_nan=False)


def test_samples_show_how_answers_changed():
    answers = ["a", "a", "b", "c", "c", "d", "e", "f", "f"]
    records = [{"update": i, "samples": [{"prompt": "p", "answer": a}]} for i, a in enumerate(answers, 1)]
    (changes,) = run_of(*records).samples.values()
    assert changes == [(1, "a"), (4, "c"), (6, "d"), (7, "e"), (8, "f")] and len(changes) == ANSWERS


def test_held_out_samples_stay_beside_those_of_rollouts():
    """Of rollouts, whose prompts are others each time, the last one is kept."""
    held_out = {"prompt": "h", "answer": "x"}
    rolled = [[{"prompt": f"r{i}", "answer": text, "reward": 0.5} for text in "ab"] for i in range(30)]
    records = [{"update": i, "samples": rolled[i] + [held_out] * (i == 2)} for i in range(30)]
    run = run_of(*records)
    assert run.samples == {"h": [(2, "x")]} and run.rollout == {"r29": [(29, "a"), (29, "b")]}


def test_settings_that_differ_and_files_that_are_damaged(tmp_path):
    metrics = tmp_path / "a_64_metrics.jsonl"
    assert read_settings(metrics) == ({}, {})
    for text in ("", "{", "[]", "{}", '{"settings": 1}', '{"settings": null}', "[" * 100_000, "\0"):
        (tmp_path / "a_64_run.json").write_text(text)
        assert read_settings(metrics) == ({}, None)
    (tmp_path / "a_64_run.json").write_text(
        json.dumps({"settings": {"x": True, "y": None}, "stage": "s", "run": 1})
    )
    assert read_settings(metrics) == ({"stage": "s", "x": "1", "y": "none"}, {"run": 1})
    runs = [{"a": "1", "b": "2", "save_dir": "x"}, {}, {"a": "1", "b": "3", "c": "4", "save_dir": "y"}]
    assert differing(runs) == ["b", "c"] and differing(runs[:2]) == differing([]) == []
