"""Builds the files of a token cache: blocks of raw data are tokenised by several processes and written in order.

Memory stays flat whatever the corpus: a few blocks per process are under way, and everything else is on disk.
The result does not depend on the number of processes.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
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
from dataset.errors import STOP_SIGNALS, Interrupted, UserError
from dataset.formats import BadRecords, bad_records_message
from dataset.tokenizing import BlockTokenizer, Samples, TokenizerSpec

SMALL = 8 << 20  # bytes of data below which starting processes costs more than it saves
Results = Iterator[tuple[Block, Samples]]


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
        blocks = iter_blocks(paths)
        results = stack.enter_context(closing(tokenised(blocks, tokenizer, num_proc, check_only, folder)))
        for block, samples in results:
            counts.update(samples.counts)
            bad.add(block, samples.bad)
            if bad.count and not skip_bad:
                check_only.set()  # the rest is only searched for more bad records
            else:
                counts.update(_write(files, block, samples))
            progress.update(block.size, len(samples.tokens))
        if bad.count and not skip_bad:
            raise UserError(bad_records_message(bad.first_text(paths), bad.count))
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
        "first_bad_record": bad.first,
        "length_mean": round(float(lengths.mean()), 1),
        "length_percentiles": dict(zip(map(str, shares), map(int, np.percentile(lengths, shares)), strict=True)),
        "real_share_if_padded": round(counts["tokens"] / (len(lengths) * max_length), 4),
    }


def format_report(report: dict) -> str:
    """The report of a cache as lines for people."""
    r = report

    def part(name: str) -> str:
        return f"{r[name]:,} ({r[name] / max(1, r['records']):.1%})"

    lines = [f"{r['kind']}, at most {r['max_length']} tokens a sample: {r['records']:,} records in {r['files']} files"]
    if r["kind"] == "pretrain":
        lines.append(f"  documents {r['documents']:,}, split {part('documents_split')}, empty {r['empty_documents']:,}")
    else:
        cuts = f"cut behind a turn {part('cut_at_turn')}, cut inside the first turn {part('cut_inside_turn')}"
        lines.append(f"  conversations {r['conversations']:,}, {cuts}")
    lines.append(f"  dropped for want of a label {part('dropped_without_label')}, bad {part('skipped_bad_records')}")
    share = r["targets"] / r["tokens"]
    lines.append(f"  samples {r['samples']:,}, tokens {r['tokens']:,}, of them targets {r['targets']:,} ({share:.1%})")
    lengths = ", ".join(f"{share} % {length:,}" for share, length in r["length_percentiles"].items())
    lines.append(f"  length of a sample: mean {r['length_mean']}; percentiles {lengths}")
    lines.append(f"  a batch padded to {r['max_length']} would be {r['real_share_if_padded']:.1%} real tokens")
    return "\n".join(lines)


def _nothing_left(paths: list[str], counts: Counter, bad: "BadRecords") -> str:
    if bad.count and bad.count == counts["records"]:
        return f"every one of the {bad.count} records is bad; the first: {bad.first_text(paths)}"
    where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"
    also_bad = f", {bad.count} are bad, the first: {bad.first_text(paths)}" if bad.count else ""
    return (
        f"{where}: none of the {counts['records']} records gives a sample with something to train on "
        f"({counts['dropped_without_label']} have no label within --max_seq_len, {counts['empty_documents']} are "
        f"empty{also_bad}); raise --max_seq_len or check the data with python -m dataset.inspect"
    )


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


def _in_this_process(blocks, tokenizer: BlockTokenizer, num_proc: int, check_only, folder: Path) -> Results:
    for block in blocks:
        yield block, tokenizer(block, check_only.is_set())


def _in_processes(blocks, tokenizer: BlockTokenizer, num_proc: int, check_only, folder: Path) -> Results:
    """The same from several processes: results in the order of the blocks, a few blocks per process under way."""
    # The workers read the tokenizer from a file. Sent as an argument it is more than a pipe holds: starting a process
    # that dies at once would then wait forever.
    settings = folder / "worker_settings.pickle"
    settings.write_bytes(pickle.dumps((tokenizer.spec, tokenizer.kind, tokenizer.max_length)))
    # Fresh processes rather than forks: the parent may hold torch with its threads, or a CUDA context.
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with _signals_later():  # it starts a process of its own, too
        pool = ProcessPoolExecutor(num_proc, context, initializer=_start_worker, initargs=(settings,))
    under_way: deque = deque()
    try:
        for block in blocks:
            with _signals_later(), _main_module_hidden():
                under_way.append((block, pool.submit(_run_worker, block, check_only.is_set())))
            if len(under_way) >= 3 * num_proc:
                block, future = under_way.popleft()
                yield block, future.result()
        for block, future in under_way:
            yield block, future.result()
    except BaseException as error:  # GeneratorExit among them: nobody waits for the rest
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        if not isinstance(error, BrokenProcessPool):
            raise
        time.sleep(0.5)  # a signal that went to the whole group is the better reason: let it arrive
        raise UserError(
            "a process of the token cache died, perhaps for want of memory; build the cache ahead of time with fewer "
            "of them (--num_proc of python -m dataset.token_cache)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        settings.unlink(missing_ok=True)


_worker: BlockTokenizer | None = None


def _start_worker(settings: Path) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where there is no mask to inherit, see _signals_later
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process: the processes are the parallelism
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker = BlockTokenizer(*pickle.loads(settings.read_bytes()))


def _leave_with_parent() -> None:
    """A parent killed with -9 cannot end its workers, so each of them watches for that."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _run_worker(block: Block, check_only: bool) -> Samples:
    return _worker(block, check_only)


@contextmanager
def _signals_later():
    """Start processes undisturbed: what Ctrl-C interrupts there would leave half a process behind.

    A signal comes when the block is over. The new processes inherit the mask and never see it: Ctrl-C and a closed
    terminal are for the parent, which then ends them. SIGTERM must still end them: the pool uses it.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
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

    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, stop) for number in heeded}
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


def write_json(path: Path, content: dict) -> None:
    """Write and wait until it is on the disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)  # in ASCII: the name of a file may hold bytes that are not UTF-8
        file.flush()
        os.fsync(file.fileno())


def say(text: str) -> None:
    """Print, also where stdout cannot write every character that a file name or a record may hold."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
