"""Optimizers: AdamW for everything, or Muon for the hidden matrices and AdamW for the rest."""

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from dataset.errors import UserError

OPTIMIZERS = ("adamw", "muon")
MUON_RATE = 8.0  # how much larger the best rate is with Muon; docs/LOG.md, "Muon's learning rate"


def make_optimizer(model: nn.Module, lr: float, weight_decay: float, kind: str = "adamw") -> Optimizer:
    """Fused AdamW, or with `kind` muon Muon for the matrices of the layers and AdamW for embedding, router and norms.

    `lr` is on AdamW's scale: with Muon everything runs at MUON_RATE times as much, and each group says so under `rate`,
    for the loop. Weight decay acts on matrices only: norm weights keep their scale.

    Raises:
        UserError: Muon finds nothing to do.
    """
    named = list(model.named_parameters())
    hidden = [p for name, p in named if kind == "muon" and is_hidden_matrix(name, p)]
    if kind == "muon" and not hidden:
        raise UserError("--optimizer muon: this model has no matrices in `layers`; use adamw")
    taken = set(map(id, hidden))
    matrices = [p for _, p in named if p.ndim >= 2 and id(p) not in taken]
    vectors = [p for _, p in named if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = named[0][1].device.type in ("cpu", "cuda")
    if not hidden:
        return AdamW(groups, lr=lr, fused=fused)
    lr *= MUON_RATE
    return MuonWithAdamW(hidden, AdamW(groups, lr=lr, fused=fused), lr, weight_decay)


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon is for it: a matrix inside a layer that maps one hidden vector to another (a router does not)."""
    return ".layers." in name and parameter.ndim == 2 and not name.endswith("mlp.gate.weight")


class MuonWithAdamW(Optimizer):
    """Two optimizers that step as one.

    Muon (K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024) makes each update of a matrix
    orthogonal; scaled as in "Muon is Scalable for LLM Training" (arXiv:2502.16982) its steps are as large as AdamW's,
    so both follow one learning rate, which both bear to be larger than AdamW alone does.
    """

    def __init__(self, hidden: list[nn.Parameter], adamw: AdamW, lr: float, weight_decay: float):
        options = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        self.muon, self.adamw = torch.optim.Muon(hidden, **options), adamw
        for group in (*self.muon.param_groups, *adamw.param_groups):
            group["rate"] = MUON_RATE
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    def step(self, closure=None) -> None:
        """One step of both; a closure is not supported."""
        self.muon.step()
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        """Of both, by name."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both back."""
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]
