"""The cores and memory that a container (a Linux control group) allows this process."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

PROCESS = Path("/proc/self")


def available_cores() -> int:
    """The number of cores that this process may use: at most those it may run on, and at most the CPU quota
    of a container (`docker run --cpus`, a limit of Kubernetes). A fraction of a core counts as one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(cores, cpu_quota()))


def cpu_quota(process: Path = PROCESS) -> float:
    """The CPU quota of a process's groups, in cores; infinite if none is set."""
    quotas = [math.inf]
    for group in groups("cpu", process):
        limit = numbers(group / "cpu.max")
        limit = limit or numbers(group / "cpu.cfs_quota_us") + numbers(group / "cpu.cfs_period_us")
        if len(limit) == 2 and min(limit) > 0:  # -1: none
            quotas.append(limit[0] / limit[1])
    return min(quotas)


def memory_left(process: Path = PROCESS) -> float:
    """Bytes that the groups of a process may still use, including cached file pages that can be dropped;
    infinite if no limit is set."""
    left = [math.inf]
    for group in groups("memory", process):
        limit = numbers(group / "memory.max") or numbers(group / "memory.limit_in_bytes")
        used = numbers(group / "memory.current") or numbers(group / "memory.usage_in_bytes")
        if limit and used:
            stat = group / "memory.stat"
            files = numbers(stat, "total_inactive_file") or numbers(stat, "inactive_file")
            left.append(limit[0] - used[0] + sum(files))
    return min(left)


def groups(controller: str, process: Path) -> Iterator[Path]:
    """The folders of a process's control group and its parent groups, if they are mounted here. They cover
    version 1, where each controller (`cpu`, `memory`) has its own folder, and version 2."""
    try:
        own = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:  # no Linux
        return
    for mount in mounts:
        root, point = mount[3], Path(mount[4])
        kind, _, options = mount[mount.index("-") + 1 :][:3]
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and controller not in options.split(",")):
            continue
        wanted = "" if kind == "cgroup2" else controller
        for path in [Path(path) for _, names, path in own if wanted in names.split(",")]:
            # a container may see its own group alone, mounted as the outermost one
            folder = point / (path.relative_to(root) if path.is_relative_to(root) else ".")
            around = [folder, *folder.parents]
            yield from around[: around.index(point) + 1]


def numbers(path: Path, name: str = "") -> list[float]:
    """The numbers in a file of a group; if its lines have names, those with this name. Empty if the file does
    not exist."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return []
    words = [line[1] for line in lines if line[0] == name] if name else sum(lines, [])
    return [math.inf if word == "max" else float(word) for word in words]
