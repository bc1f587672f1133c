"""A small network that learns a known linear function: the smoke test of the engine."""

from typing import ClassVar

from torch import Tensor, nn

from dataset.batch import Batch
from llm.training.core.config import EngineArgs
from llm.training.data.base import DataModule
from llm.training.data.synthetic import SyntheticDataModule
from llm.training.tasks.base_task import TrainingTask


class RegressionArgs(EngineArgs):
    """The defaults of this task."""

    hidden_size: int = 64
    epochs: int = 20
    batch_size: int = 32
    learning_rate: float = 1e-2
    weight_decay: float | None = 0.0
    use_amp: bool = False
    log_interval: int = 51


class RegressionTask(TrainingTask):
    """Mean squared error of a two-layer perceptron; it approaches the variance of the noise in
    SyntheticDataModule."""

    args_class: ClassVar[type[EngineArgs]] = RegressionArgs
    data_module: ClassVar[type[DataModule]] = SyntheticDataModule

    def build_model(self) -> nn.Module:
        width, features = self.args.hidden_size, SyntheticDataModule.features
        return nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, 1))

    def build_criterion(self) -> nn.Module:
        return nn.MSELoss(reduction="sum")

    def train_step(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.criterion(model(batch["x"]), batch["y"])

    def validation_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        prediction, y = model(batch["x"]), batch["y"]
        return {"loss": self.criterion(prediction, y), "absolute_error": (prediction - y).abs().sum()}
