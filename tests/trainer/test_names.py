"""A setting that names what is not there, or is something else: one line, before the data are read; what only
an evaluation knows, before the first update."""

from pathlib import Path

import pytest
import torch

from common.errors import UserError
from llm.training.train import check_address
from tests.stage_process import run
from tests.trainer.rollout_runs import rollout_flags, write_prompts
from tests.trainer.stage_flags import flags, write_start_weights
from trainer import train_agent, train_distillation, train_full_sft, train_grpo, train_ppo, train_pretrain

SCRIPTS = {
    "pretrain": train_pretrain, "sft": train_full_sft, "distillation": train_distillation,
    "grpo": train_grpo, "ppo": train_ppo, "agent": train_agent,
}  # fmt: skip
HELD_OUT = {"eval_data_path": "none"}
# stage, settings (DIR: the folder of the files below), what is told
MISTAKES = [
    ("pretrain", {"patience": 2} | HELD_OUT, "--patience 2: early stopping needs held-out data"),
    ("pretrain", {"sample_prompts": "DIR/good.txt"} | HELD_OUT, "--sample_prompts DIR/good.txt needs held-out"),
    ("pretrain", {"sample_prompts": "DIR/no.txt"}, "--sample_prompts DIR/no.txt: no such file"),
    ("pretrain", {"sample_prompts": "DIR/blank.txt"}, "DIR/blank.txt: the file contains no prompt"),
    ("pretrain", {"sample_prompts": "DIR/latin.txt"}, "DIR/latin.txt: 'utf-8' codec can't decode"),
    ("pretrain", {"tensorboard_dir": "DIR/good.txt/tb"}, "--tensorboard_dir DIR/good.txt/tb cannot be written"),
    ("pretrain", {"resume_from": "DIR/no.pth"}, "--resume_from DIR/no.pth: no such file"),
    ("pretrain", {"save_weight": "x" * 201}, "--save_weight: the name is too long for files; at most 200"),
    ("sft", {"from_weight": "DIR/ppo_resume.pth"}, "checkpoint to resume from, of a policy and its critic"),
    ("sft", {"from_weight": "DIR/lora_resume.pth"}, "checkpoint to resume from, of an adapter without its"),
    ("sft", {"from_weight": "DIR/lora_32"}, "DIR/lora_32 is an adapter (LoRA), not a model"),
    ("sft", {"from_weight": "DIR/good.txt"}, "weights DIR/good.txt: not a readable weights file"),
    ("distillation", {"from_teacher_weight": "nobody"}, "teacher: weights DIR/out/nobody_*.pth do not exist"),
    ("distillation", {"from_teacher_weight": "nobody"}, "or name another (--from_teacher_weight) or its shape"),
    ("distillation", {"from_teacher_weight": "DIR/no.pth"}, "--from_teacher_weight DIR/no.pth: no such file"),
    ("distillation", {"from_teacher_weight": "DIR/out/pretrain_32.pth,"}, "a name beside a comma is empty"),
    ("distillation", {"from_teacher_weight": "DIR/ppo_resume.pth"}, "of a policy and its critic"),
    (
        "distillation",
        {"from_teacher_weight": "DIR/out/pretrain_32.pth", "teacher_num_layers": 3},
        "--teacher_num_layers 3: --from_teacher_weight DIR/out/pretrain_32.pth is of 1; leave the flag out",
    ),
    ("grpo", {"reward": "lenght"}, "--reward lenght: give module:function, or one of"),
    ("grpo", {"reward": "no_such:f"}, "--reward no_such:f cannot be imported"),
    ("grpo", {"reward": "DIR/rewards.py:goood"}, "has no 'goood'"),
    ("ppo", {"reward": "length=abc"}, "--reward length=abc: the weight 'abc' must be a finite number"),
    ("ppo", {"reward_model": "DIR/no"}, "--reward_model DIR/no: no such folder"),
    ("agent", {"reward_model": "DIR/lora_32"}, "--reward_model DIR/lora_32 holds no sequence classifier"),
    ("grpo", {"max_gen_len": 40000}, "--max_seq_len 32 and --max_gen_len 40000 together exceed the 32768"),
    ("agent", {"max_total_len": 40000}, "--max_total_len must be less than or equal to 32768"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Start weights, and what is none."""
    folder = tmp_path_factory.mktemp("names")
    (folder / "out").mkdir()
    shape = {"hidden_size": 32, "num_hidden_layers": 1}
    write_start_weights(folder / "out", {"pretrain_32": shape, "full_sft_32": shape})
    for name, content in {"good": b"one\n", "blank": b"\n \n", "latin": b"caf\xe9\n"}.items():
        (folder / f"{name}.txt").write_bytes(content)
    (folder / "rewards.py").write_text("def good(prompt, completion, record):\n    return 1.0\n")
    (folder / "lora_32").mkdir()
    (folder / "lora_32/adapter_config.json").write_text("{}")
    state = {"optimizer": {}, "epoch": 0, "step": 1, "world_size": 1}
    of_models = {"ppo": "critic.lm_head.weight", "lora": "model.layers.0.self_attn.q_proj.lora_A.weight"}
    for name, tensor in of_models.items():
        torch.save(state | {"model": {tensor: torch.zeros(1)}}, folder / f"{name}_resume.pth")
    return folder


@pytest.mark.parametrize(("stage", "settings", "told"), MISTAKES, ids=lambda value: str(value)[:40])
def test_it_is_told_before_the_data_are_read(corpus, folder, monkeypatch, stage, settings, told):
    def read(*_):
        raise AssertionError("the data are read")

    script = SCRIPTS[stage]
    own = {name: str(value).replace("DIR", str(folder)) for name, value in settings.items()}
    if stage in ("grpo", "ppo", "agent"):
        argv = rollout_flags(write_prompts(folder), folder, **own)
    else:
        argv = flags(corpus, folder, "pretrain" if stage == "pretrain" else "sft", **own)
    monkeypatch.setattr(script, "open_data", read)
    monkeypatch.setattr("sys.argv", [f"train_{stage}.py", *argv])
    with pytest.raises(UserError) as error:
        script.main()
    assert told.replace("DIR", str(folder)) in str(error.value) and "\n" not in str(error.value)


def test_held_out_data_of_another_form_are_told_before_the_training_data_are_tokenised(corpus, tmp_path):
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    own = {"eval_data_path": tmp_path / "other.jsonl", "cache_dir": tmp_path / "cache"}
    (line,) = run("pretrain", flags(corpus, tmp_path, "pretrain", **own), status=2).error_lines
    assert f"{tmp_path}/other.jsonl:1: no 'text'" in line and not list(tmp_path.glob("cache/*/tokens.bin"))


def test_an_address_of_another_machine_is_refused_where_the_engine_starts_the_processes():
    check_address("127.0.0.1")
    with pytest.raises(UserError, match=r"--master_addr 192\.0\.2\.1 is not of this machine"):
        check_address("192.0.2.1")
