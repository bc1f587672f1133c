"""Updates with a non-finite loss or gradient: skipped on all ranks, counted, and too many in a row end the
run.

In float16 a gradient may overflow because the scaler's scale is too high; the scaler then lowers it. Such an
update is skipped as well, but counted apart, as an overflow.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError, warn
from trainer.devices.process_group import gather


class BadUpdates:
    """Judges each update and counts the skipped ones.

    Losses and gradient norm are all-reduced, so all ranks judge alike. The judgement stays on the device
    until `read_and_warn`, so that the host does not wait for a GPU in every update.

    Args:
        limit: bad updates in a row that end the run.
        source: FILE:LINE of a sample.
    """

    def __init__(self, limit: int = 5, source: Callable[[int], str] = str):
        self.limit, self.source = limit, source
        self.in_a_row = 0
        self.skipped: list[dict[str, Any]] = []  # since the last record
        self.overflows = 0  # since the last record
        self._unread: list[tuple[int, Tensor, list[int]]] = []
        self._judgement = torch.zeros(2, dtype=torch.bool)  # of the last update: bad, an overflow

    def state_dict(self) -> dict[str, Any]:
        """The counts to save."""
        return {"in_a_row": self.in_a_row, "skipped": self.skipped, "overflows": self.overflows}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from saved counts."""
        self.in_a_row, self.skipped = saved["in_a_row"], list(saved["skipped"])
        self.overflows = saved["overflows"]

    def check_on_device(self, losses: Tensor, grad_norm: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
        """Whether to skip the optimizer step: a bool [] on the device.

        losses [2]: the update's mean losses over all ranks. grad_norm []: of the unscaled, reduced gradient.
        In float16 an overflow of the gradient is not bad while the scaler can still lower its scale.
        """
        bad_loss = ~torch.isfinite(losses).all()
        skip = bad_loss | ~torch.isfinite(grad_norm)
        scale = scaler.scale(torch.ones_like(grad_norm))  # read on the device; 1 without a scaler
        bad = bad_loss | (skip & (scale <= 1.0))
        self._judgement = torch.stack((bad, skip & ~bad))
        return skip

    def remember(self, update: int, window: list[dict], read: bool = True) -> None:
        """Remember the samples of the update just judged; with `read`, also look at the judgement."""
        samples = [i for batch in window if "sample_ids" in batch for i in batch["sample_ids"].tolist()]
        self._unread.append((update, self._judgement, samples))
        if read:
            self.read_and_warn()

    def read_and_warn(self) -> None:
        """Look at the judgements since the last reading and warn of bad updates. Sync point. Raises UserError
        if `limit` of them came in a row."""
        unread, self._unread = self._unread, []
        judgements = torch.stack([judgement for _, judgement, _ in unread]).tolist() if unread else []
        for (update, _, samples), (bad, overflow) in zip(unread, judgements, strict=True):
            self.overflows += overflow
            self.in_a_row = self.in_a_row + 1 if bad else 0
            if bad:
                self._warn(update, samples)
            if self.in_a_row >= self.limit:
                raise UserError(
                    f"--max_bad_updates {self.limit}: the loss or gradient was not finite in {self.limit} "
                    f"updates in a row, the last of them update {update}. The last checkpoint is intact, "
                    "no bad update is in it; lower --learning_rate, look at the samples named above, or "
                    "use --dtype float32"
                )

    def _warn(self, update: int, own_samples: list[int]) -> None:
        samples = sum(gather(own_samples), [])
        self.skipped.append({"update": update, "sample_ids": samples})
        named = ", ".join(f"{sample} ({self.source(sample)})" for sample in samples[:4])
        more = f" and {len(samples) - 4} more, all in the metrics file" if len(samples) > 4 else ""
        warn(f"update {update} is skipped, its loss or gradient is not finite; its samples: {named}{more}")

    def pop_record_fields(self) -> dict[str, Any]:
        """The fields of a log record, and a new start: `skipped`, the updates [{"update", "sample_ids"}]
        since the last record, and `overflows`, how many more were skipped because of one in float16; each
        where there are any."""
        taken = {"skipped": self.skipped, "overflows": self.overflows}
        self.skipped, self.overflows = [], 0
        return {name: value for name, value in taken.items() if value}
