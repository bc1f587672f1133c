"""verify_resume finds every kind of difference, leaves no process, and a real run killed at random moments
passes it."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
import torch

from common.command_line import one_line_errors
from common.settings import StageArgs
from scripts import verify_resume
from scripts.verify_resume import make_run, run_to_end, run_to_kill
from tests.conftest import write_jsonl
from tests.stage_process import Faults, StageProcess
from tools.verify import launch as launches
from tools.verify.compare import compare_runs, is_same
from tools.verify.launch import KILL_METHODS, Launch, Run, is_alive

# --- comparing


def write_run(folder: Path, change=lambda records, state, weights: None) -> Path:
    """The files of a small made-up run, after a change."""
    folder.mkdir()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    weights = {key: value.half() for key, value in model.state_dict().items()}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "update": 10, "seconds": 1}
    records = [{"update": update, "loss": 5 / update, "seconds": 0.5} for update in range(1, 11)]
    records[4]["loss"] = float("nan")
    change(records, state, weights)
    write_jsonl(folder / "a_metrics.jsonl", records)
    torch.save(weights, folder / "a.pth")
    torch.save(state, folder / "a_resume.pth")
    return folder


def flip(tensor: torch.Tensor) -> None:
    """Turn the lowest bit of the first value."""
    tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])[0] ^= 1


CHANGES = {
    "times": (lambda records, state, weights: (state.update(seconds=2), records[0].update(mfu=0.1)), None),
    "a loss": (
        lambda records, state, weights: records[6].update(loss=records[6]["loss"] + 1e-16),
        "a_metrics.jsonl: 1 values differ, the first is 6.loss",
    ),
    "a doubled update": (
        lambda records, state, weights: records.append(dict(records[6])),
        "a_metrics.jsonl: 2 values differ, the first is 10.update",
    ),
    "a bit of the optimizer": (
        lambda records, state, weights: flip(state["optimizer"]["state"][2]["exp_avg_sq"]),
        "a_resume.pth: 1 values differ, the first is optimizer.state.2.exp_avg_sq",
    ),
    "a lost counter": (
        lambda records, state, weights: state.pop("update"),
        "a_resume.pth: 1 values differ, the first is update",
    ),
    "a bit of the weights": (
        lambda records, state, weights: flip(weights["0.weight"]),
        "a.pth: 1 values differ, the first is 0.weight",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_difference_is_found(tmp_path, case):
    change, expected = CHANGES[case]
    found = compare_runs(write_run(tmp_path / "a"), write_run(tmp_path / "b", change))
    assert found == ([expected] if expected else [])


def test_a_missing_file_and_every_bit_count(tmp_path):
    right, other = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (other / "a.pth").unlink()
    assert compare_runs(right, other) == ["a.pth is missing"]
    nan = torch.tensor([float("nan"), 1.0])
    assert is_same(nan, nan.clone()) and not is_same(torch.zeros(2), -torch.zeros(2))
    assert not is_same(0.0, -0.0) and not is_same(1, 1.0) and not is_same(nan, nan.double())


# --- running and killing


@pytest.fixture
def run(tmp_path):
    """A run whose command a test replaces."""
    return Run(tmp_path / "killed", StageArgs(), [])


FAMILY = """
import pathlib, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
depth = int(sys.argv[1])
pathlib.Path(sys.argv[2], str(os.getpid())).touch()
for _ in range(2 if depth else 0):
    command = [sys.executable, *sys.orig_argv[1:3], str(depth - 1), sys.argv[2]]
    subprocess.Popen(command, start_new_session=True)
time.sleep(600 if depth != 1 else 0)
"""


def test_a_kill_leaves_no_process(run, tmp_path, monkeypatch):
    """Seven processes, of which two have ended: their children are orphans. None obeys SIGTERM."""
    monkeypatch.setattr(launches, "GRACE_SECONDS", 0.5)
    pids = tmp_path / "pids"
    pids.mkdir()
    run.command = [sys.executable, "-c", FAMILY, "2", str(pids)]
    started = Launch(run)
    while len(list(pids.iterdir())) < 7:
        assert not started.ends_within(0.1)
    processes = [
        psutil.Process(int(path.name)) for path in pids.iterdir() if psutil.pid_exists(int(path.name))
    ]
    assert len(processes) >= 5
    with pytest.raises(SystemExit, match="FAIL: processes are left 0 s after SIGTERM"):
        started.kill("SIGTERM")
    started.kill("SIGKILL to all processes")
    assert not any(is_alive(process) for process in processes)


def test_a_run_that_fails_by_itself_is_shown_with_its_last_lines(run):
    run.command = [sys.executable, "-c", "import sys; sys.exit('something is wrong')"]
    expected = r"FAIL: a launch ended by itself with status 1;(.|\n)*something is wrong"
    with pytest.raises(SystemExit, match=expected):
        run_to_end(run)
    with pytest.raises(SystemExit, match=expected):
        run_to_kill(run, 600.0, True, KILL_METHODS[0])


def test_a_run_that_starts_over_instead_of_resuming_is_found(run, monkeypatch):
    """It would reach the same bits in the end."""
    monkeypatch.setattr(run, "saved_update", lambda: 12)
    script = "import pathlib, sys; path = pathlib.Path(sys.argv[1]); path.parent.mkdir()\n"
    script += f"path.write_text({json.dumps({'update': 13})!r} + '\\n'); print(sys.argv[2])"
    metrics = run.folder / "save/a_metrics.jsonl"
    resumed = "resuming full_sft at epoch 2, update 12 of 45"
    run.command = [sys.executable, "-c", script, str(metrics), resumed]
    run_to_end(run)
    assert run.last_update() == 13
    metrics.write_text("")
    assert run.last_update() == 0  # killed before the first record was written
    shutil.rmtree(metrics.parent)
    run.command[-1] = "new run: "
    with pytest.raises(SystemExit, match="FAIL: there was a checkpoint of update 12, but the run began anew"):
        run_to_end(run)


# --- the script


def call(monkeypatch, *flags) -> None:
    """The script in this process."""
    monkeypatch.setattr(sys, "argv", ["verify_resume.py", *map(str, flags)])
    with one_line_errors():
        verify_resume.main()


MISTAKES = {
    "no kill for a combination": (["--kills", 3, "--ranks", "1,2", "--use_moe", "0,1"], "--kills at least"),
    "no number": (["--ranks", "one"], "argument --ranks"),
    "a stage's own flag": (["--", "--bath_size", 4], "--bath_size"),
    "a flag of this script": (["--", "--use_moe", 1], "--use_moe goes before the --"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(monkeypatch, capsys, case):
    flags, expected = MISTAKES[case]
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, *flags)
    captured = capsys.readouterr()
    assert end.value.code == 2 and not captured.out
    assert captured.err.startswith("error: ") and expected in captured.err and captured.err.count("\n") == 1


def test_the_users_own_data_and_settings(tmp_path):
    def args_of(name, *typed):
        return make_run("sft", list(map(str, typed)), 1, 0, tmp_path, name).args

    assert args_of("a").eval_share == 0.1
    assert args_of("b", "--eval_data_path", "mine.jsonl").eval_data_path == "mine.jsonl"
    config = tmp_path / "run.yaml"
    config.write_text("model: {hidden_size: 48}\ndata: {data_path: mine.jsonl}\n")
    found = args_of("c", "--config", config, "--batch_size", 3)
    assert (found.hidden_size, found.data_path, found.batch_size) == (48, "mine.jsonl", 3)


def killed_at_random(monkeypatch, capsys, *flags) -> str:
    """What the script prints; a failure shows the seed that draws the same kills again."""
    seed = random.SystemRandom().randrange(10**6)
    try:
        call(monkeypatch, "--seed", seed, *flags)
    except SystemExit as end:
        pytest.fail(f"--seed {seed} {flags}: {capsys.readouterr()} {end.code}")
    return capsys.readouterr().out


class ForkedLaunch:
    """What `Launch` starts, forked from a process that has torch loaded, in the place of `subprocess.Popen`."""

    environments: ClassVar[
        dict[int, dict[str, str]]
    ] = {}  # of each process; a fork shows those of its parent

    def __init__(self, command, stdout, env, **_):
        script = f"log = os.open({stdout.name!r}, os.O_WRONLY | os.O_APPEND)\n"
        script += "os.dup2(log, 1)\nos.dup2(log, 2)\n"
        self.process = StageProcess(command[1], command[2:], Faults(script=script)).process
        self.pid = self.process.pid
        self.environments[self.pid] = env

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a run", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def test_one_rank_killed_at_a_random_moment(monkeypatch, capsys):
    environ = psutil.Process.environ
    forked = lambda process: ForkedLaunch.environments.get(process.pid) or environ(process)  # noqa: E731
    monkeypatch.setattr(psutil.Process, "environ", forked)
    in_place = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedLaunch})
    monkeypatch.setattr(launches, "subprocess", in_place)
    monkeypatch.setattr(verify_resume, "UPDATES", 24)
    printed = killed_at_random(monkeypatch, capsys, "--kills", 2)
    assert re.search(r"PASS: [12] of 2 kills in training, 0 differing bits", printed)
    assert not Path(re.search(r", in (\S+)", printed)[1]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_of_a_mixture_of_experts_killed_at_a_random_moment(monkeypatch, capsys, parallel):
    monkeypatch.setattr(verify_resume, "UPDATES", 18)
    flags = ["--stage", "pretrain", "--kills", 2, "--ranks", 2, "--use_moe", 1]
    small = ["--", "--num_hidden_layers", 1, "--packing", 1, "--parallel", parallel, "--optimizer", "adamw"]
    assert "0 differing bits" in killed_at_random(monkeypatch, capsys, *flags, *small)
