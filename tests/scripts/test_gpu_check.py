"""Checks of GPUs: each ends on its own, in one row and one entry of the JSON, whatever becomes of it."""

import json
import os
import re
import subprocess
import sys

import psutil
import pytest
import torch

from tests.conftest import ROOT

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
    table = (folder / "new/found.md").read_text(encoding="utf-8")
    assert table in done.stdout and f"| torch | {torch.__version__} |  |  |\n" in table
    assert re.search(r"^\| passes \| passed \| [\d.]+ \| ranks 2 \|$", table, re.M)
    assert re.search(
        r"^\| fails \| failed \| [\d.]+ \| AssertionError: the losses.*; difference 3 \|$", table, re.M
    )
    assert "| all 6 checks | 1 passed, 4 failed, 1 skipped |" in table
    assert {"device", "CUDA", "Triton"} <= machine.keys() and os.uname().nodename not in table
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
