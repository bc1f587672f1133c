"""MiniMind's helpers under MiniMind's names, and what every stage does alike before it trains.

Three of MiniMind's names are defined in files that this one is built upon, and are only imported here:
`Logger` and `is_main_process` in devices/process_group.py, since everything prints through them, and
`SkipBatchSampler` in data/datasets.py, beside the loaders that use it.
"""

import math
import os
import random
import uuid
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from common.arguments import parse_args
from common.command_line import log_to
from common.errors import UserError, reason
from common.files import lock_output, read_errors
from common.launcher import available_cores, launch
from common.settings import ROOT, StageArgs
from dataset.lm_dataset import StageDataset
from dataset.token_cache import load_tokenizer
from trainer.data.datasets import (  # noqa: F401
    SizedDataset,
    SkipBatchSampler,
    StageData,
    check_data_paths,
    check_needs_held_out,
    epoch_samples,
    epoch_tokens,
    eval_loader,
    steps_per_epoch,
)
from trainer.devices.device import (
    autocast_dtype,
    describe_device,
    device_and_precision,
    matrix_rate,
    prepare_device,
)
from trainer.devices.process_group import (
    Logger,
    check_gpus_differ,
    interruptible,
    is_main_process,
    join_process_group,
    world_size,
)
from trainer.devices.wrapping import freeze, unwrap, wrap_model
from trainer.objectives.next_token import frozen_model
from trainer.optim.build import check_optimizer
from trainer.report.warnings import facts_for_advice
from trainer.run import resume
from trainer.run.compiling import check_cache_folder, compile_model, compiles
from trainer.run.experts import ExpertLoad, token_counters
from trainer.run.included_callbacks import EarlyStopping, TensorBoardLogger
from trainer.run.samples import sample_callbacks
from trainer.run.saving import check_starts, complete_moves, has_ended_early, is_new, restore
from trainer.run.state import TrainState
from trainer.weights import checkpoint
from trainer.weights.config import SHAPE, check_tokenizer, describe_size
from trainer.weights.files import (
    check_model_file,
    described_config,
    fill,
    keep_tokenizer,
    missing_weights,
    read_model,
    tokenizer_folder,
)
from trainer.weights.paths import (
    NAMED_SHAPE,
    is_path,
    log_path,
    output_folders,
    resume_path,
    run_name,
    start_path,
    state_files,
    tensorboard_folder,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

A = TypeVar("A", bound=StageArgs)


def init_distributed_mode(rank_timeout: float = 600, device: torch.device | None = None) -> int:
    """Join the process group that the environment describes: gloo for CPU tensors, NCCL for CUDA ones.

    Args:
        device: of this rank; by default a GPU if there is one. Without one CUDA is not touched.
        rank_timeout: seconds that a rank waits in a collective until it takes its peer for lost; a network
            that is cut off gives no other sign. The rendezvous itself waits a day, since one machine may
            still be tokenising what another one has in its cache.

    Returns:
        The local rank; 0 without a process group (a single process).

    Raises:
        UserError: the environment does not say which rank this is, the ranks cannot meet, or two share a GPU.
    """
    place = launch()
    if place.problem:
        raise UserError(place.problem)
    if place.world_size == 1:
        return 0
    local_rank = place.local_rank
    on_gpu = device.type == "cuda" if device is not None else torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(min(local_rank, torch.cuda.device_count() - 1) if device is None else device)
    elif place.local_world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        # torchrun gives each process one thread; share all cores instead
        torch.set_num_threads(max(1, available_cores() // place.local_world_size))
    try:
        timeout = timedelta(seconds=rank_timeout)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        interruptible(lambda: join_process_group(place.rank, place.world_size, backend, timeout))
    except RuntimeError as error:  # dist.DistNetworkError and its like
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"the ranks cannot meet at {where} ({reason(error)}); if the port is taken give torchrun another "
            "--master_port, or --standalone on one machine"
        ) from error
    if on_gpu:
        check_gpus_differ()
    return local_rank


def setup_seed(seed: int) -> None:
    """Seed Python, numpy and torch, alike on every rank, and make cuDNN deterministic."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def get_lr(current_step: int, total_steps: int, lr: float) -> float:
    """Cosine from `lr` down to a tenth of it; steps are optimizer updates, the first is 1 (MiniMind's
    schedule)."""
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * current_step / total_steps)))


def lm_checkpoint(
    lm_config: Any,
    weight: str = "full_sft",
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    epoch: int = 0,
    step: int = 0,
    wandb: Any = None,
    save_dir: str | Path = ROOT / "checkpoints",
    resume_from: str | None = None,
    **kwargs: Any,
) -> dict[str, Any] | None:
    """Save the state to resume from when given a model, else return the saved one (None if there is none).

    Saved: fp32 weights, optimizer, epoch, step (micro-batches of this epoch done), world size, id of the
    tracker (`wandb`: its run, or its module), and whatever `kwargs` holds. All ranks must call.
    `resume_from`: the state with which a branch begins.
    """
    path = resume_path(save_dir, weight, lm_config)
    if model is None:
        return checkpoint.load(path, resume_from)
    run = wandb.get_run() if hasattr(wandb, "get_run") else wandb
    weights, optimizer_state = checkpoint.get_state(model, optimizer)
    state = {"model": weights, "optimizer": optimizer_state, "epoch": epoch, "step": step}
    state |= {"world_size": world_size(), "wandb_id": getattr(run, "id", None)}
    described = {"model": lm_config.own_fields()} if hasattr(lm_config, "own_fields") else None
    if is_main_process():
        checkpoint.write_state(path, state | kwargs, described)
    return None


def init_model(
    lm_config: "MiniMindConfig",
    from_weight: str = "pretrain",
    tokenizer_path: str | Path = ROOT / "model",
    save_dir: str | Path = ROOT / "out",
    device: str | torch.device = "cpu",
) -> "tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]":
    """Build the model in float32 and load its tokenizer; `from_weight`: the weights to start from, their name
    in `save_dir` or their path, or `none` for random ones. Raises UserError if the weights are missing or of
    another shape, or the tokenizer does not fit the vocabulary."""
    from model.model_minimind import MiniMindForCausalLM

    tokenizer = load_tokenizer(tokenizer_path)
    check_tokenizer(tokenizer, tokenizer_path, lm_config)
    model = MiniMindForCausalLM(lm_config)
    loaded = ""
    if from_weight != "none":
        path = start_path(save_dir, from_weight, lm_config)
        weights, stored = read_model(path, lm_config.num_experts_per_tok)
        fill(model, weights, path, stored)
        check_tokenizer(tokenizer, tokenizer_path, stored)
        loaded = f", weights: {from_weight}"
    Logger(f"{describe_size(model)}{loaded}")
    cast(nn.Module, model).to(device)  # in place
    return model, tokenizer


# --- what every stage does alike


def warmup_cosine(update: int, total_updates: int, args: StageArgs) -> float:
    """The schedule of a stage: learning rate of an update, from 1; linear warm-up times the cosine of
    `get_lr`."""
    return min(1.0, update / max(1, args.warmup_updates)) * get_lr(update, total_updates, args.learning_rate)


def read_start_weights(args: A) -> "tuple[A, MiniMindConfig | None]":
    """The settings with the shape and the tokenizer of the model in --from_weight, and its config. Where the
    weights are gone, but the run is resumed from a checkpoint, which replaces them, that says the same.

    Order of precedence, the first that there is:
        config of the weights: in their file, else what the tensors and the name of the file show.
        shape: the config of the weights; flags, --config, defaults. A flag that contradicts is refused.
        tokenizer: --tokenizer_path; that of the weights; that of this repository.
        dropout: the settings alone.

    Raises UserError if there are no such weights, or another shape was asked for.
    """
    path = start_path(args.save_dir, args.from_weight, args)
    with read_errors(path):
        is_there = path.exists()
    if not is_there:
        state = state_to_resume(args) if args.from_resume or args.resume_from else None
        if state is None and is_path(args.from_weight):
            raise UserError(f"--from_weight {path}: no such file or folder")
        if state is None:
            raise missing_weights(path)
        path = state
    else:
        check_model_file(path)
    config = described_config(path)
    if config is None:
        config = read_model(path, args.num_experts_per_tok if args.use_moe else None)[1]
    shape = {name: getattr(config, name) for name in SHAPE}
    for name, value in shape.items():
        if getattr(args, name) != value and is_given(args, name):
            raise UserError(
                f"--{name} {getattr(args, name)}: --from_weight {path} is of {value}; leave the flag out"
            )
    if not is_given(args, "tokenizer_path"):
        args = args.model_copy(update={"tokenizer_path": str(tokenizer_folder(path))})
    return args.model_copy(update=shape), config


def state_to_resume(args: StageArgs) -> Path | None:
    """The newest state of the run that the settings name, None if there is none. Where a path in
    --from_weight told the shape, which is in the name of a run, the flags that are given must tell it from
    others. Raises UserError if they do not."""
    if not is_path(args.from_weight):
        states = [resume_path(args.checkpoint_dir, args.save_weight, args)]
    else:
        given = {name: getattr(args, name) for name in NAMED_SHAPE if is_given(args, name)}
        shapes = state_files(args.checkpoint_dir, args.save_weight)
        states = [path for path, shape in shapes.items() if given.items() <= shape.items()]
    if len(states) > 1:
        named = ", ".join(path.name for path in states)
        raise UserError(
            f"--from_weight {args.from_weight} is gone, and {args.checkpoint_dir} holds several runs of this "
            f"name ({named}); choose one with --hidden_size and --use_moe"
        )
    if states:
        for place in (states[0], checkpoint.previous_path(states[0])):
            if place.exists():
                return place
    return Path(args.resume_from) if args.resume_from else None


def is_given(args: StageArgs, name: str) -> bool:
    """Whether the user gave a setting, be it with the value of its default."""
    return name in args.model_fields_set or not args.is_default(name)


def read_settings(args_class: type[A], description: str | None) -> "tuple[A, MiniMindConfig | None]":
    """The settings of a stage, from its class, --config and command line, and the config of its start
    weights, see `read_start_weights`; None without any."""
    args = parse_args(args_class, description)
    resume.check_utf8(args)
    check_data_paths(args)
    if args.resume_from is not None:
        args = args.model_copy(update={"from_resume": True})
    start = None
    if args.from_weight != "none":
        args, start = read_start_weights(args)
    check_names(args)
    return args, start


def check_names(args: StageArgs) -> None:
    """Raise UserError if a setting names what is not there: called before anything that takes time."""
    args.check_names()
    own = resume_path(args.checkpoint_dir, args.save_weight, args)
    has_own_state = own.exists() or checkpoint.previous_path(own).exists()  # a branch goes on with it
    if args.resume_from is not None and not has_own_state and not Path(args.resume_from).is_file():
        raise UserError(f"--resume_from {args.resume_from}: no such file")


def set_up_process(args: StageArgs) -> tuple[torch.device, Any, torch.amp.GradScaler]:
    """Prepare this process: its console (and log file), device and precision; from here on no other run may
    write to the files of this name. Returns device, autocast and gradient scaler."""
    name = run_name(args.save_weight, args)
    log_to(log_path(args, name), args.log_level)
    lock_output(name, **output_folders(args))
    if launch().rank == 0:
        complete_moves(args)
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        check_cache_folder(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    return device_and_precision(args)


def resolve_settings_and_check_resume(
    args: A,
    saved: dict[str, Any] | None,
    lm_config: "MiniMindConfig",
    train_set: StageData,
    eval_set: StageData | None,
) -> tuple[A, resume.Fingerprint]:
    """The settings, adapted to another number of ranks, and what identifies the run. Raises UserError if the
    checkpoint `saved` belongs to another run."""
    if saved is not None:
        args = resume.keep_global_batch(args, saved)
    data = train_set.fingerprint
    if eval_set is not None:
        data = data | {"held_out_data": eval_set.fingerprint["data"]}
    run = resume.run_fingerprint(args, lm_config.own_fields(), data, epoch_samples(train_set, args))
    resume.check_resume(args, run, saved)
    if is_new(saved):
        check_starts(args)
    return args, run


def reference_model(args: StageArgs, lm_config: "MiniMindConfig", device: torch.device) -> nn.Module:
    """A frozen model with the weights that a run starts from, which it reads again when it is resumed."""
    setup_seed(args.seed)  # --from_weight none: the same random ones
    model, _ = init_model(lm_config, args.from_weight, args.tokenizer_path, args.save_dir, device)
    return frozen_model(model, device)


def compile_and_wrap(
    model: nn.Module,
    args: StageArgs,
    device: torch.device,
    autocast: Any,
    train_set: SizedDataset,
    frozen: tuple[str, ...] = (),
) -> nn.Module:
    """The model on its device, compiled where that is asked for or pays, and wrapped in DDP or FSDP where
    there are several ranks. `frozen`: prefixes of the names of parameters that are not trained."""
    prepare_device(device)
    if frozen:
        freeze(model, frozen)
    if compiles(args, train_set, device):
        compile_model(model, may_fail=args.use_compile is None)
    return wrap_model(model, device, args.parallel, args.activation_checkpointing, autocast)


def begin_run(
    state: TrainState, saved: dict[str, Any] | None, data: Any, eval_set: StageData | None = None
) -> None:
    """Complete the state of a run before it trains, from the checkpoint `saved` if there is one, which is
    emptied to free its memory. data: the training data, or what else has their `source` (FILE:LINE of a
    sample). Raises UserError if the checkpoint is of another kind of model; early stopping without held-out
    data."""
    args = state.args
    check_optimizer(state.optimizer)
    state.environment = resume.environment(args, state.device, state.autocast)
    state.code = resume.code_of_run(state.optimizer)
    resume.check_ranks_agree(
        {name: state.environment[name] for name in ("device", "dtype")} | state.code["sources"]
    )
    state.source = data.source
    if eval_set is not None:
        state.eval_loader = eval_loader(eval_set, args.batch_size, eval_set.collate)
    add_callbacks(state)
    state.objective.load_frozen(args, state.device)
    if state.objective.needs_reference and saved is not None:
        resume.check_reference(args, state.run, saved)
    if state.objective.needs_reference and state.objective.reference is None:
        state.objective.reference = reference_model(args, state.lm_config, state.device)
    dtype = autocast_dtype(state.autocast, state.device)
    state.meter.peak = matrix_rate(state.device, dtype)
    vocabulary = getattr(state.lm_config, "vocab_size", 0)
    guessing = math.log(vocabulary) if vocabulary and state.objective.loss_is_cross_entropy else None
    state.facts = facts_for_advice(
        args,
        state.total_updates,
        guessing,
        held_out_is_training=state.run.get("held_out_data", "") == state.run.get("data"),
        best_weights=run_name(f"{args.save_weight}_best", args),
    )
    tokenizer = state.run.get("tokenizer")
    if tokenizer and Path(args.tokenizer_path).resolve() != ROOT / "model":
        for folder in (args.save_dir, args.checkpoint_dir):
            keep_tokenizer(args.tokenizer_path, folder, tokenizer)
    if saved is not None:
        go_on(state, saved)
    state.progress.run_id = state.progress.run_id or uuid.uuid4().hex
    text = f"run: {state.total_updates - state.progress.update:,} of {state.total_updates:,} updates"
    if isinstance(data, StageDataset):
        text += f", {epoch_tokens(data, args) * args.epochs:,.0f} tokens in all"
    Logger(f"{text}; {describe_device(state.device, state.autocast)}")


def go_on(state: TrainState, saved: dict[str, Any]) -> None:
    """Restore a run, or begin a branch, from a checkpoint, and say so."""
    resume.warn_of_changes(saved, state.environment, state.code)
    restore(state, saved)
    # start weights that are gone keep their name
    state.run["from_weight_sha256"] = saved["run"]["from_weight_sha256"]
    progress = state.progress
    if progress.finished and not has_ended_early(state.args, saved):
        progress.finished, progress.extended_to = False, state.args.epochs
    state.stopped = progress.finished
    if progress.run_id:  # else a branch begins
        state.resumed_update = state.saved_update = progress.update
    # The samples that are done, in micro-batches of the present batch size and ranks. They are whole updates;
    # only the end of an epoch makes it necessary to round up.
    progress.step = steps_per_epoch(progress.samples_done, state.args.batch_size)
    Logger(
        f"resuming {state.args.save_weight} at epoch {progress.epoch + 1}, update {progress.update} of "
        f"{state.total_updates}, from {saved['loaded_from']}"
    )
    saved.clear()  # whoever read it still refers to it: 12 bytes a parameter


def add_callbacks(state: TrainState) -> None:
    """Add the callbacks that the settings ask for, behind those that the run has already."""
    args = state.args
    check_needs_held_out(args, state.eval_loader is not None)
    if args.patience:
        state.callbacks.append(EarlyStopping(args.monitor, args.mode, args.patience, args.min_delta))
    if args.use_tensorboard or args.tensorboard_dir:
        state.callbacks.append(TensorBoardLogger(tensorboard_folder(args)))
    if getattr(state.lm_config, "use_moe", False) and token_counters(unwrap(state.model)):
        state.callbacks.append(ExpertLoad(unwrap(state.model)))
    if args.sample_prompts != "none" and (args.sample_prompts != "auto" or state.eval_loader is not None):
        state.callbacks += sample_callbacks(state)
    state.callbacks.check()
