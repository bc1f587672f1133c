"""Builds the files of a token cache: several processes tokenise blocks of raw data, which are written in order.

Memory use does not grow with the corpus: each process works on a few blocks, and everything else is on disk.
The result does not depend on the number of processes.
"""

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from common.errors import UserError
from dataset import blocks
from dataset.blocks import Block
from dataset.data_files import iter_blocks
from dataset.packing import pack
from dataset.report import describe_records, first_bad_record, make_report, stop_at_bad_record
from dataset.tokenizing import TOKENIZERS, Samples, TokenizerSpec
from dataset.worker_pool import in_processes

ARRAYS = {  # what a block's samples are appended to, each in a file; for their meaning see TokenCache
    "tokens": "",  # the smallest type that holds every id
    "offsets": "int64",
    "loss_mask": "bool",
    "target_bytes": "int64",
    "num_targets": "int64",
    "sources": "int64",
}
PROGRESS = {"delay": 10, "mininterval": 10, "leave": False}  # seconds: nothing is shown of a short build
SMALL = 8 << 20  # bytes of data; below that, starting processes costs more than it saves


def build_arrays(
    folder: Path,
    paths: list[str],
    spec: TokenizerSpec,
    kind: str,
    max_length: int,
    num_proc: int,
    on_bad_data: str,
    text_separator: str = "",
) -> tuple[dict, dict[str, str]]:
    """Tokenise the files into `folder` (an existing, empty one): an array in NAME.bin for each array of TokenCache.
    Returns the report, and the type of each array.

    `on_bad_data`: "skip" skips bad records and lists them in bad_records.txt.
    Raises UserError at the first bad record and if no sample remains.
    """
    total = sum(os.path.getsize(path) for path in paths)
    tokenizer = TOKENIZERS[kind](spec, max_length)  # also validates the tokenizer
    num_proc = min(num_proc, 1 + total // blocks.BLOCK_BYTES)
    unread = iter_blocks(paths, text_separator)
    counts, unused = Counter(), Counter()
    first_bad: tuple[int, int, str] | None = None  # index of the file, line, reason
    with ExitStack() as stack:
        names = [name for name in ARRAYS if kind != "pretrain" or name != "loss_mask"]
        files = {name: stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in names}
        files["offsets"].write(np.zeros(1, dtype=np.int64).data)
        text = {"encoding": "utf-8", "errors": "backslashreplace"}
        listed = stack.enter_context(open(folder / "bad_records.txt", "w", **text))
        progress = stack.enter_context(tqdm(total=total, desc="tokenising", unit="B", unit_scale=True, **PROGRESS))
        if num_proc > 1 and total > SMALL:
            results = in_processes(unread, (spec, kind, max_length), num_proc)
        else:
            results = ((block, tokenizer(block)) for block in unread)
        for block, samples in stack.enter_context(closing(results)):
            counts.update(samples.counts)
            unused.update(samples.unused_fields)
            if samples.bad:
                first_bad = first_bad or (block.file, *samples.bad[0])
                counts["skipped_bad_records"] += len(samples.bad)
                lines = [f"{block.path}:{line}: {reason}" for line, reason in samples.bad]
                stop_at_bad_record(lines[0], on_bad_data)
                listed.writelines(f"{line}\n" for line in lines)
            _write(files, block, samples, counts)
            progress.update(block.size)
    lengths = np.diff(np.fromfile(folder / "offsets.bin", dtype=np.int64)).astype(np.min_scalar_type(max_length))
    report = {"kind": kind, "max_length": max_length, "files": len(paths), "first_bad_record": first_bad}
    report |= make_report(counts, unused, lengths, max_length)
    first = first_bad_record(report, paths) if first_bad else ""
    if not counts["samples"]:
        where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"
        raise UserError(
            f"{where}: none of the {counts['records']} records gives a sample with something to train on "
            f"({describe_records(report)}{first and f'; the first bad one: {first}'}); raise --max_seq_len or check "
            "the data with python -m dataset.show_samples"
        )
    types = {name: dtype for name, dtype in ARRAYS.items() if name in files} | {"tokens": tokenizer.dtype.name}
    for name, values in zip(("row_samples", "row_offsets"), pack(lengths, max_length), strict=True):
        types[name] = np.min_scalar_type(len(lengths)).name
        values.astype(types[name]).tofile(folder / f"{name}.bin")
    return report, types


def _write(files: Mapping[str, BinaryIO], block: Block, samples: Samples, counts: Counter) -> None:
    """Append the samples of one block, and count them."""
    arrays = {
        "tokens": samples.tokens,
        "offsets": counts["tokens"] + np.cumsum(samples.lengths),
        "loss_mask": samples.loss_mask,
        "target_bytes": samples.target_bytes,
        "num_targets": samples.num_targets,
        "sources": np.stack([np.full_like(samples.lines, block.file), samples.lines], axis=1),
    }
    for name, file in files.items():
        file.write(arrays[name].data)
    counts["samples"] += len(samples.lengths)
    counts["tokens"] += len(samples.tokens)
    counts["targets"] += int(samples.num_targets.sum())
    counts["target_bytes"] += int(samples.target_bytes.sum())
