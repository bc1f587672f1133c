"""--use_compile auto: whether compiling the layers pays for the time that it takes."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from common.settings import StageArgs
from dataset.lm_dataset import TokenDataset
from trainer.data.order import SizedDataset
from trainer.devices.device import has_matrix_unit, native_bfloat16, select_device
from trainer.devices.process_group import Logger, world_size
from trainer.report.speed import layer_weights

# operations of a run per thread: five to twelve minutes; compiling takes half a one and saves a tenth
ENOUGH = 5e13
# per GPU: eight minutes at 100 TFLOP/s, for a minute of compiling; by arithmetic, not measured
CUDA_ENOUGH = 5e16


def compiles(args: StageArgs, train_set: SizedDataset) -> bool:
    """Whether a run compiles its layers: what --use_compile says, or where that is `auto`, whether it pays.

    It pays in long pretraining and SFT: on a CPU with a unit for matrix products, which leaves most of the
    time to what the compiler fuses, and on other CPUs in those of dense models on packed rows
    (docs/dev/LOG.md); by arithmetic on GPUs in half precision, where a layer is one graph. Elsewhere it
    gained nothing, or was not measured. The settings, the data and the machine decide, not times, so that a
    resumed run does as it did before.
    """
    if args.use_compile is not None:
        return args.use_compile
    # an engine task may have other data, for which nothing was measured
    is_text = isinstance(train_set, TokenDataset)
    if not (args.compiling_pays and is_text) or args.activation_checkpointing:
        return False
    device = select_device(args.device)
    if device.type == "cuda":
        fits, enough = args.dtype != "float32" and native_bfloat16(device), CUDA_ENOUGH
    else:
        fits = (args.packing and not args.use_moe) or (
            args.dtype in ("auto", "bfloat16") and has_matrix_unit()
        )
        fits, enough = (
            fits and device.type == "cpu" and args.parallel == "ddp",
            ENOUGH * torch.get_num_threads(),
        )
    pays = fits and has_compiler(device.type) and operations(args, train_set) >= enough
    if pays:
        Logger("--use_compile auto: the layers are compiled, as the run is long enough to gain from it")
        from torch._dynamo import config

        config.suppress_errors = True  # what cannot be compiled runs as it is, with a warning
    return pays


def operations(args: StageArgs, train_set: TokenDataset) -> float:
    """Roughly the floating-point operations of a run, of each rank."""
    weights = layer_weights(args.num_hidden_layers, args.hidden_size)
    return 6.0 * weights * train_set.num_tokens * args.epochs / world_size()


def has_compiler(device: str) -> bool:
    """Whether there is what torch needs to compile for `cpu` or `cuda`: Python's headers, and a C++ compiler,
    or Triton with the C compiler that it calls."""
    if device == "cuda":
        if find_spec("triton") is None:
            return False
        names = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")
    else:
        names = (os.environ.get("CXX", "g++"),)
    return any(map(shutil.which, names)) and (Path(sysconfig.get_path("include")) / "Python.h").is_file()
