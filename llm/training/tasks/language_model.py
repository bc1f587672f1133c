"""MiniMind's own stages as tasks: pretraining and supervised fine-tuning, dense or mixture of experts by config.

Defaults, loss, schedule and frozen parameters are read from the stage scripts, so that a change there applies here too.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from common.settings import own_defaults, own_flags, settings_of
from dataset.lm_dataset import PretrainDataset, SFTDataset, StageDataset
from llm.training.core.config import Config
from llm.training.data.language_model import LanguageModelDataModule
from llm.training.tasks.base_task import TrainingTask
from trainer import train_full_sft, train_pretrain
from trainer.components.language_model import flat_size, held_out_loss
from trainer.components.meter import Size
from trainer.components.parallel import freeze
from trainer.components.resume import model_fingerprint
from trainer.components.state import Batch
from trainer.trainer_utils import init_model, load_tokenizer, model_config


class LanguageModelTask(TrainingTask):
    """Next-token prediction with MiniMind; the same numbers as the stage script with the same settings."""

    stage: ClassVar[ModuleType]  # the stage script
    dataset_class: ClassVar[type[StageDataset]]

    def __init__(self, config: Config):
        super().__init__(config)
        self.lm_config = model_config(load_tokenizer(config.model.tokenizer_path), config.model)
        rows, values = settings_of(self.stage.Args), config.values() | config.extra  # with the stage's own flags
        self.args = self.stage.Args(**{name: row.parse(values.get(name, row.default)) for name, row in rows.items()})

    def build_data(self) -> LanguageModelDataModule:
        return LanguageModelDataModule(self.config, self.dataset_class)

    def build_model(self) -> nn.Module:
        args = self.config.to_args()
        model, _ = init_model(self.lm_config, args.from_weight, args.tokenizer_path, args.save_dir)
        freeze(model, self.stage.frozen)
        return model

    def build_scheduler(self, optimizer: Optimizer, total_updates: int) -> Callable[[int], float]:
        return lambda update: self.stage.schedule(update, total_updates, self.args)

    def build_criterion(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return self.stage.loss_fn

    def train_step(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.criterion(model, batch, self.args)

    def validation_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return held_out_loss(model, batch)

    def size(self, batch: Batch) -> Size:
        return flat_size(batch, self.lm_config)

    def fingerprint(self) -> dict[str, Any]:
        return model_fingerprint(self.lm_config) | own_flags(self.args)

    def code_files(self) -> list[str]:
        return [self.stage.__file__ or ""]


class PretrainTask(LanguageModelTask):
    """Documents: every token is a target."""

    stage, dataset_class = train_pretrain, PretrainDataset
    defaults: ClassVar[dict[str, Any]] = own_defaults(train_pretrain.Args)


class FullSFTTask(LanguageModelTask):
    """Conversations: the assistant's turns are targets."""

    stage, dataset_class = train_full_sft, SFTDataset
    defaults: ClassVar[dict[str, Any]] = own_defaults(train_full_sft.Args)
