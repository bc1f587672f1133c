"""Callbacks against a small engine that calls them in the order of docs/CALLBACKS.md, can be killed between
any two calls and resumes as the real one does; the page itself against the code."""

import inspect
import io
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from argparse import Namespace
from collections import Counter, OrderedDict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from common.errors import Interrupted, UserError
from llm.training.core.callbacks import (
    Callback,
    EarlyStopping,
    LRSchedulerCallback,
    MetricsLogger,
    TensorBoardLogger,
)
from tests.conftest import ROOT
from trainer.run import included_callbacks
from trainer.run.callbacks import HOOKS, CallbackList

PAGE = (ROOT / "docs/CALLBACKS.md").read_text(encoding="utf-8")


class Killed(BaseException):
    """The process is gone: nobody is told."""


class FakeEngine:
    """What the page says that an engine offers, and a run of it: two updates per epoch, validation and
    checkpoint at each epoch's end. The public attributes are exactly those of the page."""

    def __init__(
        self,
        save_dir=".",
        callbacks=(),
        epochs=2,
        rank=0,
        saved=None,
        evals=None,
        log_every=2,
        make=None,
        interval="update",
    ):
        args = Namespace(epochs=epochs, save_dir=str(save_dir), learning_rate=0.1)
        self.config = SimpleNamespace(to_args=lambda: args, training=None)
        self.is_main_process = rank == 0
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1, betas=(0.9, 0.99))
        self.state = SimpleNamespace(
            args=args, total_updates=2 * epochs, iters=2, update=0, epoch=0, step=0, shown=()
        )
        self.state.optimizer = self.optimizer = optimizer
        self.state.finish = self.stop
        self.model = self.device = self.criterion = self.data_module = None
        self.run_name, self.checkpoint_manager = "task_16", None
        self.scheduler, self.task = make and make(optimizer), SimpleNamespace(scheduler_interval=interval)
        self.lines, self._reason = [], None
        self.logger = SimpleNamespace(info=self.lines.append, debug=lambda text: None)
        self._callbacks, self._saved, self._evals, self._log_every = (
            CallbackList(callbacks),
            saved,
            evals,
            log_every,
        )
        self._callbacks.engine = self
        self._calls, self._pending, self.checkpoint, self.used = 0, False, saved, []
        self.resumed_update = None
        if saved is not None:
            self.state.update, self._pending = saved["update"], saved["pending"]
            self.resumed_update = saved["update"] - saved["pending"]
            optimizer.load_state_dict(saved["optimizer"])
            self._callbacks.load_state_dict(saved["callbacks"])
            self._callbacks.epochs = saved["epochs"]

    def stop(self, reason):
        self._reason = reason

    def _call(self, name, *args):
        self._calls += 1
        if self._calls == self._kill_at:
            raise Killed
        self._callbacks.call(name, *args)

    def run(self, kill_at=0, stop_at=0):
        """Train to the end, to the `kill_at`-th call, or to a signal before update `stop_at`."""
        self._kill_at = kill_at
        try:
            self._call("on_train_start")
            if self._pending:
                self._finish_update()
            # a complete epoch is ended again
            first = math.ceil(self.state.update / 2) - 1 if self.state.update else 0
            for epoch in range(first, self.state.args.epochs):
                if self._reason:
                    break
                self._run_epoch(epoch, stop_at)
            self._call("on_train_end")
        except Killed:
            pass
        except BaseException as error:
            self._call("on_exception", error)
            raise
        return self

    def _run_epoch(self, epoch, stop_at):
        self._call("on_epoch_start", epoch)
        for update in range(max(self.state.update, 2 * epoch) + 1, 2 * epoch + 3):
            if update == stop_at:
                self._save(pending=False)
                raise Interrupted(signal.SIGTERM, "by SIGTERM")
            self._call("on_batch_start", update)
            self._train(update)
            self._call("on_optimizer_step", update)
            if update % self._log_every == 0:
                self._call("on_record", make_record(update))
            if update % 2 == 0:
                self._save(pending=True)
                self._call("on_checkpoint_saved", ROOT / "x_resume.pth")
            self._finish_update()
        self._call("on_epoch_end", epoch)

    def _train(self, update):
        group = self.state.optimizer.param_groups[0]
        self.used.append((update, group["lr"], group["betas"][0]))
        group["params"][0].grad = torch.zeros(1)
        self.state.optimizer.step()
        self.state.update, self.state.epoch, self.state.step = update, (update - 1) // 2, (update - 1) % 2 + 1

    def _save(self, pending):
        states = {"update": self.state.update, "pending": pending, "callbacks": self._callbacks.state_dict()}
        states["epochs"] = self._callbacks.epochs
        states["optimizer"] = self.state.optimizer.state_dict()
        file = io.BytesIO()
        torch.save(states, file)
        self.checkpoint = torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    def _finish_update(self):
        update = self.state.update
        record = make_record(update) if update % self._log_every == 0 else None
        if update % 2 == 0:
            self._call("on_validation_start")
            loss = 1 / update if self._evals is None else self._evals[update // 2 - 1]
            metrics = {"eval_loss": loss, "eval_bpb": 0.5}
            self._call("on_validation_end", metrics)
            record = record and record | metrics
        if record is not None:
            self._call("on_log", record)
        self._call("on_batch_end", update, record)


def make_record(update: int) -> dict:
    record = dict.fromkeys(
        ("logits_loss", "aux_loss", "learning_rate", "tokens_per_second", "mfu", "data_wait"), 0.5
    )
    record |= {"update": update, "epoch": (update - 1) // 2, "step": (update - 1) % 2 + 1, "loss": 1 / update}
    return record | {
        "mean_loss": 1.5 / update,
        "grad_norm": 1.0,
        "tokens": 10 * update,
        "seconds": 1.0 * update,
        "memory_mb": 10.0,
        "seconds_left": 5.0,
    }


class Recorder(Callback):
    """One line per call, in the form of the page."""

    def __init__(self):
        self.lines = []

    def note(self, name, engine, *args):
        names = list(inspect.signature(getattr(Callback, name)).parameters)[2:]
        shown = [str(a) if a is None or isinstance(a, int) else n for n, a in zip(names, args, strict=True)]
        self.lines.append(f"{name}({', '.join(['engine', *shown])})")

    def __getattribute__(self, name):
        return partial(self.note, name) if name in HOOKS else super().__getattribute__(name)


def fenced(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.M | re.S)
    return block


# --- the page
# ------------------------------------------------------------------------------------------------------


def test_the_example_on_the_page_runs_and_resumes():
    space = {}
    exec(compile(fenced("python"), "CALLBACKS.md", "exec"), space)
    spikes = space["GradientSpikes"]()
    callbacks, engine = CallbackList([spikes]), FakeEngine()
    callbacks.engine = engine
    norms = [1.0, 1.2, None, 5.0, 1.0]
    callbacks.call("on_batch_end", 1, None)
    for update, norm in enumerate(norms, 2):
        callbacks.call("on_batch_end", update, make_record(update) | {"grad_norm": norm})
    assert engine.lines == ["update 5: gradient norm 5.00, usually 1.02"]
    again = space["GradientSpikes"]()
    CallbackList([again]).load_state_dict(callbacks.state_dict())
    assert again.usual == spikes.usual == pytest.approx(0.9 * (0.9 * 1.02 + 0.5) + 0.1)


# --- the list
# ------------------------------------------------------------------------------------------------------


def test_the_base_class_does_nothing_and_all_are_called_in_order():
    seen = []

    class Noisy(Callback):
        def on_train_start(self, engine):
            seen.append(self)

    noisy = [Noisy(), Callback(), Noisy()]
    FakeEngine(callbacks=noisy).run()
    assert seen == [noisy[0], noisy[2]]
    assert CallbackList(noisy).state_dict() == {}


class Broken(Callback):
    """Fails where it is told to."""

    def __init__(self, where, error):
        self.where, self.error = where, error

    def __getattribute__(self, name):
        if name in (*HOOKS, "state_dict", "load_state_dict") and name == self.where:
            return self.fail
        return super().__getattribute__(name)

    def fail(self, *args):
        raise self.error


@pytest.mark.parametrize("where", [h for h in HOOKS if h != "on_exception"])
def test_a_callback_that_raises_is_named(where):
    error = KeyError("x")
    recorder = Recorder()
    with pytest.raises(KeyError) as caught:
        FakeEngine(callbacks=[Callback(), Broken(where, error), recorder]).run()
    assert caught.value is error and error.__notes__ == [f"callback Broken failed in {where}"]
    assert recorder.lines[-1] == "on_exception(engine, error)"


@pytest.mark.parametrize("error", [UserError("mend it"), Interrupted(15, "by SIGTERM"), KeyboardInterrupt()])
def test_what_is_not_a_bug_of_the_callback_passes_through(error):
    with pytest.raises(type(error)) as caught:
        FakeEngine(callbacks=[Broken("on_batch_end", error)]).run()
    assert caught.value is error


@pytest.mark.parametrize("second", [ValueError("also this"), UserError("also this")])
def test_a_failure_in_on_exception_hides_neither_the_error_nor_the_other_callbacks(capsys, second):
    recorder = Recorder()
    with pytest.raises(UserError, match="mend it"):
        FakeEngine(
            callbacks=[Broken("on_exception", second), recorder, Broken("on_epoch_end", UserError("mend it"))]
        ).run()
    assert recorder.lines[-1] == "on_exception(engine, error)"
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ") and "also this" in warning and warning.count("\n") == 1


def test_a_method_that_cannot_be_called_is_refused_before_training():
    class WithoutEngine(Callback):
        def on_epoch_end(self, epoch):
            pass

    class WithLogs(Callback):
        def on_validation_end(self, engine, metrics, logs):
            pass

    class Fits(Callback):
        def on_epoch_end(self, *args):
            pass

        def on_batch_end(self, engine, number, record, more=None):
            pass

    CallbackList([Fits()])
    told = "callback WithoutEngine: on_epoch_end is declared with (epoch), but it is called as on_epoch_end(engine, epo"
    with pytest.raises(UserError, match=re.escape(told)):
        CallbackList([WithoutEngine()])
    with pytest.raises(
        UserError, match=r"WithLogs: .*but it is called as on_validation_end\(engine, metrics\)"
    ):
        CallbackList([WithLogs()])


def test_what_would_never_be_called_is_refused():
    class Misspelt(Callback):
        def on_epoch_finish(self, engine, epoch):
            pass

    with pytest.raises(
        UserError, match="callback Misspelt: on_epoch_finish would never be called; the methods are on_train"
    ):
        CallbackList([Misspelt()])
    for wrong in (EarlyStopping, None, "EarlyStopping"):
        with pytest.raises(UserError, match="is not a callback"):
            CallbackList([wrong])


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
    empty = {"best": None, "waited": 0, "monitor": "eval_loss", "mode": "min"}
    assert states == {"Keeper": {"value": 1}, "Keeper#2": {"value": 2}, "EarlyStopping": empty}
    again = [EarlyStopping(), Keeper(), Callback(), Keeper()]
    CallbackList(again).load_state_dict(through_a_file(states))
    assert (again[1].value, again[3].value) == (1, 2)
    assert capsys.readouterr().err == ""


def test_callbacks_that_went_are_one_warning_and_their_state_is_kept(capsys):
    saved = {"Keeper": {"value": 3}, "Gone": {"best": 1.0}}
    kept = Keeper()
    callbacks = CallbackList([kept, EarlyStopping(), Callback()])  # EarlyStopping came
    callbacks.load_state_dict(saved)
    assert kept.value == 3
    told = "callbacks of the checkpoint that this run does not have: Gone; their state is kept"
    assert capsys.readouterr().err == f"warning: {told}\n"
    assert saved.items() <= callbacks.state_dict().items()


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_states_come_back_as_they_were(value):
    states = CallbackList([Keeper(value)]).state_dict()
    assert through_a_file(states)["Keeper"]["value"] == value


def test_tensors_and_kinds_of_dicts_are_plain():
    value = {"t": torch.arange(3), "counts": Counter("aab"), "order": OrderedDict(a=1)}
    back = through_a_file(CallbackList([Keeper(value)]).state_dict())["Keeper"]["value"]
    assert (
        back["t"].tolist() == [0, 1, 2] and back["counts"] == {"a": 2, "b": 1} and back["order"] == {"a": 1}
    )


@pytest.mark.parametrize(
    "value, kind",
    [({1}, "set"), (np.float64(1), "numpy.float64"), (Namespace(), "argparse.Namespace"), (b"a", "bytes")],
)
def test_a_state_that_no_checkpoint_could_give_back_is_refused(value, kind):
    with pytest.raises(UserError, match=rf"the state of callback Keeper\['value'\]\[1\] is a {kind}"):
        CallbackList([Keeper([0, value])]).state_dict()
    if value.__hash__ is not None:
        with pytest.raises(UserError, match=rf"a key of the state of callback Keeper\['value'\] is a {kind}"):
            CallbackList([Keeper({value: 0})]).state_dict()


# --- MetricsLogger
# -------------------------------------------------------------------------------------------------


def test_ranks_other_than_the_first_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(included_callbacks, "is_main_process", lambda: False)
    logs = [MetricsLogger(), TensorBoardLogger(tmp_path / "curves")]
    FakeEngine(tmp_path, logs, rank=1).run()
    assert list(tmp_path.iterdir()) == []


# --- EarlyStopping
# -------------------------------------------------------------------------------------------------

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
    st.integers(0, 60),
)
def test_it_stops_where_it_should_on_all_ranks_and_after_a_kill(evals, mode, patience, min_delta, kill_at):
    expected = stops_after(evals, mode, patience, min_delta) or len(evals)
    make = partial(EarlyStopping, "eval_loss", mode, patience, min_delta)
    reasons = []
    for rank in (0, 1):
        engine = FakeEngine(callbacks=[make()], epochs=len(evals), evals=evals, rank=rank).run()
        assert engine.state.update == 2 * expected
        reasons.append(engine._reason)
    assert reasons[0] == reasons[1]
    killed = FakeEngine(callbacks=[make()], epochs=len(evals), evals=evals).run(kill_at)
    resumed = FakeEngine(callbacks=[make()], epochs=len(evals), evals=evals, saved=killed.checkpoint).run()
    assert resumed.state.update == 2 * expected and resumed._reason == reasons[0]
    once_more = FakeEngine(callbacks=[make()], epochs=len(evals), evals=evals, saved=resumed.checkpoint).run()
    assert once_more.state.update == 2 * expected  # a run that was stopped early stays stopped


def test_the_reason_tells_metric_and_best_value():
    engine = FakeEngine(
        callbacks=[EarlyStopping(patience=2)], epochs=5, evals=[0.51234, 0.6, 0.7, 0.1, 0.1]
    ).run()
    assert engine._reason == "EarlyStopping: eval_loss got no better than 0.51234 in 2 validations"
    engine = FakeEngine(callbacks=[EarlyStopping(patience=2)], evals=[None, None]).run()
    assert engine._reason == "EarlyStopping: eval_loss was never finite in 2 validations"


def test_another_metric_is_not_compared_with_the_best_of_the_one_before(capsys):
    saved = {"best": 0.1, "waited": 2, "monitor": "eval_loss", "mode": "min"}
    same, other = EarlyStopping(), EarlyStopping("eval_bpb")
    same.load_state_dict(saved)
    assert (same.best, same.waited) == (0.1, 2) and capsys.readouterr().err == ""
    other.load_state_dict(saved)
    assert (other.best, other.waited) == (None, 0)
    told = "EarlyStopping begins to count anew: eval_bpb min is monitored instead of eval_loss min"
    assert capsys.readouterr().err == f"warning: {told}\n"


def test_a_metric_that_is_missing_names_those_there_are():
    with pytest.raises(UserError, match="gives no 'accuracy' to monitor; it gives eval_bpb, eval_loss"):
        FakeEngine(callbacks=[EarlyStopping("accuracy", mode="max")]).run()


@pytest.mark.parametrize(
    "wrong", [{"mode": "low"}, {"patience": 0}, {"min_delta": -0.1}, {"min_delta": math.nan}]
)
def test_impossible_arguments(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=rf"EarlyStopping: .*{name} {re.escape(repr(value))}"):
        EarlyStopping(**wrong)


# --- TensorBoard
# ---------------------------------------------------------------------------------------------------


def curves(folder) -> dict[str, list[tuple[int, float]]]:
    """All points that TensorBoard's own reader finds in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(point.step, point.value) for point in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def test_the_points_read_back_are_those_of_the_records(tmp_path):
    pytest.importorskip("tensorboard")
    odd = [{"loss": None, "skipped": [3], "mfu": math.nan}, {"eval_loss": 0.25, "evaluated": True}, {}]
    logger, engine = TensorBoardLogger(tmp_path / "a" / "b"), FakeEngine()
    logger.on_train_start(engine)
    records = [make_record(update) | more for update, more in zip((3, 5, 10**6), odd, strict=True)]
    for record in records:
        logger.on_batch_end(engine, record["update"] - 1, None)
        logger.on_batch_end(engine, record["update"], record)
    logger.on_train_end(engine)
    found = curves(tmp_path / "a" / "b")
    names = {key for record in records for key in record} - {"update", "skipped", "evaluated"}
    assert set(found) == names | {"evaluated"}
    for name in names:
        points = [
            (r["update"], r[name]) for r in records if r.get(name) is not None and not math.isnan(r[name])
        ]
        assert [step for step, _ in found[name]] == [step for step, _ in points]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-6)


def killed_run(folder):
    """Log five updates and die."""
    engine = FakeEngine()
    logger = TensorBoardLogger(folder)
    logger.on_train_start(engine)
    for update in range(1, 6):
        logger.on_batch_end(engine, update, make_record(update) | {"loss": 100.0 + update})
    os.kill(os.getpid(), signal.SIGKILL)


def test_each_update_is_there_once_after_a_real_kill_and_resumes(tmp_path):
    pytest.importorskip("tensorboard")
    process = multiprocessing.get_context("fork").Process(
        target=killed_run, args=(str(tmp_path),), daemon=True
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert curves(tmp_path)["loss"] == [(u, 100.0 + u) for u in range(1, 6)]  # nothing was lost in a buffer
    (first,) = tmp_path.iterdir()
    first.write_bytes(first.read_bytes()[:-7])  # the last point was cut off by the kill
    for start, base, resumed in ((4, 200.0, 3), (6, 300.0, 5)):  # two resumes, the first one also killed
        logger = TensorBoardLogger(tmp_path)
        engine = FakeEngine()
        engine.resumed_update = resumed
        logger.on_train_start(engine)
        for update in range(start, start + 4):
            logger.on_batch_end(engine, update, make_record(update) | {"loss": base + update})
    expected = [101, 102, 103, 204, 205, 306, 307, 308, 309]
    assert curves(tmp_path)["loss"] == list(enumerate(map(float, expected), 1))
    assert all([step for step, _ in points] == list(range(1, 10)) for points in curves(tmp_path).values())
    FakeEngine(tmp_path, [TensorBoardLogger(tmp_path)]).run()  # a new run in the same folder
    assert curves(tmp_path)["loss"] == [(2, 0.5), (4, 0.25)]


def test_a_new_event_file_is_read_after_the_older_ones(tmp_path):
    pytest.importorskip("torch.utils.tensorboard")  # the import itself may take a second
    older = tmp_path / f"events.out.tfevents.{int(time.time()):010d}.zzz.99.9"
    older.touch()
    logger = TensorBoardLogger(tmp_path)
    logger.on_train_start(FakeEngine())
    logger.on_batch_end(FakeEngine(), 1, make_record(1))
    assert sorted(tmp_path.iterdir())[0] == older


def test_without_the_package_one_line_tells_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"^TensorBoard: .*tensorboard.*; pip install tensorboard"):
        FakeEngine(callbacks=[TensorBoardLogger(tmp_path)]).run()


def test_a_folder_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"TensorBoard: .*file cannot be written \(.*\); make room or"):
        FakeEngine(callbacks=[TensorBoardLogger(tmp_path / "file")]).run()

    logger = TensorBoardLogger(tmp_path)
    engine = FakeEngine()
    logger.on_train_start(engine)

    def full(*args):
        raise OSError(28, "No space left on device")

    logger.on_batch_end(engine, 1, make_record(1))
    monkeypatch.setattr(logger.log, "flush", full)
    with pytest.raises(UserError, match="No space left on device"):
        logger.on_batch_end(engine, 2, make_record(2))


# --- LRSchedulerCallback
# -------------------------------------------------------------------------------------------

SCHEDULERS = {
    "step": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=6),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 1 / (n + 2)),
    "multistep": partial(lr_scheduler.MultiStepLR, milestones=[1, 3]),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=8),  # moves beta1 as well
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.7)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("interval", ["update", "epoch"])
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch's own SequentialLR uses it
def test_the_rates_are_those_of_a_plain_loop_also_after_a_kill_at_any_call(kind, interval):
    make = SCHEDULERS[kind]
    plain = FakeEngine(epochs=3)
    optimizer = plain.state.optimizer
    scheduler = make(optimizer)
    for update in range(1, 7):
        plain._train(update)
        if interval == "update" or update % 2 == 0:
            scheduler.step()
    assert len({rate for _, rate, _ in plain.used}) > 1
    stepped = partial(FakeEngine, epochs=3, make=make, interval=interval)
    whole = stepped(callbacks=[LRSchedulerCallback()]).run()
    assert whole.used == plain.used
    for kill_at in range(3, whole._calls + 1):
        killed = stepped(callbacks=[LRSchedulerCallback()]).run(kill_at)
        resumed = stepped(callbacks=[LRSchedulerCallback()], saved=killed.checkpoint).run()
        done = 0 if killed.checkpoint is None else killed.checkpoint["update"]
        assert resumed.used == plain.used[done:], kill_at
        assert resumed.state.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
