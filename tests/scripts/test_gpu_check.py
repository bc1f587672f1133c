"""scripts/gpu_check.sh: each check ends on its own, in one row of the table, whatever becomes of it."""

import os
import re
import sys

import psutil
import pytest
import torch

from common.errors import UserError
from tests.gpu import run_checks
from tests.stage_process import run

CHECKS = """
import os, pathlib, signal, socket, subprocess, sys, time
import pytest

def test_fails(record_property):
    record_property("difference", 3.0)
    assert False, f"rank 1 ({socket.gethostname()}): the losses in /home/ann/runs/a.json are wrong, 9 tokens/s"

def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    time.sleep(600)

def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)

def test_is_left_out():
    pytest.skip("no such kernel")

def test_passes(record_property):
    record_property("ranks", 2)
"""


def test_a_check_that_fails_crashes_or_hangs_stops_no_other(tmp_path, monkeypatch, capsys):
    folder, table = tmp_path / "tests/gpu", tmp_path / "out/table.md"
    folder.mkdir(parents=True)
    (folder / "test_made_up.py").write_text(CHECKS)
    for name, value in {"ROOT": tmp_path, "TABLE": table, "LIMIT": 1.5}.items():
        monkeypatch.setattr(run_checks, name, value)
    monkeypatch.setattr(sys, "argv", ["run_checks"])
    # a dozen processes of pytest, of which each would load hypothesis for a second
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(run_checks, "PYTEST", [*run_checks.PYTEST, "-p", "xdist.plugin"])
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--slow', action='store_true')"
    )
    assert run_checks.main() == 1
    printed, text = capsys.readouterr().out, table.read_text()
    assert text in printed and f"| torch | {torch.__version__} |  |  |\n" in text
    rows = dict(re.findall(r"^\| (\w+) \| ((?:passed|failed|skipped) \| [\d.]+ \| .*) \|$", text, re.M))
    ends = {name: re.sub(r" \| [\d.]+ \| ", ": ", row) for name, row in rows.items()}
    assert ends == {
        "fails": "failed: AssertionError: rank 1: the losses in a.json are wrong, 9 tokens/s; difference 3",
        "hangs": "failed: no end within 2 s",
        "crashes": "failed: its process crashed",
        "is_left_out": "skipped: no such kernel",
        "passes": "passed: ranks 2",
    }
    assert "| all 5 checks | 3 failed, 1 passed, 1 skipped |" in text and os.uname().nodename not in text
    assert not psutil.pid_exists(int((folder / "child").read_text())), "what a check has started outlives it"
    assert re.search(r"^    passes passed in [\d.]+ s: ranks 2$", printed, re.M), "no line of its own"
    assert "fails failed beside others, and comes again alone" in printed


def test_what_does_not_fit_into_the_time_is_left_out(monkeypatch, capsys):
    ids = ["tests/gpu/test_decoding.py::test_server", "tests/gpu/test_kernels.py::test_kernel_hash_tensor"]
    monkeypatch.setattr(run_checks, "collect", lambda arguments: ids)
    monkeypatch.setattr(sys, "argv", ["run_checks", "--seconds", "0"])
    monkeypatch.setattr(run_checks, "TABLE", run_checks.ROOT / "out/gpu_check_test.md")
    try:
        assert run_checks.main() == 0
    finally:
        run_checks.TABLE.unlink(missing_ok=True)
    printed = capsys.readouterr().out
    assert printed.index("kernels: 1 checks") < printed.index("resume: 1 checks")
    assert "| all 2 checks | 2 left out |" in printed
    assert printed.endswith("left out, as --seconds 0 did not suffice: kernel_hash_tensor, server\n")


def test_checks_come_in_the_order_of_what_they_tell():
    ids = ["a.py::test_resume[dpo]", "a.py::test_new", "a.py::test_speed[0]", "a.py::test_kernel_sampling"]
    found = [(group.name, chosen) for group, chosen in run_checks.grouped(ids)]
    assert found == [("kernels", ids[3:]), ("speed", ids[2:3]), ("resume", ids[:1]), ("others", ids[1:2])]
    grouped = [check for group in run_checks.GROUPS for check in group.checks]
    assert set(grouped) == set(run_checks.ADVICE) and len(grouped) == len(set(grouped))


@pytest.mark.slow
def test_arguments_choose_checks():
    process = run(run_checks.__file__, ["--collect-only", "-k", "attention"])
    lines = process.out.splitlines()
    assert lines and all("attention" in line for line in lines)


def test_each_check_has_advice_where_it_fails():
    files = (run_checks.ROOT / "tests/gpu").glob("test_*.py")
    names = {name for file in files for name in re.findall(r"^def test_(\w+)", file.read_text(), re.M)}
    assert names == set(run_checks.ADVICE)


def test_a_gpu_that_torch_does_not_see_is_an_error(monkeypatch):
    monkeypatch.setattr(run_checks, "driver", lambda: "NVIDIA X100, 999.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"sees no GPU, but there is one \(NVIDIA X100, 999.1\).*unset it"):
        run_checks.main()
