"""The data of a task: prepared once per machine, set up on every rank, distributed by the samplers of
trainer/."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from common.errors import UserError
from dataset.batch import Batch
from dataset.order import SizedDataset, epoch_loader, eval_loader, in_order
from llm.training.core.checks import checked_batch
from llm.training.core.config import Config


class DataModule(ABC):
    """Base class of a task's data. `setup` sets `train_dataset` and, if there is held-out data,
    `val_dataset`."""

    train_dataset: SizedDataset
    val_dataset: SizedDataset | None = None
    collate_fn: Callable[[list], Batch] = staticmethod(default_collate)

    def __init__(self, config: Config):
        self.config = config

    def prepare_data(self) -> None:  # noqa: B027 (optional)
        """Download, tokenise: called once per machine, before the process group exists."""

    @abstractmethod
    def setup(self) -> None:
        """Open the data, on every rank: set `train_dataset` and `val_dataset`."""

    def fingerprint(self) -> dict[str, Any]:
        """Identifies the data: a run cannot be resumed on other data."""
        return {"data": type(self).__name__}

    def source(self, sample_id: int) -> str:
        """The origin of a sample, for messages."""
        return f"sample {sample_id}"

    def collate(self, samples: list) -> Batch:
        """The batch of some samples. At the end of an epoch a rank may have none. If `collate_fn` cannot make
        a batch of no samples, the batch of the first sample is used, with every tensor cut to length 0.
        Raises UserError if it is not a dict."""
        if samples:
            return checked_batch(self, self.collate_fn(samples))
        try:
            return self.collate_fn([])
        except Exception:  # IndexError of default_collate, RuntimeError of torch.stack ...
            batch = checked_batch(self, self.collate_fn([self.train_dataset[0]]))
        for key, value in batch.items():
            if isinstance(value, Tensor | list):
                batch[key] = value[:0]
        return batch

    def num_samples(self) -> int:
        """Samples per epoch (packed sequences, with --packing). Raises UserError if there are none."""
        dataset = getattr(self, "train_dataset", None)
        if dataset is None or len(dataset) == 0:
            why = "not set by setup()" if dataset is None else "empty"
            raise UserError(f"{type(self).__name__} has no samples: its train_dataset is {why}")
        return len(dataset)

    def train_dataloader(self, epoch: int = 0, skip_batches: int = 0) -> DataLoader:
        """This rank's micro-batches of one epoch, from micro-batch `skip_batches` on."""
        size, seed = self.config.training.batch_size, self.config.training.seed
        workers = self.config.data.num_workers
        order = in_order(self.train_dataset, np.arange(len(self.train_dataset)), seed, epoch)
        return epoch_loader(self.train_dataset, order, size, skip_batches, workers, self.collate)

    def val_dataloader(self) -> DataLoader | None:
        """This rank's share of the held-out data, or None. Every rank gets the same number of batches, as
        FSDP needs it. Raises UserError if `val_dataset` is empty."""
        if self.val_dataset is None:
            return None
        if len(self.val_dataset) == 0:
            what = f"{type(self).__name__}: val_dataset is empty"
            raise UserError(f"{what}; leave it None if nothing is held out")
        return eval_loader(self.val_dataset, self.config.training.batch_size, self.collate)
