"""Pretraining and SFT as tasks. Each is made from the parts of its stage script above `main`."""

from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dataset.order import eval_loader, train_loader
from dataset.token_cache import load_tokenizer
from llm.training.core.checks import names_of
from llm.training.core.config import Config, EngineArgs
from llm.training.data.base import DataModule
from llm.training.tasks.base_task import Task
from trainer import train_full_sft, train_pretrain
from trainer.objectives.base import Objective
from trainer.stage import data_fingerprint, read_start_weights
from trainer.trainer_utils import init_model
from trainer.weights.config import model_config


class StageDataModule(DataModule):
    """The data from `open_data` of a stage script.

    Args:
        task: the StageTask, whose settings may change (another number of ranks).
    """

    train_dataset: Any
    val_dataset: Any = None

    def __init__(self, task: Any):
        super().__init__(task.config)
        self.task = task

    def prepare_data(self) -> None:
        self.setup()  # builds the cache under a lock, if there is none

    def setup(self) -> None:
        if not hasattr(self, "train_dataset"):  # otherwise this process has prepared the data
            self.train_dataset, self.val_dataset = self.task.script.open_data(
                self.task.args, self.task.tokenizer
            )

    def fingerprint(self) -> dict[str, Any]:
        return data_fingerprint(self.train_dataset, self.val_dataset)

    def source(self, sample_id: int) -> str:
        return self.train_dataset.source(sample_id)

    def num_samples(self) -> int:
        return self.train_dataset.epoch_samples(self.task.args)

    def train_dataloader(self, epoch: int = 0, skip_batches: int = 0) -> DataLoader:
        return train_loader(self.train_dataset, self.task.args, epoch, skip_batches)

    def val_dataloader(self) -> DataLoader | None:
        if self.val_dataset is None:
            return None
        return eval_loader(self.val_dataset, self.task.args.batch_size, self.val_dataset.collate)


class StageTask(Task):
    """The stage of a script: the same numbers, files and checkpoints as the script with the same settings. A
    subclass may have its own `build_model`, more `frozen_parameters`, and as
    `objective_class` a subclass of the
    script's Objective."""

    script: ClassVar[ModuleType]
    objective_class: ClassVar[type[Objective] | None] = None

    def __init__(self, config: Config):
        super().__init__(config)
        start = None
        if self.args.from_weight != "none":
            self.args, start = read_start_weights(self.args)
        self.tokenizer = load_tokenizer(self.args.tokenizer_path)
        self.lm_config = model_config(self.tokenizer, self.args, start)
        self.frozen_parameters = (
            *names_of(self, "frozen_parameters"),
            *names_of(self.script, "frozen_parameters"),
        )

    @cached_property
    def objective(self) -> Objective:
        return (self.objective_class or self.script.Objective)()

    def build_data(self) -> DataModule:
        return StageDataModule(self) if self.data_module is None else super().build_data()

    def build_model(self) -> nn.Module:
        args = self.args
        model, _ = init_model(self.lm_config, args.from_weight, args.tokenizer_path, args.save_dir)
        return model

    def build_scheduler(self, optimizer: Optimizer, total_updates: int) -> Callable[[int], float]:
        return lambda update: self.script.schedule(update, total_updates, self.args)

    def fingerprint(self) -> dict[str, Any]:
        return self.lm_config.own_fields()


class PretrainArgs(train_pretrain.Args, EngineArgs):
    """The settings of the script and of the engine."""


class FullSFTArgs(train_full_sft.Args, EngineArgs):
    """The settings of the script and of the engine."""


class Pretrain(StageTask):
    """The same as trainer/train_pretrain.py."""

    script = train_pretrain
    args_class = PretrainArgs


class FullSFT(StageTask):
    """The same as trainer/train_full_sft.py."""

    script = train_full_sft
    args_class = FullSFTArgs
