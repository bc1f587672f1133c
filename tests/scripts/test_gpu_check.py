"""Checks of GPUs: each ends on its own, in one row and one entry of the JSON, whatever becomes of it; on this
CPU, with few updates, they pass, and what is wrong is found."""

import json
import os
import re
import subprocess
import sys

import psutil
import pytest
import torch

from model import model_minimind
from tests.conftest import ROOT
from tests.gpu import parts
from tests.gpu import test_numbers as numbers
from trainer import loop
from trainer.devices.device import mixed_precision

CHECKS = """
import os, pathlib, signal, socket, subprocess, sys, time
import pytest

def test_fails(record_property):
    record_property("difference", 3.0)
    assert False, "the losses are wrong"

def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("child").write_text(str(child.pid))
    time.sleep(600)

def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)

def test_names_the_machine():
    assert False, f"error: rank 1 ({socket.gethostname()}) ended"

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
    (folder / "conftest.py").write_text(text.replace("LIMIT = 400 ", "LIMIT = 16 "), encoding="utf-8")
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
    assert ends["fails"][0] == "failed" and ends["fails"][1].startswith(
        "AssertionError: the losses are wrong"
    )
    assert ends["hangs"] == ("failed", "no end within 16 s") and " in test_hangs" in done.stdout
    assert ends["crashes"] == ("failed", "its process ended with status -9")
    assert ends["is_left_out"] == ("skipped", "no such kernel") and ends["passes"] == ("passed", "")
    assert done.returncode == 1
    assert not psutil.pid_exists(int((folder / "child").read_text())), "what a check has started outlives it"


def test_the_table_and_the_json(made):
    done, checks, machine, folder = made
    assert re.search(r"^passes +passed +[\d.]+ s  ranks 2$", done.stdout, re.M)
    assert re.search(
        r"^fails +failed +[\d.]+ s  AssertionError: the losses.*; difference 3.0$", done.stdout, re.M
    )
    assert checks["fails"]["figures"] == {"difference": 3.0} and machine["torch"] == torch.__version__
    assert os.uname().nodename not in (folder / "new/found.json").read_text()
    assert checks["names_the_machine"]["reason"].startswith("AssertionError: error: rank 1 ended")


def test_a_gpu_that_torch_does_not_see_is_an_error(tmp_path):
    """A driver's program is there, and torch sees no GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA X100, 999.1\n")
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--gpu_check", str(tmp_path / "found.json")]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 4 and re.search(
        r"sees no GPU, but there is one \((NVRM|NVIDIA X100, 999.1)", said
    )
    assert (
        f"torch {torch.__version__} (CUDA {torch.version.cuda})" in said and "may hide it: unset it" in said
    )


# --- the checks, with few updates
# ------------------------------------------------------------------------------------


cpu = torch.device("cpu")


# Each breaks the training that the checks look at; the reference, stock transformers, does not run through
# it.


def no_rotary(patch) -> None:
    patch.setattr(model_minimind, "apply_rotary", lambda x, *_: x)


def a_wrong_scale_of_the_loss(patch) -> None:
    patch.setattr(loop, "world_size", lambda: 2)


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


@pytest.mark.parametrize("sabotage", [no_rotary, a_wrong_scale_of_the_loss])
def test_gradients_that_are_wrong_are_found(monkeypatch, sabotage):
    """By a distance that no rounding has."""
    monkeypatch.setattr(numbers, "dtypes", lambda device: ["float32"])
    right = {use_moe: parts.stock_gradients(use_moe) for use_moe in parts.SHAPES.values()}
    monkeypatch.setattr(parts, "stock_gradients", right.__getitem__)
    sabotage(monkeypatch)
    figures = {}
    with pytest.raises(AssertionError, match=r"gradients are not those of|tensors in one of them only"):
        numbers.test_gradients(cpu, figures.__setitem__)
    for name, distance in figures.items():
        shape = name.split()[0]
        assert distance > 1.2 * max(limit for key, limit in numbers.LIMITS.items() if key[0] == shape)
