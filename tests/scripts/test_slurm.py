"""The SLURM job file, with stand-ins for SLURM's commands on one machine and the real torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dataset import show_samples
from tests.conftest import ROOT
from tests.stage_process import run
from tests.trainer.stage_flags import assert_same_run, flags
from trainer.report.metrics import read_metrics

COMMANDS = {
    "srun": 'shift\necho $$ > step\nexec "$@"\n',  # one node: torchrun itself; without --kill-on-bad-exit
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > requeued; else echo 127.0.0.1; fi\n',
    # 120 s before it the job stops: that is in as many seconds as SECONDS_LEFT says
    "squeue": """[ "$SLURM_TIME_FORMAT $*" = "standard --noheader --job 77 --format %e" ]
date --date "+$((SECONDS_LEFT + 120)) seconds" +%Y-%m-%dT%H:%M:%S\n""",
}
NODE = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node"}


def stand_in(folder: Path, commands: dict[str, str]) -> None:
    """Put commands into a folder, and an environment that changes nothing."""
    for name, script in commands.items():
        (folder / name).write_text("#!/usr/bin/env bash\nset -e\n" + script)
        (folder / name).chmod(0o755)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()


def submit(
    folder: Path, data: Path, cache: Path, port: int, argv: list[str], seconds_left: int = 1000
) -> subprocess.Popen:
    """Run the job file as SLURM does."""
    env = os.environ | NODE | {"SLURM_SUBMIT_DIR": str(folder), "DATA": str(data), "CACHE": str(cache)}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env |= {"SECONDS_LEFT": str(seconds_left), "RANKS_PER_NODE": "2", "MASTER_PORT": str(port), "PATH": path}
    with open(folder / "job.log", "a") as log:
        return subprocess.Popen(["bash", ROOT / "scripts/slurm.sh", *argv], env=env, stdout=log, stderr=log)


def wait_for(updates: int, folder: Path, job: subprocess.Popen) -> None:
    """Wait until the metrics file holds that many updates."""
    while not any(r["update"] >= updates for r in read_metrics(folder / "run/out/pretrain_32_metrics.jsonl")):
        assert job.poll() is None, (folder / "job.log").read_text()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_job_is_queued_again_at_its_time_limit_and_restarts_a_killed_rank(corpus, tmp_path):
    """Before the time limit the ranks save and end, and the job is requeued. It goes on; a rank is killed, and
    torchrun starts the ranks again. The result is that of a run that nothing happened to."""
    stand_in(tmp_path, COMMANDS)
    for name in ("trainer", "dataset", "common", "model"):
        (tmp_path / name).symlink_to(ROOT / name)
    settings = {"epochs": 16, "save_interval": 6, "eval_data_path": None}
    argv = flags(corpus, tmp_path / "run", "pretrain", **settings)
    job = submit(tmp_path, corpus["pretrain"], corpus["cache"], 29611, argv, seconds_left=1)
    assert job.wait(60) == 0 and (tmp_path / "requeued").read_text() == "77\n"
    said = (tmp_path / "job.log").read_text()
    assert "stopped: by --stop_after 1s after update 1 of " in said, said
    (tmp_path / "requeued").unlink()
    job = submit(tmp_path, corpus["pretrain"], corpus["cache"], 29612, argv)
    wait_for(10, tmp_path, job)
    launcher = int((tmp_path / "step").read_text())
    ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGKILL)
    assert job.wait(120) == 0, (tmp_path / "job.log").read_text()
    assert (tmp_path / "job.log").read_text().count("resuming pretrain at epoch") == 2
    assert not (tmp_path / "requeued").exists()
    logs = list((tmp_path / "out/logs/77/node_0").glob("*/attempt_0"))
    assert [{path.name for path in each.iterdir()} >= {"0", "1"} for each in logs] == [True, True]
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings), ranks=2)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_the_data_are_tokenised_with_the_flags_of_the_training(corpus, tmp_path, monkeypatch):
    """So the training finds its token cache."""
    recorded = tmp_path / "recorded"
    stand_in(tmp_path, COMMANDS | {"srun": "exit 0\n", "python": f'printf "%s\\n" "$@" > {recorded}\n'})
    settings = {"cache_dir": tmp_path / "cache", "eval_data_path": None, "on_bad_data": "skip"}
    argv = [*flags(corpus, tmp_path / "run", "pretrain", **settings), "--eval_share=0.2"]
    job = submit(tmp_path, tmp_path / "other.jsonl", corpus["cache"], 29613, argv)
    assert job.wait(20) == 0, (tmp_path / "job.log").read_text()
    module, *tokenising = recorded.read_text().splitlines()[1:]
    assert module == "dataset.show_samples"
    monkeypatch.setattr(sys, "argv", ["show_samples", *tokenising])
    show_samples.main()
    caches = sorted((tmp_path / "cache").glob("*/meta.json"))
    assert len(caches) == 2  # what is trained, and what is held out
    run("pretrain", argv)
    assert sorted((tmp_path / "cache").glob("*/meta.json")) == caches
