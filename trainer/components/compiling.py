"""--use_compile auto: whether compiling the layers pays for the time that it takes."""

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from common.settings import StageArgs
from dataset.lm_dataset import TokenDataset
from trainer.components.device import has_matrix_unit, select_device
from trainer.components.distributed import Logger, world_size
from trainer.components.flops import layer_weights
from trainer.components.loaders import SizedDataset

ENOUGH = 5e13  # operations of a run per thread: five to twelve minutes; compiling takes half a one and saves a tenth


def compiles(args: StageArgs, train_set: SizedDataset) -> bool:
    """Whether a run compiles its layers: what --use_compile says, or where that is `auto`, whether it pays.

    It pays in long pretraining and SFT on a CPU with a unit for matrix products, which leaves most of the time to what
    the compiler fuses, and on other CPUs in those of dense models on packed rows; elsewhere it gained nothing, or was
    not measured (docs/dev/LOG.md). The settings, the data and the machine decide, not times, so that a resumed run does
    as it did before.
    """
    if args.use_compile != "auto":
        return args.use_compile
    if not args.compiling_pays:
        return False
    usual = args.parallel == "ddp" and not args.activation_checkpointing
    fits = (args.packing and not args.use_moe) or (args.dtype in ("auto", "bfloat16") and has_matrix_unit())
    possible = select_device(args.device).type == "cpu" and has_compiler()
    is_text = isinstance(train_set, TokenDataset)  # an engine task may have other data, for which nothing was measured
    pays = usual and fits and possible and is_text and operations(args, train_set) >= ENOUGH
    if pays:
        Logger("--use_compile auto: the layers are compiled, as the run is long enough to gain from it")
    return pays


def operations(args: StageArgs, train_set: TokenDataset) -> float:
    """Roughly the floating-point operations of a run, of each thread of a rank."""
    weights = layer_weights(args.num_hidden_layers, args.hidden_size)
    return 6.0 * weights * train_set.num_tokens * args.epochs / (world_size() * torch.get_num_threads())


def has_compiler() -> bool:
    """Whether there is what torch needs to compile for a CPU: a C++ compiler, and Python's headers."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return compiler is not None and (Path(sysconfig.get_path("include")) / "Python.h").is_file()
