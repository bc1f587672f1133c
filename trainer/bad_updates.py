"""Updates whose loss or gradient is not finite: left out on all ranks, counted, and too many in a row end the run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dataset.errors import UserError, warn
from trainer.trainer_utils import gather


class BadUpdates:
    """Steps the optimizer only where the gradient is finite, and keeps the account of where it was not.

    The gradient and its norm are the same on all ranks, so all of them decide alike. The decision is made on the
    device; the host reads it later (`read`), so a GPU is not waited for at each update.

    Args:
        limit: bad updates in a row that end the run.
        source: FILE:LINE of a sample.
    """

    def __init__(self, limit: int = 5, source: Callable[[int], str] = str):
        self.limit, self.source = limit, source
        self.in_a_row = 0
        self.skipped: list[dict[str, Any]] = []  # since the last record
        self._unread: list[tuple[int, Tensor, list[int]]] = []
        self._flag = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves."""
        return {"in_a_row": self.in_a_row, "skipped": self.skipped}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on counting."""
        self.in_a_row, self.skipped = saved["in_a_row"], list(saved["skipped"])

    def step(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, losses: Tensor, norm: Tensor
    ) -> None:
        """Step the optimizer, or leave weights and optimizer state as they are.

        losses: the update's mean losses; norm: the gradient's norm, of all ranks.
        """
        if scaler.is_enabled():  # float16: an overflow only lowers the scale, until there is nothing left to lower
            overflow_is_usual = scaler.get_scale() > 1.0
            scaler.step(optimizer)
            scaler.update()
            self._flag = ~torch.isfinite(losses).all() if overflow_is_usual else ~torch.isfinite(norm)
            return
        self._flag = ~torch.isfinite(norm)
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # fused: it looks at `found_inf` on the device
            optimizer.grad_scale, optimizer.found_inf = None, self._flag.float()
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        elif not self._flag.item():
            optimizer.step()

    def note(self, update: int, window: list[dict], read: bool = True) -> None:
        """Remember which samples an update was made of; with `read`, also look whether it was a bad one."""
        samples = [i for batch in window if "sample_ids" in batch for i in batch["sample_ids"].tolist()]
        self._unread.append((update, self._flag, samples))
        if read:
            self.read()

    def read(self) -> None:
        """Look at the updates noted since the last reading: warn of bad ones. Waits for the device.

        Raises:
            UserError: `limit` of them in a row.
        """
        unread, self._unread = self._unread, []
        flags = torch.stack([flag for _, flag, _ in unread]).tolist() if unread else []
        for (update, _, mine), bad in zip(unread, flags, strict=True):
            self.in_a_row = self.in_a_row + 1 if bad else 0
            if bad:
                self._tell(update, mine)
            if self.in_a_row >= self.limit:
                raise UserError(
                    f"--max_bad_updates {self.limit}: the loss or gradient was not finite in {self.limit} updates in a "
                    f"row, the last of them update {update}. The last checkpoint is intact, no bad update is in it; "
                    "lower --learning_rate, look at the samples named above, or use --dtype float32"
                )

    def _tell(self, update: int, mine: list[int]) -> None:
        samples = sum(gather(mine), [])
        self.skipped.append({"update": update, "sample_ids": samples})
        named = ", ".join(f"{sample} ({self.source(sample)})" for sample in samples[:4])
        more = f" and {len(samples) - 4} more, all in the metrics file" if len(samples) > 4 else ""
        warn(f"update {update} is left out, its loss or gradient is not finite; its samples: {named}{more}")

    def take(self) -> list[dict[str, Any]]:
        """The updates left out since the last record: [{"update", "sample_ids"}]."""
        taken, self.skipped = self.skipped, []
        return taken
