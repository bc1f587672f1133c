"""TrainingEngine: a task, a data module and callbacks around the one loop (trainer/loop.py); no loop of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from dataset.errors import UserError
from llm.training.core.callbacks import Callback, CallbackList, LRSchedulerCallback
from llm.training.core.config import Config
from llm.training.core.utils import CheckpointManager, DistributedManager, Logger, PerformanceMonitor
from llm.training.data.base import DataModule
from llm.training.tasks.base_task import TrainingTask
from trainer.bad_updates import BadUpdates
from trainer.checkpoint import run_name
from trainer.interrupt import StopRequest
from trainer.loop import finish_update, train_epoch
from trainer.parallel import wrap_model
from trainer.resume import describe_run, total_updates
from trainer.stage import finished_files, measured_peak, save_last_weights
from trainer.state import Batch, Hooks, TrainState
from trainer.trainer_utils import is_main_process, mixed_precision, pick_device, setup_seed


class TrainingEngine(Hooks):
    """One run of a task. Made on every rank, after the process group.

    Args:
        config: the settings, validated.
        task, data: what is trained, on what; `data.setup()` is done.
        callbacks: called at the points that docs/CALLBACKS.md lists.
        distributed, logger: see core/utils.py.
        local_rank: of this process.
        stop: tells whether a signal came.
    """

    def __init__(
        self,
        config: Config,
        task: TrainingTask,
        data: DataModule,
        callbacks: list[Callback],
        distributed: DistributedManager,
        logger: Logger,
        local_rank: int = 0,
        stop: StopRequest | None = None,
    ):
        self.config, self.task, self.data, self.distributed, self.logger = config, task, data, distributed, logger
        self.args = config.to_args()
        self.run_name = run_name(self.args.save_weight, self.args)
        self.checkpoint_manager = CheckpointManager(config, self.run_name)
        self.performance_monitor = PerformanceMonitor()
        self.callbacks = CallbackList(callbacks)
        self.resumed_update: int | None = None  # the last update whose record the metrics file holds; None: a new run
        self._setup_components(local_rank, stop or StopRequest())

    def _setup_components(self, local_rank: int, stop: StopRequest) -> None:
        args, task = self.args, self.task
        setup_seed(args.seed)
        samples, held_out = self.data.num_samples(), self.data.val_dataloader()
        if held_out is None and args.patience:
            raise UserError(f"--patience {args.patience} stops early by held-out data, but there are none")
        if text := self.data.describe():
            self.logger.info(text)
        run = describe_run(args, task.contract(), self.data.fingerprint(), samples)
        saved = self.checkpoint_manager.load_checkpoint(args, run)
        if saved is not None:  # it replaces the weights to start from
            task.config = replace(task.config, checkpoint=replace(task.config.checkpoint, from_weight="none"))
        device = pick_device(args.device, local_rank)
        autocast, scaler = mixed_precision(args.dtype, device)
        model = task.build_model()
        wrapped = wrap_model(model, device, args)
        optimizer = task.build_optimizer(model)
        updates = total_updates(run)
        self.scheduler = task.build_scheduler(optimizer, updates)
        task.criterion = task.build_criterion()
        parts = (wrapped, optimizer, scaler, autocast, device, self._loss, updates, run)
        self.state = TrainState(
            args,
            args,
            *parts,
            eval_loader=held_out,
            eval_fn=task.validation_step,
            size_fn=task.size,
            schedule=self._schedule(),
            hooks=self,
            monitor=(args.monitor, args.mode),
            peak_flops=measured_peak(autocast, device),
            stop=stop,
            bad_updates=BadUpdates(args.max_bad_updates, self.data.source),
        )
        self.state.iters = self.data.steps_per_epoch()
        if saved is not None:
            self.state.restore(saved)
            self.resumed_update = self.state.reported_update
            where = f"epoch {self.state.epoch + 1}, update {self.state.update} of {updates}"
            self.logger.info(f"resuming {args.save_weight} at {where}")

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = self.task.train_step(model, batch)
        if isinstance(loss, Tensor):
            return loss, torch.zeros_like(loss)
        if isinstance(loss, tuple) and len(loss) == 2:
            return loss
        kind = type(loss).__name__
        raise UserError(
            f"{type(self.task).__name__}.train_step returns a {kind}; a tensor, the sum of losses, is wanted"
        )

    def _schedule(self) -> Callable[[int], float | None]:
        if not isinstance(self.scheduler, LRScheduler):
            return self.scheduler
        has_one = any(isinstance(callback, LRSchedulerCallback) for callback in self.callbacks.callbacks.values())
        if not has_one:
            self.callbacks.callbacks["LRSchedulerCallback"] = LRSchedulerCallback(self.scheduler)
        return lambda update: None  # LRSchedulerCallback sets it

    # --- running

    def run(self) -> None:
        """Train to the end.

        Raises:
            UserError, Interrupted: as the loop. CallbackError: a callback failed; it is named.
        """
        try:
            self.dispatch("on_train_start")
            with finished_files(self.state, None):
                self._run_epochs()
                save_last_weights(self.state)
            self.dispatch("on_train_end")
        except BaseException as error:
            self.dispatch("on_exception", error)
            raise
        speed = self.performance_monitor.summary()
        if speed:
            text = f"{speed['batch_time']:.3f} s per update, {speed['tokens_per_second']:,.0f} tokens/s"
            self.logger.info(f"{text}, mfu {speed['mfu']:.0%}, {speed['memory_mb']:,.0f} MB")

    def _run_epochs(self) -> None:
        if self.state.record is not None:
            finish_update(self.state)  # the run was stopped between saving and reporting
        for epoch in range(self.state.epoch, self.args.epochs):
            if self.state.finished:
                break
            self._run_epoch(epoch)

    def _run_epoch(self, epoch: int) -> None:
        state = self.state
        start = state.step if epoch == state.epoch else 0
        self.dispatch("on_epoch_start", epoch)
        loader = self.data.train_dataloader(epoch, start)
        train_epoch(state, epoch, loader, self.data.steps_per_epoch(), start)
        self.dispatch("on_epoch_end", epoch)

    def _run_validation_epoch(self, evaluate: Callable) -> dict[str, float] | None:
        return evaluate(self.state, self.state.eval_loader)

    def stop(self, reason: str) -> None:
        """Ask for the end of training after this update; to be called on all ranks alike."""
        if not self.state.finished:
            self.logger.info(f"stopping: {reason}")
        self.state.finished = True

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return is_main_process()

    def dispatch(self, name: str, *args: Any) -> None:
        """Call a method of every callback."""
        self.callbacks.dispatch(name, self, *args)

    # --- what the loop calls (trainer.state.Hooks)

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
        return {"callbacks": self.callbacks.state_dict(), "checkpoints": self.checkpoint_manager.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.callbacks.load_state_dict(saved.get("callbacks"))
        self.checkpoint_manager.load_state_dict(saved.get("checkpoints", {}))
