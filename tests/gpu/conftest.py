"""The checks of GPUs: with --gpu_check (bash scripts/gpu_check.sh) each test here is made on the GPUs, or on
a CPU where there is none, in a process of its own, and the results are written to a JSON file to send in.
Without it, in the test suite, they are made on the CPU.
"""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    import torch

LIMIT = 400  # seconds for a check
# bytes that a check needs: of each GPU; in /dev/shm, of each process of several
FREE_GPU, FREE_SHM = 6e9, 64 << 20
REPORTS = "GPU_CHECK_REPORTS"  # environment variable of the process of a check: the file for its reports


def pytest_addoption(parser):
    parser.addoption("--gpu_check", metavar="JSON", help="check the GPUs, and write the results to this file")


def pytest_configure(config):
    if not config.getoption("gpu_check", None) or REPORTS in os.environ:
        return
    import torch

    from trainer.devices.unusable_gpu import driver, why_unseen

    if not torch.cuda.is_available() and (there := driver()):
        torch_is = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
        raise pytest.UsageError(f"{torch_is} sees no GPU, but there is one ({there}): {why_unseen()}")


# --- a process for each check


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """One that crashes or hangs stops no other, and a GPU that it has brought down is fresh for the next."""
    path = item.config.getoption("gpu_check", None)
    if not path or REPORTS in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    options = [f"--gpu_check={path}", "-o", f"faulthandler_timeout={LIMIT // 2}", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log"), "w+", errors="replace") as log:
        reports = Path(folder, "reports")
        command = [sys.executable, "-m", "pytest", item.nodeid, *options]
        streams = {"stdout": log, "stderr": log, "env": os.environ | {REPORTS: str(reports)}}
        begin, process = time.monotonic(), psutil.Popen(command, cwd=item.config.rootpath, **streams)
        try:
            end = f"its process ended with status {process.wait(LIMIT)}"
        except psutil.TimeoutExpired:
            end = f"no end within {LIMIT} s"
            for each in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        lines = reports.read_text(encoding="utf-8").splitlines() if reports.exists() else []
        log.seek(0)
        text = f"{end}\n{log.read()[-4000:]}"
    hook, config = item.ihook, item.config
    done = [hook.pytest_report_from_serializable(config=config, data=json.loads(line)) for line in lines]
    if [report.when for report in done][-1:] != ["teardown"]:
        done.append(
            pytest.TestReport(
                item.nodeid, item.location, {}, "failed", text, "call", duration=time.monotonic() - begin
            )
        )
    for report in done:
        # JSON knows lists only
        report.longrepr = tuple(report.longrepr) if report.skipped else report.longrepr
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """In the process of a check: hand its reports on."""
    report = yield
    if REPORTS in os.environ:
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        with open(os.environ[REPORTS], "a", encoding="utf-8") as file:
            print(json.dumps(data), file=file)
    return report


# --- the report


def about_machine() -> dict[str, object]:
    """Machine, driver and versions, without names of hosts or people."""
    import torch

    from trainer.devices.unusable_gpu import nvidia_smi

    about: dict[str, object] = {"date": str(date.today()), "device": "CPU"}
    if torch.backends.mps.is_available():
        about["device"] = f"{platform.machine()} Mac (MPS)"
    if gpus := nvidia_smi("name,memory.total,compute_cap").splitlines():
        about["device"] = "; ".join(gpus)
        about["driver"] = nvidia_smi("driver_version").partition("\n")[0]
    about |= {"torch": torch.__version__, "CUDA": torch.version.cuda or "none"}
    about["Triton"] = version_of("triton")
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        about["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    about |= {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
    with suppress(OSError):
        command = ["git", "describe", "--always", "--dirty"]
        about["code"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return about


def version_of(package: str) -> str:
    """The version of an installed package, or none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def reason_of(report) -> str:
    """Why a check failed or was skipped, in one line."""
    if report.skipped:
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr or "")).partition("\n")[0]


def markdown(machine: dict[str, object], checks: list[dict]) -> str:
    """One table of the machine and all checks."""
    rows = [("what", "result", "s", "figures"), ("---", "---", "---", "---")]
    rows += [(name, str(value), "", "") for name, value in machine.items()]
    for check in checks:
        figures = [f"{key} {shown(value)}" for key, value in check["figures"].items()]
        told = "; ".join([check["reason"], *figures] if check["reason"] else figures)
        rows.append((check["name"], check["result"], str(check["seconds"]), told))
    counts = Counter(check["result"] for check in checks)
    total = round(sum(check["seconds"] for check in checks), 1)
    ended = ", ".join(f"{count} {result}" for result, count in counts.items())
    rows.append((f"all {len(checks)} checks", ended, str(total), ""))
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def shown(value: object) -> str:
    """A figure, with few digits where it has a fraction."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def pytest_terminal_summary(terminalreporter, config):
    """The table, and the JSON."""
    path = config.getoption("gpu_check", None)
    if not path or REPORTS in os.environ:
        return
    checks = []
    for result in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(result, []):
            check = {"name": report.nodeid.partition("::test_")[2], "result": result}
            check |= {"reason": reason_of(report), "figures": dict(report.user_properties)}
            checks.append(check | {"seconds": round(report.duration, 1)})
    machine, host = about_machine(), f" ({socket.gethostname()})"  # error lines name a rank's machine so
    text = json.dumps({"machine": machine, "checks": checks}, indent=1, ensure_ascii=False)
    table = markdown(machine, checks).replace(host, "")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text.replace(host, ""), encoding="utf-8")
    Path(path).with_suffix(".md").write_text(table, encoding="utf-8")
    terminalreporter.write_line("")
    terminalreporter.write(table)
    terminalreporter.write_line(f"this table, also in {Path(path).with_suffix('.md')}, is to send in")


# --- what checks use


def usable_gpus() -> int:
    """The number of GPUs; the check is left out where one has too little free memory."""
    import torch

    for number in range(torch.cuda.device_count()):
        if (free := torch.cuda.mem_get_info(number)[0]) < FREE_GPU:
            pytest.skip(
                f"needs {FREE_GPU / 1e9:.0f} GB of free GPU memory; GPU {number} has {free / 1e9:.1f}"
            )
    return torch.cuda.device_count()


def usable_ranks(gpus: int, device: "torch.device") -> int:
    """How many processes a check of several has: one for each GPU, two on a CPU; it is left out where there
    cannot be several."""
    import torch

    if device.type == "mps":
        pytest.skip("a Mac has one GPU (MPS), which several processes cannot share")
    if gpus == 1:
        pytest.skip("needs 2 GPUs: several processes cannot share the one that torch sees")
    if any("MIG" in torch.cuda.get_device_name(number) for number in range(gpus)):
        pytest.skip("NCCL does not connect the parts of a GPU that is divided (MIG)")
    shm = os.statvfs("/dev/shm") if gpus and os.path.isdir("/dev/shm") else None
    if shm and (free := shm.f_bavail * shm.f_frsize) < gpus * FREE_SHM:
        needed = f"{gpus * FREE_SHM >> 20} MB in /dev/shm for NCCL; it has {free >> 20}"
        pytest.skip(f"needs {needed} (docker run --shm-size 1g, or --ipc host)")
    return gpus or 2


def need_compiler(gpus: int, device: "torch.device") -> None:
    """Leave a check out where a model cannot be compiled, or takes minutes."""
    from trainer.devices.compiling import compiler_problem

    if device.type == "mps":
        pytest.skip("models are not compiled on a Mac's GPU (MPS)")
    if not gpus:
        pytest.skip("compiling takes minutes on a CPU, where the tests count it: bash scripts/test.sh --slow")
    if problem := compiler_problem("cuda"):
        pytest.skip(problem)


@pytest.fixture
def gpus(request) -> int:
    """The number of GPUs to check."""
    return usable_gpus() if request.config.getoption("gpu_check", None) else 0


@pytest.fixture
def device(gpus, request):
    """Where a check of one process computes: on the first GPU, on a Mac's, or on the CPU."""
    import torch

    if gpus:
        return torch.device("cuda:0")
    is_mac = request.config.getoption("gpu_check", None) and torch.backends.mps.is_available()
    return torch.device("mps" if is_mac else "cpu")


@pytest.fixture
def ranks_to_check(gpus, device):
    """`usable_ranks`, to be called."""
    return partial(usable_ranks, gpus, device)


@pytest.fixture
def needs_compiler(gpus, device):
    """`need_compiler`, to be called."""
    return partial(need_compiler, gpus, device)
