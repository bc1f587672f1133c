"""The interface of a task: a model, an optimizer, a schedule, a criterion, and the loss of one batch; and its
data."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from common.errors import UserError
from llm.training.core.callbacks import Callback
from llm.training.core.checks import described
from llm.training.core.config import Config, EngineArgs
from llm.training.core.objective import TaskObjective
from llm.training.data.base import DataModule
from trainer.objectives.next_token import Metrics, Objective
from trainer.optim.build import build_optimizer
from trainer.report.speed import Size
from trainer.run.state import Batch
from trainer.stage import warmup_cosine


class TrainingTask(ABC):
    """Base class of a task. Subclass it, implement the abstract methods and start it by `--task
    package.module:Class`.

    Losses are SUMS over the targets of a batch. The loop divides by the number of targets of the full update,
    over all micro-batches and ranks, so the result does not depend on how the update was split.
    """

    # defaults of the settings, and flags of its own; they are in `self.args`
    args_class: ClassVar[type[EngineArgs]] = EngineArgs
    optimizer: torch.optim.Optimizer  # of `build_optimizer`, from `build_scheduler` on

    # the class of its data, if `build_data` is not implemented
    data_module: ClassVar[type[DataModule] | None] = None
    # of steps of a scheduler; None: epoch
    scheduler_interval: ClassVar[Literal["epoch", "update"] | None] = None
    shown: tuple[str, ...] = ()  # metrics that stand on the console's line
    needs_reference = False  # `reference` becomes a frozen model with the start weights, on the device
    reference: Any = None
    frozen: tuple[str, ...] = ()  # prefixes of the names of parameters that are not trained
    data: DataModule  # set before the model is built
    criterion: Callable[..., Any]  # set by the engine to the result of `build_criterion`

    def __init__(self, config: Config):
        self.config, self.args = config, config.args
        self.lm_config: Any = self.args  # the shape in the names of files, such as a MiniMindConfig

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, in float32 on the CPU, with the weights of --from_weight if any. Called after
        seeding."""

    @abstractmethod
    def build_criterion(self) -> Callable[..., Any]:
        """The loss function, which the engine then stores in `self.criterion`. One that returns means is
        refused."""

    @abstractmethod
    def train_step(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Any, ...]:
        """Sum [] of the losses over the targets of a batch; or this and a sum [] of auxiliary losses over its
        tokens; or these and a dict of metrics: sums over the targets, or pairs (sum, count)."""

    @abstractmethod
    def validation_step(self, model: nn.Module, batch: Batch) -> Metrics:
        """Named sums over the targets of a held-out batch; `loss` is required, `accuracy` becomes
        `eval_accuracy`."""

    def build_data(self) -> DataModule:
        """The data module; by default that of the class in `data_module`. --data_module replaces it. Raises
        UserError if there is none."""
        if self.data_module is None:
            advice = "set its data_module, or give --data_module package.module:ClassName"
            raise UserError(f"{type(self).__name__} has no data: {advice}")
        return self.data_module(self.config)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer. By default that of --optimizer, with weight decay on matrices only."""
        args = self.args
        decay = cast(float, args.weight_decay)  # the engine has chosen it where it was auto
        return build_optimizer(model, args.learning_rate, decay, args.optimizer)

    def build_scheduler(
        self, optimizer: torch.optim.Optimizer, total_updates: int
    ) -> Callable[[int], float | None] | LRScheduler | None:
        """The learning rate: a function of the update (from 1); or a scheduler of torch, stepped at the end
        of each epoch, or as `scheduler_interval` says, `ReduceLROnPlateau` after each validation; or None, a
        constant rate. By default linear warm-up, then a cosine to a tenth of the peak. It may be declared
        without `total_updates`, or without both: `self.optimizer` is there."""
        return lambda update: warmup_cosine(update, total_updates, self.args)

    def build_objective(self) -> Objective:
        """What the loop trains."""
        return TaskObjective(self)

    def size(self, batch: Batch) -> Size:
        """The number of targets and tokens in a batch. By default one of each per sample."""
        name, first = next(iter(batch.items()))
        if not isinstance(first, list) and not (isinstance(first, Tensor) and first.dim() > 0):
            raise UserError(
                f"{type(self).__name__}: the first value of a batch, {name!r}, is {described(first)}; put a "
                "tensor of the samples first, or implement `size(batch)`"
            )
        return Size(targets=len(first), tokens=len(first))

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must share with its checkpoint beside the settings."""
        return {}

    def callbacks(self) -> list[Callback]:
        """Additional callbacks of this task."""
        return []
