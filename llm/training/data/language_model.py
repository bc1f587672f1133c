"""The stages' own datasets as a data module: the token cache is built once, and each rank opens it as memory maps."""

from typing import Any

from dataset.lm_dataset import StageDataset, collate_flat
from llm.training.core.config import Config
from llm.training.data.base import DataModule
from trainer.components.data import open_datasets
from trainer.components.resume import data_fingerprint
from trainer.trainer_utils import load_tokenizer


class LanguageModelDataModule(DataModule):
    """Samples of a token cache, concatenated into flat batches.

    Args:
        config: the settings.
        dataset_class: PretrainDataset or SFTDataset.
    """

    collate_fn = staticmethod(collate_flat)

    def __init__(self, config: Config, dataset_class: type[StageDataset]):
        super().__init__(config)
        self.dataset_class = dataset_class

    def prepare_data(self) -> None:
        self.setup()  # builds the cache, under a lock, if there is none

    def setup(self) -> None:
        if hasattr(self, "samples"):
            return  # this process prepared the data
        tokenizer = load_tokenizer(self.config.model.tokenizer_path)
        self.samples, self.val_dataset = open_datasets(self.dataset_class, self.config.to_args(), tokenizer)
        self.train_dataset = self.samples

    def fingerprint(self) -> dict[str, Any]:
        return data_fingerprint(self.samples.cache)

    def describe(self) -> str:
        return self.samples.describe()

    def source(self, sample_id: int) -> str:
        return self.samples.cache.source(sample_id)
