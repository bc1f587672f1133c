"""A decoder that notices when a model's outputs are not numbers. From such logits the first token of the
vocabulary would be drawn again and again: a special one, which is shown as nothing."""

from torch import Tensor

from common.errors import UserError
from model.generation import Decoder


class NotFinite(UserError):
    """A model's outputs are not finite numbers."""

    def __init__(self) -> None:
        super().__init__(
            "the model's outputs are not finite numbers: its training diverged, or the file is damaged"
        )


class FiniteDecoder(Decoder):
    """A `Decoder` that raises NotFinite rather than draw tokens from logits that are not finite."""

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = super()._logits(hidden)  # [R, V]
        if not bool(logits.amax(dim=-1).isfinite().all()):  # NaN is the greatest of a row; sync point
            raise NotFinite
        return logits
