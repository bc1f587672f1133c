"""Files that survive a kill: written whole or not at all, read without running what is in them."""

import os
import pickle
import resource
import subprocess
import sys

import pytest
import torch

from dataset.errors import UserError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.checkpoint import atomic_write, load_weights, save_weights, weight_path
from trainer.trainer_utils import lm_checkpoint, make_optimizer

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=1)


def trained(seed: int = 0) -> tuple[MiniMindForCausalLM, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = MiniMindForCausalLM(CONFIG)
    optimizer = make_optimizer(model, 1e-2, 0.1)
    model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu")
    lm_checkpoint(CONFIG, "w", model, optimizer, 2, 7, save_dir=tmp_path, scaler=scaler, update=9)
    saved = lm_checkpoint(CONFIG, "w", save_dir=tmp_path)
    assert (saved["epoch"], saved["step"], saved["update"], saved["world_size"]) == (2, 7, 9, 1)
    assert saved["scaler"] == scaler.state_dict()
    for key, value in model.state_dict().items():
        assert saved["model"][key].dtype == torch.float32 and torch.equal(saved["model"][key], value)
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(saved["optimizer"]["state"][index][k], v) for k, v in state.items())
    assert lm_checkpoint(CONFIG, "other", save_dir=tmp_path) is None


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, capsys):
    model, optimizer = trained()
    for step in (1, 2):
        lm_checkpoint(CONFIG, "w", model, optimizer, 0, step, save_dir=tmp_path)
    newest = tmp_path / "w_32_resume.pth"
    content = newest.read_bytes()
    for damage in (b"", content[: len(content) // 2], b"x" * len(content)):
        newest.write_bytes(damage)
        assert lm_checkpoint(CONFIG, "w", save_dir=tmp_path)["step"] == 1
        assert "warning: damaged checkpoint" in capsys.readouterr().err
    (tmp_path / "w_32_resume_previous.pth").write_bytes(b"")
    with pytest.raises(UserError, match="no readable checkpoint"):
        lm_checkpoint(CONFIG, "w", save_dir=tmp_path)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path):
    trap = tmp_path / "trap"
    for path in (tmp_path / "w_32_resume.pth", tmp_path / "w_32.pth"):
        torch.save({"model": Malicious(str(trap))}, path)
    with pytest.raises(UserError):
        lm_checkpoint(CONFIG, "w", save_dir=tmp_path)
    with pytest.raises(UserError, match="not a readable weights file"):
        load_weights(MiniMindForCausalLM(CONFIG), tmp_path / "w_32.pth")
    (tmp_path / "w_32.pth").write_bytes(pickle.dumps(Malicious(str(trap))))
    with pytest.raises(UserError, match="not a readable weights file"):
        load_weights(MiniMindForCausalLM(CONFIG), tmp_path / "w_32.pth")
    assert not trap.exists()


def test_weights_for_use_are_fp16_and_load_back(tmp_path):
    model, _ = trained()
    path = weight_path(tmp_path, "pretrain", CONFIG)
    assert path.name == "pretrain_32.pth"
    assert weight_path(tmp_path, "p", MiniMindConfig(use_moe=True)).name == "p_512_moe.pth"
    save_weights(model, path)
    weights = torch.load(path, weights_only=True)
    assert set(weights) == set(model.state_dict())
    again = MiniMindForCausalLM(CONFIG)
    load_weights(again, path)
    for key, value in again.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, model.state_dict()[key].half().float())
    assert path.stat().st_size < 1.2 * 2 * sum(p.numel() for p in model.parameters()) + 20_000  # tied once
    with pytest.raises(UserError, match=r"nowhere_32.pth do not exist \(found there: pretrain_32.pth\)"):
        load_weights(again, weight_path(tmp_path, "nowhere", CONFIG))


def test_a_failing_write_changes_nothing(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, lambda file: file.write(b"first"))

    def fail(file):
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(UserError, match=r"file cannot be written \(disk full\)"):
        atomic_write(path, fail)
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["file"]


def test_a_real_file_size_limit_leaves_the_old_weights(tmp_path):
    model, _ = trained()
    path = tmp_path / "w.pth"
    save_weights(model, path)
    before = path.read_bytes()
    code = (
        "import resource, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from tests.trainer.test_checkpoint import trained\n"
        "from trainer.checkpoint import save_weights\n"
        "model, _ = trained(1)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) // 2}, {resource.RLIM_INFINITY}))\n"
        f"save_weights(model, Path({str(path)!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["w.pth"]
