"""What ends a run before its time.

Errors of memory, of shared memory and of lost peers become a UserError of one line. At a stop signal the loop
finishes the update under way, saves, and leaves.
"""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from common.command_line import STOP_SIGNALS, one_line_errors, write_now
from common.errors import Interrupted, LostRank, UserError, WriteError, reason
from common.launcher import launch
from trainer.devices.device import peak_memory_mb, reserved_memory_mb
from trainer.devices.process_group import LOST_PEER_MESSAGES, leave_process_group, lost_rank_message
from trainer.report.metrics import duration

OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
)

# in the messages of torch when a data loader process cannot pass on its batches, or was killed
LOADER_MESSAGES = ("shared memory", "is killed by signal", "exited unexpectedly")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the machine or of a GPU, was lacking."""
    is_typed = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_typed or any(phrase in str(error) for phrase in OUT_OF_MEMORY_MESSAGES)


@contextmanager
def training_errors() -> Iterator[None]:
    """Wrap the `main()` of a training command: `one_line_errors`, for failures of memory and of other ranks
    too. The run does not end with its console."""
    with one_line_errors(), translated_failures():
        yield
        if dist.is_initialized():
            leave_process_group()  # after `main`, whose DDP is freed


@contextmanager
def translated_failures() -> Iterator[None]:
    """Translate errors of memory, of files, of data loader processes and of lost peers.

    Raises:
        UserError: out of memory, or of shared memory, or a file cannot be written. LostRank: a collective
            failed because a peer ended.
    """
    try:
        yield
    except WriteError as error:
        raise UserError(
            f"{error}; --from_resume 1 then goes on from the last checkpoint, if there is one"
        ) from error
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        text = str(error)
        if is_out_of_memory(error):
            raise UserError(
                f"out of memory ({reason(error)}{_gpu_memory()}); lower --batch_size (raise "
                "--accumulation_steps by as much: the update stays the same), --max_seq_len or the model's "
                "size; --from_resume 1 goes on from the last checkpoint"
            ) from error
        if dist.is_initialized() and any(phrase in text for phrase in LOST_PEER_MESSAGES):
            raise LostRank(lost_rank_message(error)) from error
        if any(phrase in text for phrase in LOADER_MESSAGES):
            raise loader_error(error) from error
        if "OSError" in text and was_compiling(error):  # wrapped
            raise _compiler_error(error) from error
        raise
    except OSError as error:
        if was_compiling(error):
            raise _compiler_error(error) from error
        raise


def was_compiling(error: BaseException) -> bool:
    """Whether an error was raised within torch's compiler."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("_inductor" in frame.filename or "_dynamo" in frame.filename for frame in frames)


def _compiler_error(error: Exception) -> UserError:
    return UserError(
        f"--use_compile: the compiler cannot write its cache ({reason(error)}); make room, or name another "
        "folder in the environment variable TORCHINDUCTOR_CACHE_DIR, or give --use_compile 0"
    )


def _gpu_memory() -> str:
    if not torch.cuda.is_initialized():
        return ""
    device = torch.device("cuda", torch.cuda.current_device())
    return f"; at most {peak_memory_mb(device):,.0f} MB in use, {reserved_memory_mb(device):,.0f} MB reserved"


def check_shared_memory(num_workers: int) -> None:
    """Make as many semaphores and descriptors as a data loader needs. Raises UserError if there is no room
    for them."""
    descriptors: list[int] = []
    try:
        _ = [multiprocessing.Lock() for _ in range(8 * (num_workers + 1))]
        descriptors.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(8 * (num_workers + 1)))
    except OSError as error:
        raise loader_error(error) from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def loader_error(error: Exception) -> UserError:
    """The error line for data loader processes that failed."""
    return UserError(
        f"the data loader processes failed ({reason(error)}); use --num_workers 0, or give the machine "
        "more shared memory in /dev/shm (docker run --shm-size 1g); --from_resume 1 goes on from the "
        "last checkpoint"
    )


# --- stop signals


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP as a request that the loop grants at the end of an update.

    Before and after training (`defer` is False: nothing to save) a first signal ends the run at once. A
    second Ctrl-C always does. As a context manager it restores the previous handlers at the end.
    """

    def __init__(self):
        self.signal = 0  # the number of the signal that came; 0: none
        self.defer = False
        # the loop's estimate of an update's seconds, None before the first one
        self.seconds_left: Callable[[], float | None] = lambda: None
        self._since = 0.0

    def install(self) -> "StopRequest":
        """Handle the stop signals from here on, without those that are ignored: nohup ignores SIGHUP, a shell
        SIGINT in background jobs."""
        self._owner = os.getpid()
        self._before = {}
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
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
                seconds = self.seconds_left()
                about = "" if seconds is None else f" (an update takes about {duration(seconds)})"
                text = f"{name}: finishing this update{about}, then saving"
                if number == signal.SIGINT:
                    text += "; a second Ctrl-C stops at once, and the last checkpoint remains"
                write_now(text)


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
