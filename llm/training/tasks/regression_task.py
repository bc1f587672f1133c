"""A small network that learns a linear function: the engine's smoke test, whose solution is known."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llm.training.data.base import DataModule
from llm.training.data.synthetic import SyntheticDataModule
from llm.training.tasks.base_task import TrainingTask
from trainer.state import Batch


class RegressionTask(TrainingTask):
    """Mean squared error of a two-layer perceptron on SyntheticDataModule: the loss goes to the noise's variance."""

    defaults: ClassVar[dict[str, Any]] = {
        "hidden_size": 64,
        "epochs": 20,
        "batch_size": 32,
        "learning_rate": 1e-2,
        "weight_decay": 0.0,
        "use_amp": False,
        "log_interval": 51,
    }

    def build_model(self) -> nn.Module:
        width, features = self.config.model.hidden_size, SyntheticDataModule.features
        return nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return super().build_optimizer(model)

    def build_scheduler(self, optimizer: torch.optim.Optimizer, total_updates: int):
        return super().build_scheduler(optimizer, total_updates)

    def build_criterion(self) -> nn.Module:
        return nn.MSELoss(reduction="sum")

    def train_step(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.criterion(model(batch["x"]), batch["y"])

    def validation_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        prediction = model(batch["x"])
        absolute = (prediction - batch["y"]).abs().sum()
        return {"loss": self.criterion(prediction, batch["y"]), "absolute_error": absolute}

    def build_data(self) -> DataModule:
        return SyntheticDataModule(self.config)
