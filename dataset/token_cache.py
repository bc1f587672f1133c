"""The token cache: data tokenised once into plain .npy files, which every rank opens as memory maps.

    python -m dataset.token_cache --kind sft --data_path data/sft.jsonl --max_seq_len 768

builds it ahead of time; otherwise the first run builds it, before any process group exists. Its name is a hash of the
data's content, the tokenizer and the settings, so a change of any of them builds another cache. It is built in a
temporary folder and renamed when complete, under a lock: of several ranks or runs, one builds while the others wait,
and a half-built cache is never used.

    <cache_dir>/<key>/  tokens.npy [N], offsets.npy [S+1], loss_mask.npy [N] (SFT, DPO), target_bytes.npy [S],
                        num_targets.npy [S], sources.npy [S, 2] (file, line), row_samples.npy [S],
                        row_offsets.npy [R+1] (see dataset/packing.py), meta.json, bad_records.txt (if any)

meta.json has the times and the SHA-256 of each file. A file changed since is found when the cache is opened, which
builds it again.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import mmap
import os
import platform
import shutil
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from common.command_line import Parser, one_line_errors
from common.durable_files import atomic_write, sync_folder, write_json
from common.errors import UserError, reason, say, warn
from common.locks import locked
from common.machine import available_cores
from common.settings import DataConfig, StageArgs, add_flags, settings_of
from dataset.bad_records import judge_bad_records
from dataset.cache_build import build_arrays, format_report
from dataset.data_files import describe_files, expand_paths, how_read
from dataset.tokenizing import KINDS, TokenizerSpec
from dataset.worker_pool import stoppable

if TYPE_CHECKING:  # transformers imports torch
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 3  # raise it when the same data give other tokens or labels; checkpoints record it
LAYOUT_VERSIONS = {"pretrain": 4, "sft": 5, "dpo": 5}  # raise one when the same samples are stored in other files, or
# counted in another way
STAGE_LENGTH = {"pretrain": 340, "sft": 768, "dpo": 1024}  # default --max_seq_len of the stage scripts
KEY_LENGTH = 32  # hexadecimal digits in a cache's name
LARGE = 1 << 28  # bytes; pages of larger caches are unmapped after use
HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]


class TokenCache:
    """An open cache: S samples of N tokens in all, as memory maps. Pickled as its path.

    tokens        unsigned [N]   sample i is tokens[offsets[i]:offsets[i + 1]]
    offsets       int64 [S+1]
    loss_mask     bool [N]       this token is a target; None for pretraining: all but each sample's first
    target_bytes  int64 [S]      UTF-8 bytes of the targets' text
    num_targets   int64 [S]
    sources       int64 [S, 2]   file (index into `files`) and line or row of the record
    row_samples   unsigned [S]   the samples row by row, when packed into R rows
    row_offsets   unsigned [R+1] row r is row_samples[row_offsets[r]:row_offsets[r + 1]]
    report        dict           counts of records, samples, tokens, cuts and drops, and the lengths
    fingerprint   str            SHA-256 of data, tokenizer and settings
    """

    def __init__(self, path: str | os.PathLike, files: list[str]):
        self.path, self.files = Path(path), files
        self.meta = json.loads((self.path / "meta.json").read_text(encoding="utf-8"))
        self.report: dict = self.meta["report"]
        self.fingerprint: str = self.meta["fingerprint"]
        self.tokens, self.offsets, self.target_bytes = map(self._open, ("tokens", "offsets", "target_bytes"))
        self.num_targets, self.sources = map(self._open, ("num_targets", "sources"))
        self.row_samples, self.row_offsets = map(self._open, ("row_samples", "row_offsets"))
        self.loss_mask = self._open("loss_mask") if self.meta["kind"] != "pretrain" else None

    def _open(self, name: str) -> np.ndarray:
        return np.load(self.path / f"{name}.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.target_bytes)

    def release(self) -> None:
        """Unmap the pages of a large cache read so far; otherwise all of it would in the end count as this process's
        memory. They stay in the page cache: mapping them again costs about a microsecond each."""
        if sum(self.meta["sizes"].values()) > LARGE:
            for array in vars(self).values():
                if isinstance(array, np.memmap):
                    cast(mmap.mmap, array.base).madvise(mmap.MADV_DONTNEED)

    def __reduce__(self):
        return TokenCache, (str(self.path), self.files)

    def source(self, sample_id: int) -> str:
        """FILE:LINE of the record that a sample comes from."""
        file, line = self.sources[sample_id]
        return f"{self.files[file]}:{line}"


def build_token_cache(
    kind: str,
    data_path: str,
    tokenizer,
    max_length: int,
    cache_dir: str | os.PathLike | None = None,
    num_proc: int | None = None,
    on_bad_data: str = "stop",
    *,
    max_bad_share: float = DataConfig.max_bad_share,
    text_separator: str | None = None,
) -> TokenCache:
    """Open the token cache of these data, tokenizer and settings, building it first if necessary.

    kind: one of KINDS. data_path: files, globs and folders, separated by commas. tokenizer: a transformers
    tokenizer. max_length: tokens per sample at most. cache_dir: default `dataset/cache` in the repository. num_proc:
    processes that tokenise, default one per core. on_bad_data: "stop" at a bad record, or "skip" and list each.
    max_bad_share: the share of the records, 0 to 1, above which "skip" stops as well. text_separator: the line between
    documents of .txt files. Raises UserError.
    """
    if kind not in KINDS or on_bad_data not in ("stop", "skip"):
        raise UserError(f"kind is one of {KINDS} and on_bad_data 'stop' or 'skip', not {kind!r} and {on_bad_data!r}")
    if not 0 <= max_bad_share <= 1:
        raise UserError(f"--max_bad_share {max_bad_share} is not a share of the records; give a number from 0 to 1")
    if max_length < 2:
        raise UserError(f"--max_seq_len {max_length} leaves no token to predict; use at least 2")
    paths = expand_paths(data_path, plain_text=kind == "pretrain")
    spec = TokenizerSpec.of(tokenizer)
    cache_dir = Path(cache_dir or DataConfig.cache_dir).expanduser()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        stamps = [_stamp(path) for path in paths]
        hashes = [how_read(path, text_separator or "") + file_hash(path, cache_dir) for path in paths]
        settings = {"format": FORMAT_VERSION, "kind": kind, "max_length": max_length, "data": hashes}
        settings |= {"layout": LAYOUT_VERSIONS[kind], "tokenizer": spec.fingerprint()}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        folder = cache_dir / key[:KEY_LENGTH]
        if not _is_complete(folder):
            settings |= {"fingerprint": key, "text_separator": text_separator or ""}
            options = {"num_proc": num_proc or available_cores(), "skip_bad": on_bad_data == "skip"}
            _build_once(folder, dict(zip(paths, stamps, strict=True)), spec, settings, options)
        cache = TokenCache(folder, paths)
    except OSError as error:
        raise UserError(
            f"the token cache in {cache_dir} cannot be written or read ({error.strerror or error}); "
            f"make room or give another folder (--cache_dir)"
        ) from error
    except MemoryError as error:
        raise UserError(
            "out of memory while the token cache is built; build it ahead of time with fewer processes "
            "(python -m dataset.token_cache ... --num_proc 1), and split lines of hundreds of megabytes"
        ) from error
    if count := cache.report["skipped_bad_records"]:
        file, line, reason = cache.report["first_bad_record"]
        first = f"{cache.files[file]}:{line}: {reason}"
        listed = f"all of them are listed in {cache.path / 'bad_records.txt'}"
        judge_bad_records(first, count, cache.report["records"], listed, on_bad_data, max_bad_share)
    return cache


def _build_once(folder: Path, stamps: dict[str, list], spec: TokenizerSpec, settings: dict, options: dict) -> None:
    """Build the cache in `folder` unless another process has; `stamps`: `_stamp` of each file when it was hashed."""
    failure = folder.with_suffix(".error-skip" if options["skip_bad"] else ".error-stop")
    before = _stamp_if_any(failure)
    message = f"waiting for the token cache {folder.name}, which another process builds"
    with locked(folder.with_suffix(".lock"), message) as is_held:
        if _is_complete(folder):
            return
        if _stamp_if_any(failure) not in (None, before):  # the process that this one waited for has failed
            raise UserError(failure.read_text(encoding="utf-8", errors="surrogateescape"))
        if is_held:
            _remove_leftovers(folder)
        if folder.exists():
            warn(f"the token cache {folder} is damaged or was changed; it is built again")
        building = folder.with_suffix(f".tmp-{HOST}-{uuid.uuid4().hex[:8]}")
        try:
            building.mkdir()
            _build(building, stamps, spec, settings, options)
            _put_in_place(building, folder)
            failure.unlink(missing_ok=True)
        except UserError as error:
            failure.write_text(str(error), encoding="utf-8", errors="surrogateescape")
            raise
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed builds left, half-built caches and locks: of this cache, and of others not being built now."""
    found = [*folder.parent.glob("*.tmp-*"), *folder.parent.glob("[0-9a-f]" * KEY_LENGTH + ".lock")]
    for key in {path.stem for path in found}:
        mine = contextlib.nullcontext(True) if key == folder.name else locked(folder.with_name(f"{key}.lock"))
        with mine as is_held, contextlib.suppress(OSError):
            for leftover in filter(_is_abandoned, folder.parent.glob(f"{key}.tmp-*") if is_held else ()):
                shutil.rmtree(leftover)


def _is_abandoned(leftover: Path) -> bool:
    # on some shared file systems a lock holds on one machine only, so another machine's must also be an hour old
    latest = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
    return leftover.suffix.startswith(f".tmp-{HOST}") or time.time() - latest > 3600


def _put_in_place(building: Path, folder: Path) -> None:
    """Rename a finished cache, unless another process (on a file system without locks) was faster."""
    if _is_complete(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)  # exists but is incomplete: damaged
    try:
        os.rename(building, folder)
    except OSError:
        if not _is_complete(folder):
            raise
    sync_folder(folder.parent)


def _build(folder: Path, stamps: dict[str, list], spec: TokenizerSpec, settings: dict, options: dict) -> None:
    begin = time.monotonic()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # see cache_build: the processes are the parallelism
    options |= {"text_separator": settings["text_separator"]}
    report = build_arrays(folder, list(stamps), spec, settings["kind"], settings["max_length"], **options)
    changed = [path for path, stamp in stamps.items() if not os.path.exists(path) or _stamp(path) != stamp]
    if changed:
        raise UserError(f"{changed[0]} changed while it was read; start again when it is complete")
    times = {path.name: _stamp(path) for path in sorted(folder.iterdir())}
    files = {"sizes": {name: stamp[0] for name, stamp in times.items()}, "stamps": times}
    digests = {name: _sha256(folder / name) for name in times}
    write_json(folder / "meta.json", {**settings, "report": report, **files, "sha256": digests})
    sync_folder(folder)
    seconds = time.monotonic() - begin
    say(describe_files(list(stamps)))
    say(f"token cache {folder.stem} built in {seconds:.1f} s ({report['tokens'] / seconds:,.0f} tokens/s)")
    say(format_report(report))
    if report["skipped_bad_records"]:
        with open(folder / "bad_records.txt", encoding="utf-8") as listed:
            for line in itertools.islice(listed, 20):
                say(f"  skipped: {line.rstrip()}")


def _is_complete(folder: Path) -> bool:
    """Whether all files are those that meta.json, which is written last, describes. A file is read only if its times
    have changed since it was built and since it was last read (`file_hash`), and not where that cannot be remembered:
    every rank would read it at every start. Early versions' caches for pretraining have no digests."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        same = all((folder / name).stat().st_size == size for name, size in meta["sizes"].items())
        digests, stamps = meta.get("sha256", {}), meta.get("stamps", {})
        changed = [name for name in digests if _stamp(folder / name) != stamps.get(name)]
        if same and os.access(folder.parent / "hashes", os.W_OK):
            same = all(file_hash(str(folder / name), folder.parent) == digests[name] for name in changed)
        return same and len(TokenCache(folder, [])) > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, UserError, MemoryError):
        raise
    except Exception:  # of many types, for a damaged meta.json or .npy header
        return False


def file_hash(path: str, cache_dir: Path) -> str:
    """SHA-256 of a file's content, stored in the cache folder by path, size and times of modification and change.

    Only one of several ranks reads the file, and later runs do not read it again.
    """
    known = cache_dir / "hashes" / (hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32] + ".json")
    with contextlib.suppress(OSError):  # a read-only folder, a full disk: then the hash is not remembered
        known.parent.mkdir(parents=True, exist_ok=True)
    if digest := _remembered_hash(known, _stamp(path)):
        return digest
    with locked(cache_dir / "hashes" / ".lock", f"waiting for another process that reads {path}"):
        stamp = _stamp(path)
        if digest := _remembered_hash(known, stamp):
            return digest
        begin = time.time()
        if stamp[0] > 2e9:
            say(f"reading {path} ({stamp[0] / 1e9:.1f} GB) once to compute its hash")
        try:
            digest = _sha256(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); check the file and its permissions") from error
        # A file modified just now may change again within the same time stamp, so its hash is not stored.
        if _stamp(path) == stamp and max(stamp[1:]) < (begin - 2) * 1e9:
            entry = json.dumps({"path": path, "stamp": stamp, "sha256": digest})
            with contextlib.suppress(UserError):
                atomic_write(known, lambda file: file.write(entry.encode()))
        return digest


def _remembered_hash(known: Path, stamp: list[int]) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(known.read_text(encoding="utf-8"))
        if entry["stamp"] == stamp:
            return entry["sha256"]
    return ""


def _sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: str | Path) -> list[int]:
    """Size and times of a file. Whoever sets the modification time back cannot set back the time of that change."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _stamp_if_any(path: Path) -> list[int] | None:
    try:
        return _stamp(path)
    except OSError:
        return None


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a cache."""
    rows = settings_of(StageArgs)
    names = ("data_path", "text_separator", "tokenizer_path", "max_seq_len", "cache_dir", "on_bad_data")
    parser.add_argument("--kind", choices=KINDS, required=True, help="kind of training")
    add_flags(parser, (rows[name] for name in (*names, "max_bad_share")))
    parser.add_argument("--num_proc", type=int, help="processes that tokenise (one per core)")
    parser.set_defaults(max_seq_len=None)  # that of the stage: STAGE_LENGTH


def cache_of_arguments(args: argparse.Namespace, tokenizer) -> TokenCache:
    """The cache that the options of `add_arguments` select."""
    if args.data_path is None:
        raise UserError("--data_path is missing: give files, globs or folders, separated by commas")
    names = ("cache_dir", "num_proc", "on_bad_data", "max_bad_share", "text_separator")
    options = {name: getattr(args, name) for name in names}
    length = args.max_seq_len or STAGE_LENGTH[args.kind]
    with stoppable():
        return build_token_cache(args.kind, args.data_path, tokenizer, length, **options)


def main() -> None:
    """Build a cache ahead of time, unless it exists, and print its report."""
    parser = Parser(prog="python -m dataset.token_cache", description=__doc__.splitlines()[0])
    add_arguments(parser)
    args = parser.parse_args()
    say(f"ready: {cache_of_arguments(args, load_tokenizer(args.tokenizer_path)).path}")


if __name__ == "__main__":
    with one_line_errors():
        main()
