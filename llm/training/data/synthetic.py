"""Synthetic data of a known linear function, generated from the seed: y = w . x + b + noise."""

from typing import Any

import torch
from torch.utils.data import TensorDataset

from llm.training.data.base import DataModule


def name_columns(rows: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """A batch {"x": [B, features], "y": [B, 1]}, also from an empty list."""
    if not rows:
        return {"x": torch.empty(0, SyntheticDataModule.features), "y": torch.empty(0, 1)}
    x, y = zip(*rows, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


class SyntheticDataModule(DataModule):
    """`--num_samples` points in all, `--validation_share` of them held out; the same on every rank."""

    features = 8
    collate_fn = staticmethod(name_columns)

    def setup(self) -> None:
        data, seed = self.config.data, self.config.training.seed
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(self.features, 1, generator=generator)
        bias = torch.randn(1, generator=generator)
        x = torch.randn(data.num_samples, self.features, generator=generator)
        y = x @ weight + bias + data.noise * torch.randn(data.num_samples, 1, generator=generator)
        held_out = max(1, round(data.num_samples * data.validation_share))
        self.train_dataset = TensorDataset(x[held_out:], y[held_out:])
        self.val_dataset = TensorDataset(x[:held_out], y[:held_out])

    def fingerprint(self) -> dict[str, Any]:
        data = self.config.data
        return {"data": f"synthetic, {data.num_samples} samples, noise {data.noise}, held out {data.validation_share}"}
