"""Builds the files of a token cache: several processes tokenise blocks of raw data, which are written in order.

Memory use does not grow with the corpus: each process works on a few blocks, and everything else is on disk.
The result does not depend on the number of processes.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike
from tqdm import tqdm

from common.errors import UserError
from dataset import blocks
from dataset.bad_records import BadRecords, bad_records_message
from dataset.blocks import Block
from dataset.data_files import iter_blocks
from dataset.formats import BELOW, LABELS, PREFERENCE, TOOLS
from dataset.json_records import short
from dataset.messages import MEDIA
from dataset.packing import pack
from dataset.tokenizing import BlockTokenizer, Samples, TokenizerSpec
from dataset.worker_pool import Results, in_processes

MOST_FIELDS = 100  # of the fields that nothing reads, the most frequent ones stand in the report
SHOWN_FIELDS = 12  # and fewer in its text
# Fields that are likely to change what a record means, wherever they are not read.
MEANINGFUL = MEDIA.union(LABELS, PREFERENCE, BELOW, TOOLS, ("labels", "history", "weight", "loss_weight"))
MEANINGFUL |= {"reasoning", "thinking", "mask"}  # of messages
SMALL = 8 << 20  # bytes of data; below that, starting processes costs more than it saves


class ArrayFile:
    """A .npy file written row by row; at the end the header is written again, with the final length."""

    def __init__(self, path: Path, dtype: DTypeLike, row: tuple[int, ...] = ()):
        self.file = open(path, "wb")  # noqa: SIM115 (close() closes it)
        self.dtype, self.row, self.length = np.dtype(dtype), row, 0
        self.body = self._write_header()

    def _write_header(self) -> int:
        description = np.lib.format.dtype_to_descr(self.dtype)
        shape = (self.length, *self.row)
        header = {"descr": description, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)  # numpy pads it so that the first axis can grow
        return self.file.tell()

    def append(self, array: np.ndarray) -> None:
        """Append rows."""
        self.file.write(np.ascontiguousarray(array, dtype=self.dtype).data)
        self.length += len(array)

    def finish(self) -> None:
        """Write the final header and flush the file to disk."""
        self.file.seek(0)
        if self._write_header() != self.body:
            raise RuntimeError("the final .npy header does not fit in the space of the first one")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def close(self) -> None:
        """Close the file. If writing failed, flushing its buffer may fail in the same way again: ignored here."""
        with suppress(OSError):
            self.file.close()


def build_arrays(
    folder: Path,
    paths: list[str],
    spec: TokenizerSpec,
    kind: str,
    max_length: int,
    num_proc: int,
    skip_bad: bool,
    text_separator: str = "",
) -> dict:
    """Tokenise the files into `folder` (an existing, empty one) and return the report.

    `skip_bad`: skip bad records and list them in bad_records.txt, instead of stopping.
    Raises UserError for bad records (the first one, and how many follow) and if no sample remains.
    """
    total = sum(os.path.getsize(path) for path in paths)
    tokenizer = BlockTokenizer(spec, kind, max_length)  # also validates the tokenizer
    num_proc = min(num_proc, 1 + total // blocks.BLOCK_BYTES)
    parallel = num_proc > 1 and total > SMALL and not multiprocessing.current_process().daemon
    tokenised = in_processes if parallel else _in_this_process
    counts, unused, check_only = Counter(), Counter(), threading.Event()
    with ExitStack() as stack:
        files = _array_files(folder, kind, tokenizer.dtype)
        for file in files.values():
            stack.callback(file.close)
        progress = stack.enter_context(closing(Progress(total)))
        bad = stack.enter_context(closing(BadRecords(folder / "bad_records.txt")))
        unread = iter_blocks(paths, text_separator)
        results = stack.enter_context(closing(tokenised(unread, tokenizer, num_proc, check_only, folder)))
        for block, samples in results:
            counts.update(samples.counts)
            unused.update(samples.unused_fields)
            bad.add(block, samples.bad)
            if bad.count and not skip_bad:
                check_only.set()  # only count the remaining bad records
            else:
                counts.update(_write(files, block, samples))
            progress.update(block.size, len(samples.tokens))
        if bad.count and not skip_bad:
            raise UserError(bad_records_message(bad.first_text, bad.count))
        if not counts["samples"]:
            raise UserError(_nothing_left(paths, counts, bad))
        for file in files.values():
            file.finish()
    lengths = np.diff(np.load(folder / "offsets.npy")).astype(np.min_scalar_type(max_length))
    _write_rows(folder, lengths, max_length)
    report = _report(lengths, kind, max_length, counts, bad, len(paths))
    return {**report, "unused_fields": dict(sorted(unused.items(), key=lambda item: (-item[1], item[0]))[:MOST_FIELDS])}


def _array_files(folder: Path, kind: str, token_dtype: np.dtype) -> dict[str, ArrayFile]:
    types: dict[str, DTypeLike] = {
        "tokens": token_dtype,
        "offsets": np.int64,
        "target_bytes": np.int64,
        "num_targets": np.int64,
    }
    if kind != "pretrain":
        types["loss_mask"] = np.bool_
    files = {name: ArrayFile(folder / f"{name}.npy", dtype) for name, dtype in types.items()}
    files["sources"] = ArrayFile(folder / "sources.npy", np.int64, row=(2,))
    files["offsets"].append(np.zeros(1, dtype=np.int64))
    return files


def _write(files: dict[str, ArrayFile], block: Block, samples: Samples) -> dict[str, int]:
    """Append the samples of one block; returns their counts."""
    ends = np.cumsum(samples.lengths)
    targets = np.diff(np.concatenate([[0], np.cumsum(samples.loss_mask)])[np.concatenate([[0], ends])])
    files["offsets"].append(files["tokens"].length + ends)
    files["tokens"].append(samples.tokens)
    files["target_bytes"].append(samples.target_bytes)
    files["num_targets"].append(targets)
    files["sources"].append(np.stack([np.full_like(samples.lines, block.file), samples.lines], axis=1))
    if "loss_mask" in files:
        files["loss_mask"].append(samples.loss_mask)
    return {
        "samples": len(ends),
        "tokens": len(samples.tokens),
        "targets": int(targets.sum()),
        "target_bytes": int(samples.target_bytes.sum()),
    }


def _write_rows(folder: Path, lengths: np.ndarray, max_length: int) -> None:
    """Assign samples to packed rows, once, for every rank of every run."""
    for name, values in zip(("row_samples", "row_offsets"), pack(lengths, max_length), strict=True):
        file = ArrayFile(folder / f"{name}.npy", np.min_scalar_type(len(lengths)))
        file.append(values)
        file.finish()


def _report(lengths: np.ndarray, kind: str, max_length: int, counts: Counter, bad: BadRecords, files: int) -> dict:
    """All counts under fixed names, and the distribution of lengths. The same data give the same report."""
    if kind == "pretrain":
        own = {"documents": 0, "empty_documents": 0, "documents_split": 0}
    elif kind == "dpo":
        own = {"pairs": 0, "pairs_cut": 0, "dropped_alike": 0, "special_texts": 0}
    else:
        own = {"conversations": 0, "masked_turns": 0, "labelled_good": 0, "labelled_bad": 0}
        own |= {"cut_at_turn": 0, "cut_inside_turn": 0, "special_texts": 0}
    names = ["records", *own, "dropped_without_label", "samples", "tokens", "targets", "target_bytes"]
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
    """The report of a cache as text."""
    r = report

    def part(name: str) -> str:
        return f"{r[name]:,} ({r[name] / max(1, r['records']):.1%})"

    lines = [f"{r['kind']}, at most {r['max_length']} tokens a sample: {r['records']:,} records in {r['files']} files"]
    if r["kind"] == "pretrain":
        lines.append(f"  documents {r['documents']:,}, split {part('documents_split')}, empty {r['empty_documents']:,}")
    elif r["kind"] == "dpo":
        lines.append(f"  pairs {r['pairs']:,}, cut {part('pairs_cut')}, dropped as alike {part('dropped_alike')}")
    else:
        cuts = f"cut after a turn {part('cut_at_turn')}, cut inside the first turn {part('cut_inside_turn')}"
        lines.append(f"  conversations {r['conversations']:,}, {cuts}")
        if r["masked_turns"]:
            lines.append(f"  turns of the assistant marked as not to be trained {r['masked_turns']:,}")
        if r["labelled_good"] + r["labelled_bad"]:
            good = f"{r['labelled_good']:,} good answers are trained as SFT data"
            lines.append(f"  labels (KTO): {good}, {r['labelled_bad']:,} bad ones are left out")
    if r.get("special_texts"):
        lines.append(f"  conversations with the text of special tokens, which stays text {r['special_texts']:,}")
    lines.append(f"  dropped for lack of a label {part('dropped_without_label')}, bad {part('skipped_bad_records')}")
    share = r["targets"] / r["tokens"]
    lines.append(f"  samples {r['samples']:,}, tokens {r['tokens']:,}, of which targets {r['targets']:,} ({share:.1%})")
    lengths = ", ".join(f"{share} % {length:,}" for share, length in r["length_percentiles"].items())
    lines.append(f"  length of a sample: mean {r['length_mean']}; percentiles {lengths}")
    lines.append(f"  a batch padded to {r['max_length']} would be {r['real_share_if_padded']:.1%} real tokens")
    return "\n".join(lines + _about_unused(r["unused_fields"]))


def _about_unused(fields: dict[str, int]) -> list[str]:
    """The lines of the report about fields that nothing reads."""
    names = list(fields)
    told = ", ".join(f"{_printable(name)} {fields[name]:,}" for name in names[:SHOWN_FIELDS])
    more = f", and {len(names) - SHOWN_FIELDS} more" if len(names) > SHOWN_FIELDS else ""
    lines = [f"  unused fields: {told}{more}"] if names else []
    grave = [_printable(name) for name in names if name.rsplit(".", 1)[-1] in MEANINGFUL]
    if grave:
        lines.append(f"  warning: {', '.join(grave)} may change what a record means, and nothing reads them")
    return lines


def _printable(name: str) -> str:
    return short(name)[1:-1] if not name.isprintable() or len(name) > 40 else name


def _nothing_left(paths: list[str], counts: Counter, bad: BadRecords) -> str:
    if bad.count and bad.count == counts["records"]:
        return f"every one of the {bad.count} records is bad; the first: {bad.first_text}"
    where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"
    reasons = {
        "have no label within --max_seq_len": counts["dropped_without_label"],
        "are empty": counts["empty_documents"],
        "are labelled as bad answers": counts["labelled_bad"],
        "have two answers that are alike within --max_seq_len": counts["dropped_alike"],
        f"are bad, the first: {bad.first_text}": bad.count,
    }
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    masked = counts["masked_turns"]
    told = f"; {masked} turns are marked as not to be trained" if masked else ""
    return (
        f"{where}: none of the {counts['records']} records gives a sample with something to train on "
        f"({why}{told}); raise --max_seq_len or check the data with python -m dataset.inspect"
    )


class Progress:
    """Shows tokens per second and time left: as a bar on a terminal, as a line every ten seconds on a pipe."""

    def __init__(self, total: int, interval: float = 10.0):
        self.bar = tqdm(total=total, unit="B", unit_scale=True, desc="tokenising", disable=None, file=sys.stderr)
        self.total, self.interval = max(1, total), interval
        self.done = self.tokens = 0
        self.begin = self.last = time.monotonic()

    def update(self, size: int, tokens: int) -> None:
        """Count `size` more bytes of the files, which gave `tokens` tokens."""
        self.done, self.tokens = self.done + size, self.tokens + tokens
        now = time.monotonic()
        speed = self.tokens / max(now - self.begin, 1e-9)
        self.bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
        self.bar.update(size)
        if self.bar.disable and now - self.last > self.interval:
            self.last = now
            share = min(1.0, self.done / self.total)
            left = tqdm.format_interval((now - self.begin) * (1 / max(share, 1e-9) - 1))
            text = f"tokenising: {share:.0%}, {self.tokens:,} tokens, {speed:,.0f} tokens/s"
            print(f"{text}, {left} left", flush=True)

    def close(self) -> None:
        """Remove the bar."""
        self.bar.close()


def _in_this_process(blocks, tokenizer: BlockTokenizer, num_proc: int, check_only, folder: Path) -> Results:
    for block in blocks:
        yield block, tokenizer(block, check_only.is_set())
