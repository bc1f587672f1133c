"""Optimizers: AdamW for all parameters, or Muon for the hidden matrices and AdamW for the others; and the
updates that are skipped."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import AdamW, Optimizer

from common.errors import UserError, warn
from trainer.devices.process_group import gather
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

    lr: on AdamW's scale; with Muon all groups run at MUON_LR_SCALE times as much, their `lr_scale`.
    weight_decay: of matrices only. lr_scales: learning rates of modules as multiples of `lr`, such as
    {"layers.0": 0.5}. Raises UserError if there is nothing to optimize, or nothing in one of the modules.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise UserError("nothing to train: all parameters of the model are frozen")
    if kind == "muon" and not any(is_hidden_matrix(name, p) for name, p in named):
        raise UserError("--optimizer muon: this model has no matrices in `layers`; use adamw")
    rate = lr * MUON_LR_SCALE if kind == "muon" else lr
    scales = {"": 1.0} | dict(lr_scales or {})  # "": parameters in none of the modules
    parts: dict[str, dict[str, list[nn.Parameter]]] = {
        module: {"muon": [], "matrices": [], "vectors": []} for module in scales
    }
    rows: dict[nn.Parameter, int] = {}
    for name, p in named:
        module = ""
        if lr_scales:
            module = _module_of(name, lr_scales)
        part = parts[module]
        if p.ndim < 2:
            part["vectors"].append(p)
        elif kind == "muon" and is_hidden_matrix(name, p):
            part["muon"].append(p)
            rows[p] = p.shape[-2]
            if name.endswith("gate_up_proj"):  # of transformers' experts: two, one below the other
                rows[p] = p.shape[-2] // 2
        else:
            part["matrices"].append(p)
    hidden: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    for module, part in parts.items():
        scaled: dict[str, Any] = {}
        if module:
            if not any(part.values()):
                raise UserError(
                    f"lr_scales: no trained parameter is in a module {module!r}; one is {named[0][0]!r}"
                )
            scaled = {"lr": rate * scales[module], "lr_scale": scales[module]}
        hidden.append({"params": part["muon"]} | scaled)
        groups.append({"params": part["matrices"], "weight_decay": weight_decay} | scaled)
        groups.append({"params": part["vectors"], "weight_decay": 0.0} | scaled)
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

    Muon (K. Jordan, 2024) orthogonalises the update of each matrix; scaled as in arXiv:2502.16982 its steps
    have AdamW's size, so one learning rate serves both, larger than AdamW's alone.
    """

    def __init__(self, muon: Muon, adamw: AdamW):
        self.muon, self.adamw = muon, adamw
        for group in (*self.muon.param_groups, *adamw.param_groups):
            group["lr_scale"] = MUON_LR_SCALE * group.get("lr_scale", 1.0)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        # torch's names for an optimizer that reads on the device whether to skip, which `should_step` sets
        self.found_inf: Tensor | None = None
        devices = {p.device.type for group in self.param_groups for p in group["params"]}
        self._step_supports_amp_scaling = devices == {"cuda"}

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


def should_step(optimizer: Optimizer, skip: Tensor) -> bool:
    """Whether to call `optimizer.step()`, with the flag `skip` [] on the device.

    Fused optimizers, and Muon on a GPU, read it there, as torch's own `found_inf`: then always True, and the
    host does not wait. For others, and on MPS, whose fused kernels ignore it, the host reads: a sync point.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False) and skip.device.type != "mps":
        optimizer.grad_scale, optimizer.found_inf = None, skip.float()  # type: ignore[attr-defined]
        return True
    return not skip.item()


class SkippedUpdates:
    """Updates with a non-finite loss or gradient are skipped on all ranks and counted; too many in a row end
    the run.

    Losses and norm are all-reduced, so all ranks decide alike, on the device; the host reads the decisions in
    `read_and_warn`. A gradient that overflows float16 because the scaler's scale is too high is skipped as
    well, but counted apart.

    limit: non-finite updates in a row that end the run. source: FILE:LINE of a sample.
    """

    def __init__(self, limit: int = 5, source: Callable[[int], str] = str):
        self.limit, self.source = limit, source
        self.in_a_row = 0
        self.skipped: list[dict[str, Any]] = []  # since the last record
        self.overflows = 0  # since the last record
        # update, [2] on the device: not finite, an overflow; the samples of this rank
        self._unread: list[tuple[int, Tensor, list[int]]] = []

    def state_dict(self) -> dict[str, Any]:
        """The counts to save."""
        return {"in_a_row": self.in_a_row, "skipped": self.skipped, "overflows": self.overflows}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from saved counts."""
        self.in_a_row, self.skipped = saved["in_a_row"], list(saved["skipped"])
        self.overflows = saved["overflows"]

    def check_on_device(
        self, update: int, window: list[dict], losses: Tensor, grad_norm: Tensor, scaler: GradScaler
    ) -> Tensor:
        """Whether to skip the optimizer step of an update: a bool [] on the device. losses [2]: its mean
        losses over all ranks. grad_norm []: of the unscaled, reduced gradient. An overflow counts as one only
        while the scaler can lower its scale."""
        bad_loss = ~torch.isfinite(losses).all()
        skip = bad_loss | ~torch.isfinite(grad_norm)
        scale = scaler.scale(torch.ones_like(grad_norm))  # read on the device; 1 without a scaler
        bad = bad_loss | (skip & (scale <= 1.0))
        samples = [i for batch in window if "sample_ids" in batch for i in batch["sample_ids"].tolist()]
        self._unread.append((update, torch.stack((bad, skip & ~bad)), samples))
        return skip

    def read_and_warn(self) -> None:
        """Look at the updates since the last reading and warn of the skipped ones. Sync point. Raises
        UserError if `limit` of them came in a row."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        decisions = torch.stack([decision for _, decision, _ in unread]).tolist()
        for (update, _, samples), (bad, overflow) in zip(unread, decisions, strict=True):
            self.overflows += overflow
            self.in_a_row = self.in_a_row + 1 if bad else 0
            if bad:
                self._warn(update, samples)
            if self.in_a_row >= self.limit:
                raise UserError(
                    f"--max_bad_updates {self.limit}: the loss or gradient was not finite in {self.limit} "
                    f"updates in a row, the last of them update {update}. The last checkpoint is intact, "
                    "none of these updates is in it; lower --learning_rate, look at the samples named above, "
                    "or use --dtype float32"
                )

    def _warn(self, update: int, own_samples: list[int]) -> None:
        samples = sum(gather(own_samples), [])
        self.skipped.append({"update": update, "sample_ids": samples})
        named = ", ".join(f"{sample} ({self.source(sample)})" for sample in samples[:4])
        more = f" and {len(samples) - 4} more, all in the metrics file" if len(samples) > 4 else ""
        warn(f"update {update} is skipped, its loss or gradient is not finite; its samples: {named}{more}")

    def pop_record_fields(self) -> dict[str, Any]:
        """The fields of a log record, where there is something to say: `skipped`, the updates
        [{"update", "sample_ids"}] since the last record, and `overflows`, how many overflowed float16."""
        taken = {"skipped": self.skipped, "overflows": self.overflows}
        self.skipped, self.overflows = [], 0
        return {name: value for name, value in taken.items() if value}
