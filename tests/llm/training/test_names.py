"""The names and call forms of the engine, its tasks, data modules and callbacks."""

import re
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from common.command_line import log_to
from common.errors import UserError
from llm.training.core.callbacks import Callback, LRSchedulerCallback, MetricsLogger
from llm.training.core.config import Config
from llm.training.core.engine import TrainingEngine
from llm.training.core.utils import DistributedManager
from llm.training.data.base import DataModule
from llm.training.data.synthetic import SyntheticDataModule
from llm.training.tasks.base_task import TrainingTask
from llm.training.tasks.regression_task import RegressionTask
from llm.training.train import named_class, train_worker
from tests.conftest import ROOT
from tests.llm.training.test_engine import NAME, regression
from tests.stage_process import Faults, rank_variables, run
from tests.trainer.stage_flags import assert_same_run, flags, saved_state
from trainer.callbacks.base import HOOKS
from trainer.report.metrics import read_metrics


@pytest.fixture(autouse=True)
def _log():
    yield
    log_to(None)


def config_of(folder, **extra) -> Config:
    config = Config.from_args_and_env(regression(folder, **extra), {}, lambda name: RegressionTask)
    config.validate()
    return config


def made(
    task_class: type[TrainingTask], folder, callbacks=(), data_class=SyntheticDataModule, **extra
) -> TrainingEngine:
    """An engine, built as `train_worker` builds it."""
    config = config_of(folder, **extra)
    data_module = data_class(config)
    data_module.prepare_data()
    data_module.setup()
    return TrainingEngine(config, task_class(config), data_module, callbacks)


# --- the six methods


class Six(TrainingTask):
    """Nothing but the six methods."""

    def build_model(self):
        return nn.Linear(SyntheticDataModule.features, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def build_scheduler(self, optimizer):
        return lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def build_criterion(self):
        return nn.MSELoss(reduction="sum")

    def train_step(self, model, batch):
        return self.criterion(model(batch["x"]), batch["y"])

    def validation_step(self, model, batch):
        return {"loss": self.criterion(model(batch["x"]), batch["y"])}


class PerUpdate(Six):
    """Its scheduler is stepped at each update."""

    scheduler_interval = "update"


@pytest.mark.parametrize("task", [Six, PerUpdate])
def test_six_methods_are_a_task(tmp_path, task):
    """The rates are those of torch's scheduler in a plain loop: per epoch, or per update if the task says
    so."""
    recorded = LRSchedulerCallback()
    engine = made(task, tmp_path, [MetricsLogger(), recorded], epochs=3)
    engine.run()
    found = read_metrics(tmp_path / f"out/{NAME}_metrics.jsonl")
    assert found[-1]["eval_loss"] < found[0]["loss"]
    steps = [r["epoch"] if task is Six else r["update"] - 1 for r in found]
    rates = {r["update"]: r["learning_rate"] for r in found}
    assert list(rates.values()) == pytest.approx([0.1 * 0.5 ** (step // 2) for step in steps])
    changes = [u for u in rates if u == 1 or rates[u] != rates[u - 1]]
    assert recorded.rates == {update: rates[update] for update in changes} and len(changes) > 1
    with pytest.raises(Killed):
        made(task, tmp_path / "killed", [Calls(("update", 13))], epochs=3).run()
    made(task, tmp_path / "killed", epochs=3, from_resume=1).run()
    assert_same_run(tmp_path, tmp_path / "killed", NAME)


def test_the_data_come_from_the_task_or_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    source = "from llm.training.data.synthetic import SyntheticDataModule as Points\n"
    (tmp_path / "named.py").write_text(source)
    config = config_of(tmp_path, epochs=1)
    assert isinstance(RegressionTask(config).build_data(), SyntheticDataModule)
    with pytest.raises(UserError, match="Six has no data: set its data_module, or give --data_module"):
        Six(config).build_data()
    assert named_class("--data_module", "named:Points", DataModule) is SyntheticDataModule
    own = {"data_module": "named:Points", "task": f"{__name__}:Six", "save_weight": "six"}
    config = config_of(tmp_path, epochs=1, **own)
    train_worker(rank=0, world_size=1, config=config)
    assert "done: 8 updates" in capsys.readouterr().out


class DictRows(DataModule):
    """Samples that are dicts, put together by torch's default_collate, which takes no empty list."""

    def setup(self):
        self.train_dataset = [{"x": torch.full((8,), float(i)), "y": torch.ones(1)} for i in range(5)]


def test_a_rank_without_samples_gets_an_empty_batch(tmp_path):
    data = DictRows(config_of(tmp_path))
    data.setup()
    assert {key: list(value.shape) for key, value in data.collate([]).items()} == {"x": [0, 8], "y": [0, 1]}
    assert [batch["x"].shape[0] for batch in data.train_dataloader()] == [5]


# --- a frozen model, a plateau


class Reference(RegressionTask):
    """Stays near its start weights; tells the error of the samples whose target is above zero."""

    needs_reference = True

    def train_step(self, model, batch):
        error = (model(batch["x"]) - batch["y"]).square()
        with torch.no_grad():
            before = self.reference(batch["x"])
        distance = (model(batch["x"]) - before).square().sum()
        above = batch["y"] > 0
        return error.sum() + distance, 0 * distance, {"above": (error[above].sum(), above.sum())}


def test_a_frozen_reference_and_a_metric_of_some_samples(tmp_path):
    for folder, callbacks in (("whole", []), ("killed", [Calls(("update", 11))])):
        engine = made(Reference, tmp_path / folder, callbacks, epochs=2)
        start = [value.clone() for value in engine.state.objective.reference.parameters()]
        if folder == "whole":
            engine.run()
        else:
            with pytest.raises(Killed):
                engine.run()
        kept = engine.state.objective.reference
        assert all(
            torch.equal(a, b) and not b.requires_grad for a, b in zip(start, kept.parameters(), strict=True)
        )
    made(Reference, tmp_path / "killed", epochs=2, from_resume=1).run()
    assert_same_run(tmp_path / "whole", tmp_path / "killed", NAME)
    one, other = (read_metrics(tmp_path / f"{name}/out/{NAME}_metrics.jsonl") for name in ("whole", "killed"))
    assert [record["above"] for record in one] == [record["above"] for record in other]
    assert 0 < one[0]["above"] != one[0]["loss"]


class Lowered(RegressionTask):
    def build_scheduler(self, optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)


def test_a_plateau_lowers_the_rate_after_a_validation_also_when_resumed(tmp_path):
    settings = {"epochs": 8, "noise": 0.3, "learning_rate": 0.05, "log_level": "debug"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    made(Lowered, whole, **settings).run()
    found = read_metrics(whole / f"out/{NAME}_metrics.jsonl")
    scheduler = Lowered.build_scheduler(None, torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.05))
    for record in found:  # the rate of an update is that after all validations before it
        assert record["learning_rate"] == scheduler.get_last_lr()[0]
        if "eval_loss" in record:
            scheduler.step(record["eval_loss"])
    assert len({record["learning_rate"] for record in found}) > 2
    with pytest.raises(Killed):
        made(Lowered, broken, [Calls(("update", 31))], **settings).run()
    made(Lowered, broken, **settings, from_resume=1).run()
    assert_same_run(whole, broken, NAME)
    one, other = (saved_state(folder, NAME)["callbacks"] for folder in (whole, broken))
    assert one["LRSchedulerCallback"] == other["LRSchedulerCallback"]


# --- the end of a run


@pytest.mark.parametrize(("rank", "local_rank"), [(2, 0), (3, 1)])
def test_data_are_prepared_once_per_machine(tmp_path, monkeypatch, rank, local_rank):
    """Two machines of two processes: the first of each prepares, before it meets the others."""
    calls = []

    def meet(manager):
        calls.append("setup")
        raise KeyboardInterrupt  # here the ranks would wait for one another

    for name, value in (rank_variables(rank, 4, 29500) | {"LOCAL_RANK": str(local_rank)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(SyntheticDataModule, "prepare_data", lambda self: calls.append("prepare_data"))
    monkeypatch.setattr(DistributedManager, "setup", meet)
    with pytest.raises(KeyboardInterrupt):
        train_worker(rank, 4, config_of(tmp_path))
    assert calls == (["prepare_data"] if local_rank == 0 else []) + ["setup"]


class Stops(Callback):
    """Stops the run after an update; 0: before the first one."""

    def __init__(self, update):
        self.update = update

    def on_train_start(self, engine):
        if self.update == 0:
            engine.stop("asked")

    def on_batch_end(self, engine, update, record):
        if self.update == update:
            engine.stop("asked")


@pytest.mark.parametrize("update", [0, 3])
def test_a_run_that_a_callback_stops_anywhere_is_saved_there_and_can_go_on(tmp_path, update):
    """Also before its first record, which comes at the end of an epoch of 8 updates."""
    settings = {"epochs": 2, "log_interval": 100}
    made(RegressionTask, tmp_path / "whole", **settings).run()
    made(RegressionTask, tmp_path / "stopped", [Stops(update)], **settings).run()
    resumed = made(RegressionTask, tmp_path / "stopped", **settings, from_resume=1)
    resumed.run()
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", NAME)
    (tmp_path / f"stopped/checkpoints/{NAME}_resume.pth").unlink()
    resumed.checkpoint_manager.save_checkpoint()  # also after the run
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", NAME)


class Halved(RegressionTask):
    """Its rate is halved by each epoch."""

    def build_scheduler(self, optimizer):
        return lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_an_epoch_that_is_stopped_within_has_not_ended(tmp_path):
    """A scheduler of torch is stepped at its end, once, as in a run that was not stopped."""
    for folder, callbacks in (("whole", []), ("stopped", [Stops(3)])):
        made(Halved, tmp_path / folder, callbacks, epochs=2).run()
    made(Halved, tmp_path / "stopped", epochs=2, from_resume=1).run()
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", NAME)


# --- the order of the callbacks


def test_the_order_of_calls_is_the_one_that_the_page_tells(tmp_path):
    calls = []

    def recording(name):
        def hook(self, engine, *args):
            shown = ["engine"]
            for value in args:
                if isinstance(value, dict):
                    value = "metrics" if "valid" in name else "record"
                elif isinstance(value, list):
                    value = "micro_batches"
                elif isinstance(value, Path):
                    value = "path"
                shown.append(str(value))
            calls.append(f"{name}({', '.join(shown)})\n")

        return hook

    recorder = type("Recorder", (Callback,), {name: recording(name) for name in HOOKS})()
    settings = {"num_samples": 40, "batch_size": 16, "validation_share": 0.2, "log_interval": 100}
    made(RegressionTask, tmp_path, [recorder], epochs=1, **settings).run()
    page = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
    assert "".join(calls) == re.search(r"^```text\n(.*?)^```", page, flags=re.M | re.S)[1]


# --- the log


def messages(path) -> list[str]:
    """The lines of a log file without time and level, which each of them has."""
    form = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG  |INFO   |WARNING|ERROR  ) (.*)")
    lines = [form.fullmatch(line) for line in path.read_text().splitlines()]
    return [line[2] for line in lines]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_log_file_has_every_line_of_the_console(corpus, tmp_path, ranks):
    """Tokenising, model, records, a warning, the signal and the reason of the end."""
    settings = {"cache_dir": tmp_path / "cache", "epochs": 30, "log_dir": tmp_path / "logs"}
    argv = ["--task", "pretrain", *flags(corpus, tmp_path, "pretrain", **settings)]
    faults = Faults(nan=(2,), signals={5: signal.SIGTERM})
    process = run("engine", argv, faults, ranks=ranks, status=143)
    found = messages(tmp_path / "logs/pretrain_32.log")
    shown = [line for line in [*process.out.splitlines(), *process.err.splitlines()] if line.strip()]
    assert Counter(shown) <= Counter(found)  # the other rank's lines are there, too
    texts = ["tokens", "model: ", "Epoch:[1/30]", "warning: update 2 is skipped", "SIGTERM: finishing"]
    for text in [*texts, "stopped: by"]:
        assert any(text in line for line in found), text
    assert ranks > 1 or Counter(shown) == Counter(found)


def test_an_error_reaches_the_log_file(tmp_path):
    argv = regression(tmp_path, monitor="eval_f1", epochs=1, log_file=tmp_path / "a/run.log")
    said = run("engine", argv, status=2).error_lines[-1]
    assert messages(tmp_path / "a/run.log")[-1] == said and "eval_f1" in said
    (tmp_path / "file").touch()
    process = run("engine", regression(tmp_path, log_file=tmp_path / "file/run.log"), status=2)
    assert "file/run.log cannot be written (File exists); give another --log_file" in process.error_lines[0]


# --- epochs over resumes


class Killed(BaseException):
    """The process is gone."""


class Calls(Callback):
    """Keeps its calls over resumes, and is killed in one of them."""

    def __init__(self, kill=None):
        self.calls, self.kill = [], kill

    def note(self, *call):
        self.calls.append(list(call))
        if call == self.kill:
            raise Killed

    def on_epoch_start(self, engine, epoch):
        self.note("start", epoch)

    def on_epoch_end(self, engine, epoch):
        self.note("end", epoch)

    def on_batch_end(self, engine, update, record):
        self.note("update", update)

    def on_validation_end(self, engine, metrics):
        if self.kill == ("validation", engine.state.progress.update):
            raise Killed

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class OtherCalls(Calls):
    """A second one, which is called after the first."""


@pytest.mark.parametrize("kill", [("start", 0), ("validation", 2), ("update", 3), ("end", 0), ("end", 1)])
def test_each_epoch_begins_and_ends_once_wherever_a_run_is_killed(tmp_path, kill):
    """As seen from the state that is saved: two epochs of two updates, a checkpoint and a validation at their
    ends."""
    settings = {"epochs": 2, "num_samples": 40, "batch_size": 16, "validation_share": 0.2}
    wanted = [["start", 0], ["update", 1], ["update", 2], ["end", 0]]
    wanted += [["start", 1], ["update", 3], ["update", 4], ["end", 1]]
    with pytest.raises(Killed):
        made(RegressionTask, tmp_path, [Calls(), OtherCalls(kill)], **settings).run()
    again = [Calls(), OtherCalls()]
    made(RegressionTask, tmp_path, again, **settings, from_resume=1).run()
    assert [each.calls for each in again] == [wanted, wanted]
    if kill == ("end", 1):  # again, with nothing left to train
        engine = made(RegressionTask, tmp_path, [Calls(("start", 0))], **settings, from_resume=1)
        engine.run()
        assert engine.is_finished
