"""One model on several devices: replicated (DistributedDataParallel), sharded (`fully_shard`, FSDP2), or
sharded within each machine and replicated across machines (hsdp).

All average the gradients over the ranks, once per update. Their other differences are hidden here from the
loop and the checkpoints.
"""

import copy
import inspect
import os
import shutil
import sysconfig
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.launcher import launch
from common.settings import StageArgs
from dataset.lm_dataset import StageDataset
from trainer.data.datasets import SizedDataset, epoch_tokens
from trainer.devices.device import autocast_dtype, native_bfloat16
from trainer.devices.process_group import Logger, gather, this_rank, world_size
from trainer.report.speed import layer_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# --use_compile auto: operations of a run per thread from which on it pays: five to twelve minutes of training
# for half a minute of compiling, which saves a tenth
MIN_FLOPS_PER_THREAD = 5e13
# per GPU: four minutes of an RTX 4090, for a minute of compiling; by arithmetic, not measured
MIN_FLOPS_PER_GPU = 1e16


def wrap_model(
    model: nn.Module,
    device: torch.device,
    parallel: str = "ddp",
    use_compile: bool = False,
    activation_checkpointing: bool = False,
    autocast: AbstractContextManager | None = None,
) -> nn.Module:
    """Move a model to the device of this rank, compile it in place, and replicate or shard it where there are
    ranks.

    Parameter names do not change. Sharded ones become DTensors, so the optimizer must be built afterwards.

    Args:
        model: on the CPU, of which sharding moves only this rank's part to the device; on ranks other than 0
            it may be on the meta device if it is to be sharded (`build_device`).
        autocast: the context in which the model will compute, if any; fsdp gathers the layers' matrices in
            its dtype.

    Raises:
        UserError: activation checkpointing of a model without transformer layers; hsdp on unequal machines.
    """
    if activation_checkpointing:  # keep only each layer's input, and recompute the rest in the backward pass
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise UserError(
                "--activation_checkpointing 1: this task's model has no layers that can be recomputed"
            )
        cast("PreTrainedModel", model).activation_checkpointing_enable({"use_reentrant": False})
    if use_compile:
        compile_layers(model)
    if not dist.is_initialized():
        return model.to(device)
    if parallel != "ddp":
        dtype = autocast_dtype(autocast or nullcontext(), device)
        return _shard(model, device, _mesh(device.type, parallel), dtype)
    model = model.to(device)
    ids = [device.index] if device.type == "cuda" else None
    # no buffer is broadcast: the rotary frequencies are constant, and each rank counts its own tokens per
    # expert; torch 2.13 renamed the flag
    names = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {"device_ids": ids, "gradient_as_bucket_view": True, sync_buffers: False}
    return DistributedDataParallel(model, **options)


def _mesh(device_type: str, parallel: str) -> DeviceMesh:
    """The ranks in a row, [ranks]; with hsdp a row per machine, [machines, ranks of each]: parameters are
    sharded over a row and replicated over a column, so that only the sums of gradients, in shards, go from
    machine to machine."""
    if parallel == "fsdp":
        return init_device_mesh(device_type, (world_size(),))
    place = launch()
    shards = place.local_world_size
    if set(gather((shards, place.rank % shards == place.local_rank))) != {(shards, True)}:
        raise UserError(
            "--parallel hsdp: each machine must have the same number of ranks, in a row; start as many on "
            "each (torchrun --nproc_per_node N), or use --parallel fsdp"
        )
    mesh = init_device_mesh(
        device_type, (world_size() // shards, shards), mesh_dim_names=("machines", "ranks")
    )
    timeout = cast(Any, dist.group.WORLD)._get_backend(torch.device("cpu")).options._timeout  # --rank_timeout
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return mesh


def _shard(model: nn.Module, device: torch.device, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Each layer's matrices are gathered while it computes; embedding, head and norms stay gathered in
    between.

    Autocast would cast each gathered matrix and keep the copy until the backward pass. So the layers'
    matrices are gathered in `dtype`, which also halves what is sent; gradients are summed in float32. The
    shards, and everything that autocast leaves in float32 (the layers' norms), stay float32: the arithmetic
    is that of DDP.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    whole = {name: value.detach() for name, value in model.named_parameters()}
    is_partly_empty = any(gather(any(value.is_meta for value in whole.values())))
    half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else half
    layers = transformer_layers(model)
    matrices = {p for layer in layers for p in layer.parameters() if p.ndim > 1}
    fully_shard(model, mesh=mesh, ignored_params=matrices)  # in place
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=set(layer.parameters()) - matrices)
    if is_partly_empty:
        _fill_from_first_rank(model, whole, device)
    return model


@torch.no_grad()
def _fill_from_first_rank(model: nn.Module, whole: dict[str, Tensor], device: torch.device) -> None:
    """Give all ranks their shards of rank 0's parameters, and its buffers. whole: parameters before they were
    sharded; only those of rank 0 are looked at."""
    from torch.distributed.tensor import distribute_tensor

    filled = {}  # tied parameters stay one
    for name, value in cast(Any, model.named_parameters()):
        full = torch.empty(value.shape, dtype=value.dtype, device=device)
        if this_rank() == 0:
            full = whole[name].to(device)
        filled[value] = nn.Parameter(distribute_tensor(full, value.device_mesh, value.placements))
    names = model.named_parameters(remove_duplicate=False)
    model.load_state_dict({name: filled[value] for name, value in names}, strict=False, assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer)
            dist.broadcast(getattr(module, name), 0)


def build_device(args: StageArgs) -> torch.device:
    """Where to build a model that is to be sharded: on the host of rank 0, nowhere on the other ranks, which
    get their shards from there. Copies are built on the host of each rank."""
    return torch.device("cpu" if args.parallel == "ddp" or this_rank() == 0 else "meta")


def compiles(args: StageArgs, train_set: SizedDataset, device: torch.device) -> bool:
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
    is_text = isinstance(train_set, StageDataset)
    if not (args.compiling_pays and is_text) or args.activation_checkpointing:
        return False
    if device.type == "cuda":
        pays = args.dtype != "float32" and native_bfloat16(device)
        needed = MIN_FLOPS_PER_GPU
    elif device.type == "cpu" and args.parallel == "ddp":
        pays = args.packing and not args.use_moe
        if args.dtype in ("auto", "bfloat16") and torch.cpu._is_amx_tile_supported():
            pays = pays or native_bfloat16(device)
        needed = MIN_FLOPS_PER_THREAD * torch.get_num_threads()
    else:
        return False
    if not pays or operations(args, train_set) < needed or not has_compiler(device.type):
        return False
    Logger("--use_compile auto: the layers are compiled, as the run is long enough to gain from it")
    compiler_may_fail()
    return True


def compiler_may_fail() -> None:
    """What cannot be compiled runs as it is, with a warning."""
    from torch._dynamo import config

    config.suppress_errors = True


def operations(args: StageArgs, train_set: StageDataset) -> float:
    """Roughly the floating-point operations of a run, of each rank."""
    weights = layer_weights(args.num_hidden_layers, args.hidden_size)
    return 6.0 * weights * epoch_tokens(cast(Any, train_set), args) * args.epochs / world_size()


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


def compile_layers(model: nn.Module) -> None:
    """Compile each layer in place, also one that is sharded afterwards; all share what is compiled for the
    first.

    An empty micro-batch runs as it is, since it would be compiled for itself: epochs begin with one under
    DDP."""
    from torch._dynamo import config
    from torch._inductor import config as inductor
    from torch.fx.experimental import _config as shapes

    inductor.deterministic = True  # no measured times decide how a kernel sums: they would differ at a resume
    config.optimize_ddp = False  # or DDP's buckets would cut the graph of a layer
    shapes.use_duck_shape = False  # or as many tokens as the model is wide would be taken for the width
    layers = transformer_layers(model)
    if not layers:
        model.compile(dynamic=True)
    for layer in layers:
        layer.compile(dynamic=True)
        layer._compiled_call_impl = partial(_call, layer._compiled_call_impl, layer._call_impl)


def _call(compiled: Any, plain: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
    """A layer's call with hidden states x."""
    if x.numel():
        return compiled(x, *rest, **options)
    return plain(x, *rest, **options)


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer; none in other models."""
    from transformers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def freeze(model: nn.Module, prefixes: str | Sequence[str]) -> None:
    """Exclude the parameters whose names begin with one of the prefixes from training, e.g.
    `model.layers.0.`.

    Raises:
        UserError: a prefix fits no parameter.
    """
    prefixes = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise UserError(
                f"frozen: no parameter of the model begins with {prefix!r}; its names are like {names[0]}"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))


def unwrap(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel or torch.compile around it; a sharded one is itself."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return getattr(model, "_orig_mod", model)


def is_sharded(model: nn.Module | None) -> bool:
    """Whether each rank holds only a part: then all ranks must take part in its forward pass and its state
    dict."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Set whether the ranks exchange gradients after the next micro-batch; only after the last one of an
    update. With hsdp those of a machine always do, so that none holds the gradients whole; the machines after
    the last one."""
    if is_sharded(model):
        sharded = cast(Any, model)
        sharded.reshard()  # whole after a forward pass without a backward one, as old log-probabilities take
        is_one_row = next(sharded.parameters()).device_mesh.ndim == 1
        if is_one_row:
            sharded.set_requires_gradient_sync(enabled)
        else:
            sharded.set_requires_all_reduce(enabled)
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled  # as its `no_sync` does


def whole_model(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model for decoding: a copy with whole weights where it is sharded (a collective) and on a GPU, with
    matrices in `dtype`, vectors as they are; else, in float32, itself. The copy shares its buffers. Raises
    UserError if the model is sharded and has other layers than a new model of its config."""
    if dtype == torch.float32 and not next(model.parameters()).is_cuda and not is_sharded(model):
        return model
    # id in the model -> in the copy
    tensors: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for value in model.parameters():  # tied ones are there once
        full = full_tensor(value.detach())
        tensors[id(value)] = nn.Parameter(full.to(dtype) if value.ndim > 1 else full, requires_grad=False)
    if not is_sharded(model):
        return copy.deepcopy(model, tensors).eval()
    classes = [class_before_sharding(module) for module in model.modules()]
    with torch.device("meta"):
        whole = classes[0](cast(Any, model).config).eval()
    if classes != [type(module) for module in whole.modules()]:
        raise UserError(
            f"--parallel: the rollouts of a sharded model are written by a new {classes[0].__name__} of its "
            "config, which has not the layers that were put into it; use --parallel ddp"
        )
    for copied, module in zip(whole.modules(), model.modules(), strict=True):
        for name, buffer in module.named_buffers(recurse=False):
            setattr(copied, name, buffer)
        for name, value in module.named_parameters(recurse=False):
            setattr(copied, name, tensors[id(value)])
    return whole


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """The class of a module, which `fully_shard` replaces by one with the bases FSDPModule and this class."""
    if is_sharded(module):
        return type(module).__bases__[1]
    return type(module)


def full_tensor(value: Tensor) -> Tensor:
    """A tensor with the shards of all ranks; a collective if it is sharded."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def local_tensor(value: Tensor) -> Tensor:
    """What this rank has of a tensor: its shard, or all of it."""
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value
