"""Tokenises blocks in several processes; if any of them fails, all end at once.

Each worker has its own pipe, whose other end nobody else holds. If the worker dies at any point, the thread
that waits for its answer reads the end of the file; if this process dies, however it does, the worker reads
it and ends. (In concurrent.futures a worker killed while it sends a large result blocks its parent forever.)
"""

import multiprocessing
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from common.errors import UserError
from dataset.files import Block
from dataset.tokenizing import BlockTokenizer, Samples

# A new Python, not a fork: this process may have torch's threads or a CUDA context.
ROOT = str(Path(__file__).resolve().parents[1])
START = f"import sys; sys.path.insert(0, {ROOT!r}); from dataset.worker_pool import work; work(sys.argv[1])"


def in_processes(
    blocks: Iterable[Block], tokenizer: BlockTokenizer, num_proc: int
) -> Generator[tuple[Block, Samples], None, None]:
    """Yield each block with its samples, in order; each of `num_proc` workers has a copy of the tokenizer.
    Raises what a worker raises, or UserError if one dies."""
    idle: SimpleQueue[Connection] = SimpleQueue()

    def prepare(worker: Connection) -> None:
        try:
            worker.send(tokenizer)
        finally:
            idle.put(worker)

    def tokenised(block: Block) -> tuple[Block, Samples]:
        worker = idle.get()
        try:
            worker.send(block)
            samples = worker.recv()
        finally:
            idle.put(worker)
        if isinstance(samples, Exception):
            raise samples
        return block, samples

    # workers end first, which ends the threads
    with ThreadPoolExecutor(num_proc) as threads, ExitStack() as stack:
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
                "a process of the token cache died, perhaps out of memory; build the cache ahead of time "
                "with fewer processes (--num_proc of python -m dataset.show_samples)"
            ) from error
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _start_worker(stack: ExitStack) -> Connection:
    """The pipe to a new worker, which ends when `stack` is left. In a process group of its own it gets no
    signal that is meant for the whole run: that is for this process, which then ends it."""
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
        tokenizer = connection.recv()
        while True:
            block = connection.recv()
            try:
                samples = tokenizer(block)
            except Exception as error:
                error.add_note(traceback.format_exc())
                samples = error
            connection.send(samples)
