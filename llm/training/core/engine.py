"""TrainingEngine: runs a task with its data and callbacks in the training loop of trainer/loop.py."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from common.errors import UserError
from llm.training.core.callbacks import Callback, LRSchedulerCallback
from llm.training.core.config import Config
from llm.training.core.utils import CheckpointManager, Logger, PerformanceMonitor
from llm.training.data.base import DataModule
from llm.training.tasks.base_task import TrainingTask
from trainer import trainer_utils as utils
from trainer.devices.device import device_and_precision
from trainer.loop import train_epoch
from trainer.optim.rules import apply_rules
from trainer.report.trackers import start_tracker
from trainer.run.callbacks import CallbackList
from trainer.run.errors import StopRequest
from trainer.run.paths import run_name
from trainer.run.resume import check_resume, keep_global_batch, run_fingerprint, total_updates
from trainer.run.saving import is_finished, training_files
from trainer.run.state import Schedule, TrainState


class TrainingEngine:
    """One run of a task. Created on every rank, after the process group.

    Args:
        config: the validated settings.
        task, data_module: what to train, and on what; `data_module.setup()` has been called.
        callbacks: called at the points listed in docs/CALLBACKS.md.
        stop: reports whether a signal asked the run to stop; by default none is handled.
    """

    def __init__(
        self,
        config: Config,
        task: TrainingTask,
        data_module: DataModule,
        callbacks: Sequence[Callback] = (),
        stop: StopRequest | None = None,
    ):
        self.config, self.task, self.data_module = config, task, data_module
        self.logger = Logger.of(config)
        task.data = data_module
        self.is_main_process = utils.is_main_process()
        self.run_name = run_name(task.args.save_weight, task.args)
        self.checkpoint_manager = CheckpointManager(task.args)
        self.performance_monitor = PerformanceMonitor()
        self.callbacks = CallbackList(callbacks)
        self._setup_components(stop or StopRequest())

    def _setup_components(self, stop: StopRequest) -> None:
        task, data = self.task, self.data_module
        device, autocast, scaler = device_and_precision(task.args)
        utils.setup_seed(task.args.seed)

        # the settings, and the checkpoint to resume from; that of another run is refused
        data.num_samples()  # refuses to go on without any
        checkpoint = self.checkpoint_manager.load_checkpoint()
        args = apply_rules(task.args, checkpoint, data.train_dataset)
        if checkpoint is not None:
            args = keep_global_batch(args, checkpoint)
        task.args = args
        held_out = data.val_dataloader()
        if args.eval_share and held_out is None:
            raise UserError(
                f"--eval_share: {type(data).__name__} sets no val_dataset to hold it; leave the flag out"
            )
        run = run_fingerprint(args, task.fingerprint(), data.fingerprint(), data.num_samples())
        run = check_resume(args, run, checkpoint)
        self.is_finished = is_finished(args, run, checkpoint)  # then `run` has nothing to do
        self.wandb = None if self.is_finished else start_tracker(args, run, checkpoint)

        # what the task makes; a checkpoint takes the place of the start weights
        weights = args.from_weight if checkpoint is None else "none"
        start = task.config.checkpoint.model_copy(update={"from_weight": weights})
        task.config = replace(task.config, checkpoint=start)
        model = task.build_model()
        wrapped = utils.compile_and_wrap(model, args, device, autocast, data.train_dataset, task.frozen)
        self.device = device
        self.optimizer = task.optimizer = task.build_optimizer(model)
        self.scheduler = self._build_scheduler(total_updates(run))
        self.criterion = task.criterion = task.build_criterion()
        check_criterion(task)

        # the state of the run, restored from the checkpoint
        self.state = state = TrainState(
            args=args, lm_config=task.lm_config, run=run, stop_request=stop,
            model=wrapped, optimizer=self.optimizer, scaler=scaler, autocast=autocast, device=device,
            loss_fn=lambda model, batch, args: checked_loss(task, task.train_step(model, batch)),
            eval_fn=lambda model, batch, args: checked_sums(task, task.validation_step(model, batch)),
            size_fn=lambda batch, lm_config: task.size(batch),
            schedule=self._schedule(), metric_names=task.metric_names, eval_loader=held_out,
        )  # fmt: skip
        self.checkpoint_manager.state = state
        state.callbacks.engine = self
        state.callbacks += [*self.callbacks, self.performance_monitor]
        utils.begin_run(state, checkpoint, data, None, task.code_files())
        self.resumed_update = state.resumed_update

    @property
    def model(self) -> nn.Module:
        """The model, wrapped for several processes."""
        return self.state.model

    def _build_scheduler(self, updates: int) -> Any:
        """What the task's `build_scheduler` returns, which may be declared with `optimizer` and
        `total_updates`, with `optimizer`, or with nothing: a task has the optimizer as `self.optimizer`."""
        build: Callable[..., Any] = self.task.build_scheduler
        parameters = inspect.signature(build).parameters
        if not parameters:
            return build()
        if "total_updates" in parameters:
            return build(self.optimizer, total_updates=updates)
        return build(self.optimizer)

    def _schedule(self) -> Schedule:
        """The learning rate of an update; None where a scheduler of torch sets it, or it is constant."""
        scheduler = self.scheduler
        if isinstance(scheduler, LRScheduler):
            if not any(isinstance(callback, LRSchedulerCallback) for callback in self.callbacks):
                self.callbacks.append(LRSchedulerCallback())
        elif callable(scheduler):
            return lambda update, total_updates, args: scheduler(update)
        elif scheduler is not None:
            raise UserError(
                f"{type(self.task).__name__}.build_scheduler returns a {type(scheduler).__name__}; it must "
                "return a function of the update, a scheduler of torch, or None"
            )
        return lambda update, total_updates, args: None

    def run(self) -> None:
        """Train until the last epoch, or until a callback calls `stop`.

        Raises:
            UserError, Interrupted: see `train_epoch`.
        """
        if self.is_finished:
            return
        utils.setup_seed(self.state.args.seed)  # whatever was drawn for the model
        with training_files(self.state, self.wandb):
            for epoch in range(self.state.epoch, self.state.args.epochs):
                self._run_epoch(epoch)
        speed = self.performance_monitor.summary()
        if speed:
            text = f"{speed['batch_time']:.3f} s per update, {speed['tokens_per_second']:,.0f} tokens/s"
            self.logger.info(f"{text}, mfu {speed['mfu']:.0%}, {speed['memory_mb']:,.0f} MB")

    def _run_epoch(self, epoch: int) -> None:
        state = self.state
        start_step = state.step if epoch == state.epoch else 0
        loader = self.data_module.train_dataloader(epoch, start_step)
        train_epoch(state, epoch, loader, state.iters, start_step, self.wandb)

    def stop(self, reason: str) -> None:
        """End training after this update. Must be called on all ranks, at the same update. Resumed, the run
        goes on."""
        self.state.stop(reason)


# --- the form of what a task's methods return


def check_criterion(task: TrainingTask) -> None:
    """Raise UserError if the loss function is one of torch that returns means."""
    if getattr(task.criterion, "reduction", None) == "mean":
        made, kind = f"{type(task).__name__}.build_criterion", type(task.criterion).__name__
        why = "but the loop divides the sums by the number of targets of the whole update"
        raise UserError(f"{made} returns {kind}(reduction='mean'), {why}: use {kind}(reduction='sum')")


def checked_loss(task: TrainingTask, result: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss [], the auxiliary loss [] and the sums of metrics that `train_step` returned; the last two may
    be missing. Raises UserError if the loss is no single number with a gradient."""
    values = result if isinstance(result, tuple) else (result,)
    loss = values[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            what += f" of shape {list(loss.shape)}, requires_grad={loss.requires_grad}"
        raise UserError(
            f"{type(task).__name__}.train_step returns {what}; it must return the sum of the losses as "
            "computed, one number with a gradient"
        )
    aux_loss = values[1] if len(values) > 1 else torch.zeros_like(loss)
    sums = values[2] if len(values) > 2 else {}
    return loss.reshape(()), aux_loss.reshape(()), sums


def checked_sums(task: TrainingTask, result: Any) -> dict[str, Any]:
    """The sums that `validation_step` returned. Raises UserError if it returned something else."""
    if not isinstance(result, dict):
        returned = f"{type(task).__name__}.validation_step returns a {type(result).__name__}"
        raise UserError(f"{returned}; it must return sums by name, such as {{'loss': ...}}")
    return result
