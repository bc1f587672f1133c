"""Finds the files of a `--data_path` and reads them in blocks of records.

Files: JSONL, `.json` with either JSON Lines or one array, CSV, TSV and plain text, each also as .gz or .zst; Parquet,
Arrow and Feather; folders written by `datasets.save_to_disk`. Another kind of file is one more entry of READERS.
Line numbers count from 1; for Parquet and Arrow they are row numbers, from 1.
"""

import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from common.errors import UserError, reason
from dataset import blocks
from dataset.blocks import COMPRESSED, Block, DataFile
from dataset.json_files import read_json, read_json_lines
from dataset.json_records import BadRecord, parse_json
from dataset.table_files import read_arrow, read_csv, read_parquet, read_tsv
from dataset.text_files import read_text

PLAIN_TEXT = ".txt"
# Suffix -> what yields (line or row, record) of such a file, given the line between documents of plain text. A record
# is a dict, a BadRecord, or raw JSON, which the processes that tokenise parse.
READERS: dict[str, Callable[[DataFile, str], Iterator[tuple[int, Any]]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    PLAIN_TEXT: read_text,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
}
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # of data, of `datasets`


def file_kind(path: str | os.PathLike) -> str:
    """The suffix that tells how a file is read, without that of a compression; any other file is JSON Lines."""
    name = os.path.basename(os.fspath(path)).lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return next((suffix for suffix in READERS if name.endswith(suffix)), "")


def how_read(path: str, text_separator: str) -> str:
    """What decides, beside its bytes, which records a file holds; empty for the kinds that tell it themselves."""
    kind = file_kind(path)
    if kind == PLAIN_TEXT:
        return f"{kind} {text_separator.strip()!r} "
    return f"{kind} " if kind in (".csv", ".tsv") else ""


def expand_paths(data_path: str | os.PathLike, plain_text: bool = True) -> list[str]:
    """The files of `data_path`: files, globs and folders (searched recursively), separated by commas.

    The parts keep their order; within a glob or folder the paths are sorted. A file named twice is read once. A path
    that exists as typed is never read as a pattern or a list. Plain text and records are not searched for together: a
    folder that holds both is refused, or without `plain_text` only its records are taken.
    Raises UserError for a missing or empty file, for a pattern or folder without data, and for unwanted plain text.
    """
    typed = os.fspath(data_path)
    parts = [typed] if os.path.exists(typed) else [part.strip() for part in typed.split(",") if part.strip()]
    if not parts:
        raise UserError("--data_path is empty; give a file, a folder or a pattern such as 'data/*.jsonl'")
    files: dict[str, str] = {}
    for part in parts:
        try:
            for path in _expand_one(os.path.expanduser(part), plain_text):
                files.setdefault(os.path.realpath(path), path)
        except OSError as error:
            raise UserError(f"{error.filename or part} cannot be read ({error.strerror}); check --data_path") from error
    for path in files.values():
        _check_is_file(path)
        if file_kind(path) == PLAIN_TEXT and not plain_text:
            raise UserError(f"{path} is plain text, which only pretraining takes; SFT needs conversations")
    return list(files.values())


def _expand_one(part: str, plain_text: bool) -> list[str]:
    if os.path.isdir(part):
        return _choose(part, sorted(map(str, _files_of_folder(Path(part), set()))), plain_text)
    if os.path.lexists(part):
        return [part]
    paths = [path for path in glob.glob(part, recursive=True) if not os.path.isdir(path)]
    if not paths:
        what = "no file matches this pattern" if glob.has_magic(part) else "no such file"
        raise UserError(f"{part}: {what}; check --data_path")
    return sorted(paths)


def _check_is_file(path: str) -> None:
    """Raise UserError for what cannot be read several times, for a link to nothing and for an empty file."""
    if not os.path.exists(path):
        raise UserError(f"{path} is a link to {os.readlink(path)}, which is not there; restore that or remove the link")
    if not os.path.isfile(path):
        raise UserError(f"{path} is a pipe or a device; data are read more than once, so write them to a file first")
    if os.path.getsize(path) == 0:
        raise UserError(f"{path} is an empty file; remove it from --data_path or write it again")


def _choose(folder: str, paths: list[str], plain_text: bool) -> list[str]:
    """The files of a folder to read, so that a README.txt beside the data is not trained in silence."""
    texts = [path for path in paths if file_kind(path) == PLAIN_TEXT]
    records = [path for path in paths if file_kind(path) != PLAIN_TEXT]
    if texts and records and plain_text:
        wanted = os.path.join(folder, "**", f"*{file_kind(records[0])}")
        raise UserError(
            f"{folder} holds both plain text ({texts[0]}) and records ({records[0]}); say which to read with a "
            f"pattern, such as --data_path '{wanted}'"
        )
    if not paths:
        kinds = ", ".join(f"*{suffix}" for suffix in READERS)
        raise UserError(
            f"{folder} is a folder without data; it must hold files named {kinds} (also {' or '.join(COMPRESSED)})"
        )
    return paths if plain_text else records or texts


def _files_of_folder(folder: Path, seen: set[str]) -> list[Path]:
    """The data files below a folder, without hidden ones; those that a saved dataset consists of. `seen`: the folders
    that were read already, to one of which a link may lead again."""
    real = os.path.realpath(folder)
    if real in seen:
        return []
    seen.add(real)
    saved = _files_of_saved_dataset(folder, seen)
    if saved is not None:
        return saved
    files = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            files += _files_of_folder(path, seen)
        elif file_kind(path) and path.name not in DESCRIPTIONS:
            files.append(path)
    return files


def _files_of_saved_dataset(folder: Path, seen: set[str]) -> list[Path] | None:
    """The files of a folder that `datasets.save_to_disk` wrote, of several splits those of `train`; else None."""
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    try:
        if splits.is_file():
            names = json.loads(splits.read_bytes())["splits"]
            if "train" not in names:
                raise UserError(f"{folder} holds the splits {', '.join(names)}; name one of them: {folder / names[0]}")
            return _files_of_folder(folder / "train", seen)
        if not state.is_file() or not list(folder.glob("*.arrow")):
            return None
        content = json.loads(state.read_bytes())
        if content.get("_indices_data_files"):
            raise UserError(f"{folder} holds a selection of rows, not the rows; save it with a newer `datasets`")
        return [folder / entry["filename"] for entry in content["_data_files"]]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            f"{folder}: its {splits.name} or {state.name} is damaged ({reason(error)}); save it again"
        ) from error


def describe_files(paths: Sequence[str]) -> str:
    """Which files are read, in a line."""
    kinds = Counter(file_kind(path) or "other" for path in paths)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    more = f" and {len(paths) - 5:,} more" if len(paths) > 5 else ""
    return f"data: {counts} ({', '.join(paths[:5])}{more})"


def iter_blocks(paths: Sequence[str], text_separator: str = "") -> Iterator[Block]:
    """Read the files one after another as blocks of records. Raises UserError where a file cannot be read.

    text_separator: the line that separates documents in plain text; empty for one document per file.
    """
    for index, path in enumerate(paths):
        try:
            with closing(DataFile(path)) as file:
                yield from _blocks_of_file(index, file, text_separator)
        except OSError as error:
            why = error.strerror or reason(error)
            raise UserError(f"{path} cannot be read ({why}); check the file or remove it from --data_path") from error


def _blocks_of_file(index: int, file: DataFile, text_separator: str) -> Iterator[Block]:
    reader = READERS.get(file_kind(file.path), read_json_lines)
    rows: list[tuple[int, Any]] = []
    line = begin = 0  # the last line; where in the file the block begins
    try:
        for line, record in reader(file, text_separator):
            rows.append((line, record))
            position = file.stored.tell()
            if len(rows) == blocks.BLOCK_ROWS or position - begin >= blocks.BLOCK_BYTES:
                yield Block(index, file.path, rows, max(0, position - begin), file.unread)
                rows, begin = [], position
    except Exception as error:
        if damage := file.damage(error):
            raise UserError(f"{file.path}:{max(1, line)}: {damage}") from error
        raise
    if line == 0:
        raise UserError(f"{file.path} holds no record; remove it from --data_path or write it again")
    yield Block(index, file.path, rows, max(0, os.path.getsize(file.path) - begin), file.unread)


def parse_block(block: Block) -> Iterator[tuple[int, dict | BadRecord]]:
    """Yield (line or row, record) for each record of a block; an unusable one is replaced by its BadRecord."""
    for line, record in block.rows:
        try:
            yield line, parse_json(record) if isinstance(record, bytes) else record
        except BadRecord as error:
            yield line, error
