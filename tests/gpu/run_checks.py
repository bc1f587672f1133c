"""Makes the checks of tests/gpu, each in a process of its own, and ends with a table to send in.

scripts/gpu_check.sh starts it. Its arguments choose among the checks as pytest's do; with --collect-only it
lists them.
"""

import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch

from common.errors import UserError
from trainer.devices.unusable_gpu import driver, nvidia_smi, why_unseen

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "out/gpu_check.md"
LIMIT = 400.0  # seconds for a check
# what helps where a check fails
NUMBERS = "train with --dtype float32 if only half precision is wrong, else with --device cpu"
RANKS = "NCCL_DEBUG=INFO says more; try NCCL_P2P_DISABLE=1, or train on one GPU"
DECODING = "chat, serve and evaluate with --device cpu"
RESUME = "a resumed run is not that of a run without a stop: read docs/distributed.md, bitwise identical runs"
ADVICE = {"gradients": NUMBERS, "losses": NUMBERS, "attention": NUMBERS, "compiled": "--use_compile 0"}
ADVICE |= {"speed": "--use_compile 0 if compiling fails or is slower; more --num_workers if the GPU waits"}
ADVICE |= {"all_reduce": RANKS, "gradients_of_ranks": RANKS, "resume": RESUME, "resume_of_ranks": RESUME}
ADVICE |= {"log_probabilities": DECODING, "decoding_speed": DECODING, "server": DECODING}


@dataclass
class Check:
    """The result of one check."""

    name: str
    result: str  # passed, failed or skipped
    seconds: float
    notes: str  # why it failed or was skipped, and its figures


def check_gpu_is_seen() -> None:
    """Raise UserError where torch sees no GPU, but there is one."""
    if not torch.cuda.is_available() and (there := driver()):
        version = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
        raise UserError(f"{version} sees no GPU, but there is one ({there}): {why_unseen()}")


def collect(arguments: list[str]) -> list[str]:
    """The ids of the checks that these arguments of pytest choose. Ends with pytest's message if it refuses
    them, or if they choose none."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "--collect-only",
        "-q",
        "-o",
        "addopts=--import-mode=importlib",
    ]
    command += ["-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not ids:
        sys.exit(done.stdout + done.stderr)
    return ids


def make(node_id: str, folder: Path) -> Check:
    """Make one check. If it crashes or hangs, nothing that it started is left, and a GPU that it has brought
    down is fresh for the next."""
    name, report, log = node_id.partition("::test_")[2], folder / "report.xml", folder / "log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", node_id, "--slow", "--tb=short", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", "-o", f"faulthandler_timeout={LIMIT / 2}"]
    begin, environment = time.monotonic(), os.environ | {"GPU_CHECK": "1"}
    with open(log, "w") as file:
        process = psutil.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            end = f"its process ended with status {process.wait(LIMIT)}"
        except psutil.TimeoutExpired:
            end = f"no end within {LIMIT:.0f} s"
            for each in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
    check = Check(name, "failed", time.monotonic() - begin, end)
    if report.exists():
        check.result, check.notes = read_report(report)
    if check.result == "failed":
        print(log.read_text(errors="replace")[-4000:])
    return check


def read_report(path: Path) -> tuple[str, str]:
    """Result and notes of the only check in a JUnit file of pytest."""
    (case,) = ElementTree.parse(path).iter("testcase")
    result, notes = "passed", []
    for tag, ending in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        for element in case.findall(tag):
            result = ending
            notes.append(element.get("message", "").partition("\n")[0])
    for figure in case.iter("property"):
        value = figure.get("value", "")
        with suppress(ValueError):
            value = f"{float(value):.4g}"
        notes.append(f"{figure.get('name')} {value}")
    return result, "; ".join(notes)


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
    with suppress(OSError):
        command = ["git", "describe", "--always", "--dirty"]
        machine["code"] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
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
    ended = ", ".join(f"{count} {result}" for result, count in counts.items())
    rows.append([f"all {len(checks)} checks", ended, f"{total:.1f}", ""])
    table = ""
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        table += f"| {' | '.join(cells)} |\n"
    table = table.replace(f" ({socket.gethostname()})", "")  # errors name the machine of a rank so
    return re.sub(r"(?<!\w)/([^/\s|]+/)+", "", table)  # folders tell names of people


def main() -> int:
    """Make the checks; returns 1 if one failed."""
    arguments = sys.argv[1:]
    check_gpu_is_seen()
    ids = collect(arguments)
    if "--collect-only" in arguments:
        print("\n".join(ids))
        return 0
    checks = []
    with tempfile.TemporaryDirectory() as folder:
        for node_id in ids:
            print(f"{node_id} ", end="", flush=True)
            checks.append(make(node_id, Path(folder)))
            print(f"{checks[-1].result} in {checks[-1].seconds:.0f} s", flush=True)
    table = markdown(describe_machine(), checks)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table, encoding="utf-8")
    print(f"\n{table}\nThis table, also in {TABLE.relative_to(ROOT)}, is to send in.")
    failed = [check.name.partition("[")[0] for check in checks if check.result == "failed"]
    for name in dict.fromkeys(failed):
        print(f"{name} failed; until that is mended: {ADVICE.get(name, 'see above')}")
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
