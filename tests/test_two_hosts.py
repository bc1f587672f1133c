"""Two hosts: network namespaces joined by a cable (a veth pair), a rank on each. The cable is pulled out
while they train; both end soon and say what to do; it is plugged in again, and the same commands go on as if
nothing had been."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.stage_process import Faults, StageProcess
from tests.trainer.stage_flags import assert_same_run, flags, saved_state
from trainer.report.metrics import read_metrics

RANK_TIMEOUT = 4  # seconds
ADDRESS = {"MASTER_ADDR": "10.77.0.1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "cable"}
# The two hosts share this machine's cores: one thread each, and none that spins while it waits.
ADDRESS |= {"LOCAL_WORLD_SIZE": "2", "OMP_WAIT_POLICY": "PASSIVE"}
ENTER = """
import ctypes
namespace = os.open("/run/netns/{host}", os.O_RDONLY)
assert ctypes.CDLL(None, use_errno=True).setns(namespace, 0x40000000) == 0  # CLONE_NEWNET; os.setns: Python 3.12
"""


def ip(*words: str) -> str:
    """Run iproute2's `ip`; returns what is wrong, or nothing."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False).stderr


@pytest.fixture
def hosts():
    """The names of two hosts that reach each other as 10.77.0.1 and 10.77.0.2, and nobody else."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs Linux, root and the command `ip` (package iproute2)")
    names = [f"minimind-{os.getpid()}-{number}" for number in (1, 2)]
    try:
        why = "".join(ip("netns", "add", name) for name in names)
        pair = f"type veth peer name cable netns {names[1]}"
        why += ip("link", "add", "cable", "netns", names[0], *pair.split())
        if why:
            pytest.skip(f"network namespaces are not permitted here: {why.splitlines()[0]}")
        for number, name in enumerate(names, 1):
            assert not ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            assert not ip("-n", name, "link", "set", "lo", "up")
            assert not ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            command = ["ip", "netns", "pids", name]
            left = subprocess.run(command, capture_output=True, text=True, check=False)
            for pid in left.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            ip("netns", "delete", name)


def start(hosts: list[str], argv: list[str], port: int, late: float = 0.0) -> list[StageProcess]:
    """A rank on each host, as torchrun starts them; the second one's process group `late` seconds after the
    first's."""
    wait = "import time, trainer.train_pretrain as stage\nmeet = stage.utils.init_distributed_mode\n"
    wait += f"stage.utils.init_distributed_mode = lambda *args: time.sleep({late}) or meet(*args)\n"
    scripts = [ENTER.format(host=hosts[0]), ENTER.format(host=hosts[1]) + wait]
    env = {**ADDRESS, "MASTER_PORT": str(port)}
    return [StageProcess("pretrain", argv, Faults(script=scripts[r]), RANK=str(r), **env) for r in (0, 1)]


def cut_after(records: int, hosts: list[str], metrics, is_alive) -> float:
    """Pull the cable out once the metrics file holds that many records; returns the time."""
    while len(read_metrics(metrics)) < records:
        assert is_alive()
        time.sleep(0.02)
    assert not ip("-n", hosts[1], "link", "set", "cable", "down")
    return time.monotonic()


@pytest.mark.slow
def test_a_host_is_cut_off_and_comes_back(hosts, corpus, tmp_path):
    settings = {"epochs": 15, "batch_size": 4, "save_interval": 5, "eval_interval": 50}
    settings |= {"rank_timeout": RANK_TIMEOUT}
    argv = flags(corpus, tmp_path, "pretrain", **settings, from_resume=1)
    ranks = start(hosts, argv, 29500, late=RANK_TIMEOUT + 1)  # whoever still tokenises is not lost
    metrics = tmp_path / "out/pretrain_32_metrics.jsonl"
    begin = cut_after(10, hosts, metrics, lambda: all(rank.process.is_alive() for rank in ranks))
    assert [rank.wait(RANK_TIMEOUT + 30) for rank in ranks] == [2, 2]
    assert time.monotonic() - begin > RANK_TIMEOUT - 1  # it was the time-out that told, not the system
    for number, rank in enumerate(ranks):
        lost = ("rank 1", "another rank")[number]  # the place where the ranks meet is on the first host
        assert rank.error_lines[-1].startswith(f"error: rank {number}: {lost}")
        assert "ended while this one waited for it, hangs" in rank.error_lines[-1]
        assert "--from_resume 1 continues" in rank.error_lines[-1] and "Traceback" not in rank.err
    done = saved_state(tmp_path)["update"]
    assert 5 <= done < 120
    assert not ip("-n", hosts[1], "link", "set", "cable", "up")
    ranks = start(hosts, argv, 29501)
    assert [rank.wait(60) for rank in ranks] == [0, 0], ranks[0].err
    assert f"update {done} of 120" in ranks[0].out
    whole = start(hosts, flags(corpus, tmp_path / "whole", "pretrain", **settings), 29502)
    assert [rank.wait(60) for rank in whole] == [0, 0]
    assert_same_run(tmp_path / "whole", tmp_path)


@pytest.mark.slow
def test_torchrun_on_each_host_ends_as_well(hosts, corpus, tmp_path):
    """README's commands: with --node_rank the launchers do not depend on each other, and none hangs."""
    settings = {"epochs": 300, "batch_size": 4, "rank_timeout": RANK_TIMEOUT, "eval_interval": 500}
    argv = flags(corpus, tmp_path, "pretrain", **settings)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    command += ["--master_addr", "10.77.0.1", "--master_port", "29500", "--node_rank"]
    run = {"env": {**os.environ, **ADDRESS}, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    run |= {"text": True}
    launchers = []
    for number, host in enumerate(hosts):
        line = ["ip", "netns", "exec", host, *command, str(number), str(ROOT / "trainer/train_pretrain.py")]
        line += [*argv]
        launchers.append(subprocess.Popen(line, **run))
    metrics = tmp_path / "out/pretrain_32_metrics.jsonl"
    cut_after(10, hosts, metrics, lambda: all(launcher.poll() is None for launcher in launchers))
    said = [launcher.communicate(timeout=60)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [1, 1]
    for number, text in enumerate(said):
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        assert line.startswith(f"error: rank {number}: ") and "ended while this one waited" in line
