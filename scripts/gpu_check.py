"""Test on this machine's GPUs what the manual guarantees: a table of pass, fail and left out, and a JSON to send in.

    bash scripts/gpu_check.sh                                   everything, in less than 15 minutes
    python scripts/gpu_check.py --only losses,attention         some checks

docs/gpu.md says what each check tests. Without a GPU it makes those that a CPU can, in five minutes, and says why the
others are left out. Exit status 1: a check failed.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

import torch

from common.command_line import Parser, one_line_errors
from common.durable_files import atomic_write
from common.errors import UserError, say
from common.settings import ROOT
from scripts.gpu import numbers, training_runs
from scripts.gpu.runner import MARKS, Check, Machine, Result, run_all

CHECKS = (
    Check("losses", "losses of every dtype are a CPU's in float32", numbers.losses, 180),
    Check("host_waits", "the host does not wait for the GPU in an update", numbers.host_waits, 120, gpus=1),
    Check("grouped_products", "idle experts and unused rows change nothing", numbers.grouped_products, 60),
    Check("attention", "attention of head sizes 64, 96 and 128 is a CPU's", numbers.attention, 60),
    Check("same_bits", "--deterministic 1: the same bits each time", numbers.same_bits, 120),
    Check("compilations", "--use_compile 1 compiles once", numbers.compilations, 240),
    Check("resume", "--deterministic 1: a killed run ends with the same bits", training_runs.resume, 400),
    Check("resume_ranks", "the same on up to three GPUs, DDP", partial(training_runs.resume, ranks=True), 400, gpus=2),
    Check(
        "resume_fsdp", "the same, FSDP", partial(training_runs.resume, ranks=True, flags="--parallel fsdp"), 400, gpus=2
    ),
    Check("killed_rank", "a lost rank is one line on every other one", training_runs.killed_rank, 240, ranks=True),
    Check("sigterm", "a signal to one rank has all save and leave", training_runs.sigterm, 240),
)


def parse_args() -> Any:
    """The command line."""
    parser = Parser(description=(__doc__ or "").split("\n", 1)[0])
    flag = parser.add_argument
    flag("--only", type=lambda text: text.split(","), help="names of checks, separated by commas (default: all)")
    flag("--list", action="store_true", help="print the names of the checks and run none")
    flag("--json", default=str(ROOT / "out" / "gpu_check.json"), help="JSON file for the results")
    args = parser.parse_args()
    unknown = sorted(set(args.only or ()) - {check.name for check in CHECKS})
    if unknown:
        raise UserError(f"--only: there is no check {', '.join(unknown)}; --list shows them")
    return args


def described() -> dict[str, Any]:
    """Machine, driver and versions, without names of hosts or people."""
    about: dict[str, Any] = {"date": str(date.today()), "system": platform.platform()}
    about |= {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    about["cores"] = torch.get_num_threads()
    query = "--query-gpu=name,driver_version,memory.total,compute_cap"
    commands = {"gpus": f"nvidia-smi {query} --format=csv,noheader", "code": "git describe --always --dirty"}
    for name, command in commands.items():
        with suppress(OSError, subprocess.CalledProcessError):
            done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=True)
            about[name] = done.stdout.strip().splitlines()
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return about


def write_results(path: Path, results: list[Result]) -> None:
    """Write the JSON to send in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": described(), "checks": [vars(result) for result in results]}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    atomic_write(path, lambda file: file.write(text.encode()))


def main() -> None:
    """Make the checks, show the table, write the JSON."""
    args = parse_args()
    chosen = [check for check in CHECKS if not args.only or check.name in args.only]
    if args.list:
        say("\n".join(f"{check.name:26} {check.guarantee}" for check in chosen))
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    capability = torch.cuda.get_device_capability(0) if gpus else (0, 0)
    begin, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="gpu_check_"))
    machine = Machine(gpus, capability, folder)
    say(f"{gpus} GPU{'s' * (gpus != 1)}, torch {torch.__version__}; the checks' own output is in {folder}")
    results = run_all(chosen, machine, say)
    write_results(Path(args.json), results)
    counts = ", ".join(f"{sum(each.result == kind for each in results)} {mark}" for kind, mark in MARKS.items())
    say(f"{counts} in {time.monotonic() - begin:.0f} s; {args.json} holds it all, to send in")
    sys.exit(any(each.result == "fail" for each in results))


if __name__ == "__main__":
    with one_line_errors():
        main()
