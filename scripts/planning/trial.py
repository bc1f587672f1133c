"""Finds the largest micro-batch of a stage that fits on a GPU. It runs in a separate process, so its memory
is freed at the end, and a failing device ends only this process.

`-m scripts.planning.trial STAGE BYTES`, with the stage's settings as JSON on stdin, prints a line for each
micro-batch that fits: items, bytes at the peak.
"""

import subprocess
import sys
from importlib import import_module
from typing import Any

from common.errors import UserError
from common.settings import ROOT, StageArgs
from dataset.token_cache import load_tokenizer
from scripts.planning.machine import micro_batches_that_fit


def largest(script: Any, args: StageArgs, memory: float) -> tuple[int, int]:
    """The items of the largest micro-batch whose update fits into this many bytes, and its peak in bytes.
    Raises UserError if not even one item fits."""
    command = [sys.executable, "-m", "scripts.planning.trial", script.__name__, str(memory)]
    settings = args.model_dump_json()
    done = subprocess.run(command, cwd=ROOT, input=settings, capture_output=True, text=True, check=False)
    if not done.stdout:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UserError(f"this GPU cannot make an update of even one sample ({reason})")
    items, peak = map(int, done.stdout.splitlines()[-1].split())
    return items, peak


def main() -> None:
    """Print the micro-batches that fit."""
    report, sys.stdout = sys.stdout, sys.stderr  # where the stage prints its lines about the data
    script = import_module(sys.argv[1])
    args = script.Args.model_validate_json(sys.stdin.read())
    data, _ = script.open_data(args, load_tokenizer(args.tokenizer_path))
    for items, peak in micro_batches_that_fit(args, data, float(sys.argv[2])):
        print(items, peak, file=report, flush=True)


if __name__ == "__main__":
    main()
