"""The SLURM job file, with stand-ins for SLURM's commands on one machine and the real torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.stage_process import run
from tests.trainer.stage_flags import assert_same_run, flags
from trainer.components.metrics import read_metrics

COMMANDS = {
    "srun": 'shift\necho $$ > step\nexec "$@"\n',  # one node: torchrun itself; without --kill-on-bad-exit
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > requeued; else echo 127.0.0.1; fi\n',
    "scancel": '[ "$*" = "--signal=TERM 77" ]\nkill -TERM "$(cat step)"\n',
}
NODE = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node"}


def submit(folder: Path, data: Path, cache: Path, port: int, argv: list[str]) -> subprocess.Popen:
    """Run the job file as SLURM does."""
    env = os.environ | NODE | {"SLURM_SUBMIT_DIR": str(folder), "DATA": str(data), "CACHE": str(cache)}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env |= {"RANKS_PER_NODE": "2", "MASTER_PORT": str(port), "PATH": path}
    with open(folder / "job.log", "a") as log:
        return subprocess.Popen(["bash", ROOT / "scripts/slurm.sh", *argv], env=env, stdout=log, stderr=log)


def wait_for(updates: int, folder: Path, job: subprocess.Popen) -> None:
    """Wait until the metrics file holds that many updates."""
    while not any(r["update"] >= updates for r in read_metrics(folder / "run/out/pretrain_32_metrics.jsonl")):
        assert job.poll() is None, (folder / "job.log").read_text()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_job_restarts_a_killed_rank_and_is_queued_again_at_its_time_limit(corpus, tmp_path):
    """A rank is killed: torchrun starts the ranks again. USR1: they save, and the job is requeued. It goes on to the
    end, and the result is that of a run that nothing happened to."""
    for name, script in COMMANDS.items():
        (tmp_path / name).write_text("#!/usr/bin/env bash\nset -e\n" + script)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    for name in ("trainer", "dataset", "common", "model"):
        (tmp_path / name).symlink_to(ROOT / name)
    settings = {"epochs": 16, "save_interval": 6, "eval_data_path": None}
    argv = flags(corpus, tmp_path / "run", "pretrain", **settings)
    job = submit(tmp_path, corpus["pretrain"], corpus["cache"], 29611, argv)
    wait_for(10, tmp_path, job)
    launcher = int((tmp_path / "step").read_text())
    ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGKILL)
    before = len(read_metrics(tmp_path / "run/out/pretrain_32_metrics.jsonl"))
    wait_for(before + 10, tmp_path, job)
    os.kill(job.pid, signal.SIGUSR1)
    assert job.wait(60) != 0 and (tmp_path / "requeued").read_text() == "77\n"
    said = (tmp_path / "job.log").read_text()
    assert "resuming pretrain at epoch" in said and "which is saved" in said, said
    (logs,) = (tmp_path / "out/logs/77/node_0").glob("*/attempt_0")
    assert {path.name for path in logs.iterdir()} >= {"0", "1"}
    job = submit(tmp_path, corpus["pretrain"], corpus["cache"], 29612, argv)
    assert job.wait(120) == 0, (tmp_path / "job.log").read_text()
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings), ranks=2)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
