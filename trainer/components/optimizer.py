"""Optimizers: AdamW for all parameters, or Muon for the hidden matrices and AdamW for the others; skippable steps."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from common.errors import UserError
from trainer.components.device import native_bfloat16

MUON_LR_SCALE = 8.0  # best learning rate of Muon relative to AdamW's; docs/dev/LOG.md, "Muon's learning rate"


def build_optimizer(
    model: nn.Module, lr: float, weight_decay: float, kind: str = "adamw", lr_scales: Mapping[str, float] | None = None
) -> Optimizer:
    """Fused AdamW; with `kind` muon, Muon for the layers' matrices and AdamW for embedding, router and norms.

    `lr` is on AdamW's scale: with Muon all groups run at MUON_LR_SCALE times as much, noted as their `lr_scale`. Weight
    decay acts on matrices only (norm weights keep their scale). Frozen parameters are left out.

    Args:
        lr_scales: learning rates of modules of the model as multiples of `lr`, such as {"layers.0": 0.5}.

    Raises:
        UserError: there is nothing to optimize, or nothing for Muon; `lr_scales` names no trained module.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise UserError("nothing to train: all parameters of the model are frozen")
    if kind == "muon" and not any(is_hidden_matrix(*each) for each in named):
        raise UserError("--optimizer muon: this model has no matrices in `layers`; use adamw")
    rate = lr * MUON_LR_SCALE if kind == "muon" else lr
    hidden, groups = [], []
    for module, scale in {"": 1.0, **(lr_scales or {})}.items():
        own = [(name, p) for name, p in named if _module_of(name, lr_scales) == module]
        if module and not own:
            raise UserError(f"lr_scales: no trained parameter is in a module {module!r}; one is {named[0][0]!r}")
        by_muon = {name for name, p in own if kind == "muon" and is_hidden_matrix(name, p)}
        matrices = [p for name, p in own if p.ndim >= 2 and name not in by_muon]
        vectors = [p for _, p in own if p.ndim < 2]
        scaled = {"lr": rate * scale, "lr_scale": scale} if module else {}
        hidden += [{"params": [p for name, p in own if name in by_muon]} | scaled]
        groups += [{"params": matrices, "weight_decay": weight_decay} | scaled]
        groups += [{"params": vectors, "weight_decay": 0.0} | scaled]
    device = named[0][1].device.type
    adamw = AdamW(groups, lr=rate, fused=device in ("cpu", "cuda", "mps"))
    return adamw if kind == "adamw" else MuonWithAdamW(hidden, adamw, rate, weight_decay)


def _module_of(name: str, lr_scales: Mapping[str, float] | None) -> str:
    """The module of `lr_scales` that a parameter belongs to, "" for none."""
    return next((module for module in lr_scales or () if f".{module}." in f".{name}"), "")


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon optimizes this parameter: a matrix of a layer that maps hidden vectors; not the MoE router."""
    return ".layers." in name and parameter.ndim == 2 and not name.endswith("mlp.gate.weight")


class Muon(torch.optim.Muon):
    """torch's Muon, with the Newton-Schulz iteration in float32 where bfloat16 is emulated (on such a CPU a product of
    matrices takes 3 to 100 times as long), and with a step that can be undone on the device."""

    @torch.no_grad()
    def step(self, closure=None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Step each matrix; with `skip` [], read on the device, each becomes again what it was. No closure."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum_buffer"]
                before = [value.clone() for value in (p, buffer)] if skip is not None else []
                buffer.lerp_(p.grad, 1 - group["momentum"])
                direction = orthogonalized(p.grad.lerp(buffer, group["momentum"]), group)  # Nesterov momentum
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction, alpha=-0.2 * math.sqrt(max(p.shape)) * group["lr"])  # the size of AdamW's steps
                if skip is not None:
                    for value, old in zip((p, buffer), before, strict=True):
                        value.copy_(torch.where(skip, old, value))


def orthogonalized(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The nearest semi-orthogonal matrix [m, n], roughly: quintic Newton-Schulz iterations, as in torch's Muon.

    group: `ns_coefficients`, `ns_steps` and `eps` of a parameter group.
    """
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(torch.bfloat16 if native_bfloat16(matrix.device) else torch.float32)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=group["eps"])  # spectral norm at most 1
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class MuonWithAdamW(Optimizer):
    """Two optimizers that step as one.

    Muon (K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024) orthogonalises the update of each
    matrix; scaled as in "Muon is Scalable for LLM Training" (arXiv:2502.16982) its steps have AdamW's size, so one
    learning rate serves both, larger than AdamW's alone.
    """

    def __init__(self, hidden: list[dict[str, Any]], adamw: AdamW, lr: float, weight_decay: float):
        # adjust_lr_fn: torch's name for the factor in `Muon.step`; checkpoints hold it
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        self.muon, self.adamw = Muon(hidden, **options), adamw
        for group in (*self.muon.param_groups, *adamw.param_groups):
            group["lr_scale"] = MUON_LR_SCALE * group.get("lr_scale", 1.0)
        self.grad_scale = self.found_inf = None  # set by `should_step` where the next line says so: on a GPU
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self._step_supports_amp_scaling = next(p.is_cuda for group in self.param_groups for p in group["params"])

    def step(self, closure=None) -> None:  # type: ignore[override]
        """Step both, or, as a fused optimizer, neither if `found_inf` [] is set; a closure is not supported."""
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
    for group in optimizer.param_groups if lr is not None else ():
        group["lr"] = lr * group.get("lr_scale", 1.0)


def should_step(optimizer: Optimizer, skip: Tensor) -> bool:
    """Whether to call `optimizer.step()`; hands the flag `skip` [], which is on the device, to a fused optimizer.

    Fused optimizers, and Muon on a GPU, read it on the device (as torch's own `found_inf` of gradient scaling): then
    always True, and the host does not wait. For others the host reads it, and on MPS, whose fused kernels ignore it: a
    sync point.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False) and skip.device.type != "mps":
        optimizer.grad_scale, optimizer.found_inf = None, skip.float()  # type: ignore[attr-defined]
        return True
    return not skip.item()
