"""verify_resume finds every kind of difference, kills every process, and real runs killed at random moments
pass it."""

import json
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
from scripts.verify_resume import Kill, draw_kills, run_to_end, run_to_kill
from tests.conftest import write_jsonl
from tools.verify import launch as launches
from tools.verify.compare import compare_runs, is_same
from tools.verify.launch import WAYS, Launch, Run

# --- comparing


def write_run(folder: Path, change=lambda records, state, weights: None) -> SimpleNamespace:
    """The files of a small made-up run, after a change."""
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
    records = [{"update": update, "loss": 5 / update, "seconds": 0.5} for update in range(1, 11)]
    records[4]["loss"] = float("nan")
    change(records, state, weights)
    run = SimpleNamespace(metrics=write_jsonl(folder / "metrics.jsonl", records))
    for name, content in (("weights", weights), ("best_weights", weights), ("checkpoint", state)):
        setattr(run, name, folder / f"{name}.pth")
        torch.save(content, getattr(run, name))
    return run


def flip(tensor: torch.Tensor) -> None:
    """Turn the lowest bit of the first value."""
    tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])[0] ^= 1


def test_the_same_run_has_no_difference(tmp_path):
    def other_times(records: list[dict], state: dict, _) -> None:
        for record in records:
            record |= {"seconds": 9.9, "rollout_seconds": 1.0, "tokens_per_second": 5.0, "mfu": 0.1}
        state.update(seconds=2, world_size=2)

    assert compare_runs(write_run(tmp_path / "a"), write_run(tmp_path / "b", other_times)) == []


CHANGES = {
    "a loss": (
        lambda records, state, weights: records[6].update(loss=records[6]["loss"] + 1e-16),
        "metrics: 1 values differ, first 6.loss: 0.71428",
    ),
    "NaN in one": (
        lambda records, state, weights: records[4].update(loss=1.0),
        "metrics: 1 values differ, first 4.loss: 1.0, not nan",
    ),
    "a doubled update": (
        lambda records, state, weights: records.append(dict(records[6])),
        "metrics: 2 values differ, first 10.update: 7, not 'missing'",
    ),
    "a bit of the optimizer": (
        lambda records, state, weights: flip(state["optimizer"]["state"][2]["exp_avg_sq"]),
        "checkpoint: 1 values differ, first optimizer.state.2.exp_avg_sq: torch.float32 [2, 3] of sum ",
    ),
    "a lost counter": (
        lambda records, state, weights: state.pop("update"),
        "checkpoint: 1 values differ, first update: None, not 10",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_difference_is_found(tmp_path, case):
    change, expected = CHANGES[case]
    found = compare_runs(write_run(tmp_path / "a"), write_run(tmp_path / "b", change))
    assert len(found) == 1 and found[0].startswith(expected)


def test_a_bit_of_the_weights_and_a_file_that_cannot_be_read(tmp_path):
    right = write_run(tmp_path / "a")
    found = write_run(tmp_path / "b", lambda records, state, weights: flip(weights["0.weight"]))
    texts = compare_runs(right, found)
    assert [text.split(":")[0] for text in texts] == ["weights", "best_weights"]
    found.weights.write_bytes(right.weights.read_bytes()[:-100])
    assert compare_runs(right, found)[0].startswith("weights: cannot be read")
    found.best_weights.unlink()
    assert compare_runs(right, found)[1].startswith("best_weights: cannot be read")


def test_every_bit_counts():
    nan = torch.tensor([float("nan"), 1.0])
    assert is_same(nan, nan.clone()) and not is_same(nan, torch.ones(2))
    assert not is_same(torch.zeros(2), -torch.zeros(2)) and not is_same(0.0, -0.0) and not is_same(1, 1.0)
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float64):
        for shape in ((), (0,), (2, 3)):
            tensor = torch.ones(shape, dtype=dtype)
            assert is_same(tensor, tensor.clone())
            assert is_same(tensor, torch.zeros_like(tensor)) == (tensor.numel() == 0)


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
time.sleep(600 if depth != 1 else 0)
"""


def test_a_kill_leaves_no_process(run, tmp_path):
    """Seven processes, of which two have ended: their children are orphans."""
    pids = tmp_path / "pids"
    pids.mkdir()
    run.command = [sys.executable, "-c", FAMILY, "2", str(pids)]
    started = Launch(run)
    assert started.wait(lambda: len(list(pids.iterdir())) == 7, seconds=60) and len(list(pids.iterdir())) == 7
    processes = []
    for path in pids.iterdir():
        if psutil.pid_exists(int(path.name)):
            processes.append(psutil.Process(int(path.name)))
    assert len(processes) >= 5
    started.end("all")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    started.close()  # a second time changes nothing


def test_a_process_that_stays_after_sigterm_is_reported(run, tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "GRACE", 0.5)
    run.command = [sys.executable, "-c", FAMILY, "0", str(tmp_path)]
    started = Launch(run)
    try:
        started.wait(lambda: [path for path in tmp_path.iterdir() if path.name.isdigit()], seconds=60)
        with pytest.raises(SystemExit, match="FAIL: processes are left 0 s after SIGTERM"):
            started.end("term")
    finally:
        started.close()


def test_a_hung_run_ends(run, monkeypatch):
    monkeypatch.setattr(launches, "TIMEOUT", 0.5)
    run.command = [sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(600)"]
    begin = time.monotonic()
    with pytest.raises(SystemExit, match=r"FAIL: no output for(.|\n)*so far"):
        run_to_end(run)
    assert time.monotonic() - begin < 30
    commands = [child.as_dict(["cmdline"], ad_value=[])["cmdline"] for child in psutil.Process().children()]
    assert not [words for words in commands if "so far" in " ".join(words)]


@pytest.mark.parametrize("kill", [None, Kill(False, 600.0, "all"), Kill(True, 0.5, "all")])
def test_a_run_that_fails_by_itself_is_told_with_its_last_lines(run, kill):
    run.command = [sys.executable, "-c", "import sys; sys.exit('something is wrong')"]
    expected = r"FAIL: a launch ended by itself with status 1;(.|\n)*something is wrong"
    with pytest.raises(SystemExit, match=expected):
        run_to_end(run) if kill is None else run_to_kill(run, kill, "kill 1 of 1")


def test_a_run_that_starts_over_instead_of_resuming_is_found(run, monkeypatch):
    """It would reach the same bits in the end."""
    monkeypatch.setattr(run, "saved_update", lambda: 12)
    record = json.dumps({"update": 13, "seconds": 1.0, "samples": "long " * 2000})
    script = "import pathlib, sys; path = pathlib.Path(sys.argv[1]); path.parent.mkdir()\n"
    script += f"path.write_text({record!r} + '\\n'); print(sys.argv[2])"
    resumed = "resuming full_sft at epoch 2, update 12 of 45"
    run.command = [sys.executable, "-c", script, str(run.metrics), resumed]
    run_to_end(run)
    assert run.last_update() == 13
    shutil.rmtree(run.metrics.parent)
    run.command[-1] = "new run: "
    with pytest.raises(SystemExit, match="FAIL: there was a checkpoint of update 12, but the run began anew"):
        run_to_end(run)


def test_kills_are_spread_over_the_run_and_one_falls_within_training():
    for seed in range(50):
        for count, ranks in ((1, 1), (5, 3)):
            kills = draw_kills(random.Random(seed), count, ranks, 4.0, 10.0)
            in_training = [kill for kill in kills if kill.in_training]
            assert len(kills) == count and in_training
            assert sum(kill.seconds for kill in in_training) <= 10.0
            assert all(0 <= kill.seconds <= 4.0 for kill in kills if not kill.in_training)
    many = draw_kills(random.Random(0), 400, 2, 4.0, 10.0)
    assert {kill.way for kill in many} == set(WAYS)
    assert 250 < sum(kill.in_training for kill in many) < 350


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
    def args_of(*typed):
        return Run("sft", 1, 0, tmp_path, "killed", list(map(str, typed))).args

    assert args_of("--eval_share=0.1").eval_data_path is None
    assert args_of("--eval_data_path", "mine.jsonl").eval_data_path == "mine.jsonl"
    config = tmp_path / "run.yaml"
    config.write_text("model: {hidden_size: 48}\ndata: {data_path: mine.jsonl}\n")
    found = args_of("--config", config, "--batch_size", 3)
    assert (found.hidden_size, found.data_path, found.batch_size) == (48, "mine.jsonl", 3)


def test_no_kill_within_training_is_no_pass(monkeypatch, capsys):
    monkeypatch.setattr(verify_resume, "check", lambda *_: (2, 0))
    with pytest.raises(SystemExit, match="FAIL: no kill fell within training"):
        call(monkeypatch, "--kills", 2)
    assert "PASS" not in capsys.readouterr().out


def killed_at_random(monkeypatch, capsys, *flags) -> str:
    """What the script prints; a failure shows the seed that draws the same kills again."""
    seed = random.SystemRandom().randrange(10**6)
    try:
        call(monkeypatch, "--seed", seed, *flags)
    except SystemExit as end:
        pytest.fail(f"--seed {seed} {flags}: {capsys.readouterr()} {end.code}")
    return capsys.readouterr().out


def test_one_rank_killed_at_a_random_moment(monkeypatch, capsys):
    monkeypatch.setattr(verify_resume, "UPDATES", 24)
    told = killed_at_random(monkeypatch, capsys, "--kills", 1)
    assert "PASS: 1 of 1 kills, 1 of them in training, 0 differing bits" in told
    assert not Path(re.search(r", in (\S+)", told)[1]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_of_a_mixture_of_experts_killed_at_a_random_moment(monkeypatch, capsys, parallel):
    monkeypatch.setattr(verify_resume, "UPDATES", 18)
    flags = ["--stage", "pretrain", "--kills", 2, "--ranks", 2, "--use_moe", 1]
    small = ["--", "--num_hidden_layers", 1, "--packing", 1, "--parallel", parallel]
    assert "0 differing bits" in killed_at_random(monkeypatch, capsys, *flags, *small)
