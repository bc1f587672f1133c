"""Callbacks: called in order, refused if they could not be called, with states that a checkpoint holds; and the
included ones. Runs with callbacks that are killed and resumed: test_names.py."""

import io
import math
import re
import sys
from argparse import Namespace
from collections import Counter, OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import UserError
from llm.training.core.callbacks import Callback, EarlyStopping, TensorBoardLogger
from tests.conftest import ROOT
from trainer.callbacks.base import CallbackList

PAGE = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
ENGINE = SimpleNamespace(resumed_update=None)


def make_record(update: int, **more) -> dict:
    record = {"update": update, "epoch": (update - 1) // 2, "loss": 1 / update, "mfu": 0.5}
    return record | {"mean_loss": 1.5 / update, "grad_norm": 1.0, "tokens": 10 * update} | more


# --- the page


def test_the_example_on_the_page_runs_and_resumes(capsys):
    space = {}
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    (example,) = [block for block in examples if "class GradientSpikes" in block]
    exec(compile(example, "engine.md", "exec"), space)
    spikes = space["GradientSpikes"]()
    callbacks = CallbackList([spikes])
    norms = [1.0, 1.2, None, 5.0, 1.0]
    callbacks.call("on_batch_end", 1, None)
    for update, norm in enumerate(norms, 2):
        callbacks.call("on_batch_end", update, make_record(update, grad_norm=norm))
    assert capsys.readouterr().out == "update 5: gradient norm 5.00, usually 1.02\n"
    again = space["GradientSpikes"]()
    CallbackList([again]).load_state_dict(callbacks.state_dict())
    assert again.usual == spikes.usual == pytest.approx(0.9 * (0.9 * 1.02 + 0.5) + 0.1)


# --- the list


def with_method(name, method) -> Callback:
    return type("Own", (Callback,), {name: method})()


def test_a_failure_in_on_exception_is_a_warning_and_the_others_are_called(capsys):
    def fail(self, engine, error):
        raise ValueError("also this")

    closes = with_method("on_exception", lambda self, engine, error: print("closed"))
    CallbackList([with_method("on_exception", fail), closes]).call("on_exception", UserError("mend it"))
    said = capsys.readouterr()
    assert said.out == "closed\n" and said.err.count("\n") == 1
    assert said.err.startswith("warning: ") and "also this" in said.err


def test_a_method_that_would_never_be_called_is_refused():
    with pytest.raises(UserError, match="Own: on_epoch_finish would never be called"):
        CallbackList([with_method("on_epoch_finish", lambda *_: 0)]).check()


class Keeper(Callback):
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_states_are_kept_by_class_name(capsys):
    states = CallbackList([Keeper(1), Callback(), Keeper(2), EarlyStopping()]).state_dict()
    again = [EarlyStopping(), Keeper(), Callback(), Keeper()]
    CallbackList(again).load_state_dict(through_a_file(states) | {"Gone": {"best": 1.0}})
    assert (again[1].value, again[3].value) == (1, 2)
    assert capsys.readouterr().err.endswith("this run does not have: Gone\n")


def nested(inner):
    return st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.recursive(scalars, nested, max_leaves=8))
def test_plain_states_come_back_as_they_were(value):
    states = CallbackList([Keeper(value)]).state_dict()
    assert through_a_file(states)["Keeper"]["value"] == value


def test_tensors_and_kinds_of_dicts_are_plain():
    value = {"t": torch.arange(3), "counts": Counter("aab"), "order": OrderedDict(a=1)}
    back = through_a_file(CallbackList([Keeper(value)]).state_dict())["Keeper"]["value"]
    assert back.pop("t").tolist() == [0, 1, 2]
    assert back == {"counts": {"a": 2, "b": 1}, "order": {"a": 1}}


@pytest.mark.parametrize("value", [{1}, Namespace(), b"a", "\udcff", np.zeros(3)])
def test_a_state_that_no_checkpoint_could_give_back_is_refused(value):
    with pytest.raises(UserError, match=r"the state of Keeper\['value'\]"):
        CallbackList([Keeper([0, value])]).state_dict()


def test_a_record_gets_numbers_or_the_callback_is_named():
    def adds(value):
        return with_method("on_log", lambda self, state, record: record.update(more=value))

    for value, number in (
        (torch.tensor(2.5), 2.5),
        (math.nan, None),
        (np.float32(1), 1.0),
        ([1, math.inf], [1, None]),
    ):
        record = {"update": 1}
        CallbackList([adds(value)]).call("on_log", record)
        assert record == {"update": 1, "more": number}
    for value in (torch.zeros(2), {1}, Namespace()):
        with pytest.raises(UserError, match="'more', which callback Own puts into the record"):
            CallbackList([adds(value)]).call("on_log", {"update": 1})


# --- EarlyStopping

values = st.none() | st.just(math.nan) | st.just(math.inf) | st.integers(-4, 4).map(lambda n: n / 2)


def stops_after(evals, mode, patience, min_delta):
    """Independent of the code: the first validation that ends `patience` ones which bring nothing new."""
    best_at, best = 0, None
    for i, value in enumerate(evals, 1):
        usable = value is not None and math.isfinite(value)
        if usable and (
            best is None or (value < best - min_delta if mode == "min" else value > best + min_delta)
        ):
            best_at, best = i, value
        elif i - best_at == patience:
            return i
    return None


@given(
    st.lists(values, min_size=1, max_size=9),
    st.sampled_from(["min", "max"]),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 1.25]),
    st.integers(0, 9),
)
@example([1.0, 1.0, 1.0], "min", 2, 0.0, 0)
@example([1.0, 1.5, 2.0], "max", 1, 0.5, 0)
def test_it_stops_where_it_should_also_when_resumed(evals, mode, patience, min_delta, resume_at):
    expected = stops_after(evals, mode, patience, min_delta)
    stopping, reasons = EarlyStopping("eval_loss", mode, patience, min_delta), []
    engine = SimpleNamespace(finish=reasons.append)
    for number, value in enumerate(evals, 1):
        if number == resume_at:
            state, stopping = stopping.state_dict(), EarlyStopping("eval_loss", mode, patience, min_delta)
            stopping.load_state_dict(state)
        stopping.on_validation_end(engine, {"eval_loss": value})
        if reasons:
            break
    assert (number if reasons else None) == expected


def test_of_another_metric_nothing_is_known_when_it_is_resumed():
    before = EarlyStopping("eval_loss", patience=3)
    before.best, before.waited = 1.0, 2
    for now, known in (
        (EarlyStopping("eval_loss", patience=9), (1.0, 2)),
        (EarlyStopping("eval_bpb"), (None, 0)),
        (EarlyStopping("eval_loss", mode="max"), (None, 0)),
    ):
        now.load_state_dict(before.state_dict())
        assert (now.best, now.waited) == known
    old = EarlyStopping("eval_loss")
    old.load_state_dict({"best": 1.0, "waited": 2})  # of older code
    assert (old.best, old.waited) == (1.0, 2)


def test_impossible_arguments():
    for name, value in (("mode", "low"), ("patience", 0), ("min_delta", -0.1), ("min_delta", math.nan)):
        with pytest.raises(UserError, match=rf"EarlyStopping: .*{name} {re.escape(repr(value))}"):
            EarlyStopping(**{name: value})


# --- TensorBoard


def curves(folder) -> dict[str, list[tuple[int, float]]]:
    """All points that TensorBoard's own reader finds in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    points = {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}
    return {tag: [(point.step, point.value) for point in of_tag] for tag, of_tag in points.items()}


def test_the_points_read_back_are_those_of_the_records(tmp_path):
    pytest.importorskip("tensorboard")
    odd = [{"loss": None, "skipped": [3], "mfu": math.nan}, {"eval_loss": 0.25, "evaluated": True}, {}]
    logger = TensorBoardLogger(tmp_path / "a" / "b")
    records = [make_record(update, **more) for update, more in zip((3, 5, 10**6), odd, strict=True)]
    for record in records:
        logger.on_batch_end(ENGINE, record["update"] - 1, None)
        logger.on_batch_end(ENGINE, record["update"], record)
    found = curves(tmp_path / "a" / "b")
    names = {key for record in records for key in record} - {"update", "skipped", "evaluated"}
    assert set(found) == names | {"evaluated"}
    for name in names:
        kept = [r for r in records if r.get(name) is not None and not math.isnan(r[name])]
        expected = [(r["update"], pytest.approx(r[name], rel=1e-6)) for r in kept]
        assert found[name] == expected


def test_without_the_package_one_line_tells_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"^TensorBoard: .*tensorboard.*; pip install tensorboard"):
        TensorBoardLogger(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"TensorBoard: .*file cannot be written \(.*\); make room or"):
        TensorBoardLogger(tmp_path / "file").on_batch_end(ENGINE, 1, make_record(1))

    logger = TensorBoardLogger(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    logger.on_batch_end(ENGINE, 1, make_record(1))
    monkeypatch.setattr(logger.log, "flush", full)
    with pytest.raises(UserError, match="No space left on device"):
        logger.on_batch_end(ENGINE, 2, make_record(2))
