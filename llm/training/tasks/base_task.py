"""What a task is to the engine: a model, an optimizer, a schedule, a criterion, and what one batch contributes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from llm.training.core.callbacks import Callback
from llm.training.core.config import Config
from llm.training.data.base import DataModule
from trainer.optim import make_optimizer
from trainer.state import Batch, Size
from trainer.trainer_utils import warmup_cosine


class TrainingTask(ABC):
    """Subclass it, implement the six abstract methods and `build_data`, and give `--task package.module:ClassName`.

    The contract with the loop: losses are SUMS over a batch's targets. The loop divides by the number of targets of the
    whole update, over all micro-batches and ranks, so that how it was cut changes nothing.

    Three of the abstract methods have a usual answer, which `super()` gives.
    """

    defaults: ClassVar[dict[str, Any]] = {}  # of settings; a YAML file, the environment and flags override them

    def __init__(self, config: Config):
        self.config = config

    # --- the six

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, in float32 on the CPU. Called after seeding; with the weights of --from_weight, if any."""

    @abstractmethod
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer. `super()`: that of --optimizer, weight decay on matrices only."""
        training = self.config.training
        return make_optimizer(model, training.learning_rate, training.weight_decay, training.optimizer)

    @abstractmethod
    def build_scheduler(
        self, optimizer: torch.optim.Optimizer, total_updates: int
    ) -> Callable[[int], float] | LRScheduler:
        """The learning rate: a function of the update (from 1), or a torch scheduler, which is stepped at each update.
        `super()`: warm-up, then a cosine down to a tenth."""
        training = self.config.training

        def rate(update: int) -> float:
            return warmup_cosine(update, total_updates, training.learning_rate, training.warmup_updates)

        return rate

    @abstractmethod
    def build_criterion(self) -> Callable[..., Any]:
        """What compares predictions with targets; `self.criterion` from then on."""

    @abstractmethod
    def train_step(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """Sum of the losses of a batch's targets; or that and a sum of auxiliary losses over its tokens."""

    @abstractmethod
    def validation_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over a held-out batch's targets by name, `loss` among them; `accuracy` becomes `eval_accuracy`."""

    # --- with an answer that may do

    def build_data(self) -> DataModule:
        """The data module."""
        raise NotImplementedError(f"{type(self).__name__} says nothing of its data: implement build_data")

    def size(self, batch: Batch) -> Size:
        """How many targets and tokens a batch has; here one of each per sample."""
        samples = len(next(iter(batch.values())))
        return Size(targets=samples, tokens=samples)

    def contract(self) -> dict[str, Any]:
        """What of the model must be the same for a resume to be the same run."""
        model = self.config.model
        return {"hidden_size": model.hidden_size, "num_hidden_layers": model.num_hidden_layers} | self.config.extra

    def callbacks(self) -> list[Callback]:
        """Further callbacks of this task."""
        return []
