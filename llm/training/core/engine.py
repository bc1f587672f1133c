"""TrainingEngine: runs a task with its data and callbacks in the training loop of trainer/loop.py."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from common.errors import UserError
from common.settings import StageArgs
from llm.training.core.callbacks import Callback, CallbackList, LRSchedulerCallback
from llm.training.core.config import Config
from llm.training.core.rehearsal import check_criterion, check_forms, checked_loss, rehearse
from llm.training.core.utils import CheckpointManager, Logger, PerformanceMonitor
from llm.training.data.base import DataModule
from llm.training.tasks.base_task import TrainingTask
from trainer.components.bad_updates import BadUpdates
from trainer.components.compiling import compiles
from trainer.components.device import mixed_precision, prepare_device, select_device, use_deterministic_kernels
from trainer.components.flops import peak_rate
from trainer.components.parallel import wrap_model
from trainer.components.resume import check_resume, code_hashes, keep_global_batch, run_fingerprint, total_updates
from trainer.components.run_files import run_name
from trainer.components.saving import complete_files, save_final_weights, set_earlier_run_aside
from trainer.components.signals import StopRequest
from trainer.components.state import Batch, Hooks, Schedule, TrainState
from trainer.loop import finish_update, train_epoch
from trainer.trainer_utils import is_main_process, setup_seed, steps_per_epoch


class TrainingEngine(Hooks):
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
        self.config, self.task, self.data, self.logger = config, task, data_module, Logger.of(config)
        task.data = data_module
        check_forms(task, data_module)
        self.args = config.to_args()
        self.is_main_process = is_main_process()
        self.run_name = run_name(self.args.save_weight, self.args)
        self.checkpoint_manager = CheckpointManager(config, self.run_name)
        self.performance_monitor = PerformanceMonitor()
        self.callbacks = CallbackList(callbacks)
        self.resumed_update: int | None = None  # the last update reported before the resume
        self._setup_components(stop or StopRequest())

    def _setup_components(self, stop: StopRequest) -> None:
        args, task = self.args, self.task
        use_deterministic_kernels(args.deterministic)
        device = select_device(args.device)
        autocast, scaler = mixed_precision(args.dtype, device)
        prepare_device(device)
        setup_seed(args.seed)
        samples, held_out = self.data.num_samples(), self.data.val_dataloader()
        if held_out is None and args.patience:
            raise UserError(f"--patience {args.patience}: early stopping needs held-out data, but there are none")
        if text := self.data.describe():
            self.logger.info(text)
        checkpoint = self.checkpoint_manager.load_checkpoint()
        self.args = args = keep_global_batch(args, checkpoint)
        run = run_fingerprint(args, task.fingerprint(), self.data.fingerprint(), samples)
        run = check_resume(args, run, checkpoint)
        if checkpoint is not None:  # its weights replace --from_weight
            task.config = replace(task.config, checkpoint=replace(task.config.checkpoint, from_weight="none"))
        model = task.build_model()
        compiled = compiles(args, self.data.train_dataset)
        wrapped = wrap_model(model, device, args.parallel, compiled, args.activation_checkpointing, autocast)
        optimizer = task.build_optimizer(model)
        self.scheduler = self._build_scheduler(optimizer, total_updates(run))
        task.criterion = task.build_criterion()
        check_criterion(task, task.criterion)
        parts = (scaler, autocast, device, self._loss, self._schedule(), run, stop)
        self.state = state = TrainState(args, args, wrapped, optimizer, *parts, size_fn=task.size, hooks=self)
        state.eval_loader, state.eval_fn = held_out, task.validation_step
        state.monitor = (args.monitor, args.mode)
        state.bad_updates = BadUpdates(args.max_bad_updates, self.data.source)
        state.peak_flops = peak_rate(autocast, device)
        state.code = code_hashes(task.code_files())
        state.iters = steps_per_epoch(samples, args.batch_size)
        if checkpoint is not None:
            state.restore(checkpoint)
            self.resumed_update = state.reported_update

    def _loss(self, model: nn.Module, batch: Batch, args: StageArgs) -> tuple[Tensor, Tensor]:
        return checked_loss(self.task, self.task.train_step(model, batch))

    def _build_scheduler(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        """What the task's `build_scheduler` returns, declared with or without `total_updates`."""
        build = self.task.build_scheduler
        parameters = inspect.signature(build).parameters.values()
        needed = [each for each in parameters if each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD]
        takes_updates = len(needed) > 1 or any(each.name == "total_updates" for each in parameters)
        return build(optimizer, updates) if takes_updates else build(optimizer)  # type: ignore[call-arg]

    def _schedule(self) -> Schedule:
        scheduler, callbacks, task = self.scheduler, self.callbacks.callbacks, self.task
        if isinstance(scheduler, LRScheduler):  # LRSchedulerCallback sets the rate
            found = [each for each in callbacks.values() if isinstance(each, LRSchedulerCallback)]
            stepping = found[0] if found else LRSchedulerCallback()
            callbacks |= {} if found else {"LRSchedulerCallback": stepping}
            stepping.adopt(scheduler, task.scheduler_interval)
            return lambda update, total_updates, args: None
        if scheduler is not None and not callable(scheduler):
            kind = type(scheduler).__name__
            told = f"{type(task).__name__}.build_scheduler returns a {kind}; it must return a function of the update"
            raise UserError(f"{told}, a scheduler of torch.optim.lr_scheduler, or None for a constant rate")
        return lambda update, total_updates, args: scheduler(update) if scheduler is not None else None

    def run(self) -> None:
        """Train until the last epoch, or until a callback calls `stop`.

        Raises:
            UserError, Interrupted: see `train_epoch`.
            CallbackError: a callback failed.
        """
        try:
            rehearse(self.task, self.data, self.state)
            if self.resumed_update is None and self.is_main_process:
                set_earlier_run_aside(self.args, self.args)
            self.dispatch("on_train_start")
            with complete_files(self.state):
                if self.state.record is not None:
                    finish_update(self.state)  # the run was stopped between saving and reporting
                for epoch in range(self.state.epoch, self.args.epochs):
                    self._run_epoch(epoch)
                save_final_weights(self.state)
            self.dispatch("on_train_end")
        except BaseException as error:
            self.dispatch("on_exception", error)
            raise
        speed = self.performance_monitor.summary()
        if speed:
            text = f"{speed['batch_time']:.3f} s per update, {speed['tokens_per_second']:,.0f} tokens/s"
            self.logger.info(f"{text}, mfu {speed['mfu']:.0%}, {speed['memory_mb']:,.0f} MB")

    def _run_epoch(self, epoch: int) -> None:
        state = self.state
        start = state.step if epoch == state.epoch else 0
        if state.finished and start == 0:
            return
        self.dispatch("on_epoch_start", epoch)
        train_epoch(state, epoch, self.data.train_dataloader(epoch, start), state.iters, start)
        self.dispatch("on_epoch_end", epoch)

    def _run_validation_epoch(self, evaluate: Callable) -> dict[str, float] | None:
        return evaluate(self.state, self.state.eval_loader)

    def stop(self, reason: str) -> None:
        """End training after this update. Must be called on all ranks, at the same update."""
        if not self.state.finished:
            self.logger.info(f"stopping: {reason}")
        self.state.finished = True

    def dispatch(self, name: str, *args: Any) -> None:
        """Call a method of every callback."""
        self.callbacks.dispatch(name, self, *args)

    # --- called by the loop (trainer.components.state.Hooks)

    def batch_start(self, state: TrainState) -> None:
        self.dispatch("on_batch_start", state.update + 1)

    def batch_end(self, state: TrainState, record: dict[str, Any] | None) -> None:
        if record is not None:
            self.performance_monitor.update(record)
        self.dispatch("on_batch_end", state.update, record)

    def wants_checkpoint(self, state: TrainState) -> bool:
        return self.checkpoint_manager.is_due(state.update)

    def checkpoint_saved(self, state: TrainState, path: Path) -> None:
        self.checkpoint_manager.saved(state)
        self.dispatch("on_checkpoint_saved", path)

    def validate(self, state: TrainState, evaluate: Callable) -> dict[str, float] | None:
        self.dispatch("on_validation_start")
        return self._run_validation_epoch(evaluate)

    def validation_end(self, state: TrainState, metrics: dict[str, float], is_best: bool) -> None:
        if is_best:
            self.checkpoint_manager.best(state)
        self.dispatch("on_validation_end", metrics)

    def state_dict(self) -> dict[str, Any]:
        callbacks = {"callbacks": self.callbacks.state_dict(), "epochs": self.callbacks.epochs}
        return callbacks | {"checkpoints": self.checkpoint_manager.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.callbacks.load_state_dict(saved.get("callbacks"))
        self.callbacks.epochs = saved.get("epochs", {})
        self.checkpoint_manager.load_state_dict(saved.get("checkpoints", {}))
