"""What takes part in a run: its Objective, then its callbacks."""

from types import SimpleNamespace

import pytest

from common.errors import UserError
from trainer.callbacks.base import Callback, CallbackList
from trainer.objectives.base import Objective


class Counts(Callback):
    """Notes who was called."""

    def __init__(self, calls: list[str]):
        self.calls = calls

    def on_batch_start(self, state, update):
        self.calls.append(f"callback {update}")


class Mine(Objective):
    """An objective that takes part, and has a state."""

    def __init__(self, calls: list[str]):
        self.calls, self.kept = calls, 3

    def on_batch_start(self, state, update):
        self.calls.append(f"objective {update}")

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, saved):
        self.kept = saved["kept"]


def members(objective: Objective, calls: list[str]) -> CallbackList:
    callbacks = CallbackList([Counts(calls)])
    optimizer = SimpleNamespace(param_groups=[])
    callbacks.state = SimpleNamespace(objective=objective, optimizer=optimizer)
    return callbacks


def test_the_objective_is_called_before_the_callbacks_and_its_state_is_kept():
    calls: list[str] = []
    objective = Mine(calls)
    callbacks = members(objective, calls)
    callbacks.check()
    callbacks.call("on_batch_start", 7)
    callbacks.call("on_epoch_start", 0)  # which the objective does not have
    assert calls == ["objective 7", "callback 7"]
    saved, objective.kept = callbacks.state_dict(), 4
    assert saved == {"the Objective": {"kept": 3}, "Counts": {}}
    callbacks.load_state_dict(saved)
    assert objective.kept == 3


def test_a_method_of_the_objective_that_would_never_be_called_is_refused():
    class Misspelled(Mine):
        def on_batch_begin(self, state, update): ...

    with pytest.raises(
        UserError, match=r"^objective Misspelled: on_batch_begin would never be called; there"
    ):
        members(Misspelled([]), []).check()
