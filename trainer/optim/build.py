"""Optimizers: AdamW for all parameters, or Muon for the hidden matrices and AdamW for the others; skippable
steps."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from common.errors import UserError
from trainer.devices.device import native_bfloat16
from trainer.devices.wrapping import local_tensor
from trainer.optim.sharing import divide_work

MUON_LR_SCALE = 8.0  # best learning rate of Muon relative to AdamW's; docs/dev/LOG.md, "Muon's learning rate"
STACK = 1 << 24  # elements of the matrices that are orthogonalised at once: 64 MiB in float32
CPU_STACK = 1 << 22  # there: memory of more than 32 MiB at once is new each time, which costs page faults


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
    if kind == "muon" and not any(is_hidden_matrix(*each) for each in named):
        raise UserError("--optimizer muon: this model has no matrices in `layers`; use adamw")
    rate = lr * MUON_LR_SCALE if kind == "muon" else lr
    hidden, groups = [], []
    for module, scale in {"": 1.0, **(lr_scales or {})}.items():
        own = [(name, p) for name, p in named if _module_of(name, lr_scales) == module]
        if module and not own:
            raise UserError(
                f"lr_scales: no trained parameter is in a module {module!r}; one is {named[0][0]!r}"
            )
        by_muon = {name for name, p in own if kind == "muon" and is_hidden_matrix(name, p)}
        matrices = [p for name, p in own if p.ndim >= 2 and name not in by_muon]
        vectors = [p for _, p in own if p.ndim < 2]
        scaled = {"lr": rate * scale, "lr_scale": scale} if module else {}
        hidden += [{"params": [p for name, p in own if name in by_muon]} | scaled]
        groups += [{"params": matrices, "weight_decay": weight_decay} | scaled]
        groups += [{"params": vectors, "weight_decay": 0.0} | scaled]
    device = named[0][1].device.type
    adamw = AdamW(groups, lr=rate, fused=device in ("cpu", "cuda", "mps"))
    if kind == "adamw":
        return adamw
    rows = {p: p.shape[-2] // (2 if name.endswith("gate_up_proj") else 1) for name, p in named if p.ndim >= 2}
    return MuonWithAdamW(Muon(hidden, rows, rate, weight_decay), adamw)


def _module_of(name: str, lr_scales: Mapping[str, float] | None) -> str:
    """The module of `lr_scales` that a parameter belongs to, "" for none."""
    return next((module for module in lr_scales or () if f".{module}." in f".{name}"), "")


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon optimizes this parameter: matrices of a layer that map hidden vectors; not the MoE
    router."""
    return ".layers." in name and parameter.ndim in (2, 3) and not name.endswith("mlp.gate.weight")


class Muon(Optimizer):
    """torch's Muon on stacks of matrices of one shape, so that the operators of an update do not grow with
    depth.

    Several ranks share the stacks, also those of sharded parameters. How they are cut does not depend on the
    ranks, so the results are the same bits. The iteration is in float32 where bfloat16 is emulated (on such a
    CPU a product of matrices takes 3 to 100 times as long), and a step can be undone on the device.

    rows: m of the matrices [m, n] in each parameter; one of three dimensions holds several, one below the
    other.
    """

    def __init__(self, groups: list[dict[str, Any]], rows: Mapping[Any, int], lr: float, weight_decay: float):
        torchs = torch.optim.Muon([torch.zeros(1, 1)], lr, weight_decay, adjust_lr_fn="match_rms_adamw")
        # checkpoints hold them; adjust_lr_fn is the factor in `move`
        super().__init__(groups, torchs.defaults)
        self.rows = rows

    @torch.no_grad()
    def step(self, closure=None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Step each matrix; with `skip` [], read on the device, all stay what they were. No closure."""
        groups, stacks = self.stacks()
        divide_work(
            stacks,
            part_of=lambda i: self.momentum(groups[i], stacks[i], skip),
            work=lambda i, update: self.directions(groups[i], stacks[i], update),
            use=lambda i, directions: self.move(groups[i], stacks[i], directions, skip),
        )

    def stacks(self) -> tuple[list[dict[str, Any]], list[list[Tensor]]]:
        """The parameters with a gradient in stacks of one group and shape, of STACK elements at most if not
        of a single parameter, and their groups. Those with most work come first: ranks that take one each
        then end together."""
        alike: dict[tuple, list[Tensor]] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((number, self.rows[p], p.shape), []).append(p)
        found = []
        for (number, rows, shape), params in alike.items():
            count = max(1, (CPU_STACK if params[0].device.type == "cpu" else STACK) // shape.numel())
            pieces = [params[i : i + count] for i in range(0, len(params), count)]
            found += [(len(piece) * shape.numel() * min(rows, shape[-1]), number, piece) for piece in pieces]
        found.sort(key=lambda each: -each[0])
        return [self.param_groups[number] for _, number, _ in found], [piece for _, _, piece in found]

    def momentum(self, group: dict[str, Any], params: list[Tensor], skip: Tensor | None) -> Tensor:
        """Take the gradients into the momentum -> the update [k, rows, ...] to orthogonalise, of what this
        rank has."""
        for p in params:
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [local_tensor(self.state[p]["momentum_buffer"]) for p in params]
        grads = torch.stack([local_tensor(cast(Tensor, p.grad)) for p in params])
        if skip is not None:
            grads = torch.where(skip, torch.stack(buffers), grads)  # then the momentum stays what it is
        torch._foreach_lerp_(buffers, grads.unbind(), 1 - group["momentum"])
        update = grads.lerp_(torch.stack(buffers), group["momentum"])  # Nesterov momentum
        return update.to(torch.bfloat16 if native_bfloat16(update.device) else torch.float32)

    def directions(self, group: dict[str, Any], params: list[Tensor], update: Tensor) -> Tensor:
        """The update of whole parameters [k, rows, ...], its matrices orthogonalised."""
        matrices = update.reshape(-1, self.rows[params[0]], update.shape[-1])
        return orthogonalized(matrices, group).view(update.shape)

    def move(
        self, group: dict[str, Any], params: list[Tensor], directions: Tensor, skip: Tensor | None
    ) -> None:
        """Decay the parameters, and add the directions [k, rows, ...], what this rank has of both."""
        decay: Any = 1 - group["lr"] * group["weight_decay"]
        if skip is not None:
            decay, directions = 1 - ~skip * (1 - decay), directions * ~skip
        values = [local_tensor(p) for p in params]
        torch._foreach_mul_(values, decay)
        size = 0.2 * math.sqrt(max(self.rows[params[0]], params[0].shape[-1]))  # of AdamW's steps
        torch._foreach_add_(values, directions.to(values[0].dtype).unbind(), alpha=-size * group["lr"])


def orthogonalized(matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The semi-orthogonal matrices nearest to the given ones [k, m, n], roughly: quintic Newton-Schulz
    iterations, as in torch's Muon.

    group: `ns_coefficients`, `ns_steps` and `eps` of a parameter group.
    """
    a, b, c = group["ns_coefficients"]
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])  # spectral norm at most 1
    for _ in range(group["ns_steps"]):
        gram = torch.bmm(x.mT, x) if is_tall else torch.bmm(x, x.mT)  # the smaller of the two
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factor, beta=a) if is_tall else torch.baddbmm(x, factor, x, beta=a)
    return x


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
    for group in optimizer.param_groups if lr is not None else ():
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
