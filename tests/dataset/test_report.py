"""What is said of the records: fields that nothing reads, bad ones."""

from collections import Counter

import numpy as np

from common.launcher import launch
from dataset import report


def test_the_most_frequent_fields_come_first():
    unused = Counter({"b": 5, "a": 5, "rare": 1, "often": 9} | {f"x{i}": 3 for i in range(20)})
    made = report.make_report(Counter(records=30), unused, np.array([3, 5]), 8)
    assert list(made["unused_fields"].items())[:3] == [("often", 9), ("a", 5), ("b", 5)]
    assert len(made["unused_fields"]) == report.MOST_FIELDS and "rare" not in made["unused_fields"]


def test_one_process_of_a_machine_tells_of_them(monkeypatch, capsys):
    monkeypatch.setattr(report, "launch", lambda: launch()._replace(local_rank=1))
    report.judge_bad_records("a.jsonl:2: no text", 1, 100, "listed in bad.txt", 0.1)
    assert not capsys.readouterr().out
