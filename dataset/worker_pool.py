"""Tokenises blocks in several processes; if any of them fails, all end at once.

Each worker has its own pipe, whose other end no other worker holds: if it dies at any point, the parent reads EOF. (In
concurrent.futures a worker killed while sending a large result blocks the parent forever.) A worker is sent a block,
which may exceed a pipe's buffer, only when it waits for one.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

from common.command_line import STOP_SIGNALS, handled_signals
from common.errors import Interrupted, UserError
from dataset.blocks import Block
from dataset.tokenizing import BlockTokenizer, Samples

Results = Generator[tuple[Block, Samples], None, None]


def in_processes(blocks, tokenizer: BlockTokenizer, num_proc: int, check_only, folder: Path) -> Results:
    """Yield each block with its samples, in order.

    tokenizer: copied to `num_proc` workers through a file in `folder`. check_only: an event; once it is set, blocks are
    only checked for bad records. Raises what a worker raises, or UserError if one dies.
    """
    settings = folder / "worker_settings.pickle"
    settings.write_bytes(pickle.dumps((tokenizer.spec, tokenizer.kind, tokenizer.max_length)))
    workers: dict[Connection, BaseProcess] = {}
    try:
        with _signals_deferred():  # multiprocessing's helper first: starting it would reset the signal mask
            resource_tracker.ensure_running()
        for _ in range(num_proc):
            with _signals_deferred(), _main_module_hidden():
                connection, process = _start_worker(settings)
                workers[connection] = process
        yield from _distribute(blocks, list(workers), check_only)
    except (EOFError, OSError) as error:
        raise UserError(
            "a process of the token cache died, perhaps out of memory; build the cache ahead of time with fewer "
            "processes (--num_proc of python -m dataset.token_cache)"
        ) from error
    finally:
        for connection, process in workers.items():
            process.kill()
            process.join()
            connection.close()
        settings.unlink(missing_ok=True)


def _distribute(blocks, workers: list[Connection], check_only) -> Results:
    """Send each free worker a block. A worker sends None when it is ready for its first one."""
    numbered, exhausted = enumerate(blocks), False
    free, at_work, finished, first = [], {}, {}, 0
    while at_work or not exhausted:
        while free and not exhausted and len(at_work) + len(finished) < 3 * len(workers):
            number, block = next(numbered, (None, None))
            exhausted = block is None
            if not exhausted:
                free[-1].send((block, check_only.is_set()))
                at_work[free.pop()] = number, block
        for connection in cast(list[Connection], wait(workers) if at_work or not free else []):
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
    # Spawned, not forked: the parent may have torch's threads or a CUDA context.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, settings), daemon=True)
    process.start()
    there.close()
    return here, process


def _work(connection: Connection, settings: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for a parent thread without a mask, see _signals_deferred
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process is enough
    threading.Thread(target=_exit_with_parent, daemon=True).start()
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


def _exit_with_parent() -> None:
    """A parent killed by SIGKILL cannot end its workers, so each of them watches it."""
    wait([cast(BaseProcess, multiprocessing.parent_process()).sentinel])
    os._exit(1)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer signals until processes have started: an interrupted start would leave a broken process behind.

    The new processes inherit the mask and never receive a signal: signals, which often go to all processes of a run,
    are for the parent, which then ends its workers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise Interrupted at SIGTERM, SIGHUP and Ctrl-C, so that no half-built cache is left behind."""

    def stop(number: int, _) -> None:
        raise Interrupted(
            number, f"by {signal.Signals(number).name}; the next run builds the token cache from the start"
        )

    before = {number: signal.signal(number, stop) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep new processes from importing the main script: a worker needs neither it nor torch."""
    main = vars(sys.modules["__main__"])
    saved = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    try:
        main["__file__"] = main["__spec__"] = None
        yield
    finally:
        del main["__file__"], main["__spec__"]
        main.update(saved)
