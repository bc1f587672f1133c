"""A file of tensors: writing it, in the background, and reading it. Nothing in it is executed."""

import json
import pickle
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from common.files import read_errors

# What zipfile and torch.load raise in `read_errors` for a damaged or foreign file.
DAMAGED: tuple[type[Exception], ...] = (
    *(RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError),
    *(OverflowError, ImportError, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
)


def write_file(value: Any, file: BinaryIO, description: dict[str, Any] | None = None) -> None:
    """`torch.save`, with the description of the model in the zip comment, which `torch.load` ignores."""
    torch.save(value, file)
    if description:
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = json.dumps(description).encode()


def comment_of(path: Path) -> bytes:
    """The comment that `write_file` was given; empty for files of other programs. Raises as `read_file`."""
    with read_errors(path), zipfile.ZipFile(path) as archive:
        return archive.comment


def read_file(path: Path) -> Any:
    """The content of a file of `torch.save`. Its tensors are memory-mapped, so the ranks of a machine share
    the pages. Raises one of DAMAGED if it is damaged or holds code, and ReadError if it cannot be read at the
    moment."""
    with read_errors(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load itself does not check the checksums
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


class Writer:
    """A thread that writes files one after another, so that training does not wait for a disk. The data of a
    job must not change any more. After a failure nothing more is written, so the files on the disk stay those
    of the last complete save."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self.last: Future = self.thread.submit(lambda: None)

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job. It is skipped if an earlier job fails; `check` and `wait` raise that failure."""
        previous = self.last

        def job_after_previous() -> None:
            previous.result()  # raises the failure of the job before
            job()

        self.last = self.thread.submit(job_after_previous)

    def check(self) -> None:
        """Raise the failure of a job; does not wait."""
        if self.last.done():
            self.last.result()

    def wait(self) -> None:
        """Wait until everything is on the disk; raises the failure of a job."""
        self.last.result()
