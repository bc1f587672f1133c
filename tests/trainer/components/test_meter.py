"""What the meter notes, and the time left: against a clock of the test's own, no test here is timed."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import loop
from trainer.components import device as device_module
from trainer.components import meter as meter_module
from trainer.components.device import autocast_dtype, mixed_precision
from trainer.components.diagnosis import WARM
from trainer.components.meter import Meter, Size, events
from trainer.loop import reached, read_meter

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


def make_state(**settings) -> SimpleNamespace:
    """What the meter needs of a run's state."""
    args = {"epochs": 1, "accumulation_steps": 1, "save_interval": 0, "eval_interval": 0, "batch_size": 4}
    args |= {key: settings.pop(key) for key in list(settings) if key in args}
    parts = {"eval_loader": None, "iters": 10, "total_updates": 10, "epoch": 0, "step": 0, "update": 0, "seconds": 0.0}
    parts |= {"tokens": 0, "peak_flops": 1000.0, "device": CPU, "clock": 0.0, "meter": Meter()}
    return SimpleNamespace(args=SimpleNamespace(**args), **(parts | settings))


def test_each_kind_of_time_is_noted_and_saving_is_not_training(clock):
    state = make_state()
    meter = state.meter

    def batches():
        while True:
            clock.now += 0.5
            yield {}

    source = batches()
    for _ in range(4):
        assert len(meter.fetch(source, 2)) == 2  # 1 s
        with meter.timing("comm"):
            clock.now += 0.25
        meter.count([Size(10, 20, flops=1000.0, samples=3, pad_rows=1)] * 2, CPU)
        clock.now += 1.25
    found = read_meter(state)
    assert found["data_wait"] == pytest.approx(4 / 10) and found["comm_wait"] == pytest.approx(1 / 10)
    assert found["tokens_per_second"] == pytest.approx(160 / 10) and found["tokens"] == 160
    assert found["mfu"] == pytest.approx(8000 / 10 / 1000)
    for kind, seconds in (("save", 3.0), ("evaluate", 5.0)):
        with meter.timing(kind):
            clock.now += seconds
    meter.restart()
    meter.count([Size(10, 20)], CPU)
    clock.now += 1.0
    found = read_meter(state)
    assert found["tokens_per_second"] == pytest.approx(20.0) and found["data_wait"] == 0 and found["tokens"] == 180
    total = meter.totals(CPU, dict.fromkeys(meter_module.COUNTS, 0) | {"clock": 0.0})
    assert (total["save"], total["evaluate"], total["clock"]) == (3.0, 5.0, 19.0)
    assert (total["updates"], total["micro_batches"], total["samples"], total["pad_rows"]) == (5, 9, 24, 8)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 50))
def test_the_saves_and_evaluations_of_an_epoch_are_those_of_the_loop(iters, accumulation, interval):
    """But for one: where an interval's end and the epoch's end fall into one update, two may be counted."""
    happened, before = 0, 0
    for step in [*range(accumulation, iters, accumulation), iters]:
        assert happened <= events(interval, before, iters, accumulation) + 1
        happened, before = happened + reached(interval, before, step, iters), step
        assert abs(events(interval, step, iters, accumulation) - happened) <= 1
    assert 0 <= events(interval, iters, iters, accumulation) - happened <= 1


# seconds: of the first update (compilation), of an update, of an evaluation, of a save; settings
RUNS = [
    (0.0, 1.0, 0.0, 0.0, {"iters": 200}),
    (60.0, 1.0, 0.0, 0.0, {"iters": 200}),
    (60.0, 1.0, 40.0, 0.0, {"iters": 100, "epochs": 4}),
    (5.0, 0.5, 7.0, 2.0, {"iters": 200, "epochs": 2, "eval_interval": 50, "save_interval": 20}),
    (0.0, 4.0, 0.0, 1.0, {"iters": 400, "accumulation_steps": 4, "save_interval": 40}),
    (30.0, 1.0, 30.0, 0.0, {"iters": 150, "epochs": 3, "resumed": 200}),  # in the second epoch, by another machine
]


@pytest.mark.parametrize(("first", "each", "evaluation", "save", "settings"), RUNS)
def test_the_time_left_is_what_is_left(clock, first, each, evaluation, save, settings):
    """Simulated runs: after the warm-up, what each log point says is what the rest of the run then takes."""
    settings = dict(settings)
    resumed, log_interval = settings.pop("resumed", 0), 10
    state = make_state(eval_loader=[None] * 25 if evaluation else None, **settings)
    args, per_epoch = state.args, math.ceil(state.iters / state.args.accumulation_steps)
    state.total_updates = per_epoch * args.epochs
    state.seconds = 1000.0 * resumed  # the updates before the resume were slow
    said, evaluated = [], 0
    for update in range(resumed + 1, state.total_updates + 1):
        state.update = update
        state.epoch, place = divmod(state.update - 1, per_epoch)
        before, state.step = (place * args.accumulation_steps, min(state.iters, (place + 1) * args.accumulation_steps))
        clock.now += each + (first if state.update == resumed + 1 else 0)
        state.meter.count([Size(1, 1, samples=4)] * (state.step - before), CPU)
        due = [reached(n, before, state.step, state.iters) for n in (args.eval_interval, args.save_interval)]
        logging = reached(log_interval, before, state.step, state.iters)
        if logging:
            left = read_meter(state)["seconds_left"]
            done = state.meter.updates > WARM and (evaluated or not evaluation)
            said.append((left, clock.now, done, evaluation * (due[0] and evaluation > 0) + save * due[1]))
        for kind, seconds, wanted in (("save", save, due[1]), ("evaluate", evaluation, due[0] and evaluation)):
            if wanted:
                evaluated += kind == "evaluate"
                with state.meter.timing(kind):
                    clock.now += seconds
        if state.meter.updates == WARM:
            state.meter.warmed()
        if logging:
            state.meter.restart()
    checked = [(left, clock.now - at - now) for left, at, known, now in said if known]
    assert len(checked) >= 5
    for left, took in checked:
        assert left == pytest.approx(took, rel=0.02, abs=max(each, 2 * save))


def test_a_first_evaluation_is_guessed_from_training(clock):
    """A forward pass is a third of the work: 100 held-out samples take as long as 33 trained ones."""
    state = make_state(iters=100, total_updates=100, eval_loader=[None] * 25)
    for _ in range(50):
        state.update += 1
        clock.now += 8.0
        state.meter.count([Size(1, 1, samples=4)], CPU)
    state.step = 50
    assert read_meter(state)["seconds_left"] == pytest.approx(50 * 8.0 + 100 / 3 * 2.0)


@pytest.mark.parametrize("dtype", ["bfloat16_emulated", "float16", "float32"])
def test_the_rate_is_measured_in_the_dtype_of_the_run(dtype, monkeypatch):
    monkeypatch.setattr(device_module, "native_float16", lambda device: True)
    expected = getattr(torch, dtype.removesuffix("_emulated"))
    assert autocast_dtype(mixed_precision(dtype, CPU)[0], CPU) == expected
