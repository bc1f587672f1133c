"""What a task of the engine learns, as the loop takes it: the results of its methods, checked."""

from typing import Any

from torch import Tensor, nn

from common.errors import UserError
from llm.training.core.checks import (
    check_no_gradients,
    checked_batch,
    checked_loss,
    checked_sums,
    checked_type,
    names_of,
)
from trainer.objectives.next_token import Batch, Metrics, Objective, defining_file
from trainer.report.speed import Size


class TaskObjective(Objective):
    """What a task learns, by its own methods."""

    def __init__(self, task: Any):
        self.task = task
        self.console_metrics, self.needs_reference = names_of(task, "console_metrics"), task.needs_reference
        self.is_checked = False

    @property
    def stage(self) -> str:
        return defining_file(self.task)

    def size(self, batch: Batch, lm_config: Any) -> Size:
        size = self.task.size(checked_batch(self.task.data, batch))
        form = "Size(targets=..., tokens=...) of trainer.report.speed"
        return checked_type(self.task, "size", size, Size, form)

    def loss(self, model: nn.Module, batch: Batch, args: Any) -> tuple[Tensor, Tensor, Metrics]:
        self.task.reference = self.reference
        result = self.task.train_step(model, batch)
        if not self.is_checked:
            check_no_gradients(self.task, model)
            self.is_checked = True
        return checked_loss(self.task, result)

    def held_out(self, model: nn.Module, batch: Batch, args: Any) -> Metrics:
        self.task.reference = self.reference
        sums = checked_sums(self.task, "validation_step", self.task.validation_step(model, batch))
        if "loss" not in sums:
            names = ", ".join(sums) or "nothing"
            kind = type(self.task).__name__
            raise UserError(f"{kind}.validation_step returns {names}; `loss` must be one of its sums")
        return sums
