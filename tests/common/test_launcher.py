"""Which process of a run this is, from torchrun's variables; and a rank that ends with torchrun."""

import signal
import time

import psutil
import pytest

from common.launcher import Launch, launch
from tests.conftest import ROOT
from tests.stage_process import run, torchrun
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


def test_a_stage_says_so_in_one_line(corpus, tmp_path):
    process = run("pretrain", flags(corpus, tmp_path, "pretrain"), status=2, RANK="0", WORLD_SIZE="2")
    (line,) = process.error_lines
    assert line.startswith("error: RANK=0, WORLD_SIZE=2 without LOCAL_RANK")


def test_ranks_save_and_end_with_a_torchrun_that_is_killed(corpus, tmp_path):
    """kill -9 tells torchrun nothing; the kernel tells the ranks."""
    argv = flags(corpus, tmp_path, "pretrain", epochs=500, save_interval=10**6)
    launcher = torchrun(ROOT / "trainer/train_pretrain.py", argv)
    metrics = tmp_path / "out/pretrain_32_metrics.jsonl"
    ranks: list[psutil.Process] = []
    deadline = time.monotonic() + 240
    while not (len(ranks) == 2 and metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < deadline, "no update yet"
        ranks = psutil.Process(launcher.process.pid).children()
        time.sleep(0.05)
    launcher.send(signal.SIGKILL)
    assert psutil.wait_procs(ranks, timeout=15)[1] == []
    assert launcher.wait() == -signal.SIGKILL
    assert (tmp_path / "checkpoints/pretrain_32_resume.pth").exists()
