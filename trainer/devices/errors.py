"""What ends a run early: signals, and errors of memory, of other ranks and of data loader processes. Each
becomes one line."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from common.command_line import STOP_SIGNALS, leave_dead_console, one_line_errors
from common.errors import Interrupted, LoaderFailure, LostRank, UserError, WriteError, log, reason, warn
from common.launcher import launch
from common.plugins import in_main_thread
from trainer.devices.process_group import leave_process_group


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory of the machine or of a GPU ran out."""
    is_typed = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    phrases = ("allocate memory", "not enough memory", "out of memory")
    return is_typed or any(phrase in str(error) for phrase in phrases)


@contextmanager
def training_errors() -> Iterator[None]:
    """Wrap the `main()` of a training command: `one_line_errors`, also for failures of memory and of other
    ranks. The run survives its console."""
    with one_line_errors(), translated_failures():
        yield
        if dist.is_initialized():
            leave_process_group()  # after `main`, so that its DDP model is freed
        leave_dead_console()


@contextmanager
def translated_failures(how_to_go_on: Callable[[], str] = str) -> Iterator[None]:
    """Raise a UserError if memory, disk space or shared memory runs out, and LostRank for a lost rank.
    how_to_go_on: returns the end of the line; empty before there is a checkpoint."""
    try:
        yield
    except WriteError as error:
        raise UserError(f"{error}{how_to_go_on()}") from error
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if is_out_of_memory(error):
            raise UserError(
                f"out of memory ({reason(error)}); lower --batch_size (raise --accumulation_steps by as "
                f"much: the update stays the same), --max_seq_len or the model's size{how_to_go_on()}"
            ) from error
        # gloo raises a plain RuntimeError
        if dist.is_initialized() and ("gloo/transport" in text or isinstance(error, dist.DistError)):
            raise LostRank(
                f"rank {dist.get_rank()}: another rank ended while this one waited for it, hangs, or cannot "
                f"be reached ({reason(error)}); its own error or torchrun's gives the reason{how_to_go_on()}"
            ) from error
        # torch's error for a loader process that cannot pass on its batches, or was killed
        phrases = ("shared memory", "killed by signal", "exited unexpectedly")
        if isinstance(error, LoaderFailure) or any(phrase in text for phrase in phrases):
            raise UserError(
                f"the data loader processes failed ({reason(error)}); use --num_workers 0, or give the "
                f"machine more shared memory in /dev/shm (docker run --shm-size 1g){how_to_go_on()}"
            ) from error
        raise


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP during training become a request that the loop grants after the update. A
    second Ctrl-C ends the run at once. A thread (of a notebook or a page) gets no signals: there a signal
    ends the process at once, and the run resumes from its last checkpoint."""

    current: ClassVar["StopRequest | None"] = None  # the request that handles signals now

    def __init__(self):
        self.is_saved: Callable[[], bool] = lambda: True  # whether nothing is lost if the run ends at once
        self.is_compiling = False
        self.signal = 0  # the number of the signal that came; 0: none
        self.since = 0.0
        self.owner = os.getpid()
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if not in_main_thread():
            warn("not in the main thread: a signal does not save first, and --reward_timeout has no effect")
            return self
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self.before[number] = signal.signal(number, self.receive)
        StopRequest.current = self
        return self

    def __exit__(self, *_) -> None:
        StopRequest.current = None
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame) -> None:
        """Note a signal; end the run at once while the model is compiled."""
        if os.getpid() != self.owner:
            return  # a data loader process; its parent ends it
        if self.is_compiling and self.is_saved():
            raise while_compiling(number)
        # torchrun and the terminal may both deliver the same Ctrl-C, so only a later one counts as the second
        if number == signal.SIGINT and self.signal and time.monotonic() - self.since > 2:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal, self.since = number, time.monotonic()
            if launch().local_rank == 0:
                hint = "; a second Ctrl-C stops at once" if number == signal.SIGINT else ""
                log.warning(f"{signal.Signals(number).name}: finishing this update, then saving{hint}")


@contextmanager
def compiling() -> Iterator[None]:
    """Use it around code that may compile: a signal ends the run at once, unless updates would be lost. The
    compilers are separate processes and often get the signal, too. Torch turns their failure into a traceback
    or chooses another kernel."""
    request = StopRequest.current
    if request is None:
        yield
        return
    request.is_compiling = True
    try:
        yield
    except Exception as error:
        if not request.signal:
            raise
        raise while_compiling(request.signal) from error
    finally:
        request.is_compiling = False


def while_compiling(number: int) -> Interrupted:
    """The exception for a signal while the model is being compiled."""
    how = "--from_resume 1 continues from the last checkpoint, if there is one"
    return Interrupted(number, f"by {signal.Signals(number).name} while the model was compiled; {how}")


def end_loader_processes() -> None:
    """Kill the data loader processes that remain when training stops early, because they ignore the stop
    signals."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
            child.join()
