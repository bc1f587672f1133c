"""The stages after SFT keep the loop's promises: an update is the same however it is cut, a killed run ends
with the same bits, shards train as copies do; and what a user does wrong is one line.
"""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.errors import UserError
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_tensors, flags, records, saved_state, write_start_weights
from trainer import train_distillation, train_dpo, train_lora
from trainer.report.metrics import read_metrics
from trainer.weights.paths import is_pretrained_only

STAGES = {
    "dpo": ("dpo", train_dpo.Objective.console_metrics),
    "distillation": ("full_dist", ("cross_entropy", "divergence")),
    "lora": ("lora_medical", ()),
}
TEACHER = {"from_teacher_weight": "teacher"}
# two teachers, of a text, as in pretraining
OF_TEXT = {"kind": "pretrain", "from_weight": "none", "from_teacher_weight": "teacher,full_sft"}
OF_TEXT |= {"teacher_use_moe": 0, "optimizer": "muon", "weight_decay": "auto"}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A folder with the weights that the stages start from, and with a wider teacher."""
    folder = tmp_path_factory.mktemp("start")
    shape = {"hidden_size": 32, "num_hidden_layers": 1}
    shapes = {"full_sft_32": shape, "full_sft_32_moe": shape | {"use_moe": True}}
    write_start_weights(folder, shapes | {"teacher_48": {"hidden_size": 48, "num_hidden_layers": 1}})
    return folder


def argv(corpus, start, folder: Path, stage: str, **extra) -> list[str]:
    """The flags of a small run in its own folder, with the start weights in it."""
    shutil.copytree(start, folder / "out", dirs_exist_ok=True)
    settings = {"learning_rate": 1e-3, "epochs": 1, "num_hidden_layers": 1}
    settings |= TEACHER if stage == "distillation" else {}
    kind = "dpo" if stage == "dpo" else extra.get("kind", "sft")
    return flags(corpus, folder, kind, **(settings | extra))


def weights_for_use(folder: Path, name: str) -> dict:
    path = folder / "out" / name
    return load_file(path / "adapter_model.safetensors") if path.is_dir() else torch.load(f"{path}.pth")


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_ranks_and_shards_change_nothing(corpus, start, tmp_path, stage):
    """(16) = (2 ranks x 4 x 2), the ranks with copies or with shards; of a mixture of experts."""
    name, metric_names = STAGES[stage]
    cuts, found = {"whole": (16, 1, 1), "ranks": (4, 2, 2)}, {}
    for cut, (batch_size, accumulation, ranks) in cuts.items():
        settings = {"batch_size": batch_size, "accumulation_steps": accumulation, "use_moe": 1}
        settings |= {"parallel": "ddp" if stage == "lora" else "fsdp"}
        run(stage, argv(corpus, start, tmp_path / cut, stage, **settings, save_interval=1000), ranks=ranks)
        found[cut] = read_metrics(tmp_path / cut / f"out/{name}_32_moe_metrics.jsonl")
    whole = found["whole"]
    assert len(whole) >= 3 and {*metric_names, "loss", "eval_loss"} <= whole[-1].keys()
    if stage == "dpo":
        assert whole[0]["logits_loss"] == pytest.approx(0.6931472, abs=1e-6)
    for one, other in zip(whole, found["ranks"], strict=True):
        for field in ("loss", "aux_loss", "grad_norm", "learning_rate", *metric_names):
            assert other[field] == pytest.approx(one[field], rel=1e-4, abs=2e-5), (one["update"], field)
    assert found["ranks"][-1]["eval_loss"] == pytest.approx(whole[-1]["eval_loss"], abs=2e-5)
    one, other = (weights_for_use(tmp_path / cut, f"{name}_32_moe") for cut in cuts)
    assert one.keys() == other.keys()


@pytest.mark.parametrize("stage", STAGES)
def test_killed_and_resumed_ends_with_the_same_bits(corpus, start, tmp_path, stage):
    """With dropout, within an accumulation window. A frozen model's hash belongs to the run: another is
    refused."""
    name = f"{STAGES[stage][0]}_32"
    settings = {"dropout": 0.1, "accumulation_steps": 2, "batch_size": 4, "log_interval": 2}
    settings |= {"lora": {"lora_dropout": 0.1}, "dpo": {"rpo_alpha": 0.5}, "distillation": OF_TEXT}[stage]
    run(stage, argv(corpus, start, tmp_path / "whole", stage, **settings))
    broken = argv(corpus, start, tmp_path / "broken", stage, **settings, from_resume=1)
    run(stage, broken, Faults(signals={8: signal.SIGKILL}), status=-signal.SIGKILL)
    done = run(stage, broken)
    assert f"resuming {STAGES[stage][0]} at epoch" in done.out
    one, other = (saved_state(tmp_path / folder, name) for folder in ("whole", "broken"))
    for part in ("model", "optimizer", "update", "best_eval"):
        assert_same_tensors(one[part], other[part])
    assert_same_tensors(*(weights_for_use(tmp_path / folder, name) for folder in ("whole", "broken")))
    assert is_pretrained_only(tmp_path / f"whole/out/{name}.pth") == (stage == "distillation")
    assert records(tmp_path / "whole", name) == records(tmp_path / "broken", name)
    logs = [read_metrics(tmp_path / folder / f"out/{name}_metrics.jsonl") for folder in ("whole", "broken")]
    for key in STAGES[stage][1]:
        assert [record[key] for record in logs[0]] == [record[key] for record in logs[1]]
    if stage == "lora":
        assert one["model"] and all(".lora_" in key for key in one["model"])
        assert len(one["optimizer"]["state"]) == len(one["model"])
    start_file = "teacher_48" if stage == "distillation" else "full_sft_32"
    weights = tmp_path / "broken" / f"out/{start_file}.pth"
    before = {path: path.read_bytes() for path in start.glob("*.pth")}
    assert all(
        (tmp_path / "broken/out" / path.name).read_bytes() == content for path, content in before.items()
    )
    torch.save({key: value + 1 for key, value in torch.load(weights).items()}, weights)
    weights.with_suffix(".json").unlink(missing_ok=True)
    line = run(stage, broken, status=2).error_lines[-1]
    assert f"{'teacher' if stage == 'distillation' else 'from_weight'}_sha256: " in line


MISTAKES = {
    "no start": ("dpo", {"from_weight": "none"}, "--from_weight none: DPO needs a trained model"),
    "no teacher": ("distillation", {"from_teacher_weight": "nobody"}, "teacher: weights"),
    "one missing": (
        "distillation",
        {"from_teacher_weight": "teacher,nobody"},
        "/out/nobody_*.pth do not exist",
    ),
    "target": ("lora", {"lora_targets": "q_proj,gate"}, "--lora_targets: no layer is named 'gate'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_an_impossible_setting_is_one_line(corpus, start, tmp_path, monkeypatch, case):
    stage, wrong, line = MISTAKES[case]
    script = {"dpo": train_dpo, "distillation": train_distillation, "lora": train_lora}[stage]
    monkeypatch.setattr("sys.argv", [f"train_{stage}.py", *argv(corpus, start, tmp_path, stage, **wrong)])
    with pytest.raises(UserError) as error:
        script.main()
    assert line in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").glob("*.pth"))


def test_an_adapter_is_merged_onto_its_own_weights_alone(corpus, start, tmp_path):
    """By the commands: onto a renamed copy, the export of its base; not onto the base trained further. An adapter
    or its checkpoint is no model."""
    out, states = tmp_path / "out", tmp_path / "checkpoints"
    run("lora", argv(corpus, start, tmp_path, "lora"))
    run("sft", argv(corpus, start, tmp_path, "sft", from_weight="full_sft", save_weight="further"))
    shutil.copyfile(out / "full_sft_32.pth", tmp_path / "renamed.pth")
    made, adapter = tmp_path / "made", ["--lora", out / "lora_medical_32"]

    def convert(model: Path, to: str, *more, status: int = 0) -> str:
        argv = ["--model", model, "--to", to, "--output", made / f"{model.stem}_{len(more)}", *more]
        done = run("scripts/convert_model.py", argv, status=status)
        return done.error_lines[-1] if status else done.out

    convert(out / "full_sft_32.pth", "hf")
    for base in (tmp_path / "renamed.pth", made / "full_sft_32_0"):
        assert "merged the adapter" in convert(base, "hf", *adapter)
    line = convert(out / "further_32.pth", "hf", *adapter, status=2)
    assert "was trained on other weights than these (on --from_weight full_sft, whose base_sha256 in" in line
    assert not (made / "further_32_2").exists()
    told = "is a checkpoint to resume from, of an adapter without its model; the tools"
    assert told in convert(states / "lora_medical_32_resume.pth", "hf", status=2)
    assert "is an adapter (LoRA), not a model" in convert(out / "lora_medical_32", "hf", status=2)
    said = convert(states / "further_32_resume.pth", "hf")
    assert "is a checkpoint to resume from, after update" in said and "its float32 weights are used" in said
