"""Builds the files of a token cache: blocks of raw data are tokenised by several processes and written in order.

Memory stays flat whatever the corpus: a few blocks per process are under way, and everything else is on disk.
The result does not depend on the number of processes.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dataset.data_files import Block, iter_blocks
from dataset.errors import UserError
from dataset.tokenizing import BlockTokenizer, Samples, TokenizerSpec

SMALL = 8 << 20  # bytes of data below which starting processes costs more than it saves


class ArrayFile:
    """A .npy file that grows: the header is written again at the end, with the length it turned out to have."""

    def __init__(self, path: Path, dtype: np.dtype, row: tuple[int, ...] = ()):
        self.file = open(path, "wb")  # noqa: SIM115 (closed by close)
        self.dtype, self.row, self.length = np.dtype(dtype), row, 0
        self.body = self._write_header()

    def _write_header(self) -> int:
        description = np.lib.format.dtype_to_descr(self.dtype)
        shape = (self.length, *self.row)
        header = {"descr": description, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)  # numpy leaves room for a longer first axis
        return self.file.tell()

    def append(self, array: np.ndarray) -> None:
        """Add rows at the end."""
        self.file.write(np.ascontiguousarray(array, dtype=self.dtype).data)
        self.length += len(array)

    def finish(self) -> None:
        """Write the final header, and wait until everything is on the disk."""
        self.file.seek(0)
        if self._write_header() != self.body:
            raise RuntimeError("the header of a growing .npy file changed its size")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def close(self) -> None:
        """Let go of the file; for one that is not finished this may fail again with what made it fail before."""
        with suppress(OSError):
            self.file.close()


def build_arrays(
    folder: Path, paths: list[str], spec: TokenizerSpec, kind: str, max_length: int, num_proc: int, skip_bad: bool
) -> dict:
    """Tokenise the files into `folder` (it exists and is empty) and return the report.

    `skip_bad`: leave bad records out and list them in bad_records.txt, instead of stopping.
    Raises UserError for bad records (the first one, and how many follow) and if no sample is left.
    """
    total = sum(os.path.getsize(path) for path in paths)
    tokenizer = BlockTokenizer(spec, kind, max_length)  # also finds what is wrong with the tokenizer at once
    parallel = num_proc > 1 and total > SMALL and not multiprocessing.current_process().daemon
    tokenised = _in_processes if parallel else _in_this_process
    counts, check_only = Counter(), threading.Event()
    with ExitStack() as stack:
        files = _array_files(folder, kind, tokenizer.dtype)
        for file in files.values():
            stack.callback(file.close)
        progress = stack.enter_context(closing(Progress(total)))
        bad = stack.enter_context(closing(BadRecords(folder / "bad_records.txt")))
        results = stack.enter_context(closing(tokenised(iter_blocks(paths), tokenizer, num_proc, check_only)))
        for block, samples in results:
            counts.update(samples.counts)
            bad.add(block.path, samples.bad)
            if bad.count and not skip_bad:
                check_only.set()  # the rest is only searched for more bad records
            else:
                counts.update(_write(files, block, samples))
            progress.update(block.size, len(samples.tokens))
        if bad.count and not skip_bad:
            raise UserError(bad.message())
        if not counts["samples"]:
            raise UserError(_nothing_left(paths, counts, bad))
        for file in files.values():
            file.finish()
    return _report(folder, kind, max_length, counts, bad, len(paths))


def _array_files(folder: Path, kind: str, token_dtype: np.dtype) -> dict[str, ArrayFile]:
    types = {"tokens": token_dtype, "offsets": np.int64, "target_bytes": np.int64, "num_targets": np.int64}
    if kind == "sft":
        types["trained"] = np.bool_
    files = {name: ArrayFile(folder / f"{name}.npy", dtype) for name, dtype in types.items()}
    files["sources"] = ArrayFile(folder / "sources.npy", np.int64, row=(2,))
    files["offsets"].append(np.zeros(1, dtype=np.int64))
    return files


def _write(files: dict[str, ArrayFile], block: Block, samples: Samples) -> dict[str, int]:
    """Append the samples of one block; returns what to add to the counts."""
    ends = np.cumsum(samples.lengths)
    targets = np.diff(np.concatenate([[0], np.cumsum(samples.trained)])[np.concatenate([[0], ends])])
    files["offsets"].append(files["tokens"].length + ends)
    files["tokens"].append(samples.tokens)
    files["target_bytes"].append(samples.target_bytes)
    files["num_targets"].append(targets)
    files["sources"].append(np.stack([np.full_like(samples.lines, block.file), samples.lines], axis=1))
    if "trained" in files:
        files["trained"].append(samples.trained)
    return {
        "samples": len(ends),
        "tokens": len(samples.tokens),
        "targets": int(targets.sum()),
        "target_bytes": int(samples.target_bytes.sum()),
    }


def _report(folder: Path, kind: str, max_length: int, counts: Counter, bad: "BadRecords", files: int) -> dict:
    """All counts under fixed names, and the distribution of lengths. The same data give the same report."""
    if kind == "pretrain":
        own = {"documents": 0, "empty_documents": 0, "documents_split": 0}
    else:
        own = {"conversations": 0, "cut_at_turn": 0, "cut_inside_turn": 0}
    names = ["records", *own, "dropped_without_label", "samples", "tokens", "targets", "target_bytes"]
    lengths = np.diff(np.load(folder / "offsets.npy"))
    shares = (1, 10, 25, 50, 75, 90, 99, 100)
    return {
        "kind": kind,
        "max_length": max_length,
        "files": files,
        **{name: int(counts[name]) for name in names},
        "skipped_bad_records": bad.count,
        "first_bad_record": bad.message() if bad.count else None,
        "length_mean": round(float(lengths.mean()), 1),
        "length_percentiles": dict(zip(map(str, shares), map(int, np.percentile(lengths, shares)), strict=True)),
        "real_share_if_padded": round(counts["tokens"] / (len(lengths) * max_length), 4),
    }


def _nothing_left(paths: list[str], counts: Counter, bad: "BadRecords") -> str:
    if bad.count == counts["records"]:
        return f"every one of the {bad.count} records is bad; the first: {bad.first}"
    where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"
    return (
        f"{where}: none of the {counts['records']} records gives a sample with something to train on "
        f"({counts['dropped_without_label']} have no label within --max_seq_len, {counts['empty_documents']} are "
        f"empty); raise --max_seq_len or check the data with python -m dataset.inspect"
    )


class BadRecords:
    """Counts the records that cannot be used and lists each of them in a file."""

    def __init__(self, path: Path):
        self.path, self.file = path, None
        self.count, self.first = 0, ""

    def add(self, path: str, bad: list[tuple[int, str]]) -> None:
        """Note (line, reason) of each bad record of one block."""
        for line, reason in bad:
            text = f"{path}:{line}: {reason}"
            if self.file is None:
                self.first = text
                self.file = open(self.path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            self.file.write(text + "\n")
            self.count += 1

    def message(self) -> str:
        """The first of them, how many follow, and the way out."""
        more = self.count - 1
        follow = f"; {more} more bad record{'s' * (more > 1)} follow{'s' * (more == 1)}" if more else ""
        return f"{self.first}{follow} (--on_bad_data skip leaves bad records out and lists them)"

    def close(self) -> None:
        """Finish the list."""
        if self.file:
            self.file.close()


class Progress:
    """Tokens per second and time left: a bar on a terminal, a line every ten seconds on a pipe."""

    def __init__(self, total: int, interval: float = 10.0):
        self.bar = tqdm(total=total, unit="B", unit_scale=True, desc="tokenising", disable=None, file=sys.stderr)
        self.total, self.interval = max(1, total), interval
        self.done = self.tokens = 0
        self.begin = self.last = time.monotonic()

    def update(self, size: int, tokens: int) -> None:
        """`size` more bytes of the files became `tokens` more tokens."""
        self.done, self.tokens = self.done + size, self.tokens + tokens
        now = time.monotonic()
        speed = self.tokens / max(now - self.begin, 1e-9)
        self.bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
        self.bar.update(size)
        if self.bar.disable and now - self.last > self.interval:
            self.last = now
            left = (now - self.begin) * (self.total / max(1, self.done) - 1)
            share = min(1.0, self.done / self.total)
            minutes, seconds = divmod(max(0, round(left)), 60)
            text = f"tokenising: {share:.0%}, {self.tokens:,} tokens, {speed:,.0f} tokens/s"
            print(f"{text}, {minutes}:{seconds:02d} left", flush=True)

    def close(self) -> None:
        """Take the bar away."""
        self.bar.close()


# --- one process or several ----------------------------------------------------------------------------------------


def _in_this_process(blocks, tokenizer: BlockTokenizer, num_proc: int, check_only) -> Iterator[tuple[Block, Samples]]:
    for block in blocks:
        yield block, tokenizer(block, check_only.is_set())


def _in_processes(blocks, tokenizer: BlockTokenizer, num_proc: int, check_only) -> Iterator[tuple[Block, Samples]]:
    """The same from several processes: results in the order of the blocks, a few blocks per process under way."""
    # Fresh processes rather than forks: the parent may hold torch with its threads, or a CUDA context.
    context = multiprocessing.get_context("spawn")
    settings = (tokenizer.spec, tokenizer.kind, tokenizer.max_length)
    pool = ProcessPoolExecutor(num_proc, context, initializer=_start_worker, initargs=settings)
    under_way: deque = deque()
    try:
        for block in blocks:
            with _main_module_hidden():
                under_way.append((block, pool.submit(_run_worker, block, check_only.is_set())))
            if len(under_way) >= 3 * num_proc:
                block, future = under_way.popleft()
                yield block, future.result()
        for block, future in under_way:
            yield block, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process of the token cache died, perhaps for want of memory; use fewer of them (--num_proc)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: BlockTokenizer | None = None


def _start_worker(spec: TokenizerSpec, kind: str, max_length: int) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process: the processes are the parallelism
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker = BlockTokenizer(spec, kind, max_length)


def _leave_with_parent() -> None:
    """A parent killed with -9 cannot end its workers, so each of them watches for that."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _run_worker(block: Block, check_only: bool) -> Samples:
    return _worker(block, check_only)


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


def write_json(path: Path, content: dict) -> None:
    """Write and wait until it is on the disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
