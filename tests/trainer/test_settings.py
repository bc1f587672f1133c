"""Impossible settings: one line that names each of them and the way out, exit status 2, before anything is
built."""

import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.stage_process import run
from tests.trainer.stage_flags import flags
from trainer.weights.files import save_weights

# setting -> what the line says
IMPOSSIBLE = {
    (
        "dtype",
        "float16",
    ): "--dtype float16: this cpu has no arithmetic for it; use bfloat16 or float32 (or auto)",
    ("device", "cuda:7"): "--device cuda:7 cannot be used (torch sees ",
    ("from_weight", "../x"): "--from_weight ../x: no such file or folder",
    ("data_path", "none"): "--data_path is missing: give a file, a folder or a pattern",
    ("bath_size", 3): "--bath_size is unknown; did you mean --batch_size",
}


@pytest.mark.parametrize("case", IMPOSSIBLE, ids=lambda case: f"{case[0]}={case[1]}")
def test_an_impossible_setting(corpus, tmp_path, case):
    name, value = case
    if case == ("dtype", "float16") and torch.cpu._is_amx_fp16_supported():
        pytest.skip("this CPU has arithmetic for float16")
    if name == "device" and torch.cuda.device_count() > 7:
        pytest.skip("there is such a device")
    settings = {"device": "cpu"} | {name: value}
    process = run("pretrain", flags(corpus, tmp_path, "pretrain", **settings), status=2)
    assert len(process.error_lines) == 1
    assert process.error_lines[0].startswith(f"error: {IMPOSSIBLE[case]}")
    assert process.out == "" and not list(tmp_path.rglob("*.pth"))


def test_more_ranks_than_samples(corpus, tmp_path):
    data = tmp_path / "one.jsonl"
    data.write_text('{"text": "one"}\n')
    first = run("pretrain", flags(corpus, tmp_path, "pretrain", data_path=data), ranks=2, status=2)
    (line,) = first.error_lines
    assert line.startswith("error: 2 processes, but an epoch has only 1 samples")
    assert not list(tmp_path.rglob("*.pth"))


@pytest.mark.parametrize("damage", ["another shape", "cut off", "another tokenizer"])
def test_weights_that_do_not_fit(corpus, tmp_path, damage):
    path = tmp_path / "out/pretrain_32.pth"
    path.parent.mkdir()
    shape = {"num_hidden_layers": 2 if damage == "another shape" else 1}
    shape |= {"tokenizer_sha256": "0" * 64 if damage == "another tokenizer" else None}
    save_weights(MiniMindForCausalLM(MiniMindConfig(hidden_size=32, **shape)), path)
    content = path.read_bytes()
    says = {
        "another shape": f"error: --num_hidden_layers 1: --from_weight {path} is of 2; leave the flag out",
        "cut off": f"error: weights {path}: not a readable weights file",
        "another tokenizer": "the tokenizer has other tokens than the one of the weights",
    }
    path.write_bytes(content[:5000] if damage == "cut off" else content)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.pth")}
    process = run("sft", flags(corpus, tmp_path, "sft"), status=2)
    assert len(process.error_lines) == 1 and says[damage] in process.err
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.pth")} == before
