"""How a run is stopped from outside: by a signal, by a rank that is gone, by memory that runs out."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dataset.errors import STOP_SIGNALS, Interrupted, LostRank, UserError, heeded_signals, reason

# How gloo and NCCL word it when a peer is gone (torch 2.11 to 2.13); they have no exception type of their own.
SILENT = ("Timed out wait", "Connection timed out", "No route to host", "Network is unreachable")
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", *SILENT)
LOST += (
    "remote process exited",
    "Socket closed",
    "recvValue failed",
    "sendBytes failed",
    "communicator was aborted",
)
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP as a wish that the loop grants at the end of an update.

    While `patient` is False (nothing to save yet) a signal ends the run at once. A second Ctrl-C does so always.
    """

    def __init__(self):
        self.signal = 0  # the number of the signal that came; 0: none
        self.patient = False
        self._since = 0.0

    def __enter__(self) -> "StopRequest":
        self._owner = os.getpid()
        self._before = {number: signal.signal(number, self._receive) for number in heeded_signals()}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame) -> None:
        if os.getpid() != self._owner:
            return  # a process of the data loader, which its parent ends
        now = time.monotonic()
        # torchrun and a terminal may both deliver the same Ctrl-C: only a later one is a second one
        insists = number == signal.SIGINT and self.signal and now - self._since > 2
        name = signal.Signals(number).name
        if not self.patient or insists:
            raise Interrupted(number, f"by {name}; --from_resume 1 goes on from the last checkpoint, if there is one")
        if not self.signal:
            self.signal, self._since = number, now
            if os.environ.get("LOCAL_RANK", "0") == "0":
                os.write(2, f"{name}: finishing this update, then saving\n".encode())


def ignore_stop_signals(_: int = 0) -> None:
    """In a process of the data loader: signals are for its parent, which then ends it in order."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_loader_processes() -> None:
    """End the data loader's processes that are left when training stops early; they ignore what would end them."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
            child.join()


@contextmanager
def explained() -> Iterator[None]:
    """Say in one line what ended a rank when it is nobody's bug: too little memory, or another rank that is gone.

    Raises:
        UserError: out of memory. LostRank: a collective failed because a peer ended.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        text = str(error)
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(phrase in text for phrase in NO_MEMORY):
            raise UserError(
                f"out of memory ({reason(error)}); lower --batch_size (raise --accumulation_steps by as much: "
                "the update stays the same), --max_seq_len or the model's size; --from_resume 1 goes on from the last "
                "checkpoint"
            ) from error
        if dist.is_initialized() and any(phrase in text for phrase in LOST):
            raise LostRank(lost_rank_message(error)) from error
        raise


def lost_rank_message(error: Exception) -> str:
    """What a failed collective tells: a rank that ended closes its connections; a network cut off says nothing."""
    if any(phrase in str(error) for phrase in SILENT):
        what = "no sign of another rank for --rank_timeout seconds: its machine or the network is down, or it hangs"
        then = "when it is back, the same commands with"
    else:
        what, then = "another rank ended while this one waited for it", "the reason is what that rank or torchrun says;"
    return f"rank {dist.get_rank()}: {what} ({reason(error)}); {then} --from_resume 1 go on from the last checkpoint"
