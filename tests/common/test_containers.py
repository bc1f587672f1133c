"""What control groups of both versions leave a process, in folders like those that Linux shows."""

import math
import os

import pytest
import torch

from common import containers
from common.containers import available_cores, cpu_quota, memory_left
from scripts.planning import machine
from trainer.devices import device


@pytest.fixture
def process(tmp_path):
    """A function that makes /proc/self and the groups: (lines of `cgroup`; mounts as (root, point, kind, options);
    files of groups) -> the folder of the process."""

    def make(cgroup: str, mounts: list[tuple[str, str, str, str]], files: dict[str, str]):
        lines = ["23 1 0:20 / / rw,relatime - overlay overlay rw"]
        for root, point, kind, options in mounts:
            lines.append(f"31 23 0:29 {root} {tmp_path}/sys/{point} rw shared:9 - {kind} {kind} rw,{options}")
        for name, text in files.items():
            (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "sys" / name).write_text(text)
        folder = tmp_path / "self"
        folder.mkdir()
        (folder / "cgroup").write_text(cgroup)
        (folder / "mountinfo").write_text("\n".join(lines) + "\n")
        return folder

    return make


V2 = [("/", "", "cgroup2", "nsdelegate")]
V1 = [("/", "cpu,cpuacct", "cgroup", "cpu,cpuacct"), ("/", "systemd", "cgroup", "name=systemd")]
OWN_V1 = [
    ("/docker/9f", "cpu,cpuacct", "cgroup", "cpu,cpuacct"),
    ("/docker/9f", "cpuset", "cgroup", "cpuset"),
]
QUOTAS = {
    "docker --cpus 2, which sees its own group": ("0::/\n", V2, {"cpu.max": "200000 100000\n"}, 2.0),
    "nothing set": ("0::/\n", V2, {"cpu.max": "max 100000\n"}, math.inf),
    "half a core": ("0::/\n", V2, {"cpu.max": "50000 100000\n"}, 0.5),
    "a group around": (
        "0::/pod/job\n",
        V2,
        {"pod/cpu.max": "150000 50000", "pod/job/cpu.max": "max 100000", "cpu.max": "max 100000"},
        3.0,
    ),
    "a smaller one within": (
        "0::/pod/job\n",
        V2,
        {"pod/cpu.max": "400000 100000", "pod/job/cpu.max": "250000 100000"},
        2.5,
    ),
    "outside of what is mounted": ("0::/../../other\n", V2, {"cpu.max": "100000 100000"}, 1.0),
    "version 1": (
        "4:cpu,cpuacct:/pod/job\n1:name=systemd:/x\n",
        V1,
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/pod/cpu.cfs_quota_us": "600000",
            "cpu,cpuacct/pod/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/pod/job/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/pod/job/cpu.cfs_period_us": "100000",
        },
        6.0,
    ),
    "version 1, its own group mounted as the outermost": (
        "4:cpu,cpuacct:/docker/9f\n3:cpuset:/docker/9f\n",
        OWN_V1,
        {"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
        1.5,
    ),
    "version 1 beside an empty version 2": (
        "5:cpu,cpuacct:/a\n0::/\n",
        [*V1, ("/", "unified", "cgroup2", "nsdelegate")],
        {
            "unified/cgroup.procs": "1",
            "cpu,cpuacct/a/cpu.cfs_quota_us": "400000",
            "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        },
        4.0,
    ),
    "no control groups": ("", [], {}, math.inf),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_the_smallest_quota_of_all_groups_around_counts(process, case):
    cgroup, mounts, files, quota = QUOTAS[case]
    assert cpu_quota(process(cgroup, mounts, files)) == quota


def test_without_linux_there_is_no_quota(tmp_path):
    assert cpu_quota(tmp_path) == memory_left(tmp_path) == math.inf


def test_memory_of_a_group(process):
    """The pages of files that are not in use can be forgotten, and do not count."""
    files = {"a/memory.max": "max", "memory.max": "4000", "memory.current": "3000", "a/memory.current": "9"}
    stat = "anon 2400\ninactive_file 500\nactive_file 100\n"
    assert memory_left(process("0::/a\n", V2, files | {"memory.stat": stat})) == 4000 - 3000 + 500


def test_memory_of_a_group_of_version_1(process, monkeypatch):
    files = {"memory.limit_in_bytes": "4000", "memory.usage_in_bytes": "3000"}
    files["memory.stat"] = "inactive_file 1\ntotal_inactive_file 500\n"
    mounts = [("/docker/9f", "memory", "cgroup", "memory")]
    folder = process(
        "8:memory:/docker/9f\n", mounts, {f"memory/{name}": text for name, text in files.items()}
    )
    assert memory_left(folder) == 1500
    monkeypatch.setattr(machine, "memory_left", lambda: memory_left(folder))
    assert machine.free_memory(torch.device("cpu")) == machine.MEMORY_SHARE * 1500


@pytest.mark.parametrize(
    ("quota", "told", "threads"),
    [(math.inf, None, 64), (2.5, None, 3), (0.5, None, 1), (64.0, None, 64), (2.0, "8", 64)],
)
def test_torch_takes_no_more_threads_than_the_quota_gives(monkeypatch, quota, told, threads):
    """Where there is none, or OMP_NUM_THREADS says how many, it keeps those that it has."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    taken = [64]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: taken[-1])
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    for module in (containers, device):
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    device.prepare_device(torch.device("cpu"))
    assert taken[-1] == threads and len(taken) == 1 + (threads != 64)
    assert available_cores() == min(64, math.ceil(min(quota, 64)))
