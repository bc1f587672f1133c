"""Checks of several processes: they reach each other, and their gradients are those of one."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.gpu import parts

pytestmark = pytest.mark.slow


def run(work: str, ranks: int, device: torch.device, parallel: str, folder: Path, limit: float) -> Any:
    """What tests/gpu/ranks.py returns on rank 0. Fails with what NCCL says if a rank fails, or if they are not
    done within `limit` seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += ["-m", "tests.gpu.ranks", work, str(folder), device.type, parallel]
    environment = os.environ | {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
    with open(folder / "log", "w+", errors="replace") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = f"status {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            end = f"no end within {limit:.0f} s"
            process.terminate()
            process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    causes = [line for line in lines if re.search(r"NCCL WARN|Error: |^error: ", line)]
    assert end == "status 0", f"{work}: {end}; {' | '.join(causes[:4] or lines[-1:])}"
    return torch.load(folder / "result")


def test_all_reduce(ranks, device, tmp_path, record_property):
    """All GPUs of this machine sum a tensor. What several of them do needs it, and hangs where they do not
    reach each other."""
    record_property("ranks", ranks)
    record_property("GB/s", run("all_reduce", ranks, device, "ddp", tmp_path, 90))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_of_ranks(parallel, ranks, device, tmp_path, record_property):
    """Those of several processes are those of stock transformers; also with --activation_checkpointing 1."""
    record_property("ranks", ranks)
    for case, found in run("gradients", ranks, device, parallel, tmp_path, 350).items():
        shape, dtype, recomputed = case
        parts.check_gradients(found, shape, dtype, record_property, ", recomputed" * recomputed)
