"""Impossible settings: one line that names each of them and the way out, exit status 2, before anything is built."""

import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.stage_process import run, start_ranks
from tests.trainer.stage_flags import flags
from trainer.checkpoint import save_weights

# setting -> what the line says
IMPOSSIBLE = {
    ("epochs", 0): "--epochs 0 must be 1 or more",
    ("epochs", -3): "--epochs -3 must be 1 or more",
    ("epochs", "two"): "argument --epochs: invalid int value: 'two'; see --help",
    ("batch_size", 0): "--batch_size 0 must be 1 or more",
    ("accumulation_steps", 0): "--accumulation_steps 0 must be 1 or more",
    ("accumulation_steps", -1): "--accumulation_steps -1 must be 1 or more",
    ("learning_rate", -0.1): "--learning_rate -0.1 must be positive and finite",
    ("learning_rate", 0): "--learning_rate 0.0 must be positive and finite",
    ("learning_rate", "nan"): "--learning_rate nan must be positive and finite",
    ("learning_rate", "inf"): "--learning_rate inf must be positive and finite",
    ("max_seq_len", 7): "--max_seq_len 7 must be 8 or more",
    ("max_seq_len", 40_000): "--max_seq_len 40000 must be 32768 or less",
    ("hidden_size", 100): "--hidden_size 100 must be divisible by 16",
    ("hidden_size", 0): "--hidden_size 0 must be 16 or more",
    ("num_hidden_layers", 0): "--num_hidden_layers 0 must be 1 or more",
    ("use_moe", 2): "argument --use_moe: invalid choice: 2",
    ("dropout", 1.0): "--dropout 1.0 must be from 0 to below 1",
    ("dropout", -0.5): "--dropout -0.5 must be from 0 to below 1",
    ("dropout", "nan"): "--dropout nan must be from 0 to below 1",
    ("weight_decay", -1): "--weight_decay -1.0 must be 0 or more",
    ("weight_decay", "nan"): "--weight_decay nan must be 0 or more",
    ("grad_clip", -1): "--grad_clip -1.0 must be 0 or more",
    ("warmup_updates", -1): "--warmup_updates -1 must be 0 or more",
    ("log_interval", 0): "--log_interval 0 must be 1 or more",
    ("save_interval", 0): "--save_interval 0 must be 1 or more",
    ("eval_interval", -1): "--eval_interval -1 must be 0 or more",
    ("num_workers", -1): "--num_workers -1 must be 0 or more",
    ("seed", -1): "--seed -1 must be 0 or more",
    ("max_bad_updates", 0): "--max_bad_updates 0 must be 1 or more",
    ("max_bad_share", 1.5): "--max_bad_share 1.5 must be from 0 to 1",
    ("on_bad_data", "ignore"): "argument --on_bad_data: invalid choice: 'ignore'",
    ("dtype", "int8"): "argument --dtype: invalid choice: 'int8'",
    ("dtype", "float16"): "--dtype float16: this cpu has no arithmetic for it",
    ("device", "tpu9"): "--device tpu9 cannot be used",
    ("device", "cuda:7"): "--device cuda:7 cannot be used",
    ("swanlab_mode", "nowhere"): "argument --swanlab_mode: invalid choice: 'nowhere'",
    ("save_weight", "a/b"): "--save_weight 'a/b' must be a plain name",
    ("from_weight", "../x"): "--from_weight '../x' must be a plain name",
    ("tokenizer_path", "nowhere"): "--tokenizer_path nowhere: no such folder",
    ("bath_size", 3): "unrecognized arguments: --bath_size 3; see --help",
}


@pytest.mark.parametrize("case", IMPOSSIBLE, ids=lambda case: f"{case[0]}={case[1]}")
def test_an_impossible_setting(corpus, tmp_path, case):
    name, value = case
    if case == ("dtype", "float16") and torch.cpu._is_amx_fp16_supported():
        pytest.skip("this CPU has arithmetic for float16")
    if name == "device" and torch.cuda.device_count() > 7:
        pytest.skip("there is such a device")
    device = {} if name == "device" else {"device": "cpu"}
    process = run("pretrain", flags(corpus, tmp_path, "pretrain", **device, **{name: value}), status=2)
    assert len(process.error_lines) == 1 and process.error_lines[0].startswith("error: ")
    assert IMPOSSIBLE[case] in process.error_lines[0]
    assert process.out == "" and not list(tmp_path.rglob("*.pth"))


def test_all_of_them_are_told_at_once(corpus, tmp_path):
    wrong = {"epochs": 0, "learning_rate": -1, "hidden_size": 100, "dropout": 2, "device": "tpu9", "max_bad_share": 7}
    process = run("pretrain", flags(corpus, tmp_path, "pretrain", **wrong), status=2)
    assert len(process.error_lines) == 1
    assert all(f"--{key} " in process.error_lines[0] for key in wrong)


def test_more_ranks_than_samples(corpus, tmp_path):
    data = tmp_path / "two.jsonl"
    data.write_text('{"text": "one"}\n{"text": "two"}\n')
    processes = start_ranks(3, "pretrain", flags(corpus, tmp_path, "pretrain", data_path=data))
    assert [process.wait() for process in processes] == [2, 2, 2]
    assert "3 processes, but --data_path holds only 2 samples; start fewer processes" in processes[0].error_lines[0]


@pytest.mark.parametrize(
    "damage", ["missing", "another shape", "not a file of weights", "cut off", "another vocabulary"]
)
def test_weights_that_do_not_fit(corpus, tmp_path, damage):
    path = tmp_path / "out/pretrain_32.pth"
    path.parent.mkdir()
    shape = {"num_hidden_layers": 1 if damage == "another shape" else 2}
    shape |= {"vocab_size": 7000 if damage == "another vocabulary" else 6400}
    save_weights(MiniMindForCausalLM(MiniMindConfig(hidden_size=32, **shape)), path)
    content = path.read_bytes()
    says = {
        "missing": "do not exist (",
        "another shape": "do not fit the model: model.layers.1.",
        "not a file of weights": "not a readable weights file",
        "cut off": "not a readable weights file",
        "another vocabulary": "lm_head.weight is (7000, 32), the model wants (6400, 32)",
    }
    if damage == "missing":
        path.unlink()
    else:
        changed = {"not a file of weights": b"hello", "cut off": content[:5000]}
        path.write_bytes(changed.get(damage, content))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.pth")}
    process = run("sft", flags(corpus, tmp_path, "sft"), status=2)
    assert len(process.error_lines) == 1 and f"error: weights {path}" in process.err and says[damage] in process.err
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.pth")} == before
