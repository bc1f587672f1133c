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
    """What a stage learns, from which batches, and what is written of its model: for the scripts and for the
    engine. A stage implements `loss` and `held_out`, and overrides what else differs. It may also have the
    methods `on_...` of a callback (trainer/callbacks/base.py), and is called before the callbacks."""

    console_metrics: tuple[str, ...] = ()  # metrics that stand on the console's line
    loss_is_cross_entropy = False
    saves_trained_only = False  # a checkpoint leaves out frozen weights, which a resumed run reads again
    # of a held-out metric, or "" of all: the settings that it depends on beside the model and the data;
    # scripts/compare.py keeps them equal
    held_out_reads: Mapping[str, str] = {}
    needs_reference = False  # `reference` becomes a frozen model with the start weights, on the device
    reference: Any = None

    def groups(
        self, named_parameters: Sequence[tuple[str, nn.Parameter]], args: Any
    ) -> Sequence[Mapping[str, Any]]:
        """Parameters with a learning rate, betas or weight decay of their own: rows such as
        `{"match": "embed_tokens", "lr_scale": 2.0}`, see `Group`. named_parameters: tied ones come once."""
        return ()

    def optimizer(self, model: nn.Module, args: Any) -> torch.optim.Optimizer:
        """The optimizer of a model: AdamW or Muon with the parameter groups of `groups`."""
        groups = self.groups(list(model.named_parameters()), args)
        return build_optimizer(model, args.learning_rate, args.weight_decay, args.optimizer, groups)

    @property
    def stage(self) -> str:
        """The name of the file that says what is learned."""
        return defining_file(self)

    def extend_model(self, model: nn.Module, args: Any) -> nn.Module:
        """The model to train, made of a new one before it is wrapped: with adapters, a critic, another
        head."""
        return model

    def load_frozen_models(self, args: Any, device: torch.device) -> None:
        """Load frozen models other than `reference`, such as a teacher, onto the device. Their flags are a
        subclass of `FrozenModelArgs` (common/settings.py), which has them compared and not overwritten."""

    def prepare(self, state: Any, micro_batches: list[Batch]) -> list[Batch]:
        """The micro-batches to train of those that the loader gave, such as rollouts of prompts."""
        return micro_batches

    def size(self, batch: Batch, lm_config: Any) -> Size:
        """The size of a micro-batch."""
        return batch.size(lm_config)

    def loss(self, model: nn.Module, batch: Batch, args: Any) -> tuple[Tensor, Tensor, Metrics]:
        """Sums, each []: of the losses of the targets, of the auxiliary losses of the tokens, and of metrics
        by name: over the targets, or a pair (sum, count), such as those of one source."""
        raise NotImplementedError

    def after_micro_batch(self, state: Any, number: int) -> None:
        """After the backward pass of micro-batch `number` of an update, from 0. The gradients are the sums so
        far, of this rank alone until the last one; in float16 times the scale of the gradient scaler."""

    def before_step(self, state: Any, micro_batches: list[Batch]) -> Metrics:
        """The gradients of an update are complete, on all ranks alike, and not clipped yet: change them, or
        make those None of parameters that this update leaves alone. micro_batches: this rank's micro-batches.
        Returns metrics like those of `loss`."""
        return {}

    def held_out(self, model: nn.Module, batch: Batch, args: Any) -> Metrics:
        """The same of a held-out batch, by name; `loss` is one of them."""
        raise NotImplementedError

    def save(self, model: nn.Module, path: Path, writer: Writer, description: dict[str, Any]) -> Path:
        """Write what is used of the model, in the background; returns where."""
        return save_weights(model, path, writer, description)

    def state_dict(self) -> dict[str, Any]:
        """What changes from update to update, such as a moving average, for the checkpoint: numbers, strings,
        tensors, and lists and dicts of them. Called on every rank; the checkpoint holds that of rank 0."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, whose tensors are on the CPU, before the first update of a
        resumed run; also after the first checkpoint of a run, when it must change nothing."""


def defining_file(value: Any) -> str:
    """The name of the file that defines the class of an object."""
    module = sys.modules.get(type(value).__module__)
    return Path(getattr(module, "__file__", None) or type(value).__name__).name


def frozen_model(model: "MiniMindForCausalLM", device: torch.device) -> "MiniMindForCausalLM":
    """A model that takes part in training but is not trained (a teacher, a reference): no gradients, no
    dropout."""
    cast(nn.Module, model).to(device)  # in place
    return model.requires_grad_(False).eval()
