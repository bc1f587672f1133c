"""Stopping a run by a signal: the loop finishes the update under way, saves, and leaves."""

import multiprocessing
import os
import signal
import time

from common.command_line import STOP_SIGNALS, handled_signals
from common.console import write_now
from common.errors import Interrupted
from common.launcher import launch


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP as a request that the loop grants at the end of an update.

    Before and after training (`defer` is False: nothing to save) a first signal ends the run at once. A
    second Ctrl-C always does. As a context manager it restores the previous handlers at the end.
    """

    def __init__(self):
        self.signal = 0  # the number of the signal that came; 0: none
        self.defer = False
        self._since = 0.0

    def install(self) -> "StopRequest":
        """Handle the stop signals from here on."""
        self._owner = os.getpid()
        self._before = {number: signal.signal(number, self._receive) for number in handled_signals()}
        return self

    __enter__ = install

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame) -> None:
        if os.getpid() != self._owner:
            return  # a data loader process; its parent ends it
        now = time.monotonic()
        # torchrun and the terminal may both deliver the same Ctrl-C: only a later one is a second one
        insists = number == signal.SIGINT and self.signal and now - self._since > 2
        name = signal.Signals(number).name
        # later signals repeat the request, also while the last files are written: when torchrun is killed,
        # Linux sends one for each of its threads that ends
        if insists or not (self.defer or self.signal):
            raise Interrupted(
                number, f"by {name}; --from_resume 1 goes on from the last checkpoint, if there is one"
            )
        if not self.signal:
            self.signal, self._since = number, now
            if launch().local_rank == 0:
                write_now(f"{name}: finishing this update, then saving")


def ignore_stop_signals(_: int = 0) -> None:
    """Worker initialiser of a data loader: signals are for its parent, which then ends it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_loader_processes() -> None:
    """Kill the data loader processes that are left when training stops early; they ignore the stop
    signals."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
            child.join()
