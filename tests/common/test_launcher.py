"""Which process of a run this is: the variables of each launcher, whole, in part, contradictory or
unreadable."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from itertools import combinations

import psutil
import pytest

from common.launcher import Launch, launch
from tests.conftest import ROOT, write_jsonl

PLACE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"} | PLACE
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
BATCH_SCRIPT |= {"SLURM_NODEID": "0"}
SRUN = BATCH_SCRIPT | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
OPEN_MPI = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}  # MPICH, Intel MPI
SPLIT_SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}  # one launcher per node


@pytest.mark.parametrize(
    "environment, place",
    [
        ({}, Launch()),
        (TORCHRUN, Launch(5, 8, 1, 4)),
        (TORCHRUN | SPLIT_SRUN, Launch(5, 8, 1, 4)),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, Launch()),
        ({"WORLD_SIZE": "1"}, Launch()),
        ({"WORLD_SIZE": "1", "RANK": "0"} | PLACE, Launch()),  # a cluster operator with one pod
        ({"WORLD_SIZE": "1"} | SRUN, Launch()),  # wanted: each by itself
        ({"WORLD_SIZE": "", "RANK": ""}, Launch()),
        ({"LOCAL_WORLD_SIZE": "4"} | PLACE, Launch()),
        (BATCH_SCRIPT | PLACE, Launch()),
        (SRUN | PLACE, Launch(5, 8, 1, 1)),
        (SRUN | PLACE | {"SLURM_NTASKS_PER_NODE": "4"}, Launch(5, 8, 1, 4)),
        (OPEN_MPI | PLACE, Launch(5, 8, 1, 4)),
        (HYDRA | PLACE, Launch(5, 8, 1, 4)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"} | SRUN | PLACE, Launch(5, 8, 1, 1)),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, Launch()),
    ],
)
def test_the_place_of_a_process(environment, place):
    assert launch(environment) == place


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
PARTS = [chosen for count in (1, 2) for chosen in combinations(NAMES, count)]


@pytest.mark.parametrize("given", PARTS)
@pytest.mark.parametrize("more", [{}, PLACE, {"MASTER_ADDR": "node1"}])
def test_part_of_the_variables_is_refused_with_the_names_of_the_others(given, more):
    found = launch({name: TORCHRUN[name] for name in given} | more)
    assert found[:4] == Launch()[:4]
    told, missing = found.problem.split(" without ")
    assert told == ", ".join(f"{name}={TORCHRUN[name]}" for name in given)
    missing = missing.split(";")[0].split(", ")
    assert set(missing) == ({*NAMES} - {*given}) | ({*PLACE} - {*more})
    assert "torchrun --nproc_per_node" in found.problem and "\n" not in found.problem


@pytest.mark.parametrize("given", PARTS)
@pytest.mark.parametrize("launcher", [SRUN, OPEN_MPI, HYDRA])
def test_the_rest_comes_from_a_launcher_that_says_the_same(given, launcher):
    part = {name: TORCHRUN[name] for name in given}
    assert launch(part | launcher | PLACE)[:3] == (5, 8, 1)
    other = {name: str(int(value) + 1) for name, value in part.items()}
    assert launch(other | launcher | PLACE).problem


@pytest.mark.parametrize(
    "environment, told",
    [
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two: not a number"),
        (TORCHRUN | {"RANK": "-1", "LOCAL_RANK": "x"}, "RANK=-1, LOCAL_RANK=x: not a number"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 with local rank 1 of 8 processes is impossible"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "of 0 processes is impossible"),
        (TORCHRUN | {"RANK": "0"}, "rank 0 with local rank 1 of 8 processes is impossible"),
        (TORCHRUN | {"MASTER_PORT": ""}, "8 processes without MASTER_PORT; export"),
        (TORCHRUN | {"MASTER_PORT": "tcp"}, "MASTER_PORT=tcp is no port"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no port"),
        (SRUN, "8 processes without MASTER_ADDR, MASTER_PORT; export"),
        (OPEN_MPI, "8 processes without MASTER_ADDR, MASTER_PORT; export"),
    ],
)
def test_what_cannot_be_is_one_line(environment, told):
    problem = launch(environment).problem
    assert told in problem and "WORLD_SIZE=1 to train in one process" in problem and "\n" not in problem


STOPPED_AT_IMPORTS = """
import os, sys

rank = os.environ.get("LOCAL_RANK")

def wait():
    open(f"waiting{rank}", "w").close()
    open(f"go{rank}").read()  # a FIFO: until the test writes

class AtTorch:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch":
            wait()

if rank == "0":
    wait()
elif rank:
    sys.meta_path.insert(0, AtTorch)
"""


def test_ranks_end_with_a_torchrun_that_is_killed_while_they_start(tmp_path):
    """One rank has not begun its first import, the other one has yet to load torch."""
    (tmp_path / "sitecustomize.py").write_text(STOPPED_AT_IMPORTS)
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": "red fox"}] * 9)
    for rank in (0, 1):
        os.mkfifo(tmp_path / f"go{rank}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(ROOT / "trainer/train_pretrain.py"), "--data_path", str(data), "--save_dir"]
    command += [str(tmp_path)]
    torchrun = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("waiting*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks = psutil.Process(torchrun.pid).children()
    ranks.sort(key=lambda rank: rank.environ()["LOCAL_RANK"])
    torchrun.kill()
    torchrun.wait()  # each of its threads that ends sends the signal again, which would end rank 0 unheard
    wait_for(ranks[1])
    (tmp_path / "go0").write_text("")
    wait_for(ranks[0])
    assert "error: the torchrun that started this process has ended" in torchrun.communicate()[1]


def wait_for(process: psutil.Process) -> None:
    """Until it has ended; an orphan may stay a zombie."""
    with suppress(psutil.NoSuchProcess):
        deadline = time.monotonic() + 20
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                process.kill()
                pytest.fail("a rank outlives its torchrun")
            time.sleep(0.02)
