"""Where a task's batches come from: prepared once, set up on every rank, dealt out by the trainer's own samplers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate

from dataset.errors import UserError
from llm.training.core.config import Config
from trainer.trainer_utils import epoch_loader, eval_loader, steps_per_epoch


class DataModule(ABC):
    """Data of a task. A subclass's `setup` sets `train_dataset` and, where there is validation, `val_dataset`."""

    train_dataset: Dataset
    val_dataset: Dataset | None = None
    collate_fn: Callable[[list], dict[str, Any]] = staticmethod(default_collate)

    def __init__(self, config: Config):
        self.config = config

    def prepare_data(self) -> None:  # noqa: B027 (nothing to prepare is a fine answer)
        """What is done once and not by every rank: downloads, tokenising. No process group exists yet."""

    @abstractmethod
    def setup(self) -> None:
        """Open the data, on every rank: set `train_dataset` and `val_dataset`."""

    def describe(self) -> str:
        """A line for the console when training starts; empty: none."""
        return ""

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data: a resume onto other data is refused."""
        return {"data": type(self).__name__}

    def source(self, sample_id: int) -> str:
        """Where a sample comes from, for a person."""
        return f"sample {sample_id}"

    def num_samples(self) -> int:
        """Samples (packed: rows) of an epoch.

        Raises:
            UserError: there are none.
        """
        dataset = getattr(self, "train_dataset", None)
        if dataset is None or len(dataset) == 0:
            why = "empty" if dataset is not None else "not set by setup()"
            raise UserError(f"{type(self).__name__} yields nothing: its train_dataset is {why}")
        return len(dataset)

    def steps_per_epoch(self) -> int:
        """Micro-batches of each rank in one epoch."""
        return steps_per_epoch(self.num_samples(), self.config.training.batch_size)

    def train_dataloader(self, epoch: int, skip_batches: int = 0) -> DataLoader:
        """This rank's micro-batches of one epoch, from micro-batch `skip_batches` on."""
        training, workers = self.config.training, self.config.data.num_workers
        options = (epoch, skip_batches, workers, self.collate_fn)
        return epoch_loader(self.train_dataset, training.batch_size, training.seed, *options)

    def val_dataloader(self) -> DataLoader | None:
        """This rank's share of the held-out data, or None. With --parallel fsdp every rank needs equally many
        batches, as `eval_loader` gives them.

        Raises:
            UserError: they are empty.
        """
        if self.val_dataset is None:
            return None
        if len(self.val_dataset) == 0:
            raise UserError(f"{type(self).__name__}: its val_dataset is empty; leave it None where nothing is held out")
        return eval_loader(self.val_dataset, self.config.training.batch_size, self.collate_fn)
