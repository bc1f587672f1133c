"""The stages' own datasets as a data module: token caches and prompts."""

from typing import Any

from torch.utils.data import DataLoader

from llm.training.data.base import DataModule
from trainer.data.datasets import epoch_samples, train_loader
from trainer.data.order import eval_loader


class StageDataModule(DataModule):
    """What `open_data` of a stage script gives.

    Args:
        task: the StageTask, whose settings may change (another number of ranks).
    """

    train_dataset: Any
    val_dataset: Any = None

    def __init__(self, task: Any):
        super().__init__(task.config)
        self.task = task

    def prepare_data(self) -> None:
        self.setup()  # builds the cache, under a lock, if there is none

    def setup(self) -> None:
        if not hasattr(self, "train_dataset"):  # else this process prepared the data
            self.train_dataset, self.val_dataset = self.task.script.open_data(
                self.task.args, self.task.tokenizer
            )

    def fingerprint(self) -> dict[str, Any]:
        return self.train_dataset.fingerprint

    def source(self, sample_id: int) -> str:
        return self.train_dataset.source(sample_id)

    def num_samples(self) -> int:
        return epoch_samples(self.train_dataset, self.task.args)

    def train_dataloader(self, epoch: int = 0, skip_batches: int = 0) -> DataLoader:
        return train_loader(self.train_dataset, self.task.args, epoch, skip_batches)

    def val_dataloader(self) -> DataLoader | None:
        if self.val_dataset is None:
            return None
        return eval_loader(self.val_dataset, self.task.args.batch_size, self.val_dataset.collate)
