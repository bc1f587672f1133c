"""A small network that learns a known linear function: the smoke test of the engine."""

from typing import Any, ClassVar

from torch import Tensor, nn

from llm.training.data.base import DataModule
from llm.training.data.synthetic import SyntheticDataModule
from llm.training.tasks.base_task import TrainingTask
from trainer.run.state import Batch


class RegressionTask(TrainingTask):
    """Mean squared error of a two-layer perceptron; it approaches the variance of the noise in
    SyntheticDataModule."""

    data_module: ClassVar[type[DataModule]] = SyntheticDataModule
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

    def build_criterion(self) -> nn.Module:
        return nn.MSELoss(reduction="sum")

    def train_step(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.criterion(model(batch["x"]), batch["y"])

    def validation_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        prediction, y = model(batch["x"]), batch["y"]
        return {"loss": self.criterion(prediction, y), "absolute_error": (prediction - y).abs().sum()}
