"""Recognises a file by its first bytes, so that a pointer, a web page or a workbook is not read as something
else."""

import codecs
import re
import zipfile
from pathlib import Path

from common.encodings import MANY_ZEROS, is_utf8
from common.errors import UserError
from common.files import read_errors

HEAD = 1 << 13  # bytes that are looked at
# What a file begins with -> what it is, and what to do.
BEGINNINGS = {
    b"version https://git-lfs": ("a Git LFS pointer, not the file itself", "fetch that with `git lfs pull`"),
    b"/annex/objects/": ("a git-annex pointer, not the file itself", "fetch that with `git annex get`"),
    b"%PDF-": ("a PDF document", "name it FILE.pdf"),
    b"{\\rtf": ("a rich text document", "save it as plain text, UTF-8"),
    b"\xd0\xcf\x11\xe0": ("an old Office document", "save a table as CSV, UTF-8, and a text as plain text"),
    b"\x93NUMPY": ("a NumPy array", "give the text that it was made of"),
    b"SQLite format 3\0": ("an SQLite database", "export the table as CSV"),
    b"Rar!": ("a RAR archive", "unpack it"),
    b"7z\xbc\xaf": ("a 7z archive", "unpack it"),
}
WEB_PAGE = re.compile(
    rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?<(!doctype html|html)\b", re.IGNORECASE | re.DOTALL
)
# A name inside a zip archive -> what it is, and what to do.
ZIPPED = {
    "META-INF/container.xml": ("an e-book", "name it FILE.epub"),
    "xl/": ("an Excel workbook", "save it as CSV, UTF-8"),
    "word/": ("a Word document", "name it FILE.docx"),
    "ppt/": ("a PowerPoint document", "save its text as plain text, UTF-8"),
    "content.xml": ("an OpenDocument file", "save a table as CSV, UTF-8, and a text as plain text"),
    "data.pkl": ("a file of PyTorch, such as weights", "give the text or records to train on"),
}


def check_content(path: str | Path) -> None:
    """Raise UserError if a file named like weights or a tokenizer is in fact a pointer or a web page. Raise
    ReadError if it cannot be read at present."""
    with read_errors(Path(path)), open(path, "rb") as file:
        head = file.read(HEAD)
    found = describe(path, head) if is_pointer(head) or WEB_PAGE.match(head) else None
    if found:
        raise UserError(foreign(path, found))


def is_pointer(head: bytes) -> bool:
    """Whether a file with these first bytes only says where the file itself is."""
    return head.startswith((b"version https://git-lfs", b"/annex/objects/"))


def foreign(path: str | Path, found: tuple[str, str]) -> str:
    """The message for a file that is something else."""
    return f"{path} is {found[0]}; {found[1]}"


def describe(path: str | Path, head: bytes) -> tuple[str, str] | None:
    """What a file with these first bytes is and what to do about it; None if it may hold data."""
    for beginning, found in BEGINNINGS.items():
        if head.startswith(beginning):
            return found
    if WEB_PAGE.match(head.removeprefix(codecs.BOM_UTF8)):
        return "a saved web page (HTML), perhaps the error page of a download", "fetch the file itself"
    if head[257:262] == b"ustar":
        return "a tar archive", "unpack it"
    if head.startswith(b"PK\x03\x04"):
        return describe_zip(path)
    return None


def describe_zip(path: str | Path) -> tuple[str, str]:
    """What a zip archive is."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        names = []
    for part, found in ZIPPED.items():
        if any(f"/{name}".endswith(f"/{part}") or name.startswith(part) for name in names):
            return found
    return "a zip archive", "unpack it"


def is_binary(head: bytes) -> bool:
    """Whether the first bytes of a file are binary, not text: they contain zeros and are not UTF-8, or
    contain very many zeros."""
    return 0 in head and (not is_utf8(head) or head.count(0) > MANY_ZEROS * len(head))
