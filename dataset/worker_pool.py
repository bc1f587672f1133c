"""Tokenises blocks in several processes, so that whatever happens to any of them, all come to an end at once.

Each process has a pipe of its own, whose far end nobody else holds: when it dies, wherever it is, the parent reads the
end of the pipe. (In concurrent.futures one that is killed amidst sending a large result stops everything for good.)
Nothing as large as a pipe's buffer is sent to a process before it has said that it listens.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from dataset.data_files import Block
from dataset.errors import STOP_SIGNALS, Interrupted, UserError, heeded_signals
from dataset.tokenizing import BlockTokenizer, Samples

Results = Iterator[tuple[Block, Samples]]


def in_processes(blocks, tokenizer: BlockTokenizer, num_proc: int, check_only, folder: Path) -> Results:
    """The samples of the blocks, in their order.

    tokenizer: copied to each of `num_proc` processes, through a file in `folder`. check_only: an event; once it is set,
    blocks are only searched for bad records.
    Raises UserError for what a process raises, or if one dies.
    """
    settings = folder / "worker_settings.pickle"
    settings.write_bytes(pickle.dumps((tokenizer.spec, tokenizer.kind, tokenizer.max_length)))
    workers: dict[Connection, BaseProcess] = {}
    most = 60 if sys.platform == "win32" else num_proc  # Windows cannot wait for more
    try:
        if os.name == "posix":
            with _signals_later():  # multiprocessing's own helper comes first: starting it takes the mask away
                resource_tracker.ensure_running()
        for _ in range(min(num_proc, most)):
            with _signals_later(), _main_module_hidden():
                connection, process = _start_worker(settings)
                workers[connection] = process
        yield from _dealt_out(blocks, list(workers), check_only)
    except (EOFError, OSError) as error:
        raise UserError(
            "a process of the token cache died, perhaps for want of memory; build the cache ahead of time with fewer "
            "of them (--num_proc of python -m dataset.token_cache)"
        ) from error
    finally:
        for connection, process in workers.items():
            process.kill()
            process.join()
            connection.close()
        settings.unlink(missing_ok=True)


def _dealt_out(blocks, workers: list[Connection], check_only) -> Results:
    """Give each worker that is free a block. A worker says None when it is ready for its first one."""
    numbered, exhausted = enumerate(blocks), False
    free, at_work, finished, first = [], {}, {}, 0
    while at_work or not exhausted:
        while free and not exhausted and len(at_work) + len(finished) < 3 * len(workers):
            number, block = next(numbered, (None, None))
            exhausted = block is None
            if not exhausted:
                free[-1].send((block, check_only.is_set()))
                at_work[free.pop()] = number, block
        for connection in wait(workers) if at_work or not free else ():
            samples = connection.recv()
            if isinstance(samples, Exception):
                raise samples
            if samples is not None:
                number, block = at_work.pop(connection)
                finished[number] = block, samples
            free.append(connection)
        while first in finished:
            yield finished.pop(first)
            first += 1


def _start_worker(settings: Path) -> tuple[Connection, BaseProcess]:
    # Fresh processes rather than forks: the parent may hold torch with its threads, or a CUDA context.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, settings), daemon=True)
    process.start()
    there.close()
    return here, process


def _work(connection: Connection, settings: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where there is no mask to inherit, see _signals_later
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process: the processes are the parallelism
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    tokenizer = BlockTokenizer(*pickle.loads(settings.read_bytes()))
    connection.send(None)
    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            try:
                samples = tokenizer(*connection.recv())
            except Exception as error:
                error.add_note(traceback.format_exc())
                samples = error
            connection.send(samples)


def _leave_with_parent() -> None:
    """A parent killed with -9 cannot end its workers, so each of them watches for that."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


@contextmanager
def _signals_later():
    """Start processes undisturbed: what Ctrl-C interrupts there would leave half a process behind.

    A signal comes when the block is over. The new processes inherit the mask and never see one: signals, which often
    go to all processes of a run, are for the parent, which then ends its workers.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise Interrupted at SIGTERM, SIGHUP and Ctrl-C, so that nothing half-built stays behind."""

    def stop(number: int, _) -> None:
        raise Interrupted(number, f"by {signal.Signals(number).name}; the token cache is begun anew the next time")

    before = {number: signal.signal(number, stop) for number in heeded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _main_module_hidden():
    """Keep new processes from importing the script that was started: a worker needs neither it nor its torch."""
    main = vars(sys.modules["__main__"])
    saved = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    try:
        main["__file__"] = main["__spec__"] = None
        yield
    finally:
        del main["__file__"], main["__spec__"]
        main.update(saved)
