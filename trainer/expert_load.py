"""How a mixture of experts spreads its tokens over the experts, counted on the device and read at log points only.

Each MoE layer has a buffer `load`, int64 [E]: the tokens that each expert got in training (with K experts per token,
each token counts K times; rows that only fill a batch up do not count). Recomputed activations count twice: the
figures are shares.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trainer.trainer_utils import reduce_sum


def counters(model: nn.Module) -> list[Tensor]:
    """The layers' counters; none in a dense model."""
    return [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "load"]


class ExpertLoad:
    """Tokens of each layer and expert since the last record, over all ranks."""

    def __init__(self):
        self.kept: list[list[int]] = []  # [layers][E], read but not reported: a signal came between two log points

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves."""
        return {"kept": self.kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on counting."""
        self.kept = saved["kept"]

    def read(self, model: nn.Module) -> None:
        """Take what the model has counted, on all ranks, and let it start from zero. Waits for the device."""
        layers = counters(model)
        if not layers:
            return
        counts = reduce_sum(torch.stack(layers).cpu())
        self.kept = (counts + torch.tensor(self.kept) if self.kept else counts).tolist()
        for layer in layers:
            layer.zero_()

    def take(self, model: nn.Module) -> dict[str, Any]:
        """The figures of a log record, and a new start; nothing for a dense model."""
        self.read(model)
        kept, self.kept = self.kept, []
        return spread(torch.tensor(kept)) if kept else {}


def spread(counts: Tensor) -> dict[str, Any]:
    """Figures of counts [layers, E].

    Returns:
        expert_load: share of each expert, all layers together; expert_max_min: largest over smallest share in the layer
        where that is worst, None if an expert got nothing; dead_experts: how many (layer, expert) got nothing.
    """
    total, dead = int(counts.sum()), int((counts == 0).sum())
    shares = (counts.sum(0).double() / max(1, total)).tolist()
    worst = None if dead else float((counts.amax(1).double() / counts.amin(1)).max())
    return {"expert_load": shares, "expert_max_min": worst, "dead_experts": dead}
