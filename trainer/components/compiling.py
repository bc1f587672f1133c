"""--use_compile auto: whether compiling the layers pays for the time that it takes."""

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from common.settings import StageArgs
from trainer.components.device import select_device
from trainer.components.distributed import Logger, world_size
from trainer.components.resume import Fingerprint

ENOUGH = 5e13  # operations of a run per thread: five to twelve minutes; compiling takes half a one and saves a tenth


def uses_compile(args: StageArgs, run: Fingerprint) -> bool:
    """Whether a run compiles its layers: what --use_compile says, or where that is `auto`, whether it pays.

    It pays in long pretraining and SFT of dense models on packed rows on a CPU; elsewhere it gained nothing, or was not
    measured (docs/LOG.md). The settings, the data and the machine decide, not times, so that a resumed run does as it
    did before.

    run: the fingerprint of the run.
    """
    if args.use_compile != "auto":
        return args.use_compile
    usual = args.packing and args.parallel == "ddp" and not args.use_moe and not args.activation_checkpointing
    possible = select_device(args.device).type == "cpu" and has_compiler()
    pays = bool(usual) and possible and operations(args, run) >= ENOUGH
    if pays:
        Logger("--use_compile auto: the layers are compiled, as the run is long and its packed rows are of one size")
    return pays


def operations(args: StageArgs, run: Fingerprint) -> float:
    """Roughly the floating-point operations of a run on packed rows, of each thread of a rank."""
    weights = 12.0 * args.num_hidden_layers * args.hidden_size**2
    tokens = run["samples"] * args.max_seq_len * args.epochs
    return 6.0 * weights * tokens / (world_size() * torch.get_num_threads())


def has_compiler() -> bool:
    """Whether there is what torch needs to compile for a CPU: a C++ compiler, and Python's headers."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return compiler is not None and (Path(sysconfig.get_path("include")) / "Python.h").is_file()
