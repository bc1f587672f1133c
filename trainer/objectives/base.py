"""The base class of all objectives: what a stage learns, and the points at which it takes part in a run."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dataset.batch import Batch, Size
from trainer.optim.build import build_optimizer
from trainer.weights.files import save_weights
from trainer.weights.tensor_file import Writer

if TYPE_CHECKING:
    from model.model_minimind import MiniMindForCausalLM

Metrics = Mapping[str, Tensor | tuple[Tensor, Tensor]]  # sums over the targets, or pairs (sum, count)


class Objective:
    """What a stage learns, from which batches, and which weights it writes. Scripts and engine use it. A
    stage implements `loss` and `held_out`, and overrides the other methods as needed. It may also have the
    methods `on_...` of a callback (trainer/callbacks/base.py); they are called before those of the
    callbacks."""

    console_metrics: tuple[str, ...] = ()  # metrics that are shown on the console's line
    loss_is_cross_entropy = False
    # whether a checkpoint leaves out frozen weights, which a resumed run then reads again
    saves_trained_only = False
    # held-out metric ("": all) -> the settings that it depends on besides the model and the data;
    # scripts/compare.py keeps them equal
    held_out_reads: Mapping[str, str] = {}
    needs_reference = False  # `reference` becomes a frozen model with the start weights, on the device
    reference: Any = None

    def groups(
        self, named_parameters: Sequence[tuple[str, nn.Parameter]], args: Any
    ) -> Sequence[Mapping[str, Any]]:
        """Parameters with their own learning rate, betas or weight decay, as rows such as `{"match":
        "embed_tokens", "lr_scale": 2.0}`, see `Group`. named_parameters: tied ones come once."""
        return ()

    def optimizer(self, model: nn.Module, args: Any) -> torch.optim.Optimizer:
        """The optimizer of a model: AdamW or Muon with the parameter groups of `groups`."""
        groups = self.groups(list(model.named_parameters()), args)
        return build_optimizer(model, args.learning_rate, args.weight_decay, args.optimizer, groups)

    @property
    def stage(self) -> str:
        """The name of the file that defines the objective."""
        return defining_file(self)

    def extend_model(self, model: nn.Module, args: Any) -> nn.Module:
        """Add to a new model what is trained: adapters, a critic, another head. Returns the model. Called
        before it is wrapped."""
        return model

    def load_frozen_models(self, args: Any, device: torch.device) -> None:
        """Load frozen models other than `reference`, such as a teacher, onto the device. Put their flags into
        a subclass of `FrozenModelArgs` (common/settings.py): then these models are compared on resume and
        never overwritten."""

    def prepare(self, state: Any, micro_batches: list[Batch]) -> list[Batch]:
        """The micro-batches to train, made from those of the loader, such as rollouts of prompts."""
        return micro_batches

    def size(self, batch: Batch, lm_config: Any) -> Size:
        """The size of a micro-batch."""
        return batch.size(lm_config)

    def loss(self, model: nn.Module, batch: Batch, args: Any) -> tuple[Tensor, Tensor, Metrics]:
        """Sums, each []: the losses over the targets, the auxiliary losses over the tokens, and metrics by
        name. A metric is a sum over the targets, or a pair (sum, count), such as one of a single source."""
        raise NotImplementedError

    def after_micro_batch(self, state: Any, number: int) -> None:
        """After the backward pass of micro-batch `number` of an update, from 0. The gradients are the sums so
        far; until the last micro-batch, those of this rank alone. In float16 they are multiplied by the scale
        of the gradient scaler."""

    def before_step(self, state: Any, micro_batches: list[Batch]) -> Metrics:
        """The gradients of an update are complete and equal on all ranks, but not clipped yet. You may change
        them. Set a gradient to None to leave its parameter out of this update. micro_batches: this rank's
        micro-batches. Returns metrics like those of `loss`."""
        return {}

    def held_out(self, model: nn.Module, batch: Batch, args: Any) -> Metrics:
        """The sums of a held-out batch, by name; `loss` is one of the names."""
        raise NotImplementedError

    def save(self, model: nn.Module, path: Path, writer: Writer, description: dict[str, Any]) -> Path:
        """Write the inference weights, or an adapter, in the background. Returns the path."""
        return save_weights(model, path, writer, description)

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint that changes from update to update, such as a moving average: numbers,
        strings, tensors, and lists and dicts of them. Called on every rank; the checkpoint holds the state of
        rank 0."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, with its tensors on the CPU. Called before the first update of
        a resumed run. Also called after the first checkpoint of a run, and must then change nothing."""


def defining_file(value: Any) -> str:
    """The name of the file that defines the class of an object."""
    module = sys.modules.get(type(value).__module__)
    return Path(getattr(module, "__file__", None) or type(value).__name__).name


def frozen_model(model: "MiniMindForCausalLM", device: torch.device) -> "MiniMindForCausalLM":
    """A model that takes part in training but is not trained (a teacher, a reference). It has no gradients
    and no dropout."""
    cast(nn.Module, model).to(device)  # in place
    return model.requires_grad_(False).eval()
