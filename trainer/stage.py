"""What every stage does before it trains, in the order of the calls in its `main`."""

import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from common.arguments import parse_args
from common.command_line import log_to
from common.errors import UserError
from common.files import is_file, is_there, lock_output
from common.launcher import launch
from common.settings import ROOT, StageArgs
from dataset.lm_dataset import StageDataset
from dataset.opening import check_data_paths, check_needs_held_out
from dataset.order import SizedDataset, StageData, eval_loader, steps_per_epoch
from trainer.callbacks.experts import ExpertLoad, token_counters
from trainer.callbacks.included import EarlyStopping, TensorBoardLogger
from trainer.callbacks.right_answers import answer_callbacks
from trainer.callbacks.samples import sample_callbacks
from trainer.callbacks.train_state import Fingerprint, TrainState, total_updates
from trainer.checkpoint import same_run
from trainer.checkpoint.earlier import check_starts, complete_moves
from trainer.checkpoint.file import newest_checkpoint, previous_path
from trainer.checkpoint.run import restore
from trainer.checkpoint.same_run import has_ended_early, is_new
from trainer.devices.compiling import compile_model, compiles
from trainer.devices.device import (
    autocast_dtype,
    describe_device,
    device_and_precision,
    matrix_rate,
    prepare_device,
)
from trainer.devices.process_group import Logger, world_size
from trainer.devices.wrapping import freeze, unwrap, wrap_model
from trainer.objectives.base import frozen_model
from trainer.optim.build import check_optimizer
from trainer.report.warnings import facts_for_warnings
from trainer.trainer_utils import get_lr, init_model, setup_seed
from trainer.weights.config import SHAPE
from trainer.weights.files import (
    check_model_file,
    described_config,
    keep_tokenizer,
    missing_weights,
    read_model,
    tokenizer_folder,
)
from trainer.weights.paths import (
    NAMED_SHAPE,
    checkpoint_files,
    is_path,
    log_path,
    output_folders,
    resume_path,
    run_name,
    start_path,
)

if TYPE_CHECKING:
    from model.model_minimind import MiniMindConfig

A = TypeVar("A", bound=StageArgs)


def warmup_cosine(update: int, total_updates: int, args: StageArgs) -> float:
    """The schedule of a stage: the learning rate of an update, from 1. It is a linear warm-up times the
    cosine of `get_lr`."""
    return min(1.0, update / max(1, args.warmup_updates)) * get_lr(update, total_updates, args.learning_rate)


def read_settings(args_class: type[A], description: str | None) -> "tuple[A, MiniMindConfig | None]":
    """The settings of a stage, from its class, --config and the command line, and the config of its start
    weights (see `read_start_weights`), or None if it has none."""
    args = parse_args(args_class, description)
    same_run.check_settings_utf8(args)
    check_data_paths(args)
    if args.resume_from is not None:
        args = args.model_copy(update={"from_resume": True})
    start_config = None
    if args.from_weight != "none":
        args, start_config = read_start_weights(args)
    check_names(args)
    return args, start_config


def read_start_weights(args: A) -> "tuple[A, MiniMindConfig]":
    """The settings with the shape and the tokenizer of the model in --from_weight, and its config. If the
    weights are gone but the run is resumed, the checkpoint gives shape and config.

    The first source that exists counts:
        config of the weights: in their file; inferred from the tensors and the name of the file.
        shape: the config of the weights; flags, --config, defaults. A contradicting flag is refused.
        tokenizer: --tokenizer_path; the one of the weights; the one of this repository.
        dropout: only the settings.

    Raises UserError if there are no such weights, or if another shape was asked for."""
    path = start_path(args.save_dir, args.from_weight, args)
    if not is_there(path):
        state = checkpoint_to_resume(args) if args.from_resume or args.resume_from else None
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
        if getattr(args, name) not in (None, value) and is_given(args, name):
            raise UserError(
                f"--{name} {getattr(args, name)}: --from_weight {path} is of {value}; leave the flag out"
            )
    if not is_given(args, "tokenizer_path"):
        args = args.model_copy(update={"tokenizer_path": str(tokenizer_folder(path))})
    return args.model_copy(update=shape), config


def checkpoint_to_resume(args: StageArgs) -> Path | None:
    """The newest checkpoint of the run that the settings name; None if there is none. The shape is part of a
    run's name. If --from_weight is a path that is gone, only the flags give the shape; raises UserError if
    several runs match them."""
    if not is_path(args.from_weight):
        states = [resume_path(args.checkpoint_dir, args.save_weight, args)]
    else:
        given = {name: getattr(args, name) for name in NAMED_SHAPE if is_given(args, name)}
        shapes = checkpoint_files(args.checkpoint_dir, args.save_weight)
        states = [path for path, shape in shapes.items() if given.items() <= shape.items()]
    if len(states) > 1:
        named = ", ".join(path.name for path in states)
        raise UserError(
            f"--from_weight {args.from_weight} is gone, and {args.checkpoint_dir} holds several runs of this "
            f"name ({named}); choose one with --hidden_size and --use_moe"
        )
    if states:
        for place in (states[0], previous_path(states[0])):
            if is_there(place):
                return place
    return Path(args.resume_from) if args.resume_from else None


def is_given(args: StageArgs, name: str) -> bool:
    """Whether the user gave a setting, even if with its default value."""
    return name in args.model_fields_set or not args.is_default(name)


def check_names(args: StageArgs) -> None:
    """Raise UserError if a setting names something that does not exist. Called before anything that takes
    time."""
    args.check_names()
    own = resume_path(args.checkpoint_dir, args.save_weight, args)
    has_own_state = is_there(own) or is_there(previous_path(own))  # a branch continues with its own state
    if args.resume_from is not None and not has_own_state and not is_file(args.resume_from):
        raise UserError(f"--resume_from {args.resume_from}: no such file")


def set_up_process(args: StageArgs) -> tuple[torch.device, Any, torch.amp.GradScaler]:
    """Prepare this process: its console (and log file), device and precision, and a lock, so that no other
    run writes to the files of this name. Returns device, autocast and gradient scaler."""
    name = run_name(args.save_weight, args)
    log_to(log_path(args, name), args.log_level)
    lock_output(name, **output_folders(args))
    if launch().rank == 0:
        complete_moves(args)
    return device_and_precision(args)


def data_fingerprint(train_set: StageData, eval_set: StageData | None) -> Fingerprint:
    """The fingerprint of the data of a stage."""
    data = train_set.fingerprint
    return data if eval_set is None else data | {"held_out_data": eval_set.fingerprint["data"]}


def find_run(
    args: A, model: Fingerprint, data: Fingerprint, train_set: Any, samples: Callable[[A], int] | None = None
) -> tuple[A, Fingerprint, dict[str, Any] | None]:
    """A resumed run or a new one: its settings, its fingerprint, and its checkpoint (None for a new run).

    Three settings are adapted: --accumulation_steps to another number of ranks, so that an update stays as
    large as it was; --epochs to --max_steps; --weight_decay if it is `auto`.

    Args:
        model, data: what identifies them, see `run_fingerprint`.
        samples: gives the items of an epoch; by default the data do.

    Raises UserError if the checkpoint belongs to another run or cannot be read, or if a new run would set
    aside a file that it starts from.
    """
    checkpoint = None
    if args.from_resume:
        path = resume_path(args.checkpoint_dir, args.save_weight, args)
        checkpoint = newest_checkpoint(path, args.resume_from)
    if checkpoint is not None:
        args = same_run.keep_global_batch(args, checkpoint)
    count = samples or train_set.epoch_samples
    args = same_run.with_enough_epochs(args, count(args))
    args = same_run.with_weight_decay(args, checkpoint, train_set)
    fingerprint = same_run.run_fingerprint(args, model, data, count(args))
    same_run.check_same_run(args, fingerprint, checkpoint)
    if is_new(checkpoint):
        check_starts(args)
    return args, fingerprint, checkpoint


def compile_and_wrap(
    model: nn.Module,
    args: StageArgs,
    device: torch.device,
    autocast: Any,
    train_set: SizedDataset,
    frozen_parameters: tuple[str, ...] = (),
) -> nn.Module:
    """The model on its device, compiled if that is asked for or pays off, and wrapped in DDP or FSDP if there
    are several ranks. `frozen_parameters`: prefixes of the names of parameters that are not trained."""
    prepare_device(device)
    if frozen_parameters:
        freeze(model, frozen_parameters)
    model = model.to(device)  # what is compiled depends on it
    if compiles(args, train_set, device):
        tokens = min(8192, args.batch_size * args.max_seq_len)  # no more than a micro-batch may have
        compile_model(model, tokens, may_fail=args.use_compile is None)
    return wrap_model(model, device, args.parallel, args.activation_checkpointing, autocast)


def begin_run(
    state: TrainState, saved: dict[str, Any] | None, data: Any, eval_set: StageData | None = None
) -> None:
    """Complete the state of a run before it trains, from the checkpoint `saved` if there is one. `saved` is
    emptied to free its memory. data: the training data. Raises UserError if the checkpoint is of another kind
    of model, and for early stopping without held-out data."""
    args = state.args

    # the machine and the code, which a resume compares
    check_optimizer(state.optimizer)
    state.environment = same_run.environment(args, state.device, state.autocast)
    state.code = same_run.code_of_run(state.optimizer)
    if world_size() > 1:
        chosen = {name: state.environment[name] for name in ("device", "dtype")}
        same_run.check_ranks_agree(chosen)
        same_run.check_code_agrees(state.code["sources"])

    # held-out data, callbacks, frozen models
    state.source = data.source
    if eval_set is not None:
        state.eval_loader = eval_loader(eval_set, args.batch_size, eval_set.collate)
    add_callbacks(state, data)
    state.objective.load_frozen_models(args, state.device)
    if state.objective.needs_reference and saved is not None:
        same_run.check_reference(args, state.fingerprint, saved)
    if state.objective.needs_reference and state.objective.reference is None:
        state.objective.reference = reference_model(args, state.lm_config, state.device)

    # the device's peak rate, and the facts for warnings
    dtype = autocast_dtype(state.autocast, state.device)
    state.meter.peak = matrix_rate(state.device, dtype)
    vocabulary = getattr(state.lm_config, "vocab_size", 0)
    guessing = math.log(vocabulary) if vocabulary and state.objective.loss_is_cross_entropy else None
    state.facts = facts_for_warnings(
        args,
        state.total_updates,
        guessing,
        held_out_is_training=is_trained_on(data, eval_set, state.fingerprint),
        best_weights=run_name(f"{args.save_weight}_best", args),
        data_tokens=data.num_tokens if isinstance(data, StageDataset) else None,
    )

    # the user's own tokenizer is copied beside the weights
    tokenizer = state.fingerprint.get("tokenizer")
    if tokenizer and Path(args.tokenizer_path).resolve() != ROOT / "model":
        for folder in (args.save_dir, args.checkpoint_dir):
            keep_tokenizer(args.tokenizer_path, folder, tokenizer)

    if saved is not None:
        go_on(state, saved)
    state.progress.run_id = state.progress.run_id or uuid.uuid4().hex
    text = f"run: {state.total_updates:,} updates"
    if state.progress.update:
        text += f", {state.total_updates - state.progress.update:,} of them left"
    if isinstance(data, StageDataset):
        share = state.total_updates / total_updates(state.fingerprint | {"max_steps": 0})  # of the epochs
        text += f", {data.epoch_tokens(args) * args.epochs * share:,.0f} tokens in all"
    Logger(f"{text}; {describe_device(state.device, state.autocast)}")


def is_trained_on(data: Any, eval_set: Any, fingerprint: Fingerprint) -> bool:
    """Whether the held-out data are the training data or some of their files."""
    train, held_out = getattr(data, "train_dataset", data), getattr(data, "val_dataset", eval_set)
    if not (isinstance(train, StageDataset) and isinstance(held_out, StageDataset)):
        return fingerprint.get("held_out_data", "") == fingerprint.get("data")
    return "eval_share" not in held_out.fingerprint and held_out.file_hashes <= train.file_hashes


def reference_model(args: StageArgs, lm_config: "MiniMindConfig", device: torch.device) -> nn.Module:
    """A frozen model with the weights that a run starts from. A resumed run reads them again."""
    setup_seed(args.seed)  # --from_weight none: the same random ones
    model, _ = init_model(lm_config, args.from_weight, args.tokenizer_path, args.save_dir, device)
    return frozen_model(model, device)


def add_callbacks(state: TrainState, data: Any) -> None:
    """Add the callbacks that the settings ask for, after those that the run already has. data: the training
    data."""
    args = state.args
    check_needs_held_out(args, state.eval_loader is not None)
    if args.patience:
        state.callbacks.append(EarlyStopping(args.monitor, args.mode, args.patience, args.min_delta))
    if args.tensorboard_dir:
        folder = Path(args.tensorboard_dir) / run_name(args.save_weight, args)
        state.callbacks.append(TensorBoardLogger(folder))
    if getattr(state.lm_config, "use_moe", False) and token_counters(unwrap(state.model)):
        state.callbacks.append(ExpertLoad(unwrap(state.model)))
    if args.sample_prompts != "none" and (args.sample_prompts != "auto" or state.eval_loader is not None):
        state.callbacks += [*sample_callbacks(state), *answer_callbacks(state, data)]


def go_on(state: TrainState, saved: dict[str, Any]) -> None:
    """Restore a run from a checkpoint, or begin a branch with it, and print a line about it."""
    changes = same_run.warn_of_changes(saved, state.environment, state.code)
    restore(state, saved)
    state.progress.changes += changes
    # start weights that are gone keep their name
    state.fingerprint["from_weight_sha256"] = saved["fingerprint"]["from_weight_sha256"]
    progress = state.progress
    if progress.finished and not has_ended_early(state.args, state.total_updates, saved):
        progress.finished, progress.extended_to = False, state.total_updates
    state.stopped = progress.finished
    if progress.run_id:  # else a branch begins
        state.resumed_update = state.saved_update = progress.update
    # The finished samples, in micro-batches of the current batch size and ranks. They are whole updates, so
    # rounding up is only needed at the end of an epoch.
    progress.step = steps_per_epoch(progress.samples_done, state.args.batch_size)
    Logger(
        f"resuming {state.args.save_weight} at epoch {progress.epoch + 1}, update {progress.update} of "
        f"{state.total_updates}, from {saved['loaded_from']}"
    )
    saved.clear()  # the caller still refers to it, which would keep 12 bytes per parameter
