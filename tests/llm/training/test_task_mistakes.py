"""What the author of a task gets wrong: one line that names the class and the method, and exit status 2."""

import re
import signal
import sys
from dataclasses import replace
from textwrap import indent

import pytest

from common.command_line import log_to
from common.errors import UserError
from llm.training import train as engine_command
from tests.llm.training.test_engine import NAME, regression
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_run
from trainer import stage
from trainer.report.metrics import read_metrics

# a task and its data, that a case changes
MODULE = """
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, default_collate

from llm.training.core.callbacks import Callback
from llm.training.core.config import EngineArgs
from llm.training.data.synthetic import SyntheticDataModule
from llm.training.tasks.regression_task import RegressionArgs, RegressionTask

{before}

class Points(SyntheticDataModule):
    used = True
{data}

class Mine(RegressionTask):
    data_module = Points
{task}
"""
STEP = "loss = self.criterion(model(batch['x']), batch['y'])"


def train_step(returned: str, name: str = "train_step") -> str:
    """A step that computes the loss and does something else with it."""
    return f"def {name}(self, model, batch):\n    {STEP}\n    {returned}\n"


def validation_step(returned: str) -> str:
    return train_step(returned, "validation_step")


def no_return(method: str) -> str:
    """A method that forgets its `return`."""
    return f"def {method}:\n    value = 1\n"


def scheduler(returned: str) -> str:
    return f"def build_scheduler(self, optimizer, total_updates):\n    return {returned}\n"


def callback(body: str, hook: str = "on_batch_end(self, state, update, record)") -> dict[str, str]:
    """A callback of the task."""
    before = f"class Changes(Callback):\n    def {hook}:\n        {body}\n"
    return {"before": before, "task": "def callbacks(self):\n    return [Changes()]\n"}


ONE_CYCLE = scheduler("lr_scheduler.OneCycleLR(optimizer, 0.1, total_updates)")
PLATEAU = scheduler("lr_scheduler.ReduceLROnPlateau(optimizer)")
NOTHING_HELD_OUT = "def setup(self):\n    super().setup()\n    self.val_dataset = None\n"
AT_START = [  # what is told; the task, its data and settings; before anything is trained
    ("Mine.build_model returns None (is its `return` missing?)", {"task": no_return("build_model(self)")}),
    ("Mine.callbacks returns None", {"task": no_return("callbacks(self)")}),
    ("is not a Callback; list objects", {"task": "def callbacks(self):\n    return [Callback]\n"}),
    ("MSELoss(reduction='mean')", {"task": "def build_criterion(self):\n    return nn.MSELoss()\n"}),
    ("build_scheduler returns a int; it must return", {"task": scheduler("3")}),
    ("made for 80 steps, as many as there are updates, but it is stepped after each of 10", {"task": ONE_CYCLE}),
    (
        "scheduler_interval must be 'epoch' or 'update', not 'step'",
        {"task": "scheduler_interval = 'step'\n" + ONE_CYCLE},
    ),
    ("Mine.scheduler_interval has no effect", {"task": "scheduler_interval = 'update'\n"}),
    ("needs held-out data", {"task": PLATEAU, "data": NOTHING_HELD_OUT}),
    ("callback EarlyStopping: validation does not report 'eval_accuracy'; it reports eval_absolute_error", {
        "before": "from llm.training.core.callbacks import EarlyStopping\n",
        "task": "def callbacks(self):\n    return [EarlyStopping('eval_accuracy')]\n"}),
    (
        "'loss' of Mine.validation_step is a Tensor of shape [",
        {"task": validation_step("return {'loss': loss + torch.zeros(len(batch['x']))}")},
    ),
    ("Mine.validation_step returns error; `loss` must be one of its sums", {"task": validation_step("return {'error': loss}")}),
    ("Mine.size returns a int; it must return Size(", {"task": "def size(self, batch):\n    return 3\n"}),
    ("write `def train_step(self, model, batch)`", {"task": "def train_step(self, batch):\n    pass\n"}),
    (
        "Points.train_dataloader is called with other arguments: write `def train_dataloader(self, epoch, skip_batches)`",
        {"data": "def train_dataloader(self):\n    pass\n"},
    ),
    (
        "Changes.on_batch_end is called with other arguments",
        callback("pass", "on_batch_end(self, state, update)"),
    ),
    ("Mine.build_optimiser is not known to the engine; did you mean build_optimizer", {
        "task": no_return("build_optimiser(self, model)")}),
    (
        "OwnArgs.learning_rte is not known to the engine; did you mean learning_rate",
        {"before": "class OwnArgs(RegressionArgs):\n    learning_rte: float = 1.0\n", "task": "args_class = OwnArgs"},
    ),
    (
        "Field 'epochs' defined on a base class was overridden by a non-annotated attribute",
        {"before": "class OwnArgs(RegressionArgs):\n    epochs = 3\n", "task": "args_class = OwnArgs"},
    ),
    ("Mine.__init__ must call super().__init__(config)", {"task": "def __init__(self, config):\n    pass\n"}),
    ("frozen_parameters: no parameter of the model begins with '9.'", {"task": "frozen_parameters = '9.'"}),
    ("Points has no samples: its train_dataset is empty", {
        "data": "def setup(self):\n    self.train_dataset = []\n"}),
    ("the fingerprint of the data['data'] is a set", {
        "data": "def fingerprint(self):\n    return {'data': {1}}\n"}),
    ("Mine does not implement build_model, train_step, validation_step", {
        "text": "from llm.training.tasks.base_task import TrainingTask\nclass Mine(TrainingTask):\n"
                "    def build_criterion(self): ...\n"}),
    ("Points does not implement setup", {
        "before": "from llm.training.data.base import DataModule\n",
        "task": "class Points(DataModule):\n    pass\ndata_module = Points\n"}),
    ("--task mine:Mine cannot be imported", {"module": "yours"}),
    ("--task mine is unknown; there are regression, pretrain, full_sft, and package.module:Class", {
        "task_name": "mine"}),
    ("mine.py:1: ", {"text": "class Mine\n"}),
]  # fmt: skip
AT_FIRST_UPDATE = [
    ("Mine.train_step returns (Tensor, dict); write `return loss, 0.0, metrics`", {
        "task": train_step("return loss, {'error': loss}")}),
    ("Mine.train_step returns a Tensor of shape [], requires_grad=False; it must return the sum of the losses", {"task": train_step("return loss.detach()")}),
    ("Mine.train_step returns a dict", {"task": train_step("return {'loss': loss}")}),
    ("Mine.train_step calls backward(), and the loop does, too", {
        "task": train_step("loss.backward(); return loss")}),
    ("'error' of Mine.train_step is a Tensor of shape [3]", {
        "task": train_step("return loss, 0.0, {'error': torch.zeros(3)}")}),
    ("a metric of the loss is named 'tokens'", {"task": train_step("return loss, 0.0, {'tokens': 1.0}")}),
    ("the schedule gives nan at update 1", {"task": scheduler("lambda update: math.nan")}),
    ("Points: a batch is a list; let collate_fn return a dict", {
        "data": "collate_fn = staticmethod(lambda rows: default_collate([(r['x'], r['y']) for r in rows]))"}),
    ("the first value of a batch, 'n', is a int; put a tensor of the samples first, or implement `size", {
        "data": "collate_fn = staticmethod(lambda rows: {'n': 1} | default_collate(rows))"}),
    ("Points.train_dataloader returns a list; it must return a DataLoader", {
        "data": "def train_dataloader(self, epoch=0, skip_batches=0):\n    return [{}]\n"}),
    ("epoch 1: the data loader gave no batch at all; it must give 8", {
        "data": "def train_dataloader(self, epoch=0, skip_batches=0):\n    return DataLoader([])\n"}),
    ("callback Changes changes the learning rate in on_batch_end, but the schedule sets it", callback(
        "state.optimizer.param_groups[0]['lr'] = 0.1")),
    ("'own', which callback Changes puts into the record, is a Tensor", callback(
        "record['own'] = torch.zeros(3)", "on_log(self, state, record)")),
]  # fmt: skip


def write_task(folder, module="mine", before="", data="", task="", text=None):
    """The author's file."""
    members = {"data": indent(data, "    "), "task": indent(task, "    ")}
    folder.mkdir(exist_ok=True)
    text = text or MODULE.format(before=before, **members)
    (folder / f"{module}.py").write_text(text, encoding="utf-8")


def settings_of(folder, task_name="mine:Mine", **parts) -> list[str]:
    """The settings of a run of a task, whose file is in that folder."""
    write_task(folder, **parts)
    return regression(folder, task=task_name, save_weight="regression", epochs=10)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains with these settings in this process, as the command does, in the author's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(stage, "matrix_rate", lambda device, dtype: 1e11)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def main(argv: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        engine_command.main()

    yield main
    log_to(None)


@pytest.mark.parametrize(("told", "case"), AT_START + AT_FIRST_UPDATE, ids=lambda value: str(value)[:60])
def test_a_task_of_another_form_is_refused(tmp_path, train, told, case):
    argv = settings_of(tmp_path, **case)
    with pytest.raises(UserError, match=re.escape(told)) as error:
        train(argv)
    assert "\n" not in str(error.value) and not list(tmp_path.rglob("*.pth"))


@pytest.mark.parametrize(("told", "case"), [AT_START[0], AT_START[-1], AT_FIRST_UPDATE[0]])
def test_a_mistake_is_one_line_and_exit_status_2(tmp_path, told, case):
    argv = settings_of(tmp_path, **case)
    home = Faults(script=f"os.chdir({str(tmp_path)!r})")
    (line,) = run("engine", argv, home, status=2).error_lines
    assert line.startswith("error: ") and told in line


ORDERED = {
    "before": "class OwnArgs(RegressionArgs):\n    reverse: bool = False\n    shown_as: str = ''\n"
              "    may_change = 'shown_as'\n",
    "task": "args_class = OwnArgs",
    "data": "def train_dataloader(self, epoch=0, skip_batches=0):\n"
            "    loader = super().train_dataloader(epoch, skip_batches)\n"
            "    batches = list(loader.batch_sampler)\n"
            "    if self.config.args.reverse:\n        batches.reverse()\n"
            "    return DataLoader(self.train_dataset, batch_sampler=batches)\n",
}  # fmt: skip


def test_a_setting_of_a_task_that_changes_the_order_of_samples_is_compared_at_a_resume(tmp_path):
    argv, home = settings_of(tmp_path, **ORDERED), Faults(script=f"os.chdir({str(tmp_path)!r})")
    whole = settings_of(tmp_path / "whole", **ORDERED)
    run("engine", whole, home)
    run("engine", argv, replace(home, signals={19: signal.SIGKILL}), status=-signal.SIGKILL)
    (line,) = run("engine", [*argv, "--from_resume", 1, "--reverse", 1], home, status=2).error_lines
    assert "the checkpoint belongs to another run: reverse: False -> True; use its settings" in line
    run("engine", [*argv, "--from_resume", 1, "--shown_as", "other"], home)
    assert_same_run(tmp_path / "whole", tmp_path, NAME)


def test_another_metric_that_the_learning_rate_follows_is_refused_at_a_resume(tmp_path):
    """Elsewhere --monitor changes no number of the training."""
    argv, home = settings_of(tmp_path, task=PLATEAU), Faults(script=f"os.chdir({str(tmp_path)!r})")
    run("engine", argv, replace(home, signals={19: signal.SIGTERM}), status=143)
    again = [*argv, "--from_resume", "1", "--monitor", "eval_absolute_error"]
    (line,) = run("engine", again, home, status=2).error_lines
    assert "--monitor eval_absolute_error: the learning rate of this run follows eval_loss, by Reduce" in line


ACCEPTED = {  # what is converted
    "a list of names": {"task": "console_metrics = ['error']\nfrozen = ['0.']\n"
                        + train_step("return loss, 0, {'error': 2.0, 'part': [loss, 3]}")},
    "one name as text": {"task": "console_metrics = 'error'\nfrozen = '0.'\n"
                         + train_step("return loss.reshape(1), loss.detach() * 0, {'error': np.float32(2)}")},
    "numbers of validation": {"task": validation_step("return {'loss': loss.item(), 'half': (1.0, 2)}")},
    "a rate under no schedule": {
        "before": callback("state.optimizer.param_groups[0]['lr'] = 0.005")["before"],
        "task": "def callbacks(self):\n    return [Changes()]\ndef build_scheduler(self):\n    pass\n"},
    "in a record": callback(
        "record |= {'a': np.float64(1), 'b': Path('x'), 'c': math.nan, 'd': torch.ones(1)}",
        "on_log(self, state, record)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_can_be_converted_is(tmp_path, train, capsys, name):
    argv = settings_of(tmp_path, **ACCEPTED[name])
    train([*argv, "--epochs", "1"])
    out = capsys.readouterr().out
    record = read_metrics(tmp_path / f"out/{NAME}_metrics.jsonl")[-1]
    if "error" in ACCEPTED[name]["task"]:
        assert "error: " in out and record["error"] == pytest.approx(2.0 / 32)
    assert record.get("half", record.get("eval_half", 0.5)) == 0.5
    if name == "a rate under no schedule":
        assert record["learning_rate"] == 0.005
        assert "Mine.build_scheduler returns None: a constant rate" in out
    if name == "in a record":
        assert [record[key] for key in "abcd"] == [1.0, "x", None, 1.0]
