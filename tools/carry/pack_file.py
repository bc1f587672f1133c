"""The file of a pack: a zip archive with a manifest. It is written in one piece or not at all, and read as a
stranger's: nothing in it is executed, and nothing is written outside the folder it is unpacked into."""

import hashlib
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage
from typing import IO, Any

from common.errors import UserError, reason, warn
from common.files import atomic_write, is_file, is_taken, is_there, new_path, open_regular, read_errors
from tools.carry.manifest import MANIFEST, File, Manifest, read_manifest
from trainer.weights.tensor_file import DAMAGED

LARGEST_MANIFEST = 16 << 20  # bytes
CHUNK = 1 << 20
STORED = (".pth", ".safetensors", ".gz", ".zst", ".bz2", ".xz", ".parquet")  # what deflate makes no smaller
DATE = (1980, 1, 1, 0, 0, 0)


def before_path(path: Path) -> Path:
    """The file of the pack that was replaced by the one at `path`."""
    return path.with_name(f"{path.name}.before")


# --- writing


def write_pack(path: Path, manifest: Manifest, sources: dict[str, Path]) -> None:
    """Write a pack of these files by their names, and keep the pack that was there before. The manifest gets
    their sizes and hashes. Raises UserError if a file of the data has changed since it was first packed, or
    if `path` is a folder or a device."""
    if is_taken(path) and not is_file(path):
        raise UserError(f"{path} is not a file; give the file to write, such as run.mmt")

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, source in sources.items():
                written = add_file(archive, name, source)
                if name not in manifest.data:
                    manifest.files[name] = written
                elif written.sha256 != manifest.data[name].sha256:
                    raise UserError(f"{source} has changed since the runs began with it")
            text = manifest.model_dump_json(indent=1)
            read_manifest(text.encode())  # a pack that could not be read again does not replace the old one
            archive.writestr(zipfile.ZipInfo(MANIFEST, DATE), text)

    def keep_before(path: Path) -> None:
        if is_there(path):
            os.replace(path, before_path(path))

    atomic_write(path, write, rotate=keep_before)


def add_file(archive: zipfile.ZipFile, name: str, source: Path) -> File:
    """Add a file to an archive; returns its size and hash."""
    entry = zipfile.ZipInfo(name, DATE)
    entry.compress_type = zipfile.ZIP_STORED if source.suffix in STORED else zipfile.ZIP_DEFLATED
    with open(source, "rb") as file, archive.open(entry, "w", force_zip64=True) as out:
        return copy(file, out)


def copy(source: IO[bytes], target: IO[bytes], limit: int | None = None) -> File:
    """Copy a file, at most up to one byte more than `limit`; returns the size and hash of what was copied."""
    digest, count = hashlib.sha256(), 0
    while limit is None or count <= limit:
        chunk = source.read(CHUNK if limit is None else min(CHUNK, limit + 1 - count))
        if not chunk:
            break
        target.write(chunk)
        digest.update(chunk)
        count += len(chunk)
    return File(bytes=count, sha256=digest.hexdigest())


# --- reading


@contextmanager
def open_pack(path: Path) -> Iterator[tuple[zipfile.ZipFile, Manifest]]:
    """A pack and its manifest, checked. If a kill has left only the pack before it, that one. Raises
    UserError, one line, if it is damaged, or not as a pack must be."""
    place = path
    if not is_there(path) and is_there(before_path(path)):
        place = before_path(path)
        warn(f"{path} is not there; {place}, the pack before it, is used")
    hint = f"; {before_path(place)} is the pack before it" if is_there(before_path(place)) else ""
    try:
        if not is_there(place):
            raise UserError("no such file")
        with read_errors(place), open_regular(place) as file, zipfile.ZipFile(file) as archive:
            manifest = checked_manifest(archive)
            yield archive, manifest
    except UserError as error:
        raise UserError(f"{place}: {error}{hint}") from error
    except (*DAMAGED, struct.error) as error:
        raise UserError(f"{place} is damaged, or no pack ({reason(error)}){hint}") from error


def checked_manifest(archive: zipfile.ZipFile) -> Manifest:
    """The manifest of an archive that holds exactly the files which it lists, all of them plain ones. Raises
    UserError."""
    entries: dict[str, Any] = {}
    for entry in archive.infolist():
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if entry.orig_filename != entry.filename or entry.filename in entries:
            raise UserError(f"{entry.orig_filename!a} is in it twice, or has no plain name")
        if kind not in (0, stat.S_IFREG) or entry.is_dir() or entry.flag_bits & 1:
            raise UserError(f"{entry.filename!a} is not a plain file")
        entries[entry.filename] = entry
    own = entries.pop(MANIFEST, None)
    if own is None or own.file_size > LARGEST_MANIFEST:
        raise UserError(f"it has no {MANIFEST}, or one that is too large")
    with archive.open(own) as file:
        manifest = read_manifest(file.read(LARGEST_MANIFEST + 1))
    declared = manifest.packed()
    if entries.keys() != declared.keys():
        raise UserError(
            f"{min(entries.keys() ^ declared.keys())!a} is in it or in {MANIFEST}, but not in both"
        )
    for name, entry in entries.items():
        if entry.file_size != declared[name].bytes:
            raise UserError(f"{name!a} is not as large as {MANIFEST} says")
    return manifest


def unpack(archive: zipfile.ZipFile, manifest: Manifest, folder: Path) -> None:
    """Unpack into a new folder, which appears complete or not at all. Raises UserError if a file is not what
    the manifest says, the disk is too small, or the folder exists."""
    need = sum(file.bytes for file in manifest.packed().values())
    folder.parent.mkdir(parents=True, exist_ok=True)
    if need > disk_usage(folder.parent).free:
        raise UserError(f"it holds {need / 1e9:.1f} GB, more than is free in {folder.parent}")
    with new_path(folder) as place:
        place.mkdir()
        for name, declared in manifest.packed().items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, open(place / name, "xb") as target:
                if copy(source, target, declared.bytes) != File(bytes=declared.bytes, sha256=declared.sha256):
                    raise UserError(f"{name!a} is not the file that {MANIFEST} lists")
        (place / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
