"""Files that survive a kill or a power cut, and locks between processes.

A file is written beside its place, flushed to the disk and renamed: a reader finds the old file or the new
one, never a half-written one. Locks are record locks (POSIX fcntl): they end with their process, however it
ends, and its children do not inherit them.
"""

import errno
import fcntl
import itertools
import json
import os
import shutil
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from common.errors import ReadError, UserError, WriteError, reason, say
from common.launcher import launch

_held: list[TextIO] = []  # lock files of this process, open until it ends


# --- writing


def atomic_write(
    path: Path, write: Callable[[BinaryIO], Any], rotate: Callable[[Path], None] | None = None
) -> None:
    """Replace `path` by what `write(file)` writes; on failure the old file stays. `rotate(path)` may rename
    the old file first. Raises WriteError if the disk is full, the folder is not writable, and so on."""
    with _temporary(path) as temp:
        with open(temp, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if rotate is not None:
            rotate(path)
        os.replace(temp, path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file. In ASCII: file names may hold bytes that are not UTF-8."""
    text = json.dumps(content, indent=1, default=str) + "\n"
    atomic_write(path, lambda file: file.write(text.encode()))


def json_lines(records: Iterable[dict[str, Any]]) -> bytes:
    """Records as JSON Lines in UTF-8. Half of a character (a lone surrogate) becomes a question mark."""
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return "".join(lines).encode(errors="replace")


@contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """A temporary path for writing a new file or folder. When the block ends, the result appears at `path`,
    complete and flushed; after an error nothing appears. The temporary path has the same name, in a temporary
    folder beside `path`. Raises UserError if `path` exists already, the disk is full, the folder is not
    writable, and so on."""
    if is_taken(path):
        raise UserError(f"{path} already exists; remove it, or give another name")
    with _temporary(path) as temp:
        temp.mkdir()
        yield temp / path.name
        for written in temp.rglob("*"):
            sync(written)
        os.replace(temp / path.name, path)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, which the block renames. Raises WriteError."""
    # always the same name, so that what a kill leaves behind is replaced
    temp = path.with_name(f".{path.name}.tmp")
    try:
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove(temp)  # it may be another user's file, which cannot be written but can be deleted
            yield temp
            sync(path.parent)  # the rename itself must survive a power cut
    finally:
        with suppress(OSError):  # a read-only folder: nothing was written
            remove(temp)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a WriteError, also one that torch.save wraps in a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise WriteError(
            f"{path} cannot be written ({cause.strerror or cause}); what was there is untouched; make room "
            "or give another folder"
        ) from error


# --- reading


def status(path: str | os.PathLike, follow_symlinks: bool = True) -> os.stat_result | None:
    """The stat result of a file or folder; None if it does not exist. `Path.exists` and similar methods also
    return False after a disk or network error; a run would then start over although its checkpoint exists.

    Raises ReadError if the system cannot tell."""
    with read_errors(Path(path)):
        try:
            return os.stat(path, follow_symlinks=follow_symlinks)
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: NUL, which no name has
            return None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # no file has such a name, but a list of files may
                raise
            return None


def is_there(path: str | os.PathLike) -> bool:
    """Whether a file or folder exists. Like the next four functions, it raises ReadError if the system cannot
    tell."""
    return status(path) is not None


def is_taken(path: str | os.PathLike) -> bool:
    """Whether anything has this name, including a dangling link."""
    return status(path, follow_symlinks=False) is not None


def free_path(path: Path, longest: int = 255, may_replace: Callable[[Path], bool] = lambda _: False) -> Path:
    """The path, or if its name is taken, the first free one with a number: run, run_2, run_3.

    longest: characters of a name without its ending. may_replace: whether a taken one may be used.
    """
    ends = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    names = (f"{path.stem[: longest - len(end)].strip()}{end}{path.suffix}" for end in ends)
    found = (path.with_name(name) for name in names)
    return next(each for each in found if not is_taken(each) or may_replace(each))


def is_file(path: str | os.PathLike) -> bool:
    """Whether it exists and is a file."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: str | os.PathLike) -> bool:
    """Whether it exists and is a folder."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def files_in(folder: str | os.PathLike, pattern: str = "*") -> list[Path]:
    """The paths in a folder whose names match a pattern, sorted; empty if the folder does not exist.
    (`Path.glob` also returns nothing if the folder cannot be read.)"""
    with read_errors(Path(folder)):
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            names = []
    return [Path(folder) / name for name in sorted(names) if fnmatchcase(name, pattern)]


MACHINE_ERRORS = [
    errno.EIO,
    errno.ESTALE,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EACCES,
    errno.EPERM,
]


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn an error of the machine in the block (input/output, permission, memory, descriptors) into a
    ReadError. Errors in the content of a file pass unchanged, but an OSError among them becomes a ValueError.
    So no OSError leaves the block."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if not is_machine_error(error):
            if isinstance(error, OSError):
                raise ValueError(reason(error)) from error
            raise
        why = getattr(error, "strerror", None) or reason(error)
        raise ReadError(
            f"{path} cannot be read at present ({why}); nothing was changed: see to it, then give the same "
            "command again"
        ) from error


def is_machine_error(error: BaseException) -> bool:
    """Whether an error means that the machine could not read the file, rather than that its content is wrong.
    For torch's RuntimeErrors this is decided by the text, which contains the system's message."""
    if isinstance(error, OSError):  # EINVAL: zipfile, at an offset that a damaged file gives
        return error.errno not in (None, errno.EINVAL)
    texts = [os.strerror(number) for number in MACHINE_ERRORS]
    texts += ["allocate memory", "unable to mmap", "unable to open file", "failed because of errno"]
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def open_regular(path: Path, mode: str = "rb", links: bool = True) -> BinaryIO:
    """Open a file in a folder that may contain anything. Only a regular file is opened; a pipe is refused
    instead of blocking. links: whether the file and its folder may be links. Raises OSError."""
    folder = None if links else os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def opener(name: str, flags: int) -> int:
        flags |= os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
        return os.open(name, flags, 0o666, dir_fd=folder)

    try:
        # beside an open folder the name alone: nobody can exchange the folder meanwhile
        file = open(path if links else path.name, mode, opener=opener)  # noqa: SIM115 (the caller closes it)
    finally:
        if folder is not None:
            os.close(folder)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file  # type: ignore[return-value]


def read_object(path: Path, links: bool = True) -> dict[str, Any]:
    """The object in a JSON file; an empty one if the file does not exist, cannot be read or contains anything
    else. links: as in `open_regular`."""
    try:
        with open_regular(path, links=links) as file:
            content = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# --- changing names


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(source: str | Path, name: str | Path) -> None:
    """Give a file a second name (a hard link), or copy it where the file system has no links. Raises
    WriteError if neither works."""
    try:
        os.link(source, name)
    except OSError:
        with open(source, "rb") as file:
            atomic_write(Path(name), lambda copy: shutil.copyfileobj(file, copy))


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, so that a rename or a new file survives a power cut. Some
    file systems (network shares, FUSE) do that by themselves and refuse to flush a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


# --- locks


@contextmanager
def locked(path: Path, message: str) -> Iterator[None]:
    """Hold a lock file, for example while several ranks want the same cache. If another process holds it,
    print `message` and wait."""
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks, or a folder that cannot be written
            file = stack.enter_context(open(path, "a+", encoding="utf-8"))
            if _is_locked(file) and launch().local_rank == 0:
                say(message)
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def lock_output(run_name: str, **folders: str) -> None:
    """Reserve a run's name in its output folders until this process ends (rank 0 only). `folders` maps flags
    to folders.

    This keeps a second run from writing the same files, and finds unwritable folders before any work is done.
    Raises UserError if another run holds the name, or a folder cannot be written."""
    if launch().rank != 0:
        return
    for flag, folder in folders.items():
        path = output_lock(run_name, folder, flag)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
            _held.append(file)
            if _is_locked(file):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise UserError(
                    f"{holder} is training a run of this name and writes to {folder}; wait for it, stop it, "
                    "or choose another --save_weight"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"--{flag} {folder} cannot be written ({why}); give another folder") from error


def output_lock(run: str, folder: str | Path, flag: str = "save_dir") -> Path:
    """The lock file of a run's name in one of its output folders; `flag` is the folder's flag."""
    return Path(folder) / f".{run}_{flag}.lock"


def is_running(run: str, save_dir: str | Path) -> bool | None:
    """Whether a process holds a run's name in --save_dir (`lock_output`); a killed run does not. None if it
    is unknown, because the run took no lock or the file system has no locks."""
    # C's struct flock: on macOS the type stands behind start, length and process
    layout, kind = ("hhqqi", 0) if sys.platform == "linux" else ("qqihh", 3)
    asked = [0] * 5
    asked[kind] = fcntl.F_WRLCK
    try:
        with open_regular(output_lock(run, save_dir)) as file:
            # F_GETLK asks without locking: a run that starts this moment finds its name free
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(layout, *asked))
    except OSError:
        return None
    return struct.unpack(layout, answer)[kind] != fcntl.F_UNLCK


def _is_locked(file: TextIO) -> bool:
    """Lock a file, unless another process has the lock, or the file system has none."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False
