"""The stages' own datasets as data modules: the token cache is built once, every rank opens it as memory maps."""

from typing import Any, ClassVar

from dataset.errors import UserError
from dataset.lm_dataset import PretrainDataset, SFTDataset, collate_flat
from llm.training.data.base import DataModule
from trainer.resume import data_of
from trainer.stage import load_data


class LanguageModelDataModule(DataModule):
    """Samples of a token cache, laid end to end in flat batches."""

    dataset_class: ClassVar[type[PretrainDataset | SFTDataset]]
    collate_fn = staticmethod(collate_flat)

    def prepare_data(self) -> None:
        if self.config.data.data_path is None:
            raise UserError("--data_path is missing: give a file, a folder or a pattern")
        self.setup()  # builds the cache, under a lock, unless it is there

    def setup(self) -> None:
        if "train_dataset" in vars(self):
            return  # this process prepared the data
        data = load_data(self.dataset_class, self.config.to_args())
        self.train_dataset, self.val_dataset = data.train, data.held_out

    def fingerprint(self) -> dict[str, Any]:
        return data_of(self.train_dataset.cache)

    def describe(self) -> str:
        return self.train_dataset.describe()

    def source(self, sample_id: int) -> str:
        return self.train_dataset.cache.source(sample_id)


class PretrainDataModule(LanguageModelDataModule):
    """Documents."""

    dataset_class = PretrainDataset


class SFTDataModule(LanguageModelDataModule):
    """Conversations."""

    dataset_class = SFTDataset
