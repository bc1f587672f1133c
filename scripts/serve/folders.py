"""What lies in --save_dir, found by one scan for trainings, runs, models and uploads."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """A regular file. is_link: whether its name is a link to it."""

    size: int
    mtime: float
    is_link: bool


def scan(save_dir: Path) -> dict[Path, dict[str, Entry]]:
    """The files of a folder and of the folders in it: folder -> name -> file. Hidden folders are left out,
    because they are caches or are still being written."""
    files, folders = look_into(save_dir)
    inside = {save_dir / name: look_into(save_dir / name)[0] for name in folders if not name.startswith(".")}
    return {save_dir: files} | inside


def files_in(folder: Path, links: bool = True) -> dict[str, Entry]:
    """The files of a folder by name. links: whether links to files are included."""
    return {name: file for name, file in look_into(folder)[0].items() if links or not file.is_link}


def look_into(folder: Path) -> tuple[dict[str, Entry], list[str]]:
    """The files of a folder by name and the names of the folders in it, both sorted. An entry that cannot be
    read (a dangling link, a file that is being renamed, an unreadable folder) is left out alone."""
    files: dict[str, Entry] = {}
    folders: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    files[entry.name] = Entry(status.st_size, status.st_mtime, entry.is_symlink())
                elif stat.S_ISDIR(status.st_mode):
                    folders.append(entry.name)
    return dict(sorted(files.items())), sorted(folders)
