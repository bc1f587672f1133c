"""Checks of GPUs: each ends on its own, in one row and one entry of the JSON, whatever becomes of it; on this
CPU, with few updates, they pass, and what is wrong is found."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.nn import functional as F

from dataset.lm_dataset import collate_flat
from model import model_minimind
from tests.conftest import ROOT
from tests.gpu import conftest, parts, ranks, test_all_reduce, test_ranks
from tests.gpu import test_numbers as numbers
from trainer import loop
from trainer.devices.device import mixed_precision

CHECKS = """
import os, pathlib, signal, socket, subprocess, sys, time
import pytest

def test_fails(record_property):
    record_property("difference", 3.0)
    assert False, f"rank 1 ({socket.gethostname()}): the losses are wrong"

def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("child").write_text(str(child.pid))
    time.sleep(600)

def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)

def test_is_left_out():
    pytest.skip("no such kernel")

def test_passes(record_property):
    record_property("ranks", 2)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """CHECKS made: the process, what is in its JSON by name, and the folder."""
    folder = tmp_path_factory.mktemp("checks")
    text = (ROOT / "tests/gpu/conftest.py").read_text(encoding="utf-8")
    (folder / "conftest.py").write_text(text.replace("LIMIT = 400 ", "LIMIT = 10 "), encoding="utf-8")
    (folder / "test_made_up.py").write_text(CHECKS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "test_made_up.py", "--gpu_check", "new/found.json"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, **options, check=False)
    found = json.loads((folder / "new/found.json").read_text(encoding="utf-8"))
    return done, {each["name"]: each for each in found["checks"]}, found["machine"], folder


def test_a_check_that_fails_crashes_or_hangs_stops_no_other(made):
    done, checks, _, folder = made
    ends = {name: (each["result"], each["reason"]) for name, each in checks.items()}
    assert ends["fails"][0] == "failed"
    assert ends["fails"][1].startswith("AssertionError: rank 1: the losses are wrong")
    assert ends["hangs"] == ("failed", "no end within 10 s") and " in test_hangs" in done.stdout
    assert ends["crashes"] == ("failed", "its process ended with status -9")
    assert ends["is_left_out"] == ("skipped", "no such kernel") and ends["passes"] == ("passed", "")
    assert done.returncode == 1
    assert not psutil.pid_exists(int((folder / "child").read_text())), "what a check has started outlives it"


def test_the_table_and_the_json(made):
    done, checks, machine, folder = made
    table = (folder / "new/found.md").read_text(encoding="utf-8")
    assert table in done.stdout and f"| torch | {torch.__version__} |  |  |\n" in table
    assert re.search(r"^\| passes \| passed \| [\d.]+ \| ranks 2 \|$", table, re.M)
    assert re.search(
        r"^\| fails \| failed \| [\d.]+ \| AssertionError: rank 1: the losses.*; difference 3 \|$",
        table,
        re.M,
    )
    assert "| all 5 checks | 1 passed, 3 failed, 1 skipped |" in table
    assert {"device", "CUDA", "Triton"} <= machine.keys() and os.uname().nodename not in table
    assert checks["fails"]["figures"] == {"difference": 3.0} and machine["torch"] == torch.__version__
    assert os.uname().nodename not in (folder / "new/found.json").read_text()


def test_a_gpu_that_torch_does_not_see_is_an_error(tmp_path, monkeypatch):
    """A driver's program is there, and torch sees no GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA X100, 999.1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = SimpleNamespace(getoption=lambda *_: "found.json")
    with pytest.raises(pytest.UsageError) as error:  # pytest ends with status 4
        conftest.pytest_configure(asked)
    said = str(error.value)
    assert re.search(r"sees no GPU, but there is one \((NVRM|NVIDIA X100, 999.1)", said)
    assert said.startswith(f"torch {torch.__version__} (CUDA {torch.version.cuda})")
    assert "may hide it: unset it" in said


# --- the checks, with few updates

real_train, cpu = numbers.train, torch.device("cpu")


# Each breaks the training that the checks look at; the reference, stock transformers, does not run through
# it.


def no_attention(patch) -> None:
    patch.setattr(model_minimind, "flat_attention", lambda q, k, v, spans: 0.0 * q)


def attention_to_the_future(patch) -> None:
    def attend(q, k, v, spans):
        lengths = spans[2].diff().tolist()
        pieces = zip(*(x.split([*lengths, len(q) - sum(lengths)]) for x in (q, k, v)), strict=True)
        heads = ([x.transpose(0, 1)[None].float() for x in piece] for piece in pieces)
        return torch.cat(
            [F.scaled_dot_product_attention(*each, enable_gqa=True)[0].transpose(0, 1) for each in heads]
        )

    patch.setattr(model_minimind, "flat_attention", attend)


def no_rotary(patch) -> None:
    patch.setattr(model_minimind, "apply_rotary", lambda x, *_: x)


def an_experts_gradient_is_empty(patch) -> None:
    def new_model(use_moe: bool, *size: int):
        model = real_model(use_moe, *size)
        for name, parameter in model.named_parameters():
            if ".experts.0." in name:
                parameter.register_hook(torch.zeros_like)
        return model

    patch.setattr(parts, "new_model", new_model)


def a_wrong_scale_of_the_loss(patch) -> None:
    patch.setattr(loop, "world_size", lambda: 2)


def a_micro_batch_forgotten(patch) -> None:
    patch.setattr(
        loop, "to_device", lambda batch, device: batch if batch["max_seqlen"] != 150 else collate_flat([])
    )


SABOTAGES = [
    no_attention,
    attention_to_the_future,
    no_rotary,
    a_wrong_scale_of_the_loss,
    a_micro_batch_forgotten,
]
real_model = parts.new_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_that_are_right_pass(monkeypatch, dtype):
    """Rounding is far from the limits."""
    monkeypatch.setattr(parts, "native_bfloat16", lambda device: True)
    monkeypatch.setattr(
        parts, "mixed_precision", lambda name, place: mixed_precision(f"{name}_emulated", place)
    )
    monkeypatch.setattr(numbers, "dtypes", lambda device: [dtype])
    figures = {}
    numbers.test_gradients(cpu, figures.__setitem__)
    assert all(distance < numbers.LIMITS[tuple(name.split())] / 1.8 for name, distance in figures.items())


@pytest.mark.parametrize("sabotage", [*SABOTAGES, an_experts_gradient_is_empty])
def test_gradients_that_are_wrong_are_found(monkeypatch, sabotage):
    """By a distance that no rounding has, also in the bfloat16 of a mixture of experts."""
    monkeypatch.setattr(numbers, "dtypes", lambda device: ["float32"])
    right = {use_moe: parts.stock_gradients(use_moe) for use_moe in parts.SHAPES.values()}
    monkeypatch.setattr(parts, "stock_gradients", right.__getitem__)
    sabotage(monkeypatch)
    figures = {}
    with pytest.raises(AssertionError, match=r"gradients are not those of|tensors in one of them only"):
        numbers.test_gradients(cpu, figures.__setitem__)
    if sabotage is an_experts_gradient_is_empty:
        assert figures.pop("dense float32") < 1e-3
    for name, distance in figures.items():
        shape = name.split()[0]
        assert distance > 1.2 * max(limit for key, limit in numbers.LIMITS.items() if key[0] == shape)


def no_all_reduce() -> None:
    """Called in each process: DDP never exchanges gradients."""
    sync = loop.gradient_sync
    loop.gradient_sync = lambda model, enabled: sync(model, enabled=False)


def test_an_all_reduce_that_is_missed_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "dtypes", lambda device: ["float32"])
    monkeypatch.setattr(parts, "SHAPES", {"dense": False})
    options = (0, cpu, lambda: 2, lambda: None, tmp_path)
    figures = {}
    monkeypatch.setenv(ranks.BREAK, f"{__name__}:no_all_reduce")
    with pytest.raises(AssertionError, match="gradients are not those of stock transformers: dense float32"):
        test_ranks.test_gradients_of_ranks("ddp", *options, figures.__setitem__)
    assert figures["dense float32"] > 0.3 and figures["ranks"] == 2


HANG = """
import os, time

def hang():
    if os.environ["RANK"] == "1":
        print("NCCL WARN socketStartConnect: no route", flush=True)
        time.sleep(600)
"""  # rank 1 never comes


def test_an_all_reduce_that_hangs_ends_with_what_nccl_says(monkeypatch, tmp_path):
    (tmp_path / "hanging.py").write_text(HANG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(ranks.BREAK, "hanging:hang")
    monkeypatch.setattr(test_all_reduce, "SECONDS", 15)
    with pytest.raises(
        RuntimeError, match=r"all_reduce: no end within 15 s on rank 0, 1; NCCL WARN socketStartConn"
    ):
        test_all_reduce.test_all_reduce(0, lambda: 2, tmp_path, lambda *_: None)


def test_a_wrong_loss_is_found(monkeypatch):
    figures = {}
    monkeypatch.setattr(numbers, "dtypes", lambda device: ["float32"])
    monkeypatch.setattr(numbers, "new_state", partial(parts.new_state, width=64))
    monkeypatch.setattr(numbers, "train", lambda state, updates: real_train(state, 2))
    numbers.test_losses(cpu, figures.__setitem__)
    assert figures == {"dense float32": 0.0, "moe float32": 0.0}
    losses = cycle([[1.001], [1.0]])
    monkeypatch.setattr(numbers, "train", lambda state, updates: next(losses))
    with pytest.raises(AssertionError, match="dense float32, moe float32 are not those of a CPU"):
        numbers.test_losses(cpu, figures.__setitem__)
    assert figures["dense float32"] == pytest.approx(0.001, rel=0.01)
