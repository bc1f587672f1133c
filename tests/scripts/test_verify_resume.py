"""verify_resume finds every kind of difference, kills every process, and real runs killed at random moments
pass it."""

import json
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from common.command_line import one_line_errors
from scripts import verify_resume
from scripts.verify_resume import Kill, compare_runs, differences, train
from tests.conftest import ROOT
from tests.stage_process import Faults, StageProcess
from tools.verify import launch as launches
from tools.verify.launch import Launch, Run

# --- comparing


def make_records() -> list[dict]:
    records = []
    for update in range(1, 11):
        record = {"update": update, "epoch": update // 6, "step": update * 2, "loss": 5 / update}
        record |= {"grad_norm": 1.25, "tokens": update * 100, "seconds": 0.5}
        if update % 3 == 0:
            record |= {"eval_loss": 4.0, "eval_bpb": 2.0}
        records.append(record)
    records[4]["loss"] = float("nan")
    return records


def write_run(folder: Path, change_records=None, change_state=None, change_weights=None) -> SimpleNamespace:
    """The files of a small made-up run, changed by functions."""
    folder.mkdir()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    weights = {key: value.half() for key, value in model.state_dict().items()}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": {"scale": 1024.0}}
    state |= {"epoch": 2, "step": 8, "update": 10, "tokens": 1000, "samples_done": 64, "best_eval": 4.0}
    state |= {"seconds": 1, "world_size": 1}
    records = make_records()
    for change, content in ((change_records, records), (change_state, state), (change_weights, weights)):
        if change is not None:
            change(content)
    names = ("weights", "best_weights", "checkpoint")
    run = SimpleNamespace(**{name: folder / f"{name}.pth" for name in names})
    torch.save(weights, run.weights)
    torch.save(weights, run.best_weights)
    torch.save(state, run.checkpoint)
    run.metrics = folder / "metrics.jsonl"
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def flip(tensor: torch.Tensor) -> None:
    """Turn the lowest bit of the first value."""
    tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])[0] ^= 1


def test_the_same_run_has_no_difference(tmp_path):
    def other_times(records: list[dict]) -> None:
        for record in records:
            record |= {"seconds": 9.9, "rollout_seconds": 1.0, "tokens_per_second": 5.0, "mfu": 0.1}

    def other_seconds(state: dict) -> None:
        state.update(seconds=2, world_size=2)

    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", other_times, other_seconds)
    assert compare_runs(*runs) == []


RECORDS = {
    "a changed loss": (lambda r: r[6].update(loss=r[6]["loss"] + 1e-16), "update 7.loss: 0.714285714285714"),
    "NaN in one": (lambda r: r[4].update(loss=1.0), "update 5.loss: 1.0, not nan"),
    "the earlier of two": (lambda r: (r[8].update(epoch=7), r[3].update(step=9)), "update 4.step: 9, not 8"),
    "no evaluation": (lambda r: r[2].pop("eval_bpb"), "update 3.eval_bpb: 'missing', not 2.0"),
    "a missing update": (lambda r: r.pop(6), "update 7.update: 8, not 7"),
    "a doubled update": (lambda r: r.append(dict(r[6])), "update 7.update: 7, not 'missing'"),
    "a changed order": (lambda r: r.insert(3, r.pop(6)), "update 4.update: 7, not 4"),
    "none": (lambda r: r.clear(), "update 1.update: 'missing', not 1"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_difference_in_the_metrics_is_found(tmp_path, case):
    change, expected = RECORDS[case]
    found = compare_runs(write_run(tmp_path / "a"), write_run(tmp_path / "b", change_records=change))
    assert len(found) == 1 and found[0].startswith(expected)


STATES = {
    "a bit of the model": (lambda s: flip(s["model"]["1.weight"]), "model.1.weight: 1 of 6 values differ"),
    "a bit of the optimizer": (
        lambda s: flip(s["optimizer"]["state"][2]["exp_avg_sq"]),
        "optimizer.state.2.exp_avg_sq: 1 of 6 values differ, by at most ",
    ),
    "its settings": (
        lambda s: s["optimizer"]["param_groups"][0].update(lr=0.5),
        "optimizer.param_groups.0.lr: 0.5, not 0.001",
    ),
    "the scaler": (lambda s: s["scaler"].update(scale=512.0), "scaler.scale: 512.0, not 1024.0"),
    "a lost counter": (lambda s: s.pop("update"), "update: None, not 10"),
    "a lost tensor": (lambda s: s["model"].pop("0.bias"), "model.0.bias: 'missing', not torch.float32 (3,)"),
    "another precision": (
        lambda s: s["model"].update({"0.bias": s["model"]["0.bias"].double()}),
        "model.0.bias: torch.float64 (3,), not torch.float32 (3,)",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_difference_in_the_checkpoint_is_found(tmp_path, case):
    change, expected = STATES[case]
    found = compare_runs(write_run(tmp_path / "a"), write_run(tmp_path / "b", change_state=change))
    assert len(found) == 1 and found[0].startswith(f"checkpoint.{expected}")


def test_a_bit_of_the_weights_and_a_file_that_cannot_be_read(tmp_path):
    right = write_run(tmp_path / "a")
    found = write_run(tmp_path / "b", change_weights=lambda weights: flip(weights["0.weight"]))
    texts = compare_runs(right, found)
    assert [text.split(":")[0] for text in texts] == ["weights.0.weight", "best_weights.0.weight"]
    found.weights.write_bytes(right.weights.read_bytes()[:-100])
    assert compare_runs(right, found)[0].startswith("weights: cannot be read")
    found.best_weights.unlink()
    assert compare_runs(right, found)[1].startswith("best_weights: cannot be read")


def test_every_bit_counts():
    nan = torch.tensor([float("nan"), 1.0])
    assert differences(nan, nan.clone(), "x") == []
    assert differences(nan, torch.ones(2), "x") == ["x: 1 of 2 values differ, by at most inf"]
    assert differences(torch.zeros(2), -torch.zeros(2), "x") == ["x: 2 of 2 values differ, by at most 0"]
    assert differences(0.0, -0.0, "x") and differences(1, 1.0, "x") and differences(True, 1, "x")
    assert differences([1, (2, None)], [1, (2, None)], "x") == [] and differences([1], [1, 2], "x")
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float64):
        for shape in ((), (0,), (2, 3)):
            tensor = torch.ones(shape, dtype=dtype)
            assert differences(tensor, tensor.clone(), "x") == []
            assert len(differences(tensor, torch.zeros_like(tensor), "x")) == (tensor.numel() > 0)


# --- running and killing


@pytest.fixture
def run(tmp_path):
    """A run whose command a test replaces."""
    (tmp_path / "killed").mkdir()
    return Run("sft", 1, 0, tmp_path, "killed", [])


FAMILY = """
import multiprocessing, os, pathlib, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
depth = int(sys.argv[1])
pathlib.Path(sys.argv[2], str(os.getpid())).touch()
for _ in range(2 if depth else 0):
    command = [sys.executable, *sys.orig_argv[1:3], str(depth - 1), sys.argv[2]]
    subprocess.Popen(command, start_new_session=True)
time.sleep(600)
"""


def test_a_kill_leaves_no_process(run, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    run.command = [sys.executable, "-c", FAMILY, "2", str(pids)]
    started = Launch(run)
    assert started.wait(lambda: len(list(pids.iterdir())) == 7, seconds=60) and len(list(pids.iterdir())) == 7
    processes = [psutil.Process(int(path.name)) for path in pids.iterdir()]
    started.close()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    assert started.result(killed=True).startswith("before training after")
    started.close()  # a second time changes nothing


def test_a_hung_run_ends(run, monkeypatch):
    monkeypatch.setattr(launches, "TIMEOUT", 0.5)
    run.command = [sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(600)"]
    begin = time.monotonic()
    with pytest.raises(SystemExit, match=r"FAIL: no output for(.|\n)*so far"):
        train(run, [])
    assert time.monotonic() - begin < 30 and run.launches == 1
    commands = [child.as_dict(["cmdline"], ad_value=[])["cmdline"] for child in psutil.Process().children()]
    assert not [words for words in commands if "so far" in " ".join(words)]


@pytest.mark.parametrize("kills", [[], [Kill("start", 0, 1.0)], [Kill("update", 3, 0.5)]])
def test_a_run_that_fails_by_itself_is_told_with_its_last_lines(run, kills):
    run.command = [sys.executable, "-c", "import sys; sys.exit('something is wrong')"]
    with pytest.raises(
        SystemExit, match=r"FAIL: a launch ended by itself with status 1;(.|\n)*something is wrong"
    ):
        train(run, kills, 600.0, 1.0)


def test_a_run_that_starts_over_instead_of_resuming_is_found(run, monkeypatch):
    """It would reach the same bits in the end."""
    monkeypatch.setattr(run, "saved_update", lambda: 12)
    record = json.dumps({"update": 13, "samples": "long " * 2000})  # as those of rollouts are
    script = (
        f"import pathlib, sys; pathlib.Path(sys.argv[1]).write_text({record!r} + '\\n'); print(sys.argv[2])"
    )
    resumed = "resuming full_sft at epoch 2, update 12 of 45"
    run.command = [sys.executable, "-c", script, str(run.metrics), resumed]
    train(run, [])
    assert run.last_update() == 13
    shutil.rmtree(run.weights.parent)
    run.command[-1] = "new run: "
    with pytest.raises(SystemExit, match="FAIL: checkpoint of update 12, but the run resumed from"):
        train(run, [])


# --- the script


def call(monkeypatch, *flags) -> None:
    """The script in this process."""
    monkeypatch.setattr(sys, "argv", ["verify_resume.py", *map(str, flags)])
    with one_line_errors():
        verify_resume.main()


MISTAKES = {
    "no kill for a combination": (["--kills", 3, "--ranks", "1,2", "--use_moe", "0,1"], "--kills at least"),
    "no rank": (["--ranks", 0], "--ranks must be 1 or more"),
    "no number": (["--ranks", "one"], "argument --ranks"),
    "a stage's own flag": (["--", "--bath_size", 4], "--bath_size"),
    "impossible settings": (
        ["--", "--epochs", 0, "--hidden_size", 17],
        "--hidden_size must be a multiple of 16, not '17'; --epochs must be greater than or equal to 1, not '0'",
    ),
    "a flag of this script": (["--", "--use_moe", 1], "--use_moe goes before the --"),
    "a folder that is there": (["--work_dir", ROOT], "cannot be created (File exists); give a new folder"),
    "a folder in a file": (["--work_dir", ROOT / "README.md" / "x"], "cannot be created (Not a directory)"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(monkeypatch, capsys, case):
    flags, expected = MISTAKES[case]
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, *flags)
    captured = capsys.readouterr()
    assert end.value.code == 2 and not captured.out
    assert captured.err.startswith("error: ") and expected in captured.err and captured.err.count("\n") == 1


def new_seed() -> int:
    return random.SystemRandom().randrange(10**6)


JOIN = """
os.setsid()
out = os.open({path!r}, os.O_WRONLY | os.O_APPEND)  # a terminal becomes that of the new session
[os.dup2(out, number) for number in (1, 2)]
"""


class Forked(psutil.Process):
    """In the place of psutil.Popen: a process in a session of its own that has torch loaded."""

    def __init__(self, command, stdout, **_):
        path = f"/proc/{os.getpid()}/fd/{stdout if isinstance(stdout, int) else stdout.fileno()}"
        self.started = StageProcess(command[1], command[2:], Faults(script=JOIN.format(path=path))).process
        super().__init__(self.started.pid)
        target = os.stat(path)
        while self.poll() is None and not os.path.samestat(os.stat(f"/proc/{self.pid}/fd/2"), target):
            time.sleep(0.001)

    def poll(self) -> int | None:
        self.returncode = self.started.exitcode
        return self.returncode

    def wait(self, timeout=None) -> int | None:
        self.started.join(timeout)
        return self.poll()


def test_one_rank_killed_at_random_moments(monkeypatch, capsys):
    """A failure shows the seed that draws the same kills again."""
    seed = new_seed()
    monkeypatch.setattr(psutil, "Popen", Forked)
    monkeypatch.setattr(verify_resume, "UPDATES", 24)
    try:
        call(monkeypatch, "--kills", 2, "--seed", seed)
    except SystemExit as end:
        pytest.fail(f"--kills 2 --seed {seed}: {capsys.readouterr()} {end.code}")
    said = capsys.readouterr().out
    assert re.search(rf"PASS: [12] of 2 kills, 0 differing bits \(.*--seed {seed}, ", said)
    assert not Path(re.search(r", in (\S+)", said)[1]).exists()


@pytest.mark.slow  # one rank is killed above, and the ranks of each stage in tests of their own
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_of_a_mixture_of_experts_killed_at_a_random_moment(monkeypatch, capsys, tmp_path, parallel):
    seed = new_seed()
    monkeypatch.setattr(verify_resume, "UPDATES", 18)
    small = ["--", "--num_hidden_layers", 1, "--packing", 1, "--parallel", parallel]
    flags = ["--stage", "pretrain", "--kills", 1, "--ranks", 2, "--use_moe", 1, "--seed", seed]
    try:
        call(monkeypatch, *flags, "--work_dir", tmp_path / "work", *small)
    except SystemExit as end:
        pytest.fail(f"{flags} {small}: {capsys.readouterr()} {end.code}")
    assert re.search(r"PASS: 1 of 1 kills, 0 differing bits", capsys.readouterr().out)
    runs = tmp_path / "work/ranks_2_moe_1"  # a named folder is kept
    assert len(list(runs.glob("*/save/pretrain_64_moe.pth"))) == 2
    assert len(list(runs.glob("*/checkpoint/pretrain_64_moe_resume.pth"))) == 2
