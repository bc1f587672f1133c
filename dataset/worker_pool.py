"""Tokenises blocks in several processes; if any of them fails, all end at once.

Each worker has its own pipe, whose other end nobody else holds. If the worker dies at any point, the thread that waits
for its answer reads the end of the file; if this process dies, however it does, the worker reads it and ends. (In
concurrent.futures a worker killed while it sends a large result blocks its parent forever.)
"""

import multiprocessing
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from common.command_line import handled_signals
from common.errors import Interrupted, UserError
from dataset.blocks import Block
from dataset.tokenizing import TOKENIZERS, BlockTokenizer, Samples, TokenizerSpec

Results = Generator[tuple[Block, Samples], None, None]
# A new Python, not a fork: this process may have torch's threads or a CUDA context.
ROOT = str(Path(__file__).resolve().parents[1])
START = f"import sys; sys.path.insert(0, {ROOT!r}); from dataset.worker_pool import work; work(sys.argv[1])"


def in_this_process(blocks, tokenizer: BlockTokenizer, check_only) -> Results:
    """What `in_processes` does, without processes."""
    for block in blocks:
        yield block, tokenizer(block, check_only.is_set())


def in_processes(blocks, settings: tuple[TokenizerSpec, str, int], num_proc: int, check_only) -> Results:
    """Yield each block with its samples, in order.

    settings: what each of `num_proc` workers makes its tokenizer of: spec, kind and length. check_only: an event; once
    it is set, blocks are only checked for bad records. Raises what a worker raises, or UserError if one dies.
    """
    idle: SimpleQueue[Connection] = SimpleQueue()

    def prepare(worker: Connection) -> None:
        try:
            worker.send(settings)
        finally:
            idle.put(worker)

    def tokenised(block: Block) -> tuple[Block, Samples]:
        worker = idle.get()
        try:
            worker.send((block, check_only.is_set()))
            samples = worker.recv()
        finally:
            idle.put(worker)
        if isinstance(samples, Exception):
            raise samples
        return block, samples

    with ThreadPoolExecutor(num_proc) as threads, ExitStack() as stack:  # workers end first, which ends the threads
        try:
            for _ in range(num_proc):
                threads.submit(prepare, _start_worker(stack))
            waiting = deque()
            for block in blocks:
                waiting.append(threads.submit(tokenised, block))
                if len(waiting) == 3 * num_proc:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except (EOFError, OSError) as error:
            raise UserError(
                "a process of the token cache died, perhaps out of memory; build the cache ahead of time with fewer "
                "processes (--num_proc of python -m dataset.token_cache)"
            ) from error
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _start_worker(stack: ExitStack) -> Connection:
    """The pipe to a new worker, which ends when `stack` is left. In a process group of its own it gets no signal that
    is meant for the whole run: that is for this process, which then ends it."""
    here, there = multiprocessing.Pipe()
    stack.callback(here.close)
    with there:
        command = [sys.executable, "-c", START, str(there.fileno())]
        process = subprocess.Popen(command, pass_fds=[there.fileno()], process_group=0)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return here


def work(descriptor: str) -> None:
    """Tokenise the blocks that come through a pipe until it is closed; the `main` of a worker."""
    with suppress(EOFError, OSError), Connection(int(descriptor)) as connection:
        spec, kind, max_length = connection.recv()
        tokenizer = TOKENIZERS[kind](spec, max_length)
        while True:
            block, check_only = connection.recv()
            try:
                samples = tokenizer(block, check_only)
            except Exception as error:
                error.add_note(traceback.format_exc())
                samples = error
            connection.send(samples)


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
