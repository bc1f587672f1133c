"""The engine under the names and call forms of its description (docs/dev/DESCRIBED.md)."""

import re
import signal
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from common.command_line import ConsoleStream, copy_console
from common.errors import UserError
from llm.training.core.callbacks import Callback, LRSchedulerCallback, MetricsLogger
from llm.training.core.config import Config
from llm.training.core.engine import TrainingEngine
from llm.training.core.utils import CheckpointManager, DistributedManager, Logger, PerformanceMonitor
from llm.training.data.base import DataModule
from llm.training.data.synthetic import SyntheticDataModule
from llm.training.tasks.base_task import TrainingTask
from llm.training.tasks.regression_task import RegressionTask
from llm.training.train import named_class, train_worker
from tests.llm.training.test_engine import NAME, regression
from tests.stage_process import Faults, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, flags, saved_state
from trainer.report.metrics import read_metrics


def release_console() -> None:
    """Undo `copy_console`."""
    if isinstance(sys.stdout, ConsoleStream):
        copy_console()
        sys.stdout, sys.stderr = sys.stdout.stream, sys.stderr.stream


@pytest.fixture(autouse=True)
def _console():
    yield
    release_console()


def config_of(folder, **extra) -> Config:
    config = Config.from_args_and_env(regression(folder, **extra), {}, lambda name: RegressionTask)
    config.validate()
    return config


def made(
    task_class: type[TrainingTask], folder, callbacks=(), data_class=SyntheticDataModule, **extra
) -> TrainingEngine:
    """An engine, built as the description builds it."""
    config = config_of(folder, **extra)
    data_module = data_class(config)
    data_module.prepare_data()
    data_module.setup()
    return TrainingEngine(config, task_class(config), data_module, callbacks)


# --- the six methods


class Six(TrainingTask):
    """Nothing but the methods of the description."""

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
    for name in ("_setup_components", "_run_epoch", "run"):
        assert callable(getattr(engine, name))
    assert isinstance(engine.performance_monitor, PerformanceMonitor)
    engine.run()
    found = read_metrics(tmp_path / f"out/{NAME}_metrics.jsonl")
    assert (
        found[-1]["eval_loss"] < found[0]["loss"]
        and engine.performance_monitor.summary()["loss"] == found[-1]["mean_loss"]
    )
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
    (tmp_path / "named.py").write_text(
        "from llm.training.data.synthetic import SyntheticDataModule as Points; import os\n"
    )
    config = config_of(tmp_path, epochs=1)
    assert isinstance(RegressionTask(config).build_data(), SyntheticDataModule)
    with pytest.raises(UserError, match="Six has no data: set its data_module, or give --data_module"):
        Six(config).build_data()
    assert named_class("--data_module", "named:Points", DataModule) is SyntheticDataModule
    config = config_of(
        tmp_path, epochs=1, data_module="named:Points", task=f"{__name__}:Six", save_weight="six"
    )
    train_worker(rank=0, world_size=1, config=config)
    assert "done: 8 updates" in capsys.readouterr().out


def test_no_scheduler_is_a_constant_rate(tmp_path):
    class Constant(Six):
        def build_scheduler(self):
            assert self.optimizer.param_groups[0]["lr"] == 0.1

    engine = made(Constant, tmp_path, [MetricsLogger()], epochs=2)
    engine.run()
    assert {r["learning_rate"] for r in read_metrics(tmp_path / f"out/{NAME}_metrics.jsonl")} == {0.1}


class DictRows(DataModule):
    """Samples that are dicts, put together by torch's default_collate, which takes no empty list."""

    def setup(self):
        self.train_dataset = [{"x": torch.full((8,), float(i)), "y": torch.ones(1)} for i in range(5)]


def test_a_rank_without_samples_gets_an_empty_batch(tmp_path):
    data = DictRows(config_of(tmp_path))
    data.setup()
    assert {key: list(value.shape) for key, value in data.collate([]).items()} == {"x": [0, 8], "y": [0, 1]}
    assert [batch["x"].shape[0] for batch in data.train_dataloader()] == [5]


# --- what a task must not do


class Mean(RegressionTask):
    def build_criterion(self):
        return nn.MSELoss()


class Detached(RegressionTask):
    def train_step(self, model, batch):
        return super().train_step(model, batch).detach()


class NoMetrics(RegressionTask):
    metric_names = ("error",)


class OtherMetrics(NoMetrics):
    def train_step(self, model, batch):
        loss = super().train_step(model, batch)
        return loss, 0 * loss, {"other": loss.detach()}


class OneElement(RegressionTask):
    """Losses of shape [1]."""

    metric_names = ("error",)

    def train_step(self, model, batch):
        loss = super().train_step(model, batch).reshape(1)
        return loss, 0 * loss, {"error": loss.detach()[0]}


class ManyLosses(RegressionTask):
    def train_step(self, model, batch):
        return (model(batch["x"]) - batch["y"]).square()


class Number(RegressionTask):
    def train_step(self, model, batch):
        return super().train_step(model, batch).item()


class BareTensor(RegressionTask):
    def validation_step(self, model, batch):
        return super().validation_step(model, batch)["loss"]


class NoLoss(RegressionTask):
    def validation_step(self, model, batch):
        return {"error": super().validation_step(model, batch)["loss"]}


class WrongSize(RegressionTask):
    def size(self, batch):
        return len(batch["x"])


class Pairs(SyntheticDataModule):
    """Batches (x, y), as torch makes them."""

    collate_fn = staticmethod(
        lambda rows: torch.utils.data.default_collate([(row["x"], row["y"]) for row in rows])
    )


REFUSED = [
    (Detached, "Detached.train_step returns a loss without a gradient"),
    (
        ManyLosses,
        r"ManyLosses.train_step returns a tensor of shape \[1, 1\]|train_step returns a tensor of shape",
    ),
    (
        NoMetrics,
        "NoMetrics.train_step returns no metrics beside the losses, but the task's metric_names are error",
    ),
    (
        OtherMetrics,
        "OtherMetrics.train_step returns other beside the losses, but the task's metric_names are error",
    ),
    (Number, "Number.train_step returns a float; it must return a tensor"),
    (WrongSize, "WrongSize.size returns a int; it must return Size"),
]


@pytest.mark.parametrize(("task", "message"), REFUSED, ids=[task.__name__ for task, _ in REFUSED])
def test_a_step_of_another_form_is_refused_before_the_first_update(tmp_path, task, message):
    engine = made(task, tmp_path)
    before = [value.clone() for value in engine.state.model.state_dict().values()]
    with pytest.raises(UserError, match=message):
        engine.run()
    assert engine.state.update == 0 and not list(tmp_path.rglob("*.pth"))
    after = engine.state.model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (BareTensor, "BareTensor.validation_step returns a Tensor; it must return sums by name"),
        (NoLoss, "NoLoss.validation_step returns only error; it must return sums by name"),
    ],
)
def test_a_validation_of_another_form_is_refused(tmp_path, task, message):
    with pytest.raises(UserError, match=message):
        made(task, tmp_path).run()


def test_losses_of_one_element_are_numbers(tmp_path):
    ends = []
    for task in (RegressionTask, OneElement):
        engine = made(task, tmp_path / task.__name__, [MetricsLogger()], epochs=2)
        engine.run()
        ends.append(engine.callbacks.by_name()["MetricsLogger"].records[-1])
    assert ends[0]["loss"] == ends[1]["loss"] == pytest.approx(ends[1]["error"])


def test_what_an_engine_has(tmp_path):
    engine = made(RegressionTask, tmp_path)
    state = engine.state
    assert (engine.device, engine.model, engine.optimizer) == (state.device, state.model, state.optimizer)
    assert engine.criterion is engine.task.criterion and engine.data_module is engine.task.data


def test_a_criterion_of_means_and_batches_that_are_no_dicts_are_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"Mean.build_criterion returns MSELoss\(reduction='mean'\).*reduction='sum'"
    ):
        made(Mean, tmp_path)
    with pytest.raises(UserError, match="Pairs: collate_fn returns a list; a batch is a dict of tensors"):
        made(RegressionTask, tmp_path, data_class=Pairs).run()


class TakesCriterion(RegressionTask):
    def train_step(self, batch, model, criterion): ...


class OwnLoader(SyntheticDataModule):
    def train_dataloader(self): ...


def test_methods_that_cannot_be_called_are_told_with_their_form(tmp_path):
    with pytest.raises(
        UserError, match=r"TakesCriterion\.train_step is .*but it is called as train_step\(model, batch\)"
    ):
        made(TakesCriterion, tmp_path)
    with pytest.raises(
        UserError, match=r"OwnLoader\.train_dataloader .* as train_dataloader\(epoch, skip_batches\)"
    ):
        made(RegressionTask, tmp_path, data_class=OwnLoader)


# --- schedulers of torch


def scheduled(make, interval=None) -> type[TrainingTask]:
    """A task with this scheduler."""
    build = {"build_scheduler": lambda self, optimizer, total_updates: make(optimizer, total_updates)}
    return type("Scheduled", (RegressionTask,), build | {"scheduler_interval": interval})


def one_cycle(steps):
    return lambda optimizer, updates: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps or updates)


def cosine(optimizer, updates):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)


WRONG_STEPS = {
    "OneCycleLR is made for 24 steps, as many as there are updates, but it is stepped after each of 3": (
        one_cycle(0),
    ),
    "OneCycleLR is made for 2 steps, but there will be 3": (one_cycle(2), "epoch"),
    "Scheduled.scheduler_interval must be 'epoch' or 'update', not 'step'": (cosine, "step"),
    "Scheduled.build_scheduler returns a int; it must return": (lambda optimizer, updates: 3,),
}


@pytest.mark.parametrize("told", WRONG_STEPS)
def test_a_scheduler_that_is_stepped_otherwise_than_it_is_made_for_is_refused_at_the_start(tmp_path, told):
    with pytest.raises(UserError, match=told):
        made(scheduled(*WRONG_STEPS[told]), tmp_path, epochs=3).run()
    assert not list(tmp_path.rglob("*.pth"))


# --- ReduceLROnPlateau


PLATEAU = """
import torch
from llm.training.tasks.regression_task import RegressionTask
def build_scheduler(self, optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
RegressionTask.build_scheduler = build_scheduler
"""


def test_a_plateau_lowers_the_rate_after_a_validation_also_when_resumed(tmp_path):
    settings = {"epochs": 8, "noise": 0.3, "learning_rate": 0.05, "log_level": "debug"}
    done = run("engine", regression(tmp_path / "whole", **settings), Faults(script=PLATEAU))
    found = read_metrics(tmp_path / f"whole/out/{NAME}_metrics.jsonl")
    parameter = nn.Parameter(torch.zeros(1))
    scheduler = lr_scheduler.ReduceLROnPlateau(
        torch.optim.SGD([parameter], 0.05), factor=0.5, patience=0, threshold=0.3
    )
    for record in found:  # the rate of an update is that after all validations before it
        assert record["learning_rate"] == scheduler.get_last_lr()[0]
        if "eval_loss" in record:
            scheduler.step(record["eval_loss"])
    assert len({record["learning_rate"] for record in found}) > 2
    assert "debug: update" in done.out
    broken = regression(tmp_path / "broken", **settings, from_resume=1)
    run("engine", broken, Faults(script=PLATEAU, signals={31: signal.SIGKILL}), status=-9)
    run("engine", broken, Faults(script=PLATEAU))
    assert_same_run(tmp_path / "whole", tmp_path / "broken", NAME)
    assert (
        saved_state(tmp_path / "whole", NAME)["callbacks"]
        == saved_state(tmp_path / "broken", NAME)["callbacks"]
    )


def test_a_plateau_that_could_not_work_is_refused_at_the_start(tmp_path):
    class Plateau(RegressionTask):
        def build_scheduler(self, optimizer):
            return lr_scheduler.ReduceLROnPlateau(optimizer)

    class Everything(SyntheticDataModule):
        def setup(self):
            super().setup()
            self.val_dataset = None

    for settings, told in (
        ({"data_class": Everything}, "no data are held out"),
        ({"mode": "max"}, "has mode min"),
    ):
        engine = made(Plateau, tmp_path, **settings)
        with pytest.raises(UserError, match=told):
            engine.run()
        assert engine.state.update == 0


# --- the end of a run


NOTED = """
import torch.distributed as dist
from llm.training.tasks.regression_task import RegressionTask
destroy, step, calls = dist.destroy_process_group, RegressionTask.train_step, []
def noted(*args):
    destroy(*args)
    open(FOLDER + "/destroyed" + os.environ["RANK"], "w").close()
def failing(self, model, batch):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 9:
        raise ValueError('boom')
    return step(self, model, batch)
dist.destroy_process_group, RegressionTask.train_step = noted, failing
"""


def test_the_group_is_destroyed_whatever_happens(tmp_path):
    script = f"FOLDER = {str(tmp_path)!r}\n{NOTED}"
    faults = dict.fromkeys(range(2), Faults(script=script))
    ranks = start_ranks(2, "engine", regression(tmp_path, batch_size=16), faults)
    assert [rank.wait(60) for rank in ranks] == [2, 1]
    assert (tmp_path / "destroyed0").exists() and (tmp_path / "destroyed1").exists()
    assert "ended while this one waited" in ranks[0].error_lines[-1]
    assert "ValueError: boom" in ranks[1].err


def test_the_process_group_under_its_described_name(tmp_path):
    manager = DistributedManager(config_of(tmp_path))
    assert manager.get_world_size() == 1 and manager.setup() == 0 and manager.reduce_mean(2.5) == 2.5
    manager.cleanup()


class Stops(Callback):
    """Stops the run in one of its calls."""

    def __init__(self, *place):
        self.place = place

    def on_train_start(self, engine):
        if self.place == ("train",):
            engine.stop("asked")

    def on_batch_start(self, engine, update):
        if self.place == ("start", update):
            engine.stop("asked")

    def on_batch_end(self, engine, update, record):
        if self.place == ("end", update):
            engine.stop("asked")


@pytest.mark.parametrize("place", [("train",), ("end", 3)])
def test_a_run_that_a_callback_stops_anywhere_is_saved_there_and_can_go_on(tmp_path, place):
    """Also before its first record, which comes at the end of an epoch of 8 updates."""
    settings = {"epochs": 2, "log_interval": 100}
    made(RegressionTask, tmp_path / "whole", **settings).run()
    made(RegressionTask, tmp_path / "stopped", [Stops(*place)], **settings).run()
    assert saved_state(tmp_path / "stopped", NAME)["update"] == (0 if place == ("train",) else place[1])
    resumed = made(RegressionTask, tmp_path / "stopped", **settings, from_resume=1)
    resumed.run()
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", NAME)
    (tmp_path / f"stopped/checkpoints/{NAME}_resume.pth").unlink()
    resumed.checkpoint_manager.save_checkpoint()  # also after the run
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", NAME)


# --- the log


def messages(path) -> list[str]:
    """The lines of a log file without time and level, which each of them has."""
    form = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG  |INFO   |WARNING|ERROR  ) (.*)")
    lines = [form.fullmatch(line) for line in path.read_text().splitlines()]
    return [line[2] for line in lines]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_log_file_has_every_line_of_the_console(corpus, tmp_path, ranks):
    """Tokenising, model, records, a warning, the signal and the reason of the end."""
    argv = [
        "--task",
        "pretrain",
        *flags(corpus, tmp_path, "pretrain", cache_dir=tmp_path / "cache", epochs=30),
    ]
    argv += ["--log_dir", tmp_path / "logs"]
    faults = Faults(
        nan=(2,), signals={5: signal.SIGTERM}, script="import warnings; warnings.simplefilter('always')"
    )
    process = run("engine", argv, faults, ranks=ranks, status=143)
    found = messages(tmp_path / "logs/pretrain_32.log")
    shown = [line for line in [*process.out.splitlines(), *process.err.splitlines()] if line.strip()]
    assert Counter(shown) <= Counter(found)  # the other rank's lines are there, too
    for text in (
        "tokens",
        "model: ",
        "Epoch:[1/30]",
        "warning: update 2 is skipped",
        "SIGTERM: finishing",
        "stopped: by",
    ):
        assert any(text in line for line in found), text
    assert ranks > 1 or Counter(shown) == Counter(found)


def test_an_error_reaches_the_log_file(tmp_path):
    argv = regression(tmp_path, monitor="eval_f1", epochs=1, log_file=tmp_path / "a/run.log")
    process = run("engine", argv, status=2)
    assert (
        messages(tmp_path / "a/run.log")[-1] == process.error_lines[-1]
        and "eval_f1" in process.error_lines[-1]
    )
    (tmp_path / "file").touch()
    process = run("engine", regression(tmp_path, log_file=tmp_path / "file/run.log"), status=2)
    assert "file/run.log cannot be written (File exists); give another --log_file" in process.error_lines[0]


@pytest.mark.parametrize("level", ["debug", "warning"])
def test_levels(tmp_path, capsys, level):
    logger = Logger(tmp_path / "logs/run_64.log", level)
    for name in ("debug", "info", "warning", "error"):
        getattr(logger, name)(name)
    print("printed\n  twice\n\r 10%\r 20%")
    release_console()
    told = {"debug": ["debug: debug"], "info": ["info", "printed", "  twice", " 20%"]}
    told |= {"warning": ["warning: warning"], "error": ["error: error"]}
    order = list(told)
    shown = [told[name] for name in order[order.index(level) :]]
    in_order = [
        line for name in ("debug", "info", "warning", "error") for line in told[name] if told[name] in shown
    ]
    found = messages(tmp_path / "logs/run_64.log")
    assert sorted(found) == sorted(in_order)
    out = capsys.readouterr()
    assert ("printed" in out.out) == (level in ("debug", "info")) and ("warning: " in out.err) == (
        level != "error"
    )


# --- checkpoints


def test_a_path_to_resume_from_that_is_no_checkpoint(tmp_path):
    (tmp_path / "text.pth").write_text("hello")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "weights.pth")
    for name, told in {
        "gone": "no such file",
        "text": "not a zip",
        "weights": "not a state to resume from",
    }.items():
        manager = CheckpointManager(config_of(tmp_path, resume_from=tmp_path / f"{name}.pth").to_args())
        with pytest.raises(UserError, match=rf"--resume_from .*{name}.pth is no checkpoint.*{told}"):
            manager.load_checkpoint()
    assert CheckpointManager(config_of(tmp_path).to_args()).load_checkpoint() is None


# --- what --help and the page tell


def test_numbered_states_of_a_name_with_characters_of_patterns_are_pruned(tmp_path):
    paths = [tmp_path / f"a[1].5_64_update_0000000{number}.pth" for number in range(4)]
    for path in paths:
        path.touch()
    settings = {"checkpoint_dir": tmp_path, "keep_last": 2, "save_weight": "a[1].5"}
    CheckpointManager(config_of(tmp_path, **settings).to_args()).prune(now=9, best=None)
    assert sorted(tmp_path.glob("*_update_*")) == paths[-2:]


# --- epochs over resumes


class Killed(BaseException):
    """The process is gone."""


class Calls(Callback):
    """Keeps its calls over resumes, saves in one of them, and is killed in one."""

    def __init__(self, kill=None, save=None):
        self.calls, self.kill, self.save = [], kill, save

    def note(self, engine, *call):
        self.calls.append(list(call))
        if call == self.save:
            engine.checkpoint_manager.save_checkpoint()
        if call == self.kill:
            raise Killed

    def on_epoch_start(self, engine, epoch):
        self.note(engine, "start", epoch)

    def on_epoch_end(self, engine, epoch):
        self.note(engine, "end", epoch)

    def on_batch_end(self, engine, update, record):
        self.note(engine, "update", update)

    def on_validation_end(self, engine, metrics):
        if self.kill == ("validation", engine.state.update):
            raise Killed

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class OtherCalls(Calls):
    """A second one, which is called after the first."""


KILLS = [(kill, None) for kill in (("start", 0), ("validation", 2), ("update", 3), ("end", 0), ("end", 1))]
KILLS += [(("end", 0), ("end", 0))]  # saved in the call in which it is killed


@pytest.mark.parametrize(("kill", "save"), KILLS)
def test_each_epoch_begins_and_ends_once_wherever_a_run_is_killed(tmp_path, kill, save):
    """As seen from the state that is saved: two epochs of two updates, a checkpoint and a validation at their
    ends."""
    settings = {"epochs": 2, "num_samples": 40, "batch_size": 16, "validation_share": 0.2}
    wanted = [["start", 0], ["update", 1], ["update", 2], ["end", 0]]
    wanted += [["start", 1], ["update", 3], ["update", 4], ["end", 1]]
    with pytest.raises(Killed):
        made(RegressionTask, tmp_path, [Calls(save=save), OtherCalls(kill)], **settings).run()
    again = [Calls(), OtherCalls()]
    made(RegressionTask, tmp_path, again, **settings, from_resume=1).run()
    assert [each.calls for each in again] == [wanted, wanted]
    if kill == ("end", 1):  # again, with nothing left to train
        engine = made(RegressionTask, tmp_path, [Calls(("start", 0))], **settings, from_resume=1)
        engine.run()
        assert engine.is_finished
