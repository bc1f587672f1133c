"""What the meter notes, and the time left: against a clock of the test's own, no test here is timed."""

import pytest
import torch

from dataset.batch import Size
from trainer.report import speed
from trainer.report.speed import Meter

CPU = torch.device("cpu")


class Clock:
    """A clock that passes when the test says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    return clock


def test_each_kind_of_time_is_noted_and_saving_is_not_training(clock):
    meter = Meter(peak=1000.0)
    for _ in range(4):
        with meter.timing("wait"):
            clock.now += 1.0
        with meter.timing("comm"):
            clock.now += 0.25
        meter.count([Size(10, 20, flops=1000.0, samples=3)] * 2)
        clock.now += 1.25
    record = meter.speed_metrics(6, CPU)
    assert record["data_wait"] == pytest.approx(4 / 10) and record["comm_wait"] == pytest.approx(1 / 10)
    assert record["tokens_per_second"] == pytest.approx(160 / 10)
    assert record["mfu"] == pytest.approx(8000 / 10 / 1000)
    clock.now += 8.0  # saving, evaluating
    meter.restart()
    meter.count([Size(10, 20)])
    clock.now += 1.0
    record = meter.speed_metrics(5, CPU)
    assert record["tokens_per_second"] == pytest.approx(20.0) and record["data_wait"] == 0
    assert record["mfu"] is None  # of a task of one's own nobody knows the arithmetic


def test_the_time_left_is_that_of_the_updates_so_far(clock):
    """With the saves between them, without the first one, which compiles."""
    meter = Meter()
    for update in range(1, 101):
        clock.now += 100.0 if update == 1 else 1.0
        meter.count([Size(1, 1)])
    assert meter.speed_metrics(50, CPU)["seconds_left"] == pytest.approx(50.0)
