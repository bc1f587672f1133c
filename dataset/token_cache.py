"""The token cache: data tokenised once into plain .npy files, which every rank opens as memory maps.

    python -m dataset.token_cache --kind sft --data_path data/sft.jsonl --max_seq_len 768

builds it ahead of time; otherwise the first run builds it, before any process group exists. The cache is found again by
a key made of the data's content, the tokenizer and the settings; change one of them and another cache is built beside
it. It is built in a folder of its own and renamed when complete, under a lock, so that of several ranks or runs one
builds while the others wait, and a half-built cache is never used.

    <cache_dir>/<key>/  tokens.npy [N], offsets.npy [S+1], trained.npy [N] (SFT), target_bytes.npy [S],
                        num_targets.npy [S], sources.npy [S, 2] (file, line), members.npy [S] and borders.npy [R+1]
                        (see dataset/packing.py), meta.json, bad_records.txt (if any)
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

import numpy as np

from dataset.cache_build import build_arrays, format_report
from dataset.data_files import expand_paths
from dataset.durable import fcntl, locked, sync_folder, write_json
from dataset.errors import Parser, UserError, reason, run_main, say
from dataset.formats import bad_records_message
from dataset.tokenizing import KINDS, TokenizerSpec
from dataset.worker_pool import stoppable

FORMAT_VERSION = 2  # to be raised whenever the same data would give other tokens or labels; checkpoints know it
LAYOUT_VERSION = 2  # to be raised whenever the same samples would lie in other files
REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_CACHE_DIR = REPOSITORY / "dataset" / "cache"
MAX_BAD_SHARE = 0.1
LARGE = 1 << 28  # bytes of a cache from which on its pages are let go
HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]


class TokenCache:
    """An opened cache: S samples of N tokens in all, as memory maps. Pickles as its path.

    tokens        unsigned [N]   sample i is tokens[offsets[i]:offsets[i + 1]]
    offsets       int64 [S+1]
    trained       bool [N]       this token is a target; None for pretraining: all but each sample's first
    target_bytes  int64 [S]      UTF-8 bytes of the text that the sample's targets spell
    num_targets   int64 [S]
    sources       int64 [S, 2]   file (index into `files`) and line or row of the record
    members       unsigned [S]   the samples row by row, where they are packed into R rows
    borders       unsigned [R+1] row r is members[borders[r]:borders[r + 1]]
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
        self.members, self.borders = map(self._open, ("members", "borders"))
        self.trained = self._open("trained") if self.meta["kind"] == "sft" else None

    def _open(self, name: str) -> np.ndarray:
        return np.load(self.path / f"{name}.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.target_bytes)

    def release(self) -> None:
        """Unmap the pages of a large cache that were read so far, or all of it would count as this process's memory in
        the end. They stay in the system's cache: mapping them again costs about a microsecond each."""
        if sum(self.meta["sizes"].values()) > LARGE and hasattr(mmap, "MADV_DONTNEED"):
            for array in vars(self).values():
                if isinstance(array, np.memmap):
                    array.base.madvise(mmap.MADV_DONTNEED)

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
    max_bad_share: float = MAX_BAD_SHARE,
) -> TokenCache:
    """Open the token cache of these data, tokenizer and settings; build it first if there is none.

    kind: "pretrain" or "sft". data_path: files, globs and folders, separated by commas. tokenizer: a transformers
    tokenizer. max_length: tokens per sample at most. cache_dir: default `dataset/cache` in the repository. num_proc:
    processes that tokenise, default one per core. on_bad_data: "stop" at a bad record, or "skip" and list each.
    max_bad_share: the share of the records, 0 to 1, above which "skip" stops as well. Raises UserError.
    """
    if kind not in KINDS or on_bad_data not in ("stop", "skip"):
        raise UserError(f"kind is one of {KINDS} and on_bad_data 'stop' or 'skip', not {kind!r} and {on_bad_data!r}")
    if not 0 <= max_bad_share <= 1:
        raise UserError(f"--max_bad_share {max_bad_share} is no share of the records; give a number from 0 to 1")
    if max_length < 2:
        raise UserError(f"--max_seq_len {max_length} leaves no token to predict; use at least 2")
    paths = expand_paths(data_path)
    spec = TokenizerSpec.of(tokenizer)
    cache_dir = Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        stamps = [_stamp(path) for path in paths]
        hashes = [file_hash(path, cache_dir) for path in paths]
        settings = {"format": FORMAT_VERSION, "kind": kind, "max_length": max_length, "data": hashes}
        settings |= {"layout": LAYOUT_VERSION, "tokenizer": spec.fingerprint()}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        folder = cache_dir / key[:32]
        if not _is_complete(folder):
            options = {"num_proc": num_proc or available_cores(), "skip_bad": on_bad_data == "skip"}
            _build_once(folder, dict(zip(paths, stamps, strict=True)), spec, {**settings, "fingerprint": key}, options)
        cache = TokenCache(folder, paths)
    except OSError as error:
        raise UserError(
            f"the token cache in {cache_dir} cannot be written or read ({error.strerror or error}); "
            f"make room or give another folder (--cache_dir)"
        ) from error
    except MemoryError as error:
        raise UserError(
            "out of memory while the token cache is built; build it ahead of time with fewer processes "
            "(python -m dataset.token_cache ... --num_proc 1), and cut lines of hundreds of megabytes in pieces"
        ) from error
    if cache.report["skipped_bad_records"]:
        _judge_bad_records(cache, on_bad_data, max_bad_share)
    return cache


def _judge_bad_records(cache: TokenCache, on_bad_data: str, max_bad_share: float) -> None:
    """Raise UserError where bad records are not allowed, or not so many; otherwise say how many are left out."""
    count, records = cache.report["skipped_bad_records"], cache.report["records"]
    file, line, reason = cache.report["first_bad_record"]
    first = f"{cache.files[file]}:{line}: {reason}"
    if on_bad_data == "stop":
        raise UserError(bad_records_message(first, count))
    listed = f"all of them are listed in {cache.path / 'bad_records.txt'}"
    share = f"{count:,} of {records:,} records ({count / records:.1%})"
    if count > max_bad_share * records:
        raise UserError(
            f"{first}; {share} are bad, more than --max_bad_share {max_bad_share:g} allows; {listed}; "
            f"mend them or raise --max_bad_share"
        )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"bad records are left out: {share}; {listed}")


def _build_once(folder: Path, stamps: dict[str, list], spec: TokenizerSpec, settings: dict, options: dict) -> None:
    """Build the cache in `folder`, unless another process does so meanwhile; `stamps`: of the files when hashed."""
    failure = folder.with_suffix(".error-skip" if options["skip_bad"] else ".error-stop")
    arrived = time.time()
    message = f"waiting for the token cache {folder.name}, which another process builds"
    with locked(folder.with_suffix(".lock"), message) as is_held:
        if _is_complete(folder):
            return
        if failure.exists() and failure.stat().st_mtime > arrived:
            message = failure.read_text(encoding="utf-8", errors="surrogateescape")
            raise UserError(message)  # the process that this one waited for met it
        if is_held:
            _remove_leftovers(folder)
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
    """Remove what killed builds left, of this cache, whose lock is held, and of others that nobody builds now.

    Some shared file systems keep locks on one machine only, so what another machine left must be an hour old as well.
    """
    for leftover in folder.parent.glob("*.tmp-*"):
        with open(leftover.with_suffix(".lock"), "ab") as lock, contextlib.suppress(OSError):
            if leftover.stem != folder.name:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            latest = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
            if leftover.suffix.startswith(f".tmp-{HOST}") or time.time() - latest > 3600:
                shutil.rmtree(leftover)


def _put_in_place(building: Path, folder: Path) -> None:
    """Give a finished cache its name, unless another process, on a file system without locks, was quicker."""
    if _is_complete(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)  # there, yet not complete: damaged
    try:
        os.rename(building, folder)
    except OSError:
        if not _is_complete(folder):
            raise
    sync_folder(folder.parent)


def _build(folder: Path, stamps: dict[str, list], spec: TokenizerSpec, settings: dict, options: dict) -> None:
    begin = time.monotonic()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # see cache_build: the processes are the parallelism
    report = build_arrays(folder, list(stamps), spec, settings["kind"], settings["max_length"], **options)
    changed = [path for path, stamp in stamps.items() if not os.path.exists(path) or _stamp(path) != stamp]
    if changed:
        raise UserError(f"{changed[0]} changed while it was read; start again when it is complete")
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    write_json(folder / "meta.json", {**settings, "report": report, "sizes": sizes})
    sync_folder(folder)
    seconds = time.monotonic() - begin
    say(f"token cache {folder.stem} built in {seconds:.1f} s ({report['tokens'] / seconds:,.0f} tokens/s)")
    say(format_report(report))
    if report["skipped_bad_records"]:
        with open(folder / "bad_records.txt", encoding="utf-8") as listed:
            for line in itertools.islice(listed, 20):
                say(f"  left out: {line.rstrip()}")


def _is_complete(folder: Path) -> bool:
    """Whether the folder holds all files in the sizes that meta.json, written last, tells."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in meta["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or damaged
        return False


def file_hash(path: str, cache_dir: Path) -> str:
    """SHA-256 of a file's content, remembered in the cache folder by path, size and time of change.

    Of several ranks one reads the file, and later runs do not read it again.
    """
    known = cache_dir / "hashes" / (hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32] + ".json")
    known.parent.mkdir(parents=True, exist_ok=True)
    with locked(cache_dir / "hashes" / ".lock", f"waiting for another process that reads {path}"):
        stamp = _stamp(path)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entry = json.loads(known.read_text(encoding="utf-8"))
            if entry["stamp"] == stamp:
                return entry["sha256"]
        begin = time.time()
        if stamp[0] > 2e9:
            say(f"reading {path} ({stamp[0] / 1e9:.1f} GB) once to know its content again")
        try:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); check the file and its rights") from error
        # A file changed within the last moments may change again under the same time stamp: then read it next time.
        if _stamp(path) == stamp and stamp[1] < (begin - 2) * 1e9:
            written = known.with_suffix(f".tmp-{uuid.uuid4().hex[:8]}")
            write_json(written, {"path": path, "stamp": stamp, "sha256": digest})
            os.replace(written, known)
        return digest


def _stamp(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_tokenizer(path: str | os.PathLike):
    """The tokenizer of a folder, as transformers loads it. Raises UserError."""
    from transformers import AutoTokenizer  # brings torch along, which building a cache does not need

    if not Path(path).is_dir():
        raise UserError(f"--tokenizer_path {path}: no such folder; it must hold tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # from files of strangers: transformers raises whatever it stumbles over
        message = f"--tokenizer_path {path} holds no tokenizer that transformers can load ({reason(error)})"
        raise UserError(message) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that decide which cache is meant."""
    parser.add_argument("--kind", choices=KINDS, required=True, help="kind of training")
    parser.add_argument("--data_path", required=True, help="files, globs and folders, separated by commas")
    parser.add_argument("--tokenizer_path", default=str(REPOSITORY / "model"), help="tokenizer folder")
    parser.add_argument(
        "--max_seq_len", type=int, help="tokens per sample (340 for pretrain, 768 for sft, as in training)"
    )
    parser.add_argument("--cache_dir", default=str(DEFAULT_CACHE_DIR), help="folder of caches")
    parser.add_argument("--num_proc", type=int, help="processes that tokenise (one per core)")
    parser.add_argument("--on_bad_data", choices=("stop", "skip"), default="stop", help="at a bad record")
    parser.add_argument(
        "--max_bad_share", type=float, default=MAX_BAD_SHARE, help="share of bad records above which skip stops as well"
    )


def cache_of_arguments(args: argparse.Namespace, tokenizer) -> TokenCache:
    """The cache that the options of `add_arguments` mean."""
    max_length = args.max_seq_len if args.max_seq_len is not None else {"pretrain": 340, "sft": 768}[args.kind]
    options = (args.cache_dir, args.num_proc, args.on_bad_data)
    with stoppable():
        share = args.max_bad_share
        return build_token_cache(args.kind, args.data_path, tokenizer, max_length, *options, max_bad_share=share)


def main() -> None:
    """Build a cache ahead of time, or find it built, and print its report."""
    parser = Parser(prog="python -m dataset.token_cache", description=__doc__.splitlines()[0])
    add_arguments(parser)
    args = parser.parse_args()
    cache = cache_of_arguments(args, load_tokenizer(args.tokenizer_path))
    say(f"ready: {cache.path}")


if __name__ == "__main__":
    run_main(main)
