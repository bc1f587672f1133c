"""The engine as a user runs it: the numbers of the stage scripts, with one process and several, killed and
resumed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from tests.conftest import ROOT
from tests.stage_process import FORKED, Faults, StageProcess, run
from tests.trainer.stage_flags import flags, records, saved_state
from trainer.report.metrics import read_metrics


def regression(folder, **extra) -> list[str]:
    """A short regression run; `extra` replaces its settings."""
    settings = {"task": "regression", "save_dir": folder / "out", "checkpoint_dir": folder / "checkpoints"}
    settings |= {"epochs": 6, "log_interval": 1, "num_samples": 320, "device": "cpu", "seed": 3}
    return [part for key, value in (settings | extra).items() for part in (f"--{key}", str(value))]


NAME = "regression_64"


def test_regression_finds_its_solution_whoever_starts_the_processes(tmp_path):
    """One process, two started by the engine, two of torchrun: the same validation loss for the same global
    batch."""
    losses = {}
    for name, batch_size, world_size in (("one", 32, 1), ("engine", 16, 2), ("torchrun", 16, 2)):
        settings = {"batch_size": batch_size, "world_size": world_size, "epochs": 5, "num_samples": 1280}
        argv = regression(tmp_path / name, **settings)
        forked = Faults(script=FORKED) if name == "engine" else None
        out = run("engine", argv, forked, ranks=world_size if name == "torchrun" else 1).out
        found = read_metrics(tmp_path / name / f"out/{NAME}_metrics.jsonl")
        losses[name] = [record["eval_loss"] for record in found if "eval_loss" in record]
        assert out.count("done: 160 updates") == 1
    # there is no noise
    assert len(losses["one"]) == 5 and losses["one"][-1] < min(0.005, losses["one"][0] / 10)
    for name in ("engine", "torchrun"):
        assert losses[name] == pytest.approx(losses["one"], abs=1e-5)


def test_what_the_machine_lacks_is_told_before_the_data_are_prepared(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", device="tpu9", world_size=2, cache_dir=tmp_path / "cache")
    (line,) = run("engine", ["--task", "pretrain", *argv], status=2).error_lines
    assert line.startswith("error: --device tpu9 is unknown; use auto, cpu") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("start", ["forked", pytest.param("as typed", marks=pytest.mark.slow)])
def test_two_processes_that_the_engine_starts_stop_together_at_a_signal(tmp_path, start):
    """The signal is passed on; the state is saved; nobody is left. As typed, they are spawned."""
    import psutil

    log = tmp_path / "run.log"
    argv = regression(tmp_path, world_size=2, batch_size=2, epochs=300, log_interval=50, log_file=log)
    path = tmp_path / f"out/{NAME}_metrics.jsonl"

    def children_at_the_signal(pid: int, is_alive: Callable[[], bool]) -> list[psutil.Process]:
        while len(read_metrics(path)) < 2 and is_alive():
            time.sleep(0.05)
        found = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGTERM)
        return found

    if start == "forked":
        forked = StageProcess("engine", argv, Faults(script=FORKED))
        children = children_at_the_signal(forked.process.pid, forked.process.is_alive)
        status, out, err = forked.wait(60), forked.out, forked.err
    else:
        command = [sys.executable, "-m", "llm.training.train", *argv]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        children = children_at_the_signal(process.pid, lambda: process.poll() is None)
        (out, err), status = process.communicate(timeout=60), process.returncode
    assert len(children) >= 2 and status == 143, err
    said = [line for line in err.splitlines() if line.startswith("stopped: by SIGTERM after update")]
    assert len(said) == 1 and "Traceback" not in err
    logged = [line[28:] for line in log.read_text().splitlines()]
    # without Python's own warning, of one line or with the line of code behind it
    err = re.sub(r".*resource_tracker.*\n(  warnings\.warn\(\n)?", "", err)
    shown = out.splitlines() + err.splitlines()
    assert sorted(logged) == sorted(shown)
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert saved_state(tmp_path, NAME)["update"] == int(re.search(r"after update (\d+)", said[0])[1])


def test_what_is_kept(tmp_path):
    """The last K numbered states, the newest and the best; the best one is the best by the monitored
    metric."""
    settings = {"keep_every": 3, "keep_last": 2, "mode": "max", "epochs": 5, "noise": 0.5}
    run("engine", regression(tmp_path, **settings, learning_rate=0.05))
    metrics = read_metrics(tmp_path / f"out/{NAME}_metrics.jsonl")
    held_out = {record["update"]: record["eval_loss"] for record in metrics if "eval_loss" in record}
    best = max(held_out, key=held_out.get)
    folder = tmp_path / "checkpoints"
    last = saved_state(tmp_path, NAME)["update"]
    assert last == 40 == max(held_out)
    kept = {int(path.stem[-8:]) for path in folder.glob(f"{NAME}_update_*.pth")}
    numbered = list(range(3, last + 1, 3))
    assert kept == set(numbered[-2:]) | ({best} & set(numbered))
    best_state = torch.load(folder / f"{NAME}_best_resume.pth", weights_only=True)
    assert best_state["update"] == best
    weights = torch.load(tmp_path / "out/regression_best_64.pth", weights_only=True)
    assert all(torch.equal(value.half(), weights[key]) for key, value in best_state["model"].items())
    assert not list(folder.glob("*.tmp"))


def test_a_sharded_run_resumes_from_a_numbered_state(tmp_path):
    """Two ranks with a model without blocks, whose last parameters have fewer rows than there are ranks."""
    settings = {"keep_every": 4, "keep_last": 100, "epochs": 2}
    run("engine", regression(tmp_path / "whole", **settings))
    argv = regression(tmp_path / "parts", **settings, parallel="fsdp", batch_size=16)
    run("engine", argv, ranks=2)
    folder = tmp_path / "parts/checkpoints"
    assert len(list(folder.glob(f"{NAME}_update_000000??.pth"))) == 4
    assert (folder / f"{NAME}_best_resume.pth").exists()
    (folder / f"{NAME}_resume_previous.pth").unlink()
    os.replace(folder / f"{NAME}_update_00000008.pth", folder / f"{NAME}_resume.pth")
    assert "update 8 of 16" in run("engine", [*argv, "--from_resume", "1"], ranks=2).out
    one, other = (records(tmp_path / name, NAME) for name in ("whole", "parts"))
    assert len(one) == len(other) == 16
    for a, b in zip(one, other, strict=True):
        assert a[:2] == b[:2]
        assert (a[2], a[8]) == pytest.approx((b[2], b[8]), abs=1e-5)


def test_from_the_engine_to_a_script_and_back(corpus, tmp_path):
    """A script without early stopping says so; other settings are refused, but for the metric."""
    argv = flags(corpus, tmp_path, "pretrain", eval_interval=4, from_resume=1)
    typed = ["--task", "pretrain", *argv]
    run("engine", [*typed, "--patience", "9"], Faults(signals={5: signal.SIGTERM}), status=143)
    assert saved_state(tmp_path)["callbacks"]["EarlyStopping"]["best"] > 0
    lines = run("pretrain", argv, Faults(signals={2: signal.SIGTERM}), status=143).error_lines
    assert "this run does not have: EarlyStopping" in lines[0]
    other = [*typed, "--seed", "7"]
    assert "seed: 42 -> 7" in run("engine", other, status=2).error_lines[-1]
    assert "resuming pretrain" in run("engine", [*typed, "--monitor", "eval_bpb"]).out
