"""Pretraining and SFT as engine tasks: the numbers, files and checkpoints of their scripts, bit for bit."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_tensors, flags, saved_state, write_start_weights
from trainer.report.metrics import read_metrics

TRAINED = {"from_weight": "start", "epochs": 1, "learning_rate": 1e-3, "dropout": 0.1, "patience": 9}
TRAINED |= {"keep_every": 3, "use_moe": 1}
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


IN_MAIN = """
from trainer import train_full_sft as stage
from llm.training.tasks import language_model
class Args(stage.Args):
    kl_coef: float = 0.0
class FullSFTArgs(Args, language_model.EngineArgs):
    pass
def main():
    args.kl_coef
stage.Args, stage.main, language_model.FullSFT.args_class = Args, main, FullSFTArgs
"""


def test_a_flag_that_only_main_of_the_script_reads_is_refused(data, tmp_path):
    """The engine would record it and train without it."""
    command = ["--task", "full_sft", *argv(data, tmp_path, "full_sft"), "--kl_coef", 10]
    (line,) = run("engine", command, Faults(script=IN_MAIN), status=2).error_lines
    assert "--kl_coef is read by `main` of trainer.train_full_sft, which the engine does not call" in line
    assert not list(tmp_path.rglob("*_metrics.jsonl"))


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
    assert "--from_weight none is not what this run began with, its frozen reference" in line


OWN_STAGE = """
from llm.training.tasks.language_model import FullSFT
from trainer import train_full_sft


class Doubled(train_full_sft.Objective):
    def loss(self, model, batch, args):
        loss, aux_loss, metrics = super().loss(model, batch, args)
        return 2 * loss, aux_loss, {"once": loss}


class Own(FullSFT):
    objective_class = Doubled


class Wrong(FullSFT):
    def train_step(self, model, batch):
        return 0
"""


def test_a_subclass_of_a_stages_task_has_an_objective_of_its_own(data, tmp_path):
    (tmp_path / "own.py").write_text(OWN_STAGE)
    home = Faults(script=f"os.chdir({str(tmp_path)!r})")
    run("engine", ["--task", "own:Own", *argv(data, tmp_path, "full_sft")], home)
    record = read_metrics(tmp_path / "out/full_sft_32_moe_metrics.jsonl")[0]
    assert record["logits_loss"] == pytest.approx(2 * record["once"])
    (line,) = run(
        "engine", ["--task", "own:Wrong", *argv(data, tmp_path, "full_sft")], home, status=2
    ).error_lines
    assert "Wrong.train_step would not be called: a stage learns by its Objective" in line
