"""Checks of GPUs: each ends on its own, in one row and one entry of the JSON, whatever becomes of it; on this CPU, with
few updates, they pass, and what is wrong is found."""

import itertools
import json
import os
import re
import subprocess
import sys

import psutil
import pytest
import torch

from tests.conftest import ROOT
from tests.gpu import test_numbers as numbers
from tests.gpu import test_runs

CHECKS = """
import os, pathlib, signal, subprocess, sys, time
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
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    found = json.loads((folder / "new/found.json").read_text(encoding="utf-8"))
    return done, {each["name"]: each for each in found["checks"]}, found["machine"], folder


def test_a_check_that_fails_crashes_or_hangs_stops_no_other(made):
    done, checks, _, folder = made
    ends = {name: (each["result"], each["reason"]) for name, each in checks.items()}
    assert ends["fails"][0] == "failed" and ends["fails"][1].startswith("AssertionError: the losses are wrong")
    assert ends["hangs"] == ("failed", "no end within 16 s") and " in test_hangs" in done.stdout
    assert ends["crashes"] == ("failed", "its process ended with status -9")
    assert ends["is_left_out"] == ("skipped", "no such kernel") and ends["passes"] == ("passed", "")
    assert done.returncode == 1
    assert not psutil.pid_exists(int((folder / "child").read_text())), "what a check has started outlives it"


def test_the_table_and_the_json(made):
    done, checks, machine, folder = made
    assert re.search(r"^passes +passed +[\d.]+ s  ranks 2$", done.stdout, re.M)
    assert re.search(r"^fails +failed +[\d.]+ s  AssertionError: the losses.*; difference 3.0$", done.stdout, re.M)
    assert checks["fails"]["figures"] == {"difference": 3.0} and machine["torch"] == torch.__version__
    assert os.uname().nodename not in (folder / "new/found.json").read_text()


def test_a_gpu_that_torch_does_not_see_is_an_error(tmp_path):
    """A driver's program is there, and torch sees no GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA X100, 999.1\n")
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--gpu_check", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode and re.search(
        r"sees no GPU, but there is one \((NVRM|NVIDIA X100, 999.1)", done.stdout + done.stderr
    )


# --- the checks, with few updates ------------------------------------------------------------------------------------

real_train, cpu = numbers.train, torch.device("cpu")


def test_gaps():
    right = [torch.tensor([3.0, 4.0]), torch.zeros(2)]
    assert numbers.gap(right, right) == 0
    assert numbers.gap([torch.tensor([3.0, 4.5]), torch.zeros(2)], right) == pytest.approx(0.1)
    assert numbers.gap([torch.tensor([3.0, torch.nan]), torch.zeros(2)], right) == torch.inf


def test_a_wrong_loss_is_found(monkeypatch):
    figures = {}
    monkeypatch.setattr(numbers, "dtypes", lambda device: ["float32"])
    monkeypatch.setattr(numbers, "train", lambda state, updates: real_train(state, 2))
    numbers.test_losses(cpu, figures.__setitem__)
    assert figures == {"dense float32": 0.0, "moe float32": 0.0}
    seen = []
    monkeypatch.setattr(numbers, "train", lambda state, updates: seen.append(1) or [1.0 + 0.001 * (len(seen) % 2)])
    with pytest.raises(AssertionError, match="dense float32, moe float32 are not those of a CPU"):
        numbers.test_losses(cpu, figures.__setitem__)
    assert figures["dense float32"] == pytest.approx(0.001, rel=0.01)


def test_other_bits_are_a_failure(monkeypatch):
    monkeypatch.setattr(numbers, "dtypes", lambda device: ["float32"])
    monkeypatch.setattr(numbers, "use_deterministic_kernels", lambda enabled: None)
    values = itertools.count()
    monkeypatch.setattr(numbers, "train", lambda state, updates: state.model.lm_head.weight.data.fill_(next(values)))
    with pytest.raises(AssertionError, match="other bits in dense float32, moe float32"):
        numbers.test_same_bits(cpu, monkeypatch)
    monkeypatch.setattr(numbers, "train", lambda state, updates: None)
    numbers.test_same_bits(cpu, monkeypatch)


def test_how_verify_resume_ended_is_understood(monkeypatch):
    for text, status in {"0 differing bits\nPASS: 2 of 2 kills": 0, "note\nFAIL: weights.a: 3 of 9 differ": 1}.items():
        done = subprocess.CompletedProcess([], status, stdout=text)
        monkeypatch.setattr(test_runs.subprocess, "run", lambda *_, done=done, **__: done)
        if status:
            with pytest.raises(AssertionError, match=r"^FAIL: weights\.a: 3 of 9"):
                test_runs.test_resume("one_rank", 0)
        else:
            test_runs.test_resume("one_rank", 0)
