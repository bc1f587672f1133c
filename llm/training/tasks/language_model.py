"""MiniMind's own stages as tasks: pretraining and supervised fine-tuning, dense or mixture of experts by config."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llm.training.core.config import Config
from llm.training.data.language_model import LanguageModelDataModule, PretrainDataModule, SFTDataModule
from llm.training.tasks.base_task import TrainingTask
from trainer.arguments import model_config
from trainer.resume import lm_shape
from trainer.state import Batch, Size, flat_size, next_token_loss
from trainer.train_full_sft import FULL_SFT
from trainer.train_pretrain import PRETRAIN
from trainer.trainer_utils import init_model, load_tokenizer


class LanguageModelTask(TrainingTask):
    """Next-token prediction by MiniMind; the same numbers as the stage script of the same settings."""

    data_module: ClassVar[type[LanguageModelDataModule]]

    def __init__(self, config: Config):
        super().__init__(config)
        self.shape = model_config(config.to_args(), load_tokenizer(config.model.tokenizer_path))

    def build_model(self) -> nn.Module:
        args = self.config.to_args()
        return init_model(self.shape, args.from_weight, args.tokenizer_path, args.save_dir)[0]

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return super().build_optimizer(model)

    def build_scheduler(self, optimizer: torch.optim.Optimizer, total_updates: int) -> Callable[[int], float]:
        return super().build_scheduler(optimizer, total_updates)

    def build_criterion(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return next_token_loss

    def train_step(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.criterion(model, batch)

    def validation_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.criterion(model, batch)[0]}

    def build_data(self) -> LanguageModelDataModule:
        return self.data_module(self.config)

    def size(self, batch: Batch) -> Size:
        return flat_size(batch, self.shape)

    def contract(self) -> dict[str, Any]:
        return lm_shape(self.shape)


class PretrainTask(LanguageModelTask):
    """Documents: every token is a target."""

    defaults: ClassVar[dict[str, Any]] = PRETRAIN
    data_module = PretrainDataModule


class FullSFTTask(LanguageModelTask):
    """Conversations: what the assistant says are the targets."""

    defaults: ClassVar[dict[str, Any]] = FULL_SFT
    data_module = SFTDataModule
