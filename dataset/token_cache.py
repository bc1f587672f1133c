"""The token cache: data tokenised once into plain files, which every rank opens as memory maps.

The first run builds it, before any process group exists, or `dataset.show_samples` ahead of time. Its name is
a hash of the data's content, the tokenizer and the settings, so a change of any of them builds another cache.
It is built in a temporary folder and renamed when complete, under a lock: of several ranks or runs, one
builds while the others wait, and a half-built cache is never used.

    <cache_dir>/<key>/  NAME.bin for each array of TokenCache, without a header; meta.json, bad_records.txt
    (if any)

meta.json has the SHA-256, size and times of each file. A file changed since is noticed when the cache is
opened, which builds it again.
"""

import hashlib
import json
import mmap
import os
import platform
import shutil
import time
import uuid
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tqdm import tqdm

from common.errors import UserError, reason, say, warn
from common.files import locked, sync_folder, write_json
from common.launcher import available_cores, launch
from common.settings import DataConfig
from dataset import files as data_files
from dataset.files import expand_paths, file_kind, iter_blocks, place
from dataset.held_out import Split
from dataset.packing import pack
from dataset.report import (
    describe_records,
    describe_unused_fields,
    first_bad_record,
    judge_bad_records,
    make_report,
    stop_at_bad_record,
)
from dataset.tokenizing import TOKENIZERS, TokenizerSpec
from dataset.worker_pool import in_processes

if TYPE_CHECKING:  # transformers imports torch
    from transformers import PreTrainedTokenizerBase

STAGE_LENGTH = {"pretrain": 340, "sft": 768, "dpo": 1024}  # default --max_seq_len of the stage scripts
CODE = Path(__file__).parent  # whose files decide the samples: a change of one gives another cache
RELEASE_PAGES_ABOVE = 1 << 28  # bytes; pages of larger caches are unmapped after use
PROGRESS = {"delay": 10, "mininterval": 10, "leave": False}  # seconds: nothing is shown of a short build
PARALLEL_ABOVE = 8 << 20  # bytes of data; below that, starting processes costs more than it saves


@dataclass(frozen=True)
class CacheOptions:
    """How data become a token cache.

    kind: one of TOKENIZERS, or "prompts", which no cache holds. max_length: tokens per sample at most.
    cache_dir: default `dataset/cache` in the repository. num_proc: processes that tokenise, default one per
    core. on_bad_data: "stop" at a bad record, or "skip" and list each. max_bad_share: the share of the
    records, 0 to 1, above which "skip" stops as well. text_separator: the line between documents of .txt
    files. split: the records to read, None for all. packing: whether to pack the samples into sequences of
    max_length tokens.
    """

    kind: str
    max_length: int
    cache_dir: str | os.PathLike | None = None
    num_proc: int | None = None
    on_bad_data: str = "stop"
    max_bad_share: float = DataConfig.max_bad_share
    text_separator: str | None = None
    split: Split | None = None
    packing: bool = False


class TokenCache:
    """An open cache: S samples of N tokens in all, as memory maps. Pickled as its path.

    report: counts of records, samples, tokens, cuts and drops, and the lengths.
    """

    tokens: np.ndarray  # unsigned [N]: sample i is tokens[offsets[i]:offsets[i + 1]]
    offsets: np.ndarray  # int64 [S+1]
    loss_mask: np.ndarray | None = None  # bool [N]: this token is a target; None: all but each sample's first
    target_bytes: np.ndarray  # int64 [S]: UTF-8 bytes of the targets' text
    sources: np.ndarray  # int64 [S, 2]: file (index into `files`) and line of the record (`place`)
    packed_samples: np.ndarray  # with packing, unsigned [S]: the samples of one packed sequence after another
    packed_offsets: np.ndarray  # unsigned [P+1]: sequence p is packed_samples[packed_offsets[p]:...[p + 1]]

    def __init__(self, path: str | os.PathLike, files: list[str]):
        self.path, self.files = Path(path), files
        self.meta = json.loads((self.path / "meta.json").read_text(encoding="utf-8"))
        self.report: dict = self.meta["report"]
        for name, dtype in self.meta["types"].items():
            setattr(self, name, np.memmap(self.path / f"{name}.bin", dtype, mode="r"))
        arrays = [array for array in vars(self).values() if isinstance(array, np.memmap)]
        self.is_large = sum(array.nbytes for array in arrays) > RELEASE_PAGES_ABOVE
        self.sources = self.sources.reshape(-1, 2)
        self.num_samples: int = self.report["samples"]

    def release(self) -> None:
        """Unmap the pages read so far; otherwise all of a large cache would in the end count as this
        process's memory. They stay in the page cache: mapping them again costs about a microsecond each."""
        for array in vars(self).values():
            if isinstance(array, np.memmap):
                array._mmap.madvise(mmap.MADV_DONTNEED)  # pyrefly: ignore[missing-attribute]

    def __reduce__(self):
        return TokenCache, (str(self.path), self.files)

    def source(self, sample_id: int) -> str:
        """The `place` of the record that a sample comes from."""
        file, line = self.sources[sample_id]
        return place(self.files[file], line)


def target_mask(cache: TokenCache, begin: int, end: int) -> np.ndarray:
    """Which of the tokens from `begin` to `end` are targets, bool [end - begin]; no sample's first token is
    one."""
    labels = cache.loss_mask
    mask = np.ones(end - begin, bool) if labels is None else np.array(labels[begin:end])
    first, last = np.searchsorted(cache.offsets, (begin, end))
    mask[cache.offsets[first:last] - begin] = False
    return mask


def build_token_cache(data_path: str, tokenizer, options: CacheOptions) -> TokenCache:
    """Open the token cache of these data, tokenizer and options, building it first if necessary.

    data_path: files, globs and folders, separated by commas. tokenizer: a transformers tokenizer. Raises
    UserError.
    """
    if options.max_length < 2:
        raise UserError(f"--max_seq_len {options.max_length} leaves no token to predict; use at least 2")
    paths = expand_paths(data_path, plain_text=options.kind == "pretrain")
    spec = TokenizerSpec.of(tokenizer)
    cache_dir = Path(options.cache_dir or DataConfig.cache_dir).expanduser()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        stamps = {path: _stamp(path) for path in paths}
        code = b"".join(path.read_bytes() for path in sorted(CODE.glob("*.py")))
        settings = {
            "kind": options.kind,
            "max_length": options.max_length,
            "packing": options.packing,
            "split": options.split,
            "text_separator": (options.text_separator or "").strip(),
            "data": [[file_kind(path), file_hash(path, cache_dir)] for path in paths],
            "tokenizer": spec.fingerprint,
            "code": hashlib.sha256(code).hexdigest(),
        }
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        folder = cache_dir / key[:32]
        if not _is_complete(folder):
            _build_once(folder, data_path, stamps, spec, options, settings)
        cache = TokenCache(folder, paths)
    except MemoryError as error:
        raise UserError(
            "out of memory while the token cache is built; build it ahead of time with fewer processes "
            "(--num_proc of python -m dataset.show_samples), or split records that are very long"
        ) from error
    except OSError as error:
        raise UserError(
            f"the token cache in {cache_dir} cannot be written or read ({error.strerror or error}); "
            f"make room or give another folder (--cache_dir)"
        ) from error
    count = cache.report["skipped_bad_records"]
    if count:
        first = first_bad_record(cache.report, cache.files)
        stop_at_bad_record(first, options.on_bad_data)
        listed = f"all of them are listed in {cache.path / 'bad_records.txt'}"
        judge_bad_records(first, count, cache.report["records"], listed, options.max_bad_share)
    return cache


def _build_once(
    folder: Path,
    data_path: str,
    stamps: dict[str, list],
    spec: TokenizerSpec,
    options: CacheOptions,
    settings: dict,
) -> None:
    """Build the cache in `folder` unless another process has; `stamps`: `_stamp` of each file when it was
    hashed."""
    message = f"waiting for the token cache {folder.name}, which another process builds"
    with locked(folder.with_suffix(".lock"), message) as is_held:
        if _is_complete(folder):
            return
        if folder.exists():
            warn(f"the token cache {folder} is damaged or was changed; it is built again")
        # Under the lock a machine builds in one place, where a killed build may have left files. Some shared
        # file systems have locks that hold on one machine only, others have none.
        host = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
        building = folder.with_suffix(f".tmp-{host if is_held else uuid.uuid4().hex}")
        try:
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            begin = time.monotonic()
            report, types = _write_arrays(building, list(stamps), spec, options)
            for path, stamp in stamps.items():
                if not os.path.exists(path) or _stamp(path) != stamp:
                    raise UserError(f"{path} changed while it was read; start again when it is complete")
            hashes = {}
            for path in sorted(building.iterdir()):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                hashes[path.name] = [digest, _stamp(path)]
            meta = {**settings, "report": report, "types": types, "files": hashes}
            write_json(building / "meta.json", meta)
            if not _is_complete(folder):  # without locks another process may have been faster
                shutil.rmtree(folder, ignore_errors=True)  # exists but is incomplete: damaged
                os.rename(building, folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    which = data_path
    if report["held_out"]:
        which += " (held out)"
    say(f"tokenised {which} in {time.monotonic() - begin:.1f} s: {describe_records(report)}")
    if report["unused_fields"]:
        say(f"  {describe_unused_fields(report)}")


def _write_arrays(
    folder: Path, paths: list[str], spec: TokenizerSpec, options: CacheOptions
) -> tuple[dict, dict[str, str]]:
    """Tokenise the files into `folder`: an array in NAME.bin for each array of TokenCache, and
    bad_records.txt. Returns the report, and the type of each array. Several processes tokenise blocks, which
    are written in order, so the result does not depend on their number, nor the memory on the size of the
    corpus."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    kind, max_length, split = options.kind, options.max_length, options.split
    total = sum(os.path.getsize(path) for path in paths)
    tokenizer = TOKENIZERS[kind](spec, max_length, split)  # also validates the tokenizer
    num_proc = min(options.num_proc or available_cores(), 1 + total // data_files.BLOCK_BYTES)
    blocks = iter_blocks(paths, options.text_separator or "")
    types = {"tokens": tokenizer.dtype.name, "offsets": "int64", "target_bytes": "int64", "sources": "int64"}
    if kind != "pretrain":  # where every token but a sample's first is a target
        types["loss_mask"] = "bool"
    counts, unused = Counter(), Counter()
    first_bad: tuple[int, int, str] | None = None  # index of the file, line, reason
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in types}
        files["offsets"].write(np.zeros(1, dtype=np.int64).data)
        text: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
        bad_records = stack.enter_context(open(folder / "bad_records.txt", "w", **text))
        progress = tqdm(total=total, desc="tokenising", unit="B", unit_scale=True, **PROGRESS)
        stack.enter_context(progress)
        if num_proc > 1 and total > PARALLEL_ABOVE:
            results = in_processes(blocks, tokenizer, num_proc)
        else:
            results = ((block, tokenizer(block)) for block in blocks)
        for block, samples in stack.enter_context(closing(results)):
            for line, why in samples.bad:
                first_bad = first_bad or (block.file, line, why)
                message = f"{place(block.path, line)}: {why}"
                stop_at_bad_record(message, options.on_bad_data)
                bad_records.write(f"{message}\n")
            arrays = {
                "tokens": samples.tokens,
                "offsets": counts["tokens"] + np.cumsum(samples.lengths),
                "loss_mask": samples.loss_mask,
                "target_bytes": samples.target_bytes,
                "sources": np.stack([np.full_like(samples.lines, block.file), samples.lines], axis=1),
            }
            for name, file in files.items():
                file.write(arrays[name].data)
            counts.update(samples.counts)
            counts["skipped_bad_records"] += len(samples.bad)
            counts["samples"] += len(samples.lengths)
            counts["tokens"] += len(samples.tokens)
            counts["targets"] += int(samples.loss_mask.sum())
            counts["target_bytes"] += int(samples.target_bytes.sum())
            unused.update(samples.unused_fields)
            progress.update(block.size)
    lengths = np.diff(np.fromfile(folder / "offsets.bin", dtype=np.int64))
    lengths = lengths.astype(np.min_scalar_type(max_length))
    report = {"kind": kind, "max_length": max_length, "first_bad_record": first_bad}
    report |= {"held_out": split is not None and split.held_out}
    report |= make_report(counts, unused, lengths, max_length)
    if not counts["samples"]:
        raise _no_samples_error(report, paths, split)
    if options.packing:
        number = np.min_scalar_type(len(lengths))
        for name, values in zip(("packed_samples", "packed_offsets"), pack(lengths, max_length), strict=True):
            values.astype(number).tofile(folder / f"{name}.bin")
            types[name] = number.name
    return report, types


def _no_samples_error(report: dict, paths: list[str], split: Split | None) -> UserError:
    """The error for data without a single sample."""
    where = paths[0]
    if len(paths) > 1:
        where += f" and {len(paths) - 1} more files"
    if split and not report["records"]:
        return split.no_records_error(where)
    text = f"{where}: none of the {report['records']} records gives a sample with something to train on "
    text += f"({describe_records(report)}"
    if report["first_bad_record"]:
        text += f"; the first bad one: {first_bad_record(report, paths)}"
    how = "raise --max_seq_len or check the data with python -m dataset.show_samples"
    return UserError(f"{text}); {how}")


def _is_complete(folder: Path) -> bool:
    """Whether all files are those that meta.json, which is written last, describes. A file is read only if
    its size or its times have changed since it was built, and since it was last read (`file_hash`)."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for name, (digest, stamp) in meta["files"].items():
            path = folder / name
            if _stamp(path) != stamp and file_hash(str(path), folder.parent) != digest:
                return False
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def file_hash(path: str, cache_dir: Path) -> str:
    """SHA-256 of a file's content, remembered in the cache folder by path, size and times, so that later runs
    do not read the file again."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    known = cache_dir / "hashes" / f"{name}.json"
    stamp, begin = _stamp(path), time.time()
    with suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(known.read_text(encoding="utf-8"))
        if entry["stamp"] == stamp:
            return entry["sha256"]
    if stamp[0] > 2e9 and launch().local_rank == 0:
        say(f"reading {path} ({stamp[0] / 1e9:.1f} GB) once to compute its hash")
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); check the file and its permissions"
        ) from error
    # A file modified just now may change again within the same time stamp, so its hash is not stored. One
    # rank of a machine stores it: two would write the same temporary file.
    is_settled = _stamp(path) == stamp and max(stamp[1:]) < (begin - 2) * 1e9
    if is_settled and launch().local_rank == 0:
        with suppress(UserError):  # a read-only folder, a full disk: then it is not remembered
            write_json(known, {"path": path, "stamp": stamp, "sha256": digest})
    return digest


def _stamp(path: str | Path) -> list[int]:
    """Size and times of a file. Whoever sets the modification time back cannot set back the time of that
    change."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def load_tokenizer(path: str | os.PathLike) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder, as transformers loads it. Raises UserError."""
    if not Path(path).is_dir():
        raise UserError(f"--tokenizer_path {path}: no such folder; it must hold tokenizer.json")
    from transformers import AutoTokenizer  # takes as long as torch

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return cast("PreTrainedTokenizerBase", tokenizer)
    except Exception as error:  # transformers raises errors of any type for untrusted files
        message = f"--tokenizer_path {path} holds no tokenizer that transformers can load ({reason(error)})"
        raise UserError(message) from error
