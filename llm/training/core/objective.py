"""The Objective of a TrainingTask: the results of its methods, checked."""

from typing import Any

from torch import Tensor, nn

from common.errors import UserError
from dataset.batch import Batch, Size
from llm.training.core.checks import checked_batch, checked_loss, checked_sums, checked_type, names_of
from trainer.objectives.base import Metrics, Objective, defining_file


class TaskObjective(Objective):
    """What a TrainingTask learns: calls its `train_step`, `validation_step` and `size`."""

    def __init__(self, task: Any):
        self.task = task
        self.console_metrics, self.needs_reference = names_of(task, "console_metrics"), task.needs_reference
        self.is_first_step = True

    @property
    def stage(self) -> str:
        return defining_file(self.task)

    def size(self, batch: Batch, lm_config: Any) -> Size:
        size = self.task.size(checked_batch(self.task.data, batch))
        form = "Size(targets=..., tokens=...) of trainer.report.speed"
        return checked_type(self.task, "size", size, Size, form)

    def loss(self, model: nn.Module, batch: Batch, args: Any) -> tuple[Tensor, Tensor, Metrics]:
        result = self.task.train_step(model, batch)
        if self.is_first_step and any(parameter.grad is not None for parameter in model.parameters()):
            raise UserError(
                f"{type(self.task).__name__}.train_step calls backward(), and the loop does, too; leave it "
                "out and return the loss"
            )
        self.is_first_step = False
        return checked_loss(self.task, result)

    def held_out(self, model: nn.Module, batch: Batch, args: Any) -> Metrics:
        sums = checked_sums(self.task, "validation_step", self.task.validation_step(model, batch))
        if "loss" not in sums:
            step, names = f"{type(self.task).__name__}.validation_step", ", ".join(sums) or "nothing"
            raise UserError(f"{step} returns {names}; `loss` must be one of its sums")
        return sums

    def state_dict(self) -> dict[str, Any]:
        return self.task.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.task.load_state_dict(saved)
