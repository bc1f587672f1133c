"""What the meter notes, and the time left: against a clock of the test's own, no test here is timed."""

from types import SimpleNamespace

import pytest
import torch

from trainer import loop
from trainer.loop import read_meter
from trainer.report import speed as meter_module
from trainer.report.speed import GPUS, Meter, PeakRate, Size, data_sheet_rate

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
    monkeypatch.setattr(meter_module, "time", clock)
    monkeypatch.setattr(loop, "time", clock)
    return clock


def make_state(total_updates: int = 10) -> SimpleNamespace:
    """What the meter needs of a run's state."""
    parts = {"total_updates": total_updates, "update": 0, "seconds": 0.0, "tokens": 0}
    parts |= {"peak": PeakRate(1000.0)}
    return SimpleNamespace(**parts, device=CPU, clock=0.0, meter=Meter())


def test_each_kind_of_time_is_noted_and_saving_is_not_training(clock):
    state = make_state()
    meter = state.meter
    for _ in range(4):
        with meter.timing("wait"):
            clock.now += 1.0
        with meter.timing("comm"):
            clock.now += 0.25
        meter.count([Size(10, 20, flops=1000.0, samples=3)] * 2, CPU)
        clock.now += 1.25
    record = read_meter(state)
    assert record["data_wait"] == pytest.approx(4 / 10) and record["comm_wait"] == pytest.approx(1 / 10)
    assert record["tokens_per_second"] == pytest.approx(160 / 10) and record["tokens"] == 160
    assert record["mfu"] == pytest.approx(8000 / 10 / 1000)
    clock.now += 8.0  # saving, evaluating
    meter.restart()
    meter.count([Size(10, 20)], CPU)
    clock.now += 1.0
    record = read_meter(state)
    assert (
        record["tokens_per_second"] == pytest.approx(20.0)
        and record["data_wait"] == 0
        and record["tokens"] == 180
    )
    assert meter.updates == 5 and not any(meter.counts.values())


@pytest.mark.parametrize("pause", [0.0, 30.0])
def test_the_time_left_is_that_of_the_last_log_points(clock, pause):
    """With the saves and evaluations between them; the first updates, which compile, are forgotten in
    time."""
    state = make_state(total_updates=2000)
    clock.now = 50.0  # before training
    state.meter.restart()
    for update in range(1, 1501):
        state.update = update
        clock.now += 100.0 if update == 1 else 1.0
        state.meter.count([Size(1, 1)], CPU)
        if update % 10 == 0:
            left = read_meter(state)["seconds_left"]
            if update == 10:
                assert left == pytest.approx(109.0 / 10 * 1990)
            clock.now += pause * (update % 100 == 0)
            state.meter.restart()
    assert left == pytest.approx(500 + pause * 5, rel=0.06)


def test_a_gpu_is_known_by_the_name_that_torch_gives(clock):
    names = {"rtx4090": "GeForce RTX 4090", "a100": "A100-SXM4-80GB", "h100": "H100 80GB HBM3"}
    names |= {"l40s": "L40S"}
    for key, name in names.items():
        assert data_sheet_rate(f"NVIDIA {name}") == GPUS[key][0] * 1e12
    for other in ("GeForce RTX 4090 Laptop GPU", "GeForce RTX 4060 Ti", "H100 PCIe", "RTX A1000", "L40"):
        assert data_sheet_rate(f"NVIDIA {other}") is None
    state = make_state()
    clock.now += 1.0
    assert "mfu_of_sheet" not in read_meter(state)
    state.peak.data_sheet_rate = 2000.0
    state.meter.count([Size(10, 20, flops=500.0)], CPU)
    clock.now += 1.0
    record = read_meter(state)
    assert (record["mfu"], record["mfu_of_sheet"]) == (0.5, 0.25)
