"""Checks of GPUs: each ends on its own, in one row and one entry of the JSON, whatever becomes of it."""

import itertools
import json
import os
import pickle
import signal
import sys
import time

import psutil
import pytest
import torch

from scripts import gpu_check
from scripts.gpu import numbers, training_runs
from scripts.gpu.runner import Check, Failed, LeftOut, Machine, obstacle, run_all, table_row


def passes(machine):
    print("its own output")
    return {"difference": 0.000123456, "ranks": 2}


def fails(machine):
    raise Failed("the losses are wrong\nby far", {"difference": 3.0})


def leaves_out(machine):
    raise LeftOut("no such kernel")


def crashes(machine):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(machine):
    child = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (machine.folder / "child").write_text(str(child.pid))
    time.sleep(600)


CHECKS = [Check(work.__name__, "it holds", work, 1.5 if work is hangs else 60) for work in (fails, hangs, crashes)]
CHECKS += [Check("leaves_out", "it holds", leaves_out, 60), Check("passes", "it holds", passes, 60)]
CHECKS += [Check("two_gpus", "it holds", passes, 60, gpus=2), Check("several", "it holds", passes, 60, ranks=True)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The results of CHECKS on a machine with one GPU, and the rows shown."""
    folder, rows = tmp_path_factory.mktemp("checks"), []
    return run_all(CHECKS, Machine(1, (8, 0), folder), rows.append), rows, folder


def test_a_check_that_fails_crashes_or_hangs_stops_no_other(made):
    results, rows, folder = made
    ends = {each.name: (each.result, each.reason) for each in results}
    assert ends["fails"] == ("fail", "the losses are wrong\nby far")
    assert ends["hangs"][0] == "fail" and ends["hangs"][1].startswith("no end within 2 s; its output is in")
    assert ends["crashes"][0] == "fail" and "ended with status -9" in ends["crashes"][1]
    assert ends["leaves_out"] == ("left out", "no such kernel") and ends["passes"] == ("pass", "")
    assert ends["two_gpus"] == ("left out", "needs 2 GPUs; torch sees 1")
    assert ends["several"][0] == "left out" and "cannot share" in ends["several"][1]
    assert len(rows) == len(CHECKS) and (folder / "passes.log").read_text() == "its own output\n"
    assert not psutil.pid_exists(int((folder / "child").read_text())), "what a check has started outlives it"


def test_the_table_and_the_json(made, tmp_path):
    results, rows, _ = made
    told = {row.split()[0]: row for row in rows}
    assert told["passes"].endswith("s  difference 0.000123, ranks 2") and " pass " in told["passes"]
    assert told["fails"].endswith("the losses are wrong; difference 3") and " FAIL " in told["fails"]
    path = tmp_path / "new" / "found.json"
    gpu_check.write_results(path, results)
    found = json.loads(path.read_text())
    assert [each["name"] for each in found["checks"]] == [check.name for check in CHECKS]
    assert found["checks"][0]["figures"] == {"difference": 3.0} and found["machine"]["torch"] == torch.__version__
    assert os.uname().nodename not in path.read_text()


@pytest.mark.parametrize(("works", "status"), [((passes, leaves_out), 0), ((fails, passes), 1)])
def test_the_exit_status_tells_of_failures(works, status, monkeypatch, tmp_path, capsys):
    checks = [Check(work.__name__, "it holds", work, 60) for work in works]
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--json", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert int(ended.value.code) == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"1 pass, {status} FAIL, {1 - status} left out in ")


def test_the_checks_have_names_of_their_own(capsys, monkeypatch):
    names = [check.name for check in gpu_check.CHECKS]
    assert len(set(names)) == len(names) and all(check.guarantee for check in gpu_check.CHECKS)
    assert pickle.loads(pickle.dumps(gpu_check.CHECKS)) is not None  # they are sent to processes
    for name in names:
        assert len(table_row(gpu_check.Result(name, "", "pass")).split("pass")[0]) == 28
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--only", "losses,nothing"])
    with pytest.raises(gpu_check.UserError, match="there is no check nothing; --list"):
        gpu_check.main()


def test_what_a_machine_cannot_check_is_left_out():
    left = {name: [c.name for c in gpu_check.CHECKS if obstacle(c, Machine(gpus, (8, 0), None))] for name, gpus in
            (("none", 0), ("one", 1), ("three", 3))}  # fmt: skip
    assert left["three"] == []
    assert {"killed_rank", "resume_ranks", "resume_fsdp"} <= set(left["one"])
    assert "host_waits" in left["none"]
    assert not {"losses", "same_bits", "resume", "killed_rank", "sigterm"} & set(left["none"])


# --- the pure parts of the checks ------------------------------------------------------------------------------------

real_train = numbers.train


def test_gaps():
    right = [torch.tensor([3.0, 4.0]), torch.zeros(2)]
    assert numbers.gap(right, right) == 0
    assert numbers.gap([torch.tensor([3.0, 4.5]), torch.zeros(2)], right) == pytest.approx(0.1)
    assert numbers.gap([torch.tensor([3.0, torch.nan]), torch.zeros(2)], right) == torch.inf


def test_the_number_checks_run_here(tmp_path, monkeypatch):
    """On this CPU, with few updates; a loss that is wrong is found."""
    machine = Machine(0, (0, 0), tmp_path)
    monkeypatch.setattr(numbers, "dtypes", lambda machine: ["float32"])
    monkeypatch.setattr(numbers, "train", lambda state, updates: real_train(state, 2))
    assert numbers.losses(machine) == {"dense float32": 0.0, "moe float32": 0.0}
    assert numbers.grouped_products(machine) == {"float32": pytest.approx(0, abs=1e-6)}
    for check in (numbers.attention, numbers.compilations):
        with pytest.raises(LeftOut):
            check(machine)
    seen = []
    monkeypatch.setattr(numbers, "train", lambda state, updates: seen.append(1) or [1.0 + 0.001 * (len(seen) % 2)])
    with pytest.raises(Failed, match="dense float32, moe float32 are not those of a CPU") as failed:
        numbers.losses(machine)
    assert failed.value.figures["dense float32"] == pytest.approx(0.001, rel=0.01)


def test_other_bits_are_a_failure_where_they_are_promised(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "dtypes", lambda machine: ["float32"])
    monkeypatch.setattr(numbers, "use_deterministic_kernels", lambda enabled: None)
    values = itertools.count()
    monkeypatch.setattr(numbers, "train", lambda state, updates: state.model.lm_head.weight.data.fill_(next(values)))
    with pytest.raises(Failed, match="other bits in dense float32, moe float32"):
        numbers.same_bits(Machine(0, (0, 0), tmp_path))
    monkeypatch.setattr(numbers, "train", lambda state, updates: None)
    assert numbers.same_bits(Machine(0, (0, 0), tmp_path)) == {"dense float32": True, "moe float32": True}


def test_how_verify_resume_ended_is_understood(tmp_path, monkeypatch):
    machine = Machine(0, (0, 0), tmp_path)
    for text, status in {"0 differing bits\nPASS: 2 of 2 kills": 0, "note\nFAIL: weights.a: 3 of 9 differ": 1}.items():
        done = training_runs.subprocess.CompletedProcess([], status, stdout=text)
        monkeypatch.setattr(training_runs.subprocess, "run", lambda *_, done=done, **__: done)
        if status:
            with pytest.raises(Failed, match=r"^FAIL: weights\.a: 3 of 9"):
                training_runs.resume(machine)
        else:
            assert training_runs.resume(machine) == {"ranks": 1, "kills": 2}
