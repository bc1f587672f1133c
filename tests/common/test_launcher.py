"""Which process of a run this is, from torchrun's variables; and a rank that ends with torchrun."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from common.launcher import Launch, launch
from tests.conftest import ROOT
from tests.stage_process import rank_variables, run
from tests.trainer.stage_flags import flags

RANK = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
RANK |= {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_the_place_of_a_process():
    assert launch({}) == launch({"MASTER_ADDR": "a", "SLURM_PROCID": "3"}) == Launch()
    assert launch(RANK) == Launch(5, 8, 1, 4)
    assert launch(RANK | {"WORLD_SIZE": "1"}) == Launch()  # one process, whoever started it


WRONG = {
    "RANK=5, WORLD_SIZE=8 without LOCAL_RANK, LOCAL_WORLD_SIZE": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "RANK=5, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4 without WORLD_SIZE": ("WORLD_SIZE",),
    "LOCAL_WORLD_SIZE=4 without MASTER_PORT": ("MASTER_PORT",),
}


@pytest.mark.parametrize("told", WRONG)
def test_half_of_the_variables_are_refused_with_a_way_out(told):
    environ = {name: value for name, value in RANK.items() if name not in WRONG[told]}
    found = launch(environ)
    assert f"{told}; start with torchrun --nproc_per_node" in found.problem and found[:4] == Launch()[:4]
    for name, value in (("RANK", "8"), ("RANK", "x"), ("LOCAL_RANK", "6")):
        assert f"{name}={value}" in launch(RANK | {name: value}).problem


def test_a_stage_says_so_in_one_line(corpus, tmp_path):
    process = run("pretrain", flags(corpus, tmp_path, "pretrain"), status=2, RANK="0", WORLD_SIZE="2")
    (line,) = process.error_lines
    assert line.startswith("error: RANK=0, WORLD_SIZE=2 without LOCAL_RANK")


def torchrun(*command: str, **env: str) -> subprocess.Popen:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen([*words, *command], env=os.environ | env, **options)


@pytest.mark.parametrize("when", ["starting", "training"])
def test_ranks_end_with_a_torchrun_that_is_killed(corpus, tmp_path, when):
    """kill -9 tells torchrun nothing; the kernel tells the ranks."""
    argv = flags(corpus, tmp_path, "pretrain", epochs=500, save_interval=10**6)
    process = torchrun(str(ROOT / "trainer/train_pretrain.py"), *argv)
    metrics = tmp_path / "out/pretrain_32_metrics.jsonl"
    ranks: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ranks = psutil.Process(process.pid).children()
        if len(ranks) == 2 and (when == "starting" or (metrics.exists() and metrics.stat().st_size)):
            break
        time.sleep(0.05)
    process.kill()
    assert psutil.wait_procs(ranks, timeout=15)[1] == []
    process.communicate()
    is_saved = (tmp_path / "checkpoints/pretrain_32_resume.pth").exists()
    assert is_saved == (when == "training")


def test_a_rank_whose_torchrun_has_ended_before_it_asks_ends_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | rank_variables(0, 2, port)
    env |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, "-c", "import common"]
    options = {"capture_output": True, "text": True, "cwd": ROOT, "start_new_session": True}
    done = subprocess.run(command, env=env, check=False, **options)
    assert done.stderr == "error: the torchrun that started this process has ended\n"
    assert done.returncode not in (0, -signal.SIGTERM)
