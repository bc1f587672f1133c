"""A decoder that notices when a model's outputs are not numbers. From such logits the first token of the
vocabulary would be drawn again and again: a special one, which is shown as nothing."""

import math
from collections.abc import Collection
from itertools import chain
from typing import Any

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
    """A `Decoder` of a model that is not trained, whose layers it joins. It raises NotFinite rather than
    write tokens that were drawn from logits that are not finite: their log-probabilities are not, either."""

    def __init__(self, model: Any, slots: int, length: int, end_ids: Collection[int]):
        from model.decoding import join_layers  # brings in the compiler

        join_layers(model)
        super().__init__(model, slots, length, end_ids, with_logprobs=True)

    def _read(self, tokens: Tensor, logprobs: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        read = super()._read(tokens, logprobs)
        if not all(map(math.isfinite, chain(*read[1]))):
            raise NotFinite
        return read
