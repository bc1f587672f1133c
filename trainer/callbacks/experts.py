"""How a mixture of experts distributes its tokens over the experts. They are counted on the device and read
at log points.

Each MoE layer has a buffer `tokens_per_expert`, int64 [E]: tokens routed to each expert in training (with K
experts per token each token counts K times; padding rows do not count). With recomputed activations tokens
count twice, so use the counts only as shares."""

from typing import Any

import torch
from torch import Tensor, nn

from trainer.callbacks.base import Callback
from trainer.devices.process_group import reduce_sum


def token_counters(model: nn.Module) -> list[Tensor]:
    """The layers' counters; none in a dense model."""
    return [
        buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "tokens_per_expert"
    ]


class ExpertLoad(Callback):
    """Tokens of each layer and expert since the last record, over all ranks, for a model that has
    counters."""

    def __init__(self, model: nn.Module):
        self.model = model
        # [layers][E], read but not reported yet, because a save came between two log points
        self.kept: list[list[int]] = []

    def state_dict(self) -> dict[str, Any]:
        self.read()
        return {"kept": self.kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.kept = saved["kept"]

    def on_log(self, state: Any, record: dict[str, Any]) -> None:
        """Add the metrics to the record, and start counting again."""
        self.read()
        record |= balance_metrics(torch.tensor(self.kept))
        self.kept = []

    def read(self) -> None:
        """Move the model's counts here, summed over all ranks, and zero its counters. This is a sync
        point."""
        layers = token_counters(self.model)
        counts = reduce_sum(torch.stack(layers).cpu())
        if self.kept:
            counts += torch.tensor(self.kept)
        self.kept = counts.tolist()
        for layer in layers:
            layer.zero_()


def balance_metrics(counts: Tensor) -> dict[str, Any]:
    """Metrics of token counts [layers, E].

    Returns:
        expert_load: share of each expert, all layers together; expert_max_min: largest over smallest share in
        the least balanced layer, None if an expert got nothing; dead_experts: number of (layer, expert)
        without a token.
    """
    total, dead = int(counts.sum()), int((counts == 0).sum())
    shares = (counts.sum(0).double() / max(1, total)).tolist()
    worst = None if dead else float((counts.amax(1).double() / counts.amin(1)).max())
    return {"expert_load": shares, "expert_max_min": worst, "dead_experts": dead}
