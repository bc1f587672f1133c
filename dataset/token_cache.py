"""The token cache: data tokenised once into plain files, which every rank opens as memory maps.

The first run builds it, before any process group exists; `dataset.show_samples` can build it ahead of time.
Its name is a hash of the files' paths, sizes and modification times, the tokenizer, the settings and the code
that makes samples, so a change of any of them builds another cache. If a file is replaced by one of the same
size and modification time, its ctime differs, and the contents are compared. A cache is built under a lock in
a temporary folder and renamed when complete: one of several ranks or runs builds it while the others wait.

    <cache_dir>/<key>/  NAME.bin for each array of TokenCache; meta.json; bad_records.txt

`weights.bin` is there only if a record has a weight other than 1.
"""

import hashlib
import json
import os
import shutil
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from tqdm import tqdm

from common.contents import check_content
from common.errors import UserError, reason, say
from common.files import files_in, is_folder, locked, read_errors, sync, write_json
from common.settings import ROOT, DataConfig
from dataset.files import Gaps, find_files, format_source, is_plain_text, read_records
from dataset.held_out import Split
from dataset.report import (
    BadRecords,
    check_bad_records,
    describe_files,
    describe_records,
    make_report,
    no_samples_error,
    report_gaps,
)
from dataset.round_trip import check_lost_text
from dataset.tokenizing import SampleMaker, fingerprint, token_byte_lengths

if TYPE_CHECKING:  # transformers imports torch
    from transformers import PreTrainedTokenizerBase

STAGE_LENGTH = {"pretrain": 340, "sft": 768, "dpo": 1024}  # default --max_seq_len of the stage scripts
# the code that decides the samples; the chat template is part of the tokenizer's fingerprint
CODE_FILES = ["dataset/delimited.py", "dataset/documents.py", "dataset/files.py", "dataset/held_out.py"]
CODE_FILES += ["dataset/messages.py", "dataset/pages.py"]
CODE_FILES += ["dataset/records.py", "dataset/report.py", "dataset/round_trip.py"]
CODE_FILES += ["dataset/token_cache.py", "dataset/tokenizing.py", "common/contents.py"]
CODE_FILES += ["common/encodings.py", "model/answers.py", "model/prompts.py"]
BAD_RECORDS_FILE = "bad_records.txt"  # in the folder of a cache
BATCH_SAMPLES = 1024  # written at a time
DTYPES = {"offsets": "int64", "loss_mask": "bool", "target_bytes": "int64", "sources": "int64"}
DTYPES |= {"weights": "float32"}


@dataclass(frozen=True)
class CacheOptions:
    """Options for building a token cache.

    kind: pretrain, sft or dpo. max_length: maximum tokens per sample. on_bad_data: "stop" at a bad record, or
    "skip" up to `max_bad_share` of all records. max_lost_text: the largest share of the characters that the
    tokenizer may lose. text_separator: the line between documents of .txt files. split: the records to read,
    None for all.
    """

    kind: str
    max_length: int
    cache_dir: str | os.PathLike | None = None
    on_bad_data: str = "stop"
    max_bad_share: float = DataConfig.model_fields["max_bad_share"].default
    max_lost_text: float = DataConfig.model_fields["max_lost_text"].default
    text_separator: str | None = None
    split: Split | None = None


class TokenCache:
    """An open cache: S samples of N tokens in all, as memory maps. Pickling keeps only its paths."""

    tokens: np.ndarray  # unsigned [N]: sample i is tokens[offsets[i]:offsets[i + 1]]
    loss_mask: np.ndarray  # bool [N]: this token is a target
    offsets: np.ndarray  # int64 [S+1]
    target_bytes: np.ndarray  # int64 [S]: UTF-8 bytes of the targets' text; 0 if the tokenizer loses some
    weights: np.ndarray | None = None  # float32 [S]: of the targets in the loss; None: all are 1
    sources: np.ndarray  # int64 [S, 2]: file (index into `files`) and line of the record

    def __init__(self, path: str | os.PathLike, files: list[str]):
        self.path, self.files = Path(path), files
        self.meta = json.loads((self.path / "meta.json").read_text(encoding="utf-8"))
        self.report: dict = self.meta["report"]
        self.num_samples: int = self.report["samples"]
        for name, dtype in self.meta["dtypes"].items():
            setattr(self, name, np.memmap(self.path / f"{name}.bin", dtype, mode="r"))
        self.sources = self.sources.reshape(-1, 2)

    def __reduce__(self):
        return TokenCache, (str(self.path), self.files)

    def source(self, sample_id: int) -> str:
        """FILE:LINE of the record that a sample comes from."""
        file, line = self.sources[sample_id].tolist()
        return format_source(self.files[file], line)


def build_token_cache(
    data_path: str, tokenizer: "PreTrainedTokenizerBase", options: CacheOptions
) -> TokenCache:
    """Open the token cache of these data, tokenizer and options, building it first if necessary. Raises
    UserError."""
    if options.max_length < 2:
        raise UserError(f"--max_seq_len {options.max_length} leaves no token to predict; use at least 2")
    paths, skipped = find_files(data_path)
    texts = [path for path in paths if is_plain_text(path)]
    if texts and options.kind != "pretrain":
        raise UserError(f"{texts[0]} is plain text, which only pretraining can use; SFT needs conversations")
    cache_dir = Path(options.cache_dir or DataConfig.model_fields["cache_dir"].default).expanduser()
    code = b"".join((ROOT / path).read_bytes() for path in CODE_FILES)
    settings = {
        "kind": options.kind,
        "max_length": options.max_length,
        "split": options.split,
        "text_separator": (options.text_separator or "").strip(),
        "paths": [os.path.abspath(path) for path in paths],
        "stamps": file_stamps(paths),
        "tokenizer": fingerprint(tokenizer),
        "code": hashlib.sha256(code).hexdigest(),
    }
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    folder = cache_dir / key
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        if not is_usable(folder, paths):
            message = f"waiting for the token cache {key}, which another process builds"
            with locked(folder.with_suffix(".lock"), message):
                if not is_usable(folder, paths):
                    report = build(folder, paths, tokenizer, options, settings)
                    files = describe_files(paths, skipped, report["held_out"])
                    say(f"tokenised {files}: {describe_records(report)}")
        cache = TokenCache(folder, paths)
    except OSError as error:
        raise UserError(
            f"the token cache in {cache_dir} cannot be written or read ({error.strerror or error}); "
            "free some space or give another folder (--cache_dir)"
        ) from error
    report_gaps(cache.report, paths)
    check_lost_text(cache.report, options.max_lost_text)
    check_bad_records(cache.report, options, f"all of them are listed in {cache.path / BAD_RECORDS_FILE}")
    return cache


def build(
    folder: Path,
    paths: list[str],
    tokenizer: "PreTrainedTokenizerBase",
    options: CacheOptions,
    settings: dict,
) -> dict:
    """Build the cache in `folder`; returns its report."""
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a build that was killed
    shutil.rmtree(folder, ignore_errors=True)  # damaged, if it is there
    temporary.mkdir()
    changed_at = change_times(paths)
    try:
        report, dtypes = write_arrays(temporary, paths, tokenizer, options)
        if file_stamps(paths) != settings["stamps"]:
            raise UserError(f"{paths[0]} or another file changed while it was read; start again")
        meta = settings | {"report": report, "dtypes": dtypes}
        meta["data"] = [file_hash(path) for path in paths]
        meta["changed_at"] = changed_at
        meta["sizes"] = {path.name: path.stat().st_size for path in files_in(temporary, "*.bin")}
        write_json(temporary / "meta.json", meta)
        os.rename(temporary, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return report


def write_arrays(
    folder: Path, paths: list[str], tokenizer: "PreTrainedTokenizerBase", options: CacheOptions
) -> tuple[dict, dict]:
    """Tokenise the files into `folder`. Returns the report, and the type of each array."""
    bad = BadRecords(paths, options.on_bad_data)
    maker = SampleMaker(options.kind, tokenizer, options.max_length, bad)
    token_bytes = token_byte_lengths(tokenizer)
    dtypes = DTYPES | {"tokens": np.min_scalar_type(len(token_bytes) - 1).name}
    gaps: Gaps = {}
    records = read_records(paths, options.text_separator or "", gaps)
    if options.split:
        records = options.split.choose(records, paths, is_document=options.kind == "pretrain")
    records = tqdm(records, desc="tokenising", unit=" records", delay=10, mininterval=10, leave=False)
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in dtypes}
        files["offsets"].write(np.zeros(1, dtype=np.int64).data)
        samples = stack.enter_context(closing(maker.samples(records)))
        while batch := list(islice(samples, BATCH_SAMPLES)):
            check_lost_text(maker.round_trip.report(), 10 * options.max_lost_text, is_final=False)
            tokens = np.concatenate([sample.tokens for sample in batch])
            loss_mask = np.concatenate([sample.loss_mask for sample in batch])
            sizes = np.array([len(sample.tokens) for sample in batch])
            ends = np.cumsum(sizes)
            arrays = {
                "tokens": tokens.astype(dtypes["tokens"]),
                "loss_mask": loss_mask,
                "offsets": maker.counts["tokens"] + ends,
                "target_bytes": np.add.reduceat(token_bytes[tokens] * loss_mask, ends - sizes),
                "sources": np.array([sample.source for sample in batch], dtype=np.int64),
                "weights": np.array([sample.weight for sample in batch], dtype=np.float32),
            }
            for name, file in files.items():
                file.write(arrays[name].data)
            maker.counts["tokens"] += len(tokens)
            maker.counts["targets"] += int(loss_mask.sum())
            maker.counts["target_bytes"] += int(arrays["target_bytes"].sum())
        if maker.round_trip.lost:  # the tokens do not spell the text
            files["target_bytes"].truncate(0)
            files["target_bytes"].seek(0)
            files["target_bytes"].write(bytes(files["sources"].tell() // 2))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    if not maker.counts["weighted"]:
        del dtypes["weights"]
        (folder / "weights.bin").unlink()
    lengths = np.diff(np.fromfile(folder / "offsets.bin", dtype=np.int64))
    lost = maker.round_trip.report()
    report = make_report(options, maker.counts, maker.unused, bad.lines, lengths, lost)
    report["pages_without_text"] = [[paths.index(path), *pages] for path, pages in gaps.items()]
    with open(folder / BAD_RECORDS_FILE, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in bad.lines)
        file.flush()
        os.fsync(file.fileno())
    if not len(lengths):
        raise no_samples_error(report, options.split, paths)
    return report, dtypes


def is_usable(folder: Path, paths: list[str]) -> bool:
    """Whether a complete cache (sizes as in meta.json) of the data's present content exists."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        is_complete = all((folder / name).stat().st_size == size for name, size in meta["sizes"].items())
        if not is_complete or meta["changed_at"] == change_times(paths):
            return is_complete
    except (OSError, ValueError, LookupError):
        return False
    if meta["data"] != [file_hash(path) for path in paths]:
        return False
    with suppress(OSError):  # a read-only cache: contents are compared each time
        write_json(folder / "meta.json", meta | {"changed_at": change_times(paths)})
    return True


def change_times(paths: list[str]) -> list[int]:
    """The ctime of each file in nanoseconds: when its content, name or permissions last changed."""
    return [os.stat(path).st_ctime_ns for path in paths]


def file_stamps(paths: list[str]) -> list[list[int]]:
    """Size and modification time of each file."""
    return [[os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in paths]


def file_hash(path: str | os.PathLike) -> str:
    """SHA-256 of a file's content. Raises ReadError if it cannot be read."""
    with read_errors(Path(path)), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_tokenizer(path: str | os.PathLike) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder, as transformers loads it. Raises UserError."""
    if not is_folder(path):
        raise UserError(f"--tokenizer_path {path}: no such folder; give a folder with tokenizer.json")
    for file in files_in(path, "tokenizer*.json"):
        check_content(file)
    from transformers import AutoTokenizer  # takes as long as torch

    try:
        loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        tokenizer = cast("PreTrainedTokenizerBase", loaded)
        if len(tokenizer) < 2:  # what it makes of a folder that holds only a model's config
            raise ValueError("there is no tokenizer.json")
        return tokenizer
    except Exception as error:  # transformers raises errors of any type for untrusted files
        message = f"--tokenizer_path {path} holds no tokenizer that transformers can load ({reason(error)})"
        raise UserError(message) from error
