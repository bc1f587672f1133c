"""Finds the files of a `--data_path` and reads them in blocks, which workers parse independently.

Files: JSONL, `.json` with either JSON Lines or one array, CSV, TSV and plain text, each also as .gz or .zst; Parquet,
Arrow and Feather; folders written by `datasets.save_to_disk`.
Line numbers count from 1; for Parquet and Arrow they are row numbers, from 1.
"""

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import UserError, reason
from dataset.blocks import COMPRESSED, Block
from dataset.json_files import array_blocks, line_blocks, line_records, starts_an_array
from dataset.json_records import BOM, BadRecord, not_an_object
from dataset.table_files import arrow_blocks, csv_blocks, parquet_blocks
from dataset.text_files import text_blocks, text_records

PLAIN_TEXT = ".txt"
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", PLAIN_TEXT)
TABLES = (".parquet", ".arrow", ".feather")
DATA = f"*{', *'.join(SUFFIXES)} (also {' or '.join(COMPRESSED)}), *{', *'.join(TABLES)}"
RECURSIVE = re.compile(r"(?<![^/])\*\*(?:/|$)")  # the ** of a pattern
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # of data, of `datasets`


def file_kind(path: str | os.PathLike) -> str:
    """The suffix that tells how a file is read, without that of a compression; any other file is JSON Lines."""
    name = os.path.basename(os.fspath(path)).lower()
    if name.endswith(TABLES):
        return name[name.rindex(".") :]
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def how_read(path: str, text_separator: str) -> str:
    """What decides, beside its bytes, which records a file holds; empty for the kinds that tell it themselves."""
    kind = file_kind(path)
    if kind == PLAIN_TEXT:
        return f"{kind} {text_separator.strip()!r} "
    return f"{kind} " if kind in (".csv", ".tsv") else ""


def expand_paths(data_path: str | os.PathLike | Sequence[str], plain_text: bool = True) -> list[str]:
    """The files of `data_path`: files, globs and folders (searched recursively), separated by commas.

    The parts keep their order; within a glob or folder the paths are sorted. A file named twice is read once. A path
    that exists as typed is never read as a pattern or a list. Plain text and records are not searched for together: a
    folder that holds both is refused, or without `plain_text` only its records are taken.
    Raises UserError for a missing or empty file, for a pattern or folder without data, and for unwanted plain text.
    """
    if isinstance(data_path, (str, os.PathLike)):
        typed = os.fspath(data_path)
        parts = [typed] if os.path.exists(typed) else [part.strip() for part in typed.split(",") if part.strip()]
    else:
        parts = [os.fspath(part) for part in data_path]
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
        if os.path.getsize(path) == 0:
            raise UserError(f"{path} is an empty file; remove it from --data_path or write it again")
        if file_kind(path) == PLAIN_TEXT and not plain_text:
            raise UserError(f"{path} is plain text, which only pretraining takes; SFT needs conversations")
    return list(files.values())


def _expand_one(part: str, plain_text: bool) -> list[str]:
    if os.path.isdir(part):
        return _choose(part, sorted(map(str, _files_of_folder(Path(part), _above(part)))), plain_text)
    if os.path.lexists(part):
        return [part]
    paths = [path for path in _matches(part) if not os.path.isdir(path)]
    if not paths:
        what = "no file matches this pattern" if glob.has_magic(part) else "no such file"
        raise UserError(f"{part}: {what}; check --data_path")
    return sorted(paths)


def _matches(pattern: str) -> Iterator[str]:
    """What `glob.glob` finds; but it would follow a link to a folder above it dozens of times, two of them for ever."""
    start, *rest = RECURSIVE.split(pattern, maxsplit=1)
    if not rest:
        yield from glob.glob(pattern)
        return
    for top in glob.glob(start or "./"):
        for folder in _folders_below(Path(top), _above(top)):
            yield from _matches(os.path.join("" if folder == Path() else glob.escape(str(folder)), rest[0] or "*"))


def _above(folder: str | Path) -> set[str]:
    """The folders that hold this one: a link to one of them is not followed."""
    return set(map(str, Path(os.path.realpath(folder)).parents))


def _folders_below(folder: Path, seen: set[str]) -> Iterator[Path]:
    """A folder and those below it, each once, without hidden ones; also those that are linked."""
    if folder.is_dir() and (real := os.path.realpath(folder)) not in seen:
        seen.add(real)
        yield folder
        for path in sorted(folder.iterdir()):
            if not path.name.startswith("."):
                yield from _folders_below(path, seen)


def _check_is_file(path: str) -> None:
    """Raise UserError for what cannot be read several times, and for a link to nothing."""
    if not os.path.exists(path):
        raise UserError(f"{path} is a link to {os.readlink(path)}, which is not there; restore that or remove the link")
    if not os.path.isfile(path):
        raise UserError(f"{path} is a pipe or a device; data are read more than once, so write them to a file first")


def _choose(folder: str, found: list[str], plain_text: bool) -> list[str]:
    """The files of a folder to read, so that a README.txt beside the data is not trained in silence."""
    texts = [path for path in found if file_kind(path) == PLAIN_TEXT]
    records = [path for path in found if file_kind(path) != PLAIN_TEXT]
    if texts and records and plain_text:
        wanted = os.path.join(folder, "**", f"*{file_kind(records[0])}")
        raise UserError(
            f"{folder} holds both plain text ({texts[0]}) and records ({records[0]}); say which to read with a "
            f"pattern, such as --data_path '{wanted}'"
        )
    if not found:
        raise UserError(f"{folder} is a folder without data; it must hold files named {DATA}")
    return found if plain_text else records or texts


def _files_of_folder(folder: Path, seen: set[str]) -> list[Path]:
    """The data files below a folder, without hidden ones; those that a saved dataset consists of. `seen`: the folders
    that were read already, of which links may lead to one again."""
    real = os.path.realpath(folder)
    if real in seen:
        return []
    seen.add(real)
    saved = _files_of_saved_dataset(folder)
    if saved is not None:
        return saved
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            found += _files_of_folder(path, seen)
        elif file_kind(path) and path.name not in DESCRIPTIONS:
            found.append(path)
    return found


def _files_of_saved_dataset(folder: Path) -> list[Path] | None:
    """The files of a folder that `datasets.save_to_disk` wrote, of several splits those of `train`; else None."""
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    try:
        if splits.is_file():
            names = json.loads(splits.read_bytes())["splits"]
            if "train" not in names:
                raise UserError(f"{folder} holds the splits {', '.join(names)}; name one of them: {folder / names[0]}")
            return _files_of_folder(folder / "train", _above(folder / "train"))
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
    """Read the files one after another as blocks of raw records. Raises UserError where a file cannot be read.

    text_separator: the line that separates documents in plain text; empty for one document per file.
    """
    for index, path in enumerate(paths):
        try:
            yield from _blocks_of_file(index, path, text_separator)
        except OSError as error:
            why = error.strerror or reason(error)
            raise UserError(f"{path} cannot be read ({why}); check the file or remove it from --data_path") from error


def _blocks_of_file(index: int, path: str, text_separator: str) -> Iterator[Block]:
    kind = file_kind(path)
    if kind == ".parquet":
        found = parquet_blocks(index, path)
    elif kind in TABLES:
        found = arrow_blocks(index, path)
    elif kind in (".csv", ".tsv"):
        found = csv_blocks(index, path, delimiter="," if kind == ".csv" else "\t")
    elif kind == PLAIN_TEXT:
        found = text_blocks(index, path, text_separator)
    elif kind == ".json" and starts_an_array(path):
        found = array_blocks(index, path)
    else:
        found = line_blocks(index, path)
    empty = True
    for block in found:
        empty = empty and not (block.data.replace(BOM, b"").strip() if isinstance(block.data, bytes) else block.data)
        yield block
    if empty:
        raise UserError(f"{path} holds no record; remove it from --data_path or write it again")


def parse_block(block: Block) -> Iterator[tuple[int, dict | BadRecord]]:
    """Yield (line or row, record) for each record of a block; an unusable one is replaced by its BadRecord."""
    if isinstance(block.data, bytes):
        yield from line_records(block) if block.separator is None else text_records(block)
        return
    for line, record in block.data:
        usable = isinstance(record, (dict, BadRecord))
        yield line, record if usable else BadRecord(not_an_object(record))
