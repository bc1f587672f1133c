"""Makes the checks of tests/gpu, those first that tell most, prints each as it ends, and at the end a table to
send in.

scripts/gpu_check.sh starts it. With --seconds N it leaves out what does not fit into so many seconds. Other
arguments choose among the checks as pytest's do; with --collect-only it lists them.
"""

import argparse
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch

from common.errors import UserError
from trainer.checkpoint.same_run import code_version
from trainer.devices.unusable_gpu import driver, nvidia_smi, why_unseen

CODE = Path(__file__).resolve().parents[2]
ROOT = CODE
TABLE = ROOT / "out/gpu_check.md"
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
LIMIT = 400.0  # seconds for a check
PROCESS_BYTES = 6e9  # of a GPU's memory, for each process that makes checks


class Group(NamedTuple):
    """Checks that are made together, by their names without parameters."""

    name: str
    checks: tuple[str, ...]
    processes: int  # at most
    share: int  # of the time, where there is a limit


# in this order: what fails early explains what fails later
GROUPS = (
    Group("kernels", ("kernel_attention", "kernel_deterministic_attention", "kernel_matrix_product",
                      "kernel_hash_tensor", "kernel_sampling", "kernel_orthogonalized"), 1, 2),
    Group("numbers", ("attention", "gradients", "log_probabilities", "losses", "compiled"), 8, 4),
    Group("ranks", ("all_reduce", "gradients_of_ranks"), 1, 2),
    Group("speed", ("speed", "decoding_speed"), 1, 4),
    Group("resume", ("resume", "server", "resume_of_ranks"), 8, 5),
)  # fmt: skip
# what helps where a check fails
NUMBERS = "train with --dtype float32 if only half precision is wrong, else with --device cpu"
RANKS = "NCCL_DEBUG=INFO says more; try NCCL_P2P_DISABLE=1, or train on one GPU"
DECODING = "chat, serve and evaluate with --device cpu"
RESUME = "a resumed run is not that of a run without a stop: read docs/distributed.md, bitwise identical runs"
ADVICE = {"gradients": NUMBERS, "losses": NUMBERS, "attention": NUMBERS, "compiled": "--use_compile 0"}
ADVICE |= {"speed": "--use_compile 0 if compiling fails or is slower; more --num_workers if the GPU waits"}
ADVICE |= {"all_reduce": RANKS, "gradients_of_ranks": RANKS, "resume": RESUME, "resume_of_ranks": RESUME}
ADVICE |= {"log_probabilities": DECODING, "decoding_speed": DECODING, "server": DECODING}
ADVICE |= {"kernel_attention": NUMBERS, "kernel_matrix_product": NUMBERS, "kernel_sampling": DECODING}
ADVICE |= {"kernel_deterministic_attention": RESUME, "kernel_hash_tensor": RESUME}
ADVICE |= {"kernel_orthogonalized": "train with --optimizer adamw"}


@dataclass
class Check:
    """The result of one check."""

    name: str
    result: str  # passed, failed, skipped or left out
    seconds: float
    notes: str  # why it did not pass, and its figures


def check_gpu_is_seen() -> None:
    """Raise UserError where torch sees no GPU, but there is one."""
    if not torch.cuda.is_available() and (there := driver()):
        version = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
        raise UserError(f"{version} sees no GPU, but there is one ({there}): {why_unseen()}")


def collect(arguments: list[str]) -> list[str]:
    """The ids of the checks that these arguments of pytest choose. Ends with pytest's message if it refuses
    them, or if they choose none."""
    command = [*PYTEST, "tests/gpu", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not ids:
        sys.exit(done.stdout + done.stderr)
    return ids


def name_of(node_id: str) -> str:
    """The name of a check, with its parameters."""
    return node_id.partition("::test_")[2]


def grouped(ids: list[str]) -> list[tuple[Group, list[str]]]:
    """The checks of each group that has some, in the order of GROUPS; those of no group at the end."""
    named = {check for group in GROUPS for check in group.checks}
    kinds = {node_id: name_of(node_id).partition("[")[0] for node_id in ids}
    others = Group("others", tuple(set(kinds.values()) - named), 2, 1)
    found = []
    for group in (*GROUPS, others):
        if chosen := [node_id for node_id in ids if kinds[node_id] in group.checks]:
            found.append((group, chosen))
    return found


def process_count(most: int) -> int:
    """How many processes may make checks at once: each with two cores and its part of a GPU's memory."""
    count = min(most, max(2, (os.cpu_count() or 1) // 2))
    if torch.cuda.is_available():
        count = min(count, int(torch.cuda.mem_get_info()[0] // PROCESS_BYTES))
    return max(1, count)


def make(
    ids: list[str], processes: int, deadline: float, folder: Path, ended: Callable[[Check], None]
) -> None:
    """Make checks, several at once, and hand over each as it ends; from `deadline` on they are left out.

    One that hangs costs the others beside it only time: they are made again. One that fails beside others is
    made again alone, as they share its process and its GPU."""
    waiting, failed = list(ids), {}
    while waiting and time.monotonic() < deadline:
        for node_id, check in pytest_run(waiting, processes, deadline, folder):
            waiting.remove(node_id)
            if check.result == "failed" and processes > 1:
                print(f"    {check.name} failed beside others, and comes again alone", flush=True)
                failed[node_id] = check
            else:
                ended(check)
    for node_id, check in failed.items():
        if time.monotonic() < deadline:
            check = dict(pytest_run([node_id], 1, deadline, folder)).get(node_id, check)
        ended(check)
    for node_id in waiting:
        ended(Check(name_of(node_id), "left out", 0.0, "no time"))


def pytest_run(ids: list[str], processes: int, deadline: float, folder: Path) -> Iterator[tuple[str, Check]]:
    """Make checks by one run of pytest, which gives each as it ends. It is ended, with all that it has
    started, at the deadline and when a check takes longer than LIMIT: that one has failed."""
    results, log = folder / "results", folder / "log"
    results.write_text("")
    # a test of this file may be a process of xdist itself
    environment = {name: value for name, value in os.environ.items() if "PYTEST_XDIST" not in name}
    environment |= {"GPU_CHECK": "1", "GPU_CHECK_RESULTS": str(results), "PYTHONPATH": str(CODE)}
    command = [*PYTEST, *ids, "--slow", "--tb=short", "-p", "tests.gpu.results", "-n", str(processes)]
    command += ["--dist", "worksteal", "-o", f"faulthandler_timeout={LIMIT / 2}"]
    begun: dict[str, float] = {}
    done: set[str] = set()
    with open(log, "w") as file, open(results, encoding="utf-8") as told:
        process = psutil.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        while True:
            has_ended = process.poll() is not None
            for line in iter(told.readline, ""):
                node_id, check = read_result(line, begun)
                if check is not None and node_id not in done:
                    done.add(node_id)
                    yield node_id, check
            late = [each for each in begun.keys() - done if time.monotonic() - begun[each] > LIMIT]
            if has_ended or late or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    end_processes(process)
    for node_id in late:
        yield node_id, Check(name_of(node_id), "failed", LIMIT, f"no end within {LIMIT:.0f} s")
    if has_ended and not done:
        print(log.read_text(errors="replace")[-4000:])
        why = f"pytest ended with status {process.returncode} before a check did"
        yield from ((node_id, Check(name_of(node_id), "failed", 0.0, why)) for node_id in ids)


def read_result(line: str, begun: dict[str, float]) -> tuple[str, Check | None]:
    """Of which check tests/gpu/results.py tells in a line, and its result if it ended; `begun`: when each
    began."""
    told = json.loads(line)
    node_id, name = told["id"], name_of(told["id"])
    begin = begun.setdefault(node_id, time.monotonic())
    if "result" not in told:
        return node_id, None
    notes = [told["reason"]] if told["reason"] else []
    for figure, value in told["figures"]:
        notes.append(f"{figure} {value:.4g}" if isinstance(value, float) else f"{figure} {value}")
    return node_id, Check(name, told["result"], time.monotonic() - begin, "; ".join(notes))


def end_processes(process: psutil.Popen) -> None:
    """End a process and all that it has started, and wait until they are gone."""
    every = [process]
    with suppress(psutil.NoSuchProcess):
        every = [*process.children(recursive=True), process]
    for each in every:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(every, timeout=10)


def describe_machine() -> dict[str, str]:
    """Machine, driver and versions, without names of hosts or people."""
    machine = {"date": str(date.today()), "device": "CPU"}
    if torch.backends.mps.is_available():
        machine["device"] = f"{platform.machine()} Mac (MPS)"
    if gpus := nvidia_smi("name,memory.total,compute_cap").splitlines():
        machine["device"] = "; ".join(gpus)
        machine["driver"] = nvidia_smi("driver_version").partition("\n")[0]
    machine |= {"torch": torch.__version__, "CUDA": torch.version.cuda or "none", "Triton": "none"}
    with suppress(metadata.PackageNotFoundError):
        machine["Triton"] = metadata.version("triton")
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        machine["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    machine |= {"system": platform.platform(), "cores": str(os.cpu_count())}
    machine["python"] = platform.python_version()
    machine["code"] = code_version()
    return machine


def markdown(machine: dict[str, str], checks: list[Check]) -> str:
    """One table of the machine and all checks."""
    rows = [["what", "result", "s", "figures"], ["---", "---", "---", "---"]]
    for name, value in machine.items():
        rows.append([name, value, "", ""])
    for check in checks:
        rows.append([check.name, check.result, f"{check.seconds:.1f}", check.notes])
    counts = Counter(check.result for check in checks)
    total = sum(check.seconds for check in checks)
    ended = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
    rows.append([f"all {len(checks)} checks", ended, f"{total:.1f}", ""])
    table = ""
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        table += f"| {' | '.join(cells)} |\n"
    table = table.replace(f" ({socket.gethostname()})", "")  # errors name the machine of a rank so
    return re.sub(r"(?<!\w)/([^/\s|]+/)+", "", table)  # folders tell names of people


def parse_args() -> tuple[float, list[str]]:
    """The seconds that there are, and the arguments for pytest."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="other arguments are pytest's")
    help_of_seconds = "leave out what does not fit into so many seconds"
    parser.add_argument("--seconds", type=float, default=float("inf"), help=help_of_seconds)
    known, others = parser.parse_known_args()
    return known.seconds, others


def main() -> int:
    """Make the checks; returns 1 if one failed."""
    begin = time.monotonic()
    seconds, arguments = parse_args()
    check_gpu_is_seen()
    ids = collect(arguments)
    if "--collect-only" in arguments:
        print("\n".join(ids))
        return 0
    machine, checks = describe_machine(), []
    print("; ".join(f"{name} {value}" for name, value in machine.items()), flush=True)

    def ended(check: Check) -> None:
        checks.append(check)
        print(f"    {check.name} {check.result} in {check.seconds:.1f} s: {check.notes}", flush=True)
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(markdown(machine, checks), encoding="utf-8")  # so far, in case all is ended

    groups = grouped(ids)
    with tempfile.TemporaryDirectory() as folder:
        for number, (group, chosen) in enumerate(groups):
            shares = sum(other.share for other, _ in groups[number:])
            left = begin + seconds - time.monotonic()
            limit, count = max(0.0, left) * group.share / shares, process_count(group.processes)
            within = f", within {limit:.0f} s" if limit < float("inf") else ""
            print(f"{group.name}: {len(chosen)} checks, {count} at once{within}", flush=True)
            make(chosen, count, time.monotonic() + limit, Path(folder), ended)
    print(f"\n{markdown(machine, checks)}\nThis table, also in {TABLE.relative_to(ROOT)}, is to send in.")
    print(f"It took {time.monotonic() - begin:.0f} s.")
    failed = [check.name.partition("[")[0] for check in checks if check.result == "failed"]
    for name in dict.fromkeys(failed):
        print(f"{name} failed; until that is mended: {ADVICE.get(name, 'see above')}")
    if left_out := [check.name for check in checks if check.result == "left out"]:
        print(f"left out, as --seconds {seconds:g} did not suffice: {', '.join(left_out)}")
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
