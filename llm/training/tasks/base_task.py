"""The interface of a task: its data, model, optimizer, schedule, and the Objective that the loop trains."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from common.errors import UserError
from dataset.batch import Batch, Size
from llm.training.core.callbacks import Callback
from llm.training.core.checks import check_class, describe
from llm.training.core.config import Config, EngineArgs
from llm.training.core.objective import TaskObjective
from llm.training.data.base import DataModule
from trainer.objectives.base import Metrics, Objective
from trainer.stage import warmup_cosine


class Task(ABC):
    """What the engine needs to train an Objective (trainer/objectives/base.py). For a task without an
    Objective, subclass TrainingTask instead. `--task package.module:Class` starts it."""

    # defaults of the settings, and the task's own flags; they are in `self.args`
    args_class: ClassVar[type[EngineArgs]] = EngineArgs
    # the class of its data, if `build_data` is not implemented
    data_module: ClassVar[type[DataModule] | None] = None
    # of steps of a scheduler; None: epoch
    scheduler_interval: ClassVar[Literal["epoch", "update"] | None] = None
    frozen_parameters: tuple[str, ...] = ()  # prefixes of the names of parameters that are not trained
    data: DataModule  # set before the model is built
    optimizer: torch.optim.Optimizer  # of `build_optimizer`, from `build_scheduler` on

    def __init__(self, config: Config):
        self.config, self.args = config, config.args
        self.lm_config: Any = self.args  # the shape in the names of files, such as a MiniMindConfig

    @property
    @abstractmethod
    def objective(self) -> Objective:
        """What the loop trains: always the same object."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, in float32 on the CPU, with the weights of --from_weight if there are any. Called after
        seeding."""

    def build_data(self) -> DataModule:
        """The data module; by default one of the class in `data_module`. --data_module replaces it. Raises
        UserError if there is none."""
        if self.data_module is None:
            advice = "set its data_module, or give --data_module package.module:ClassName"
            raise UserError(f"{type(self).__name__} has no data: {advice}")
        check_class(self.data_module, DataModule)
        return self.data_module(self.config)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer. By default the Objective's, which is --optimizer with weight decay on matrices
        only."""
        return self.objective.optimizer(model, self.args)

    def build_scheduler(
        self, optimizer: torch.optim.Optimizer, total_updates: int
    ) -> Callable[[int], float | None] | LRScheduler | None:
        """The learning rate, in one of three forms: a function of the update (from 1); a torch scheduler,
        which is stepped by `scheduler_interval` (by default at the end of each epoch; `ReduceLROnPlateau`
        after each validation); or None for a constant rate. By default linear warm-up, then a cosine to a
        tenth of the peak. It may be declared without `total_updates`, or without both arguments, because
        `self.optimizer` exists."""
        return lambda update: warmup_cosine(update, total_updates, self.args)

    def fingerprint(self) -> dict[str, Any]:
        """Values that must be the same when a run is resumed, in addition to the settings."""
        return {}

    def callbacks(self) -> list[Callback]:
        """Additional callbacks of this task."""
        return []


class TrainingTask(Task):
    """Base class of your own task. Subclass it and implement the abstract methods; its Objective calls
    `train_step`, `validation_step` and `size`.

    Losses are SUMS over the targets of a batch. The loop divides by the number of targets of the full update,
    over all micro-batches and ranks, so the result does not depend on how the update was split.
    """

    console_metrics: tuple[str, ...] = ()  # metrics that are shown on the console's line
    needs_reference = False  # `reference` becomes a frozen model with the start weights, on the device
    reference: Any = None
    criterion: Callable[..., Any]  # set by the engine to the result of `build_criterion`

    @cached_property
    def objective(self) -> TaskObjective:
        return TaskObjective(self)

    @abstractmethod
    def build_criterion(self) -> Callable[..., Any]:
        """The loss function. The engine stores it in `self.criterion`. A loss function that returns means is
        refused."""

    @abstractmethod
    def train_step(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Any, ...]:
        """Up to three results: the sum [] of the losses over the targets of a batch; the sum [] of auxiliary
        losses over its tokens; a dict of metrics (sums over the targets, or pairs (sum, count))."""

    @abstractmethod
    def validation_step(self, model: nn.Module, batch: Batch) -> Metrics:
        """Named sums over the targets of a held-out batch; `loss` is required, `accuracy` becomes
        `eval_accuracy`."""

    def size(self, batch: Batch) -> Size:
        """The number of targets and tokens in a batch. By default one of each per sample."""
        name, first = next(iter(batch.items()))
        if not isinstance(first, list) and not (isinstance(first, Tensor) and first.dim() > 0):
            raise UserError(
                f"{type(self).__name__}: the first value of a batch, {name!r}, is {describe(first)}; put a "
                "tensor of the samples first, or implement `size(batch)`"
            )
        return Size(targets=len(first), tokens=len(first))

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint that changes from update to update, such as a moving average: numbers,
        strings, tensors, and lists and dicts of them."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; its tensors are on the CPU. Also called after the first
        checkpoint of a run, and must then change nothing."""
