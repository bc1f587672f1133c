"""Finds the files of a `--data_path` and reads them in blocks of records.

Files: JSONL, `.json` with either JSON Lines or one array, CSV, TSV and plain text, each also as .gz or .zst;
Parquet, Arrow and Feather; folders written by `datasets.save_to_disk`. Another kind of file is one more entry
of READERS. Line numbers count from 1; for Parquet and Arrow they are row numbers, from 1. An element of an
array that does not begin a line has its index instead (`place`).
"""

import glob
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from fnmatch import fnmatch
from functools import cache
from typing import Any

from common.errors import UserError, reason
from dataset import blocks
from dataset.blocks import COMPRESSED, Block, DataFile, place
from dataset.json_files import read_json, read_json_lines
from dataset.json_records import BadRecord, parse_json
from dataset.table_files import read_arrow, read_csv, read_parquet, read_tsv
from dataset.text_files import read_text

PLAIN_TEXT = ".txt"
# Suffix -> what yields (line or row, record) of such a file. A record is a dict, a BadRecord, or raw JSON,
# which the processes that tokenise parse.
READERS: dict[str, Callable[[DataFile], Iterator[tuple[int, Any]]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    PLAIN_TEXT: read_text,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
}
NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"  # a weight of a source
DAMAGED = "the compressed file is damaged or cut off"
# of data, of `datasets`
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def file_kind(path: str | os.PathLike) -> str:
    """The suffix that tells how a file is read, without that of a compression; any other file is JSON
    Lines."""
    name = os.path.basename(os.fspath(path)).lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return next((suffix for suffix in READERS if name.endswith(suffix)), "")


def how_read(path: str, text_separator: str) -> str:
    """What decides, beside its bytes, which records a file holds; empty where nothing else does."""
    kind = file_kind(path)
    if kind == PLAIN_TEXT:
        return f"{kind} {text_separator.strip()!r} "
    return f"{kind} " if kind in (".csv", ".tsv") else ""


def split_weights(data_path: str) -> tuple[list[str], list[float]]:
    """The sources of a data path and their weights: `a.jsonl:0.7,b/*.jsonl:0.3` -> (["a.jsonl", "b/*.jsonl"],
    [0.7, 0.3]). Without weights ([data_path], []). A path that exists as typed has no weight.
    Raises UserError for a weight that is not a number above 0, and where some sources have one and others
    have not.
    """
    paths, weights = [], []
    for part in () if os.path.lexists(data_path) else filter(None, map(str.strip, data_path.split(","))):
        path, _, weight = part.rpartition(":")
        if path and re.fullmatch(NUMBER, weight.strip()) and not os.path.lexists(part):
            paths.append(path)
            weights.append(float(weight))
            if not 0 < weights[-1] < float("inf"):
                raise UserError(f"--data_path: the weight of {part} must be a number above 0")
        else:
            paths.append(part)
    if weights and len(weights) < len(paths):
        raise UserError(
            f"--data_path {data_path}: give each of the {len(paths)} sources a weight, or none of them"
        )
    return (paths, weights) if weights else ([data_path], [])


def parts_of(data_path: str | os.PathLike) -> list[str]:
    """The files, globs and folders of a data path without weights, as typed; empty parts, as in `a.jsonl,`,
    are none. A path that exists as typed is a single one."""
    typed = os.fspath(data_path)
    return [typed] if os.path.exists(typed) else [part.strip() for part in typed.split(",") if part.strip()]


def expand_paths(data_path: str | os.PathLike, plain_text: bool = True) -> list[str]:
    """The files of `data_path`: files, globs and folders (searched recursively), separated by commas.

    The parts keep their order; within a glob or folder the paths are sorted. A file named twice is read once.
    A path that exists as typed is never read as a pattern or a list. Plain text and records are not searched
    for together: a folder that holds both is refused, or without `plain_text` only its records are taken.
    Raises UserError for a missing or empty file, for a pattern or folder without data, and for unwanted plain
    text.
    """
    parts = parts_of(data_path)
    if not parts:
        raise UserError("--data_path is empty; give a file, a folder or a pattern such as 'data/*.jsonl'")
    files: dict[str, str] = {}
    for part in parts:
        try:
            for path in _expand_one(os.path.expanduser(part), plain_text):
                files.setdefault(os.path.realpath(path), path)
        except OSError as error:
            raise UserError(
                f"{error.filename or part} cannot be read ({error.strerror}); check --data_path"
            ) from error
    for path in files.values():
        if not os.path.isfile(path):
            what = "a pipe, a device or a link to nothing"
            raise UserError(f"{path} is {what}; data are read more than once, so give a file, or remove it")
        if os.path.getsize(path) == 0:
            raise UserError(f"{path} is an empty file; remove it from --data_path or write it again")
        if file_kind(path) == PLAIN_TEXT and not plain_text:
            raise UserError(f"{path} is plain text, which only pretraining takes; SFT needs conversations")
    return list(files.values())


def _expand_one(part: str, plain_text: bool) -> list[str]:
    if os.path.isdir(part):
        return _files_of_folder(part, plain_text)
    paths = glob.glob(part, recursive=True)
    paths = [part] if os.path.lexists(part) else [path for path in paths if not os.path.isdir(path)]
    if not paths:
        raise UserError(f"{part}: no such file; check --data_path")
    return sorted(paths)


def _files_of_folder(folder: str, plain_text: bool) -> list[str]:
    """The data files below a folder, without hidden ones and `datasets`' own; of a saved DatasetDict those of
    `train`. Refuses plain text beside records, so that a README.txt is not trained in silence."""
    paths, seen = [], set()
    for current, folders, names in os.walk(folder, onerror=_fail, followlinks=True):
        real = os.path.realpath(current)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if "dataset_dict.json" in names:
            folders[:] = ["train"]
        if "state.json" in names and _is_selection(os.path.join(current, "state.json")):
            raise UserError(
                f"{current} holds a selection of rows beside all of them (_indices_data_files in its state.json); save "
                "the selected rows alone: dataset.flatten_indices().save_to_disk(...)"
            )
        for name in names if real not in seen else ():
            is_other = name.startswith(".") or name in DESCRIPTIONS or fnmatch(name, "cache-*.arrow")
            paths += [os.path.join(current, name)] if file_kind(name) and not is_other else []
        seen.add(real)
    if not paths:
        kinds = ", ".join(f"*{suffix}" for suffix in READERS)
        raise UserError(
            f"{folder} is a folder without data; it must hold files named {kinds} (also {' or '.join(COMPRESSED)})"
        )
    texts = [path for path in sorted(paths) if file_kind(path) == PLAIN_TEXT]
    records = [path for path in sorted(paths) if file_kind(path) != PLAIN_TEXT]
    if texts and records and plain_text:
        wanted = os.path.join(folder, "**", f"*{file_kind(records[0])}")
        raise UserError(
            f"{folder} holds both plain text ({texts[0]}) and records ({records[0]}); say which to read with a "
            f"pattern, such as --data_path '{wanted}'"
        )
    return records or texts


def _is_selection(state: str) -> bool:
    """Whether the description of a dataset names rows that were selected, which would be lost."""
    with suppress(ValueError, AttributeError), open(state, encoding="utf-8") as file:
        return bool(json.load(file).get("_indices_data_files"))
    return False


def _fail(error: OSError) -> None:
    raise error


def describe_files(paths: Sequence[str]) -> str:
    """Which files are read, in a line."""
    more = f" and {len(paths) - 5:,} more" if len(paths) > 5 else ""
    return f"data: {', '.join(paths[:5])}{more}"


def iter_blocks(paths: Sequence[str], text_separator: str = "") -> Iterator[Block]:
    """Read the files one after another as blocks of records. Raises UserError where a file cannot be read.

    text_separator: the line that separates documents in plain text; empty for one document per file.
    """
    for index, path in enumerate(paths):
        try:
            with closing(DataFile(path, text_separator)) as file:
                yield from _blocks_of_file(index, file)
        except OSError as error:
            why = error.strerror or reason(error)
            raise UserError(
                f"{path} cannot be read ({why}); check the file or remove it from --data_path"
            ) from error


def _blocks_of_file(index: int, file: DataFile) -> Iterator[Block]:
    reader = READERS.get(file_kind(file.path), read_json_lines)
    rows: list[tuple[int, Any]] = []
    line = begin = 0  # the last line; where in the file the block begins
    try:
        for line, record in reader(file):
            rows.append((line, record))
            position = file.stored.tell()
            if len(rows) == blocks.BLOCK_ROWS or position - begin >= blocks.BLOCK_BYTES:
                yield Block(index, file.path, rows, max(0, position - begin))
                rows, begin = [], position
    except (EOFError, OSError, zlib.error) as error:
        if not file.path.lower().endswith(COMPRESSED) or getattr(error, "errno", None) is not None:
            raise
        where = place(file.path, line or 1)
        raise UserError(f"{where}: after this line {DAMAGED} ({reason(error)}); get it again") from error
    if line == 0:
        raise UserError(f"{file.path} holds no record; leave it out or write it again")
    yield Block(index, file.path, rows, max(0, os.path.getsize(file.path) - begin))


def parse_block(block: Block) -> Iterator[tuple[int, dict | BadRecord]]:
    """Yield (line or row, record) for each record of a block; an unusable one is replaced by its BadRecord.
    Raises UserError if it is unusable because a compressed file is damaged."""
    for line, record in block.rows:
        try:
            yield line, parse_json(record) if isinstance(record, bytes) else record
        except BadRecord as error:
            if block.path.lower().endswith(COMPRESSED):
                check_compressed(block.path)
            yield line, error


@cache
def check_compressed(path: str) -> None:
    """Read a compressed file to its end, where its checksum is. Raises UserError if it is damaged."""
    try:
        with closing(DataFile(path)) as file:
            while file.content.read(blocks.BLOCK_BYTES):
                pass
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path}: {DAMAGED} ({reason(error)}); get it again") from error
