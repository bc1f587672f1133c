"""The part of the engine that callbacks may use (docs/CALLBACKS.md), declared here to avoid a circular import."""

from typing import Protocol

from llm.training.core.config import Config
from llm.training.core.utils import Logger
from trainer.components.state import TrainState


class Engine(Protocol):
    """The running engine, as a callback sees it."""

    config: Config
    state: TrainState
    logger: Logger
    run_name: str
    resumed_update: int | None  # the last update reported before the resume; None in a new run
    is_main_process: bool  # on rank 0

    def stop(self, reason: str) -> None:
        """End training after this update. Must be called on all ranks, at the same update."""
