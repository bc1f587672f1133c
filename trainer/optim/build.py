"""Optimizers: AdamW for all parameters, or Muon for the hidden matrices and AdamW for the others; skippable
steps."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from common.errors import UserError
from trainer.optim.muon import Muon

MUON_LR_SCALE = 8.0  # best learning rate of Muon relative to AdamW's; docs/dev/LOG.md, "Muon's learning rate"


def build_optimizer(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    kind: str = "adamw",
    lr_scales: Mapping[str, float] | None = None,
) -> Optimizer:
    """Fused AdamW; with `kind` muon, Muon for the layers' matrices and AdamW for embedding, router and norms.

    `lr` is on AdamW's scale: with Muon all groups run at MUON_LR_SCALE times as much, noted as their
    `lr_scale`. Weight decay acts on matrices only (norm weights keep their scale). Frozen parameters are left
    out.

    Args:
        lr_scales: learning rates of modules of the model as multiples of `lr`, such as {"layers.0": 0.5}.

    Raises:
        UserError: there is nothing to optimize, or nothing for Muon; `lr_scales` names no trained module.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise UserError("nothing to train: all parameters of the model are frozen")
    if kind == "muon" and not any(is_hidden_matrix(name, p) for name, p in named):
        raise UserError("--optimizer muon: this model has no matrices in `layers`; use adamw")
    rate = lr
    if kind == "muon":
        rate = lr * MUON_LR_SCALE
    scales = {"": 1.0, **(lr_scales or {})}  # "": parameters in none of the modules
    hidden: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    rows: dict[nn.Parameter, int] = {}
    for module, scale in scales.items():
        by_muon: list[nn.Parameter] = []
        matrices: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for name, p in named:
            if lr_scales and _module_of(name, lr_scales) != module:
                continue
            if p.ndim < 2:
                vectors.append(p)
            elif kind == "muon" and is_hidden_matrix(name, p):
                by_muon.append(p)
                rows[p] = p.shape[-2]
                if name.endswith("gate_up_proj"):  # two matrices, one below the other
                    rows[p] = p.shape[-2] // 2
            else:
                matrices.append(p)
        scaled: dict[str, Any] = {}
        if module:
            if not (by_muon or matrices or vectors):
                raise UserError(
                    f"lr_scales: no trained parameter is in a module {module!r}; one is {named[0][0]!r}"
                )
            scaled = {"lr": rate * scale, "lr_scale": scale}
        hidden.append({"params": by_muon} | scaled)
        groups.append({"params": matrices, "weight_decay": weight_decay} | scaled)
        groups.append({"params": vectors, "weight_decay": 0.0} | scaled)
    device = named[0][1].device.type
    adamw = AdamW(groups, lr=rate, fused=device in ("cpu", "cuda", "mps"))
    if kind == "adamw":
        return adamw
    return MuonWithAdamW(Muon(hidden, rows, rate, weight_decay), adamw)


def _module_of(name: str, lr_scales: Mapping[str, float]) -> str:
    """The module of `lr_scales` that a parameter belongs to, "" for none."""
    for module in lr_scales:
        if f".{module}." in f".{name}":
            return module
    return ""


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon optimizes this parameter: matrices of a layer that map hidden vectors; not the MoE
    router."""
    return ".layers." in name and parameter.ndim in (2, 3) and not name.endswith("mlp.gate.weight")


class MuonWithAdamW(Optimizer):
    """Two optimizers that step as one.

    Muon (K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024) orthogonalises the
    update of each matrix; scaled as in "Muon is Scalable for LLM Training" (arXiv:2502.16982) its steps have
    AdamW's size, so one learning rate serves both, larger than AdamW's alone.
    """

    def __init__(self, muon: Muon, adamw: AdamW):
        self.muon, self.adamw = muon, adamw
        for group in (*self.muon.param_groups, *adamw.param_groups):
            group["lr_scale"] = MUON_LR_SCALE * group.get("lr_scale", 1.0)
        self.grad_scale = self.found_inf = None  # set by `should_step` where the next line says so: on a GPU
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self._step_supports_amp_scaling = next(
            p.is_cuda for group in self.param_groups for p in group["params"]
        )

    def step(self, closure=None) -> None:  # type: ignore[override]
        """Step both, or, as a fused optimizer, neither if `found_inf` [] is set; a closure is not
        supported."""
        if self.found_inf is not None:
            self.adamw.grad_scale, self.adamw.found_inf = None, self.found_inf  # type: ignore[attr-defined]
        self.muon.step(skip=None if self.found_inf is None else self.found_inf > 0)
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of both, by name."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of both."""
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]


def set_learning_rate(optimizer: Optimizer, lr: float | None) -> None:
    """Set the rate of all groups; None leaves them to a torch scheduler."""
    if lr is None:
        return
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def should_step(optimizer: Optimizer, skip: Tensor) -> bool:
    """Whether to call `optimizer.step()`; hands the flag `skip` [], which is on the device, to a fused
    optimizer.

    Fused optimizers, and Muon on a GPU, read it on the device (as torch's own `found_inf` of gradient
    scaling): then always True, and the host does not wait. For others the host reads it, and on MPS, whose
    fused kernels ignore it: a sync point.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False) and skip.device.type != "mps":
        optimizer.grad_scale, optimizer.found_inf = None, skip.float()  # type: ignore[attr-defined]
        return True
    return not skip.item()
