"""Pretraining and SFT as engine tasks: the numbers, files and checkpoints of their scripts, bit for bit."""

import ast
import inspect
import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.settings import StageArgs
from llm.training.tasks.language_model import StageTask
from llm.training.train import AVAILABLE_TASKS
from tests.llm.training.test_engine import NAME, regression
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import (
    assert_same_run,
    assert_same_tensors,
    flags,
    saved_state,
    write_start_weights,
)
from trainer.report.metrics import read_metrics

TRAINED = {"from_weight": "start", "epochs": 1, "learning_rate": 1e-3, "dropout": 0.1, "patience": 9}
TRAINED |= {"keep_every": 3, "use_moe": 1, "num_hidden_layers": 2}
SPLIT = {"eval_data_path": "none", "eval_share": 0.2}
RUNS = {  # stage -> its data and its settings
    "pretrain": ("pretrain", SPLIT | {"accumulation_steps": 2, "packing": 1}),
    "full_sft": ("sft", TRAINED),
}


@pytest.fixture(scope="module")
def data(corpus, tmp_path_factory) -> dict[str, Path]:
    """The data, and weights to start from."""
    folder = tmp_path_factory.mktemp("stages")
    shape = {"hidden_size": 32, "num_hidden_layers": 2}
    write_start_weights(folder, {"start_32": shape, "start_32_moe": shape | {"use_moe": True}})
    return corpus | {"start": folder}


def argv(data, folder: Path, stage: str, **extra) -> list[str]:
    """The flags of a small run in its own folder, with the start weights in it."""
    (folder / "out").mkdir(parents=True, exist_ok=True)
    for path in data["start"].glob("*.pth"):
        (folder / "out" / path.name).write_bytes(path.read_bytes())
    kind, settings = RUNS[stage]
    return flags(data, folder, kind, **(settings | extra))


def everything(folder: Path, name: str) -> tuple:
    """State, records and figures of a run, without those of time."""
    state = saved_state(folder, name)
    timed = ("seconds", "data_wait", "comm_wait", "tokens_per_second", "mfu", "memory_mb", "seconds_left")
    metrics = read_metrics(folder / f"out/{name}_metrics.jsonl")
    kept = [{k: v for k, v in r.items() if not any(part in k for part in timed)} for r in metrics]
    return {part: state[part] for part in ("model", "optimizer", "update", "best_eval", "fingerprint")}, kept


@pytest.mark.parametrize("stage", RUNS)
def test_engine_and_script_give_equal_bits(data, tmp_path, stage):
    """The run of the script, and one that the engine begins, is stopped in and goes on with."""
    name = f"{stage}_32{'_moe' * RUNS[stage][1].get('use_moe', 0)}"
    script = "sft" if stage == "full_sft" else stage
    run(script, argv(data, tmp_path / "script", stage))
    again = ["--task", stage, *argv(data, tmp_path / "engine", stage, from_resume=1)]
    run("engine", again, Faults(signals={2: signal.SIGTERM}), status=128 + signal.SIGTERM)
    assert "resuming" in run("engine", again).out
    (one, log), (other, others) = (everything(tmp_path / folder, name) for folder in ("script", "engine"))
    assert_same_tensors(one, other)
    assert log == others and len(log) >= 3 and any("eval_loss" in record for record in log)
    files = [tmp_path / f"{each}/out/{name}_run.json" for each in ("script", "engine")]
    about = [json.loads(file.read_text()) for file in files]
    assert len({each["stage"] for each in about}) == 1 and about[0]["fingerprint"] == about[1]["fingerprint"]
    assert about[0]["settings"].keys() <= about[1]["settings"].keys()
    assert [start["update"] for start in about[0]["starts"]] == [0] and len(about[1]["starts"]) == 2


def test_the_start_weights_are_not_needed_to_resume(data, tmp_path):
    """A branch of the run of the engine."""
    started = argv(data, tmp_path, "full_sft")
    run("engine", ["--task", "full_sft", *started])
    (tmp_path / "out/start_32_moe.pth").unlink()
    state = tmp_path / "checkpoints/full_sft_32_moe_update_00000003.pth"
    branch = ["--task", "full_sft", *started, "--resume_from", state, "--save_weight", "branch"]
    assert "update 3 of" in run("engine", branch).out


CHANGED = """
from trainer import train_full_sft as stage
from trainer.objectives.next_token import NextToken, next_token_loss
class Objective(NextToken):
    needs_reference = True
    def extend_model(self, model, args):
        import torch
        model.factor = torch.nn.Parameter(torch.full((), 2.0))
        return model
    def load_frozen_models(self, args, device):
        self.device = device
    def loss(self, model, batch, args):
        loss, aux_loss, metrics = next_token_loss(model, batch)
        assert not next(self.reference.parameters()).requires_grad and self.device.type == "cpu"
        return model.factor * loss, aux_loss, {"doubled": 2 * loss}
    def optimizer(self, model, args):
        import torch
        return torch.optim.SGD(model.parameters(), lr=args.learning_rate)
stage.Objective, stage.frozen_parameters = Objective, ("model.layers.0.",)
stage.schedule = lambda update, total_updates, args: args.learning_rate / update
"""


def test_the_parts_of_a_script_have_the_same_effect_in_both(data, tmp_path):
    """What is changed above `main`; and what the script does not call, the engine does not call either."""
    changed = Faults(script=CHANGED)
    run("sft", argv(data, tmp_path / "script", "full_sft"), changed)
    run("engine", ["--task", "full_sft", *argv(data, tmp_path / "engine", "full_sft")], changed)
    name = "full_sft_32_moe"
    (one, log), (other, others) = (everything(tmp_path / each, name) for each in ("script", "engine"))
    assert_same_tensors(one, other)
    assert (
        log == others
        and log[0]["doubled"] > 9
        and log[2]["learning_rate"] == pytest.approx(1e-3 / log[2]["update"])
    )
    start = torch.load(data["start"] / "start_32_moe.pth")
    assert one["model"]["factor"] != 2.0
    trained = {name for name, value in start.items() if not torch.equal(one["model"][name].half(), value)}
    assert trained and not any(name.startswith("model.layers.0.") for name in trained)


def settings_read_in_main(source: str) -> set[str]:
    """The attributes of `args` in `main` of a stage script."""
    (main,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    return {
        node.attr
        for node in ast.walk(main)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
    }


@pytest.mark.parametrize(
    "task",
    [task for task in AVAILABLE_TASKS.values() if issubclass(task, StageTask)],
    ids=lambda t: t.__name__,
)
def test_main_of_a_stage_reads_no_flag_of_its_stage(task):
    """The engine does not call `main`: it would take such a flag, record it, and train without it."""
    source = inspect.getsource(task.script)
    assert len(settings_read_in_main(source)) > 5
    assert settings_read_in_main(source) <= StageArgs.model_fields.keys()
    changed = source.replace("objective = Objective()", "objective = Objective(args.kl_coef)")
    assert settings_read_in_main(changed) - StageArgs.model_fields.keys() == {"kl_coef"}


@pytest.mark.parametrize("stage", ["sft", "engine"])
def test_a_frozen_reference_is_not_overwritten_and_is_compared_at_a_resume(data, tmp_path, stage):
    changed = Faults(script=CHANGED.replace("factor", "other_factor"))
    task = ["--task", "full_sft"] if stage == "engine" else []
    started = [*task, *argv(data, tmp_path, "full_sft")]
    (line,) = run(stage, [*started, "--save_weight", "start"], changed, status=2).error_lines
    assert "--from_weight" in line and "a file of the run --save_weight start" in line
    killed = replace(changed, signals={3: signal.SIGKILL})
    run(stage, started, killed, status=-signal.SIGKILL)
    again = [*started, "--from_resume", 1, "--from_weight", "none"]
    (line,) = run(stage, again, changed, status=2).error_lines
    assert (
        "--from_weight none is not what this run began with. Those weights are its frozen reference" in line
    )


OWN_STAGE = """
from torch import nn

from common.errors import UserError
from llm.training.tasks.base_task import Task
from llm.training.tasks.language_model import FullSFT
from llm.training.data.synthetic import SyntheticDataModule
from llm.training.tasks.regression_task import RegressionArgs, RegressionTask
from trainer import train_full_sft
from trainer.objectives.next_token import Objective
from dataset.batch import Size


class Doubled(train_full_sft.Objective):
    def loss(self, model, batch, args):
        loss, aux_loss, metrics = super().loss(model, batch, args)
        return 2 * loss, aux_loss, {"once": loss}


class Own(FullSFT):
    objective_class = Doubled
    frozen_parameters = "model.layers.0."


class OtherPoints(SyntheticDataModule):
    def setup(self):
        raise UserError("own data are opened")


class OtherData(FullSFT):
    data_module = OtherPoints


class WithStep(FullSFT):
    def train_step(self, model, batch):
        return 0


class WithReference(FullSFT):
    def __init__(self, config):
        super().__init__(config)
        self.needs_reference = True


class SquaredError(Objective):
    def size(self, batch, lm_config):
        return Size(targets=len(batch["x"]), tokens=len(batch["x"]))

    def loss(self, model, batch, args):
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum")
        return loss, 0 * loss.detach(), {}

    def held_out(self, model, batch, args):
        return {"loss": self.loss(model, batch, args)[0]}


class WithObjective(Task):
    args_class, data_module, objective = RegressionArgs, SyntheticDataModule, SquaredError()
    build_model = RegressionTask.build_model


class Both(RegressionTask):
    objective = SquaredError()
"""


@pytest.fixture
def home(tmp_path) -> Faults:
    """A run in the folder of these tasks."""
    (tmp_path / "own.py").write_text(OWN_STAGE)
    return Faults(script=f"os.chdir({str(tmp_path)!r})")


def test_a_subclass_of_a_stages_task_has_an_objective_of_its_own(data, tmp_path, home):
    run("engine", ["--task", "own:Own", *argv(data, tmp_path, "full_sft")], home)
    record = read_metrics(tmp_path / "out/full_sft_32_moe_metrics.jsonl")[0]
    assert record["logits_loss"] == pytest.approx(2 * record["once"])
    start, end = (torch.load(tmp_path / f"out/{name}_32_moe.pth") for name in ("start", "full_sft"))
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed and not any(name.startswith("model.layers.0.") for name in changed)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("WithStep", "WithStep.train_step has no effect: this task learns by its Objective"),
        ("WithReference", "WithReference.needs_reference has no effect: this task learns by its Objective"),
        ("OtherData", "own data are opened"),
    ],
)
def test_what_a_subclass_of_a_stages_task_overrides_has_an_effect_or_is_refused(
    data, tmp_path, home, task, message
):
    command = ["--task", f"own:{task}", *argv(data, tmp_path, "full_sft")]
    (line,) = run("engine", command, home, status=2).error_lines
    assert message in line and not list(tmp_path.rglob("*resume.pth"))


def test_an_objective_and_a_model_are_a_task(tmp_path, home):
    """The same numbers as by the steps of the RegressionTask, which may not have both."""
    run("engine", regression(tmp_path / "steps"), home)
    run(
        "engine", regression(tmp_path / "objective", task="own:WithObjective", save_weight="regression"), home
    )
    assert_same_run(tmp_path / "steps", tmp_path / "objective", NAME)
    (line,) = run("engine", regression(tmp_path, task="own:Both"), home, status=2).error_lines
    assert "Both.objective returns a SquaredError; it must return an object of TaskObjective" in line


# --- data of one's own

ROWS = '''
import numpy as np

from dataset.batch import collate_flat
from llm.training.data.base import DataModule


class Rows(DataModule):
    """Random tokens, as samples of a flat batch."""

    collate_fn = staticmethod(collate_flat)

    def setup(self):
        random = np.random.default_rng(0)
        self.train_dataset = []
        for number in range(40):
            weight = np.ones(20, np.float32)
            weight[0] = 0
            sample = {"input_ids": random.integers(3, 60, 20), "loss_weight": weight}
            self.train_dataset.append([sample | {"sample_id": number, "target_bytes": 0}])
'''


@pytest.mark.parametrize(
    ("task", "optimizer"),
    [
        ("pretrain", "muon"),
        # that AdamW goes on: tests/trainer/checkpoint/test_restore.py
        pytest.param("pretrain", "adamw", marks=pytest.mark.slow),
        ("full_sft", "muon"),
    ],
)
def test_a_stage_trains_on_a_data_module(corpus, tmp_path, task, optimizer):
    """Killed and resumed, too. `--weight_decay auto` counts the samples of such data."""
    (tmp_path / "rows.py").write_text(ROWS)
    runs = []
    for name in ("whole", "broken"):
        settings = {"optimizer": optimizer, "eval_data_path": "none", "from_resume": 1, "from_weight": "none"}
        words = flags(corpus, tmp_path / name, "pretrain", **settings)
        runs.append(["--task", task, "--data_module", "rows:Rows", *words])
    script = f"os.chdir({str(tmp_path)!r})"
    whole = run("engine", runs[0], Faults(script=script))
    assert "done: 10 updates" in whole.out
    if (task, optimizer) == ("pretrain", "muon"):
        assert "--weight_decay auto: " in whole.out and "for a pass of 5 updates" in whole.out
    run("engine", runs[1], Faults(script=script, signals={6: signal.SIGKILL}), status=-9)
    run("engine", runs[1], Faults(script=script))
    assert_same_run(tmp_path / "whole", tmp_path / "broken", f"{task}_32")
