"""TrainingEngine: runs a task with its data and callbacks in the training loop of trainer/loop.py."""

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import default_collate

from common.errors import UserError
from dataset.order import steps_per_epoch
from llm.training.core.callbacks import Callback, LRSchedulerCallback
from llm.training.core.checks import checked_criterion, checked_type, describe
from llm.training.core.config import Config
from llm.training.core.objective import TaskObjective
from llm.training.core.utils import CheckpointManager, Logger, PerformanceMonitor
from llm.training.data.base import DataModule
from llm.training.tasks.base_task import Task, TrainingTask
from trainer import stage
from trainer import trainer_utils as utils
from trainer.callbacks.base import CallbackList
from trainer.callbacks.train_state import Schedule, TrainState, total_updates
from trainer.checkpoint.run import training_files
from trainer.checkpoint.same_run import is_finished
from trainer.devices.device import device_and_precision
from trainer.loop import check_monitored, evaluate, train_epoch
from trainer.objectives.base import Objective, frozen_model
from trainer.report.trackers import start_tracker


class TrainingEngine:
    """One run of a task. Created on every rank, after the process group.

    Args:
        config: the validated settings.
        task, data_module: what to train, and on what; `data_module.setup()` has been called.
        callbacks: called at the points listed in docs/engine.md.
    """

    def __init__(
        self, config: Config, task: Task, data_module: DataModule, callbacks: Sequence[Callback] = ()
    ):
        self.config, self.task, self.data_module = config, task, data_module
        self.logger = Logger.of(config)
        task.data = data_module
        self.checkpoint_manager = CheckpointManager()
        self.performance_monitor = PerformanceMonitor()
        self.callbacks = CallbackList(callbacks)
        self._setup_components()

    def _setup_components(self) -> None:
        task, data = self.task, self.data_module
        device, autocast, scaler = device_and_precision(task.args)
        utils.setup_seed(task.args.seed)

        # the settings, and the checkpoint to resume from; another run's checkpoint is refused
        data.num_samples()  # refuses to go on without any
        eval_loader = data.val_dataloader()
        if task.args.eval_share and eval_loader is None:
            raise UserError(
                f"--eval_share: {type(data).__name__} sets no val_dataset to hold it; leave the flag out"
            )
        args, fingerprint, checkpoint = stage.find_run(
            task.args,
            task.fingerprint(),
            data.fingerprint(),
            data.train_dataset,
            samples=lambda _: data.num_samples(),
        )
        task.args = args
        self.is_finished = is_finished(args, fingerprint, checkpoint)  # then `run()` has nothing to do
        self.wandb = None if self.is_finished else start_tracker(args, fingerprint, checkpoint)

        # what the task makes; a checkpoint replaces the start weights
        kind = TaskObjective if isinstance(task, TrainingTask) else Objective
        objective = checked_type(task, "objective", task.objective, kind, f"an object of {kind.__name__}")
        reads_start_weights = checkpoint is None or objective.saves_trained_only
        model = self._build_model(args.from_weight if reads_start_weights else "none")
        model = objective.extend_model(model, args)
        checked_type(objective, "extend_model", model, nn.Module, "the model")
        wrapped_model = stage.compile_and_wrap(
            model, args, device, autocast, data.train_dataset, task.frozen_parameters
        )
        self.device = device
        optimizer = task.build_optimizer(model)
        checked_type(task, "build_optimizer", optimizer, Optimizer, "an optimizer of torch")
        self.optimizer = task.optimizer = optimizer
        self.scheduler = self._build_scheduler(total_updates(fingerprint))
        self.criterion = objective.loss
        if isinstance(task, TrainingTask):
            self.criterion = task.criterion = checked_criterion(task)
        if objective.needs_reference:
            utils.setup_seed(args.seed)  # without start weights: the same random ones
            reference: Any = self._build_model(args.from_weight)
            objective.reference = frozen_model(reference, device)
            if isinstance(task, TrainingTask):
                task.reference = objective.reference

        # the state of the run, restored from the checkpoint
        self.state = state = TrainState(
            args=args, lm_config=task.lm_config, fingerprint=fingerprint,
            model=wrapped_model, optimizer=self.optimizer, scaler=scaler, autocast=autocast, device=device,
            objective=objective, schedule=self._schedule(), eval_loader=eval_loader,
        )  # fmt: skip
        self.checkpoint_manager.state = state
        state.callbacks += [*self.callbacks, self.performance_monitor]
        stage.begin_run(state, checkpoint, data)

    def _build_model(self, weights: str) -> nn.Module:
        """The task's model, with these start weights."""
        task, args = self.task, self.task.args
        task.args = args.model_copy(update={"from_weight": weights})
        task.config = Config(task.args)
        model = checked_type(task, "build_model", task.build_model(), nn.Module, "the model, an nn.Module")
        task.args, task.config = args, Config(args)
        return model

    @property
    def model(self) -> nn.Module:
        """The model, wrapped for several processes."""
        return self.state.model

    def _build_scheduler(self, updates: int) -> Any:
        """The result of the task's `build_scheduler`. It may be declared with `optimizer` and
        `total_updates`, with `optimizer` alone, or without arguments: a task has the optimizer as
        `self.optimizer`."""
        build: Callable[..., Any] = self.task.build_scheduler
        parameters = inspect.signature(build).parameters
        if not parameters:
            return build()
        if "total_updates" in parameters:
            return build(self.optimizer, total_updates=updates)
        return build(self.optimizer)

    def _schedule(self) -> Schedule:
        """The learning rate of an update; None if a torch scheduler sets it, or if it is constant."""
        scheduler = self.scheduler
        is_stepped = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
        if self.task.scheduler_interval is not None and not is_stepped:
            raise UserError(
                f"{type(self.task).__name__}.scheduler_interval has no effect: build_scheduler returns no "
                "scheduler of torch that counts steps; leave it out"
            )
        if isinstance(scheduler, LRScheduler):
            steppers = [each for each in self.callbacks if isinstance(each, LRSchedulerCallback)]
            if not steppers:
                steppers = [LRSchedulerCallback()]
                self.callbacks += steppers
            steppers[0].scheduler, steppers[0].interval = scheduler, self.task.scheduler_interval
        elif callable(scheduler):
            return lambda update, total_updates, args: scheduler(update)
        elif scheduler is None:
            self.logger.info(f"{type(self.task).__name__}.build_scheduler returns None: a constant rate")
        else:
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
        if isinstance(self.state.objective, TaskObjective) and self.state.eval_loader is not None:
            # refuses a scheduler that would fail after an epoch
            check_monitored(self.state, evaluate(self.state, islice(self.state.eval_loader, 1)))
        utils.setup_seed(
            self.state.args.seed
        )  # regardless of what was drawn for the model and the validation
        with training_files(self.state, self.wandb):
            for epoch in range(self.state.progress.epoch, self.state.args.epochs):
                self._run_epoch(epoch)
        speed = self.performance_monitor.summary()
        if speed:
            text = f"{speed['batch_time']:.3f} s per update, {speed['tokens_per_second']:,.0f} tokens/s"
            if speed["mfu"]:
                text += f", mfu {speed['mfu']:.0%}"
            self.logger.info(f"{text}, {speed['memory_mb']:,.0f} MB")

    def _run_epoch(self, epoch: int) -> None:
        state = self.state
        start_step = state.progress.step if epoch == state.progress.epoch else 0
        loader = self.data_module.train_dataloader(epoch, start_step)
        if getattr(loader, "collate_fn", None) is default_collate:
            loader.collate_fn = self.data_module.collate  # makes empty batches, too
        if not hasattr(loader, "collate_fn"):
            raise UserError(
                f"{type(self.data_module).__name__}.train_dataloader returns {describe(loader)}; it must "
                "return a DataLoader, or an object with a collate_fn"
            )
        iters = steps_per_epoch(state.fingerprint["samples"], state.args.batch_size)
        train_epoch(state, epoch, loader, iters, start_step, self.wandb)

    def stop(self, reason: str) -> None:
        """End training after this update. Must be called on all ranks, at the same update. If the run is
        resumed, it continues."""
        self.state.stop(reason)
