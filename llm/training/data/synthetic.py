"""Synthetic data of a known linear function, generated from the seed: y = w . x + b + noise."""

from typing import Any

import torch

from llm.training.data.base import DataModule


class SyntheticDataModule(DataModule):
    """`--num_samples` points in all, `--validation_share` of them held out; the same on every rank."""

    features = 8

    def setup(self) -> None:
        data, seed = self.config.data, self.config.training.seed
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(self.features, 1, generator=generator)
        bias = torch.randn(1, generator=generator)
        x = torch.randn(data.num_samples, self.features, generator=generator)
        y = x @ weight + bias + data.noise * torch.randn(data.num_samples, 1, generator=generator)
        number = max(1, round(data.num_samples * data.validation_share))
        samples = [{"x": point, "y": target} for point, target in zip(x, y, strict=True)]  # [features], [1]
        self.train_dataset, self.val_dataset = samples[number:], samples[:number]

    def fingerprint(self) -> dict[str, Any]:
        data = self.config.data
        text = f"synthetic, {data.num_samples} samples, noise {data.noise}, held out {data.validation_share}"
        return {"data": text}
