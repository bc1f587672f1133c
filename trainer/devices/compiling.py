"""torch.compile of the whole model: whether a run uses it, and how."""

import os
import shutil
import sysconfig
import tempfile
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import UserError, reason, warn
from common.files import is_file
from common.settings import StageArgs
from dataset.batch import collate_flat, collate_shared
from dataset.lm_dataset import StageDataset
from dataset.order import SizedDataset
from trainer.devices.device import native_bfloat16
from trainer.devices.errors import compiling
from trainer.devices.process_group import Logger, world_size

# from this many operations per CPU thread on, compiling a run pays off: five to twelve minutes of training
# for half a minute of compiling, which saves a tenth
MIN_FLOPS_PER_THREAD = 5e13


def compiles(args: StageArgs, train_set: SizedDataset, device: torch.device) -> bool:
    """Whether a run compiles its model. --use_compile decides; `auto` compiles on a GPU, and on a CPU where
    it was measured to pay off. Raises UserError if --use_compile 1 is impossible."""
    if args.use_compile is False:
        return False
    is_auto = args.use_compile is None
    if args.use_moe and args.activation_checkpointing:
        # experts are called between two graphs, but a layer that is recomputed must not be split into graphs
        why = "layers of experts with --activation_checkpointing 1 are not compiled"
        if not is_auto:
            warn(f"--use_compile 1: {why}")
        elif device.type == "cuda":
            Logger(f"--use_compile auto: {why}")
        return False
    if is_auto and device.type != "cuda" and not pays_on_cpu(args, train_set, device):
        return False
    problem = compiler_problem(device.type)
    if problem and not is_auto:
        raise UserError(f"--use_compile 1: {problem}; or leave the flag out")
    if problem:
        warn(f"--use_compile auto: {problem}; the model is not compiled")
        return False
    if is_auto:
        Logger("--use_compile auto: the model is compiled; its first updates take longer")
    return True


def pays_on_cpu(args: StageArgs, train_set: SizedDataset, device: torch.device) -> bool:
    """Whether compiling pays off on a CPU, as measured (docs/dev/LOG.md): in long pretraining and SFT, with a
    matrix unit or for dense models on packed rows. Settings, data and machine decide, but no measured times,
    so that a resumed run decides as before."""
    is_text = args.compiling_pays and isinstance(train_set, StageDataset)
    if device.type != "cpu" or not is_text or args.parallel != "ddp" or args.activation_checkpointing:
        return False
    in_bfloat16 = args.dtype in ("auto", "bfloat16") and native_bfloat16(device)
    has_matrix_unit = in_bfloat16 and torch.cpu._is_amx_tile_supported()
    if not has_matrix_unit and (args.use_moe or not args.packing):
        return False
    tokens = cast(Any, train_set).epoch_tokens(args) * args.epochs / world_size()
    flops = 6.0 * layer_weights(args.num_hidden_layers, args.hidden_size) * tokens
    return flops >= MIN_FLOPS_PER_THREAD * torch.get_num_threads()


def compiler_problem(device: str) -> str:
    """What torch lacks to compile for `cpu` or `cuda`, and what to do; empty if it lacks nothing. It needs
    Python's headers, a C++ compiler, or Triton with the C compiler that it calls, and a writable cache."""
    compilers = [os.environ.get("CXX", "g++")]
    if device == "cuda":
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        if find_spec("triton") is None:
            return "Triton is not installed; pip install triton"
    if not any(map(shutil.which, compilers)):
        return f"there is no compiler {' or '.join(compilers)}; install one"
    if not is_file(Path(sysconfig.get_path("include")) / "Python.h"):
        return "Python's headers are missing (Python.h); install them (python3-dev)"
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        tempfile.TemporaryFile(dir=cache_dir()).close()
    except OSError as error:
        problem = f"the compiler's cache {cache_dir()} cannot be written ({error.strerror})"
        return f"{problem}; set TORCHINDUCTOR_CACHE_DIR to a folder that can"
    return ""


def compile_model(model: nn.Module, tokens: int = 2048, may_fail: bool = False) -> None:
    """Compile each transformer in a model in place, or the model as a whole if it has none. A call with an
    empty tensor is not compiled: it would need a graph of its own, and with DDP an epoch begins with one.

    tokens: the size of the batch that it is compiled on, see `warm_up_inputs`. may_fail: a part that cannot
    be compiled runs uncompiled, with a warning. Otherwise the compiler's error is raised."""
    from torch._dynamo import config
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch.fx.experimental import _config as shapes
    from transformers import PreTrainedModel

    # measured times must not decide how a kernel sums, because they would differ in a resumed run
    inductor.deterministic = True
    config.optimize_ddp = False  # otherwise DDP's buckets would split the graph
    functorch.force_non_lazy_backward_lowering = True  # otherwise it may fail halfway, in the backward pass
    # otherwise a number of tokens equal to the model's width would be mistaken for the width
    shapes.use_duck_shape = False
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)] or [model]
    for part in parts:
        embedding = part.get_input_embeddings() if isinstance(part, PreTrainedModel) else None
        if embedding is not None and next(part.parameters()).device.type == "cpu":
            # compiled, its gradient would be summed by atomic additions, in a random order of threads
            embedding.forward = torch.compiler.disable(embedding.forward)
        part.compile(dynamic=True)
        part._compiled_call_impl = call_of(part, tokens, may_fail)


def call_of(part: nn.Module, tokens: int, may_fail: bool) -> Any:
    """The call of a compiled module that `compile_model` describes."""
    from torch._dynamo.exc import TorchDynamoException
    from torch.distributed.fsdp import FSDPModule

    compiled_call, eager_call = cast(Any, part._compiled_call_impl), part._call_impl
    use_moe = getattr(getattr(part, "config", None), "use_moe", False)
    seen = set()

    def first_call(*args: Any, **kwargs: Any) -> Any:
        """Compile the part by a call with inputs of a new kind, and return the result of this call."""
        with compiling():
            # not with FSDP, where a call gathers the weights from all ranks, and some ranks may have an empty
            # batch
            if "cu_seqlens" in kwargs and not isinstance(part, FSDPModule):
                inputs = warm_up_inputs(kwargs, *warm_up_sizes(kwargs, tokens, use_moe))
                if inputs is not None:
                    warm_up(part, compiled_call, inputs)
            return compiled_call(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        if any(isinstance(value, Tensor) and value.numel() == 0 for value in values):
            return eager_call(*args, **kwargs)
        sizes = warm_up_sizes(kwargs, tokens, use_moe) if "cu_seqlens" in kwargs else ()
        given = frozenset(name for name, value in kwargs.items() if value is not None)
        kind = torch.is_grad_enabled(), part.training, sizes, given
        try:
            if kind in seen:
                return compiled_call(*args, **kwargs)
            seen.add(kind)
            return first_call(*args, **kwargs)
        except TorchDynamoException as error:
            if not may_fail:
                raise
            why = reason(getattr(error, "inner_exception", error))
            warn(f"--use_compile auto: the model cannot be compiled and runs uncompiled ({why})")
            part._compiled_call_impl = None
            return eager_call(*args, **kwargs)

    return call


def warm_up(part: nn.Module, compiled_call: Any, inputs: dict[str, Any]) -> None:
    """Compile a module by a call whose result is not used. The call changes neither buffers nor random
    numbers."""
    buffers = [(buffer, buffer.clone()) for buffer in part.buffers()]
    device = inputs["input_ids"].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        compiled_call(**inputs)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def warm_up_sizes(kwargs: dict[str, Any], tokens: int, use_moe: bool = False) -> tuple[int, int, int]:
    """The number of tokens, targets and samples of the batch on which a call like this one is compiled. The
    compiler writes separate kernels for more than 4,096 summands on a CPU (chunk_size of torch's
    _inductor/codegen/cpp.py), and for a single sample if there are experts."""
    samples = 1 if use_moe and len(kwargs["cu_seqlens"]) == 2 else 8
    if kwargs["input_ids"].device.type != "cpu":
        return tokens, tokens // 2, samples
    index = kwargs.get("target_index")
    tokens = 8192 if len(kwargs["input_ids"]) > 4096 else 2048
    return tokens, 6144 if index is not None and len(index) > 4096 else tokens // 4, samples


def warm_up_inputs(kwargs: dict[str, Any], tokens: int, targets: int, samples: int) -> dict[str, Any] | None:
    """Inputs like those of a call with a flat batch, of the given size; None for a user's model that takes
    other tensors.

    The compiler chooses how its kernels sum by the sizes that it sees first. If these were the sizes of the
    run's first batch, a resumed run would see another first batch and sum in another order, unless it found
    the kernels in the compiler's cache. All tokens are the same, so that they go to the same experts with any
    weights."""
    weight = np.repeat(
        np.array([0, 1], np.float32), [max(2, (tokens - targets) // samples), max(2, targets // samples)]
    )
    sample = {"input_ids": np.zeros(len(weight), np.int64), "loss_weight": weight}
    sample |= {"sample_id": 0, "target_bytes": 0}
    if kwargs.get("shared_keys") is None:
        batch = collate_flat([[sample] * samples])
    else:
        batch = collate_shared([[sample, sample]] * (samples // 2))
    batch = batch.to(kwargs["input_ids"].device)
    inputs = batch.model_inputs() | {"targets": batch.targets}
    if any(isinstance(value, Tensor) and name not in inputs for name, value in kwargs.items()):
        return None
    return {name: value if value is None else inputs.get(name, value) for name, value in kwargs.items()}


def uncompiled(model: nn.Module) -> AbstractContextManager:
    """A context in which a compiled model runs uncompiled, to generate: each length of a prompt would be
    compiled anew."""
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


def layer_weights(layers: int, width: int) -> float:
    """Roughly the number of weights in this many dense layers, all of which a token goes through."""
    return 12.0 * layers * width**2
