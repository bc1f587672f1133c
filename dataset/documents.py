"""The text of documents that are not plain text: Word (.docx), e-books (.epub), PDF, web pages and subtitles
(.srt), as a reader sees it, in its order. What is not text (pictures, scripts, notes of the layout) is left
out.

Each reader takes the bytes of a file and raises Unreadable with what is wrong. To support another kind, add
it to DOCUMENTS.
"""

import codecs
import io
import posixpath
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

from common.encodings import not_utf8

MOST_BYTES = 256 << 20  # of a part of an archive, unpacked: more is no text that somebody wrote
WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"  # the same once more
CONTAINER = "META-INF/container.xml"
ENCRYPTION = "META-INF/encryption.xml"
BLOCK = re.compile(
    "address|article|aside|blockquote|body|br|caption|dd|details|div|dl|dt|fieldset|figcaption|figure|footer|"
    "form|h[1-6]|header|hr|li|main|nav|ol|option|p|pre|section|summary|table|tbody|tfoot|thead|title|tr|ul"
)
UNSEEN = re.compile("head|script|style|template|noscript|svg|math|iframe|object|select|textarea")
CHARSET = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
HEAD_BYTES = 4096  # of a web page, in which it names its encoding
TIMES = re.compile(r"\d+:\d\d:\d\d[,.]\d+\s*-->")
MARKUP = re.compile(r"</?[a-zA-Z][^<>]*>|\{\\[^{}]*\}")  # of subtitles
CHINESE = re.compile("[\u3000-\u9fff\uff00-\uffef]")
SENTENCE_END = (".", "!", "?", "。", "！", "？")
# of the longest line of a page: a line that is as long goes on in the next one, also after a sentence's end
FULL_LINE, FULL_LINE_OF_SENTENCE = 0.8, 0.95
PAGE_NUMBER = re.compile(r"\W*(page |seite |第 ?)?\d+( ?页)?\W*", re.IGNORECASE)
MARGIN_LINES = 3  # at each end of a page, at most
REPEATED = 0.5  # share of the pages from which on an outermost line is a header or a footer


class Unreadable(Exception):
    """What is wrong with a document, and what to do."""


def decode(data: bytes) -> str:
    """UTF-8 text, with or without a byte order mark. Raises Unreadable."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(not_utf8(error.object, sample=data[:HEAD_BYTES])) from error


# --- archives


def open_archive(data: bytes, kind: str) -> zipfile.ZipFile:
    """The archive that a document is. Raises Unreadable."""
    if data.startswith(b"\xd0\xcf\x11\xe0"):
        raise Unreadable(
            "it is locked by a password, or in an old format; save it as .docx without a password"
        )
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile as error:
        raise Unreadable(f"it is damaged, or not {kind}; save it again") from error


def read_part(archive: zipfile.ZipFile, name: str) -> bytes:
    """A file in an archive. Raises Unreadable."""
    try:
        info = archive.getinfo(name)
        if info.flag_bits & 1:
            raise Unreadable("it is locked by a password; save it without one")
        with archive.open(info) as file:
            data = file.read(MOST_BYTES + 1)
    except KeyError as error:
        raise Unreadable(f"it has no {name}; save it again") from error
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, ValueError) as error:
        raise Unreadable("it is damaged; save it again") from error
    except Exception as error:  # zlib, lzma: each has an error of its own
        if isinstance(error, Unreadable):
            raise
        raise Unreadable("it is damaged; save it again") from error
    if len(data) > MOST_BYTES:
        raise Unreadable(f"{name} in it has more than {MOST_BYTES >> 20} MB")
    return data


def parse_xml(data: bytes) -> ElementTree.Element:
    """An XML document. Raises Unreadable."""
    try:
        return ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise Unreadable("it is damaged; save it again") from error


# --- Word


def read_docx(data: bytes) -> str:
    """The paragraphs of a Word document, a line each, in tables a cell each."""
    archive = open_archive(data, "a Word document")
    return "\n".join(paragraphs(parse_xml(read_part(archive, "word/document.xml"))))


def paragraphs(root: ElementTree.Element) -> Iterator[str]:
    """The text of each paragraph. A text box is in a paragraph and has paragraphs: they come after it."""
    for child in root:
        if child.tag == f"{WORD}p":
            inner: list[ElementTree.Element] = []
            yield "".join(runs(child, inner))
            for box in inner:
                yield from paragraphs(box)
        elif child.tag != FALLBACK:
            yield from paragraphs(child)


def runs(element: ElementTree.Element, boxes: list[ElementTree.Element]) -> Iterator[str]:
    """The pieces of text of a paragraph; text boxes in it are added to `boxes`."""
    for child in element:
        if child.tag == f"{WORD}t":
            yield child.text or ""
        elif child.tag in (f"{WORD}tab", f"{WORD}ptab"):
            yield "\t"
        elif child.tag in (f"{WORD}br", f"{WORD}cr"):
            yield "\n"
        elif child.tag == f"{WORD}noBreakHyphen":
            yield "-"
        elif child.tag == f"{WORD}txbxContent":
            boxes.append(child)
        elif child.tag not in (FALLBACK, f"{WORD}pPr", f"{WORD}rPr", f"{WORD}moveFrom"):
            yield from runs(child, boxes)


# --- web pages and e-books


class PageText(HTMLParser):
    """The visible text of a web page. Blocks are lines; white space is that of a browser."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = [""]
        self.unseen: list[str] = []  # open elements whose content is not shown
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """Begin an element."""
        if tag == "body":
            self.unseen.clear()  # a head may be left open
        if UNSEEN.fullmatch(tag):
            self.unseen.append(tag)
        self.preformatted += tag == "pre"
        if BLOCK.fullmatch(tag):
            self.break_line()
        elif tag in ("td", "th") and self.lines[-1]:
            self.lines[-1] += "\t"

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        """An element without content, as XHTML writes it."""
        if BLOCK.fullmatch(tag):
            self.break_line()

    def handle_endtag(self, tag: str) -> None:
        """End an element."""
        if tag in self.unseen:
            del self.unseen[self.unseen.index(tag) :]
        if tag == "pre":
            self.preformatted = max(0, self.preformatted - 1)
        if BLOCK.fullmatch(tag):
            self.break_line()

    def handle_data(self, data: str) -> None:
        """Text."""
        if self.unseen:
            return
        if self.preformatted:
            first, *more = data.split("\n")
            self.lines[-1] += first
            self.lines += more
            return
        text = re.sub(r"[ \t\r\n\f]+", " ", data)
        line = self.lines[-1]
        self.lines[-1] += text.lstrip(" ") if not line or line[-1] in " \t" else text

    def break_line(self) -> None:
        """Begin a line, unless the present one is empty."""
        if self.lines[-1].strip():
            self.lines.append("")
        else:
            self.lines[-1] = ""

    def text(self) -> str:
        """The lines."""
        return "\n".join(line.rstrip() for line in self.lines if line.strip())


def page_text(page: str) -> str:
    """The visible text of HTML or XHTML."""
    parser = PageText()
    parser.feed(page)
    parser.close()
    return parser.text()


def read_html(data: bytes) -> str:
    """The visible text of a saved web page."""
    named = CHARSET.search(data[:HEAD_BYTES])
    if named and not data.startswith(codecs.BOM_UTF8):
        try:
            return page_text(data.decode(named[1].decode()))
        except (LookupError, UnicodeDecodeError):
            pass  # it says what it is not
    return page_text(decode(data))


def read_epub(data: bytes) -> str:
    """The chapters of an e-book in their order, with an empty line between them."""
    archive = open_archive(data, "an e-book")
    container = parse_xml(read_part(archive, CONTAINER))
    root = next((element for element in container.iter() if element.tag.endswith("}rootfile")), None)
    if root is None or not root.get("full-path"):
        raise Unreadable("it names no list of its chapters; save it again")
    package_path = root.get("full-path", "")
    package = parse_xml(read_part(archive, package_path))
    paths, order = {}, []
    for element in package.iter():
        if element.tag.endswith("}item"):
            href = unquote(element.get("href", ""))
            paths[element.get("id")] = posixpath.normpath(
                posixpath.join(posixpath.dirname(package_path), href)
            )
        elif element.tag.endswith("}itemref"):
            order.append(element.get("idref"))
    chapters = [paths[name] for name in order if name in paths]
    if ENCRYPTION in archive.namelist():
        locked = {
            unquote(element.get("URI", "")) for element in parse_xml(read_part(archive, ENCRYPTION)).iter()
        }
        if locked & set(chapters):  # else fonts alone
            raise Unreadable("it is locked by its seller (DRM)")
    texts = [page_text(decode(read_part(archive, path))) for path in chapters]
    return "\n\n".join(text for text in texts if text)


# --- subtitles


def read_srt(data: bytes) -> str:
    """What is spoken, a line for each subtitle, without numbers and times."""
    spoken = []
    for block in re.split(r"\n\s*\n", decode(data).replace("\r\n", "\n").replace("\r", "\n")):
        lines = [line.strip() for line in block.strip().split("\n")]
        times = next((i for i, line in enumerate(lines) if TIMES.match(line)), None)
        if times is None and any(lines):
            raise Unreadable("it is not a file of subtitles: it has lines without a time; name it .txt")
        text = [MARKUP.sub("", line).strip() for line in lines[(times or 0) + 1 :]]
        spoken.append(joined([line for line in text if line]))
    return "\n".join(line for line in spoken if line)


# --- PDF


def read_pdf(data: bytes) -> str:
    """The text of the pages, without page numbers, headers and footers. Lines that fill their page are put
    together to paragraphs, so that a sentence may go on after a page's end."""
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError as error:
        raise Unreadable("PDF files need pypdf: pip install pypdf") from error
    import logging

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it tells of each odd object
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("it is locked by a password; save it without one")
        pages = [(page.extract_text() or "").split("\n") for page in reader.pages]
    except Unreadable:
        raise
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        raise Unreadable("it is damaged; save it again") from error
    except RecursionError as error:
        raise Unreadable("it is damaged; save it again") from error
    pages = [[line.rstrip() for line in page if line.strip()] for page in pages]
    if pages and not any(pages):
        raise Unreadable(
            f"its {len(pages)} page(s) are pictures without text; run text recognition (OCR) on it first"
        )
    return "\n".join(to_paragraphs(without_margins(pages)))


def without_margins(pages: list[list[str]]) -> list[list[str]]:
    """The pages without page numbers, and without the headers and footers that most pages have."""
    written = [page for page in pages if page]
    for end in [0, -1] * MARGIN_LINES:
        counts = Counter(without_numbers(page[end]) for page in written if len(page) > 1)
        for page in written:
            is_repeated = counts[without_numbers(page[end])] > max(2, REPEATED * len(written))
            if len(page) > 1 and (PAGE_NUMBER.fullmatch(page[end]) or is_repeated):
                del page[end]
    return written


def without_numbers(line: str) -> str:
    """A line in which all numbers are alike."""
    return re.sub(r"\d+", "#", line.strip())


def to_paragraphs(pages: list[list[str]]) -> Iterator[str]:
    """The lines of the pages, put together where one goes on in the next."""
    open_lines: list[str] = []
    for page in pages:
        longest = max(map(len, page))
        for line in page:
            open_lines.append(line.strip())
            full = FULL_LINE_OF_SENTENCE if line.endswith(SENTENCE_END) else FULL_LINE
            if len(line) < full * longest:
                yield joined(open_lines)
                open_lines = []
    if open_lines:
        yield joined(open_lines)


def joined(lines: list[str]) -> str:
    """Lines as one: with a blank between them, but not between Chinese characters or in a divided word."""
    text = ""
    for line in lines:
        if len(text) > 1 and text[-1] == "-" and text[-2].isalpha() and line[:1].islower():
            text = text[:-1] + line
        elif text and line and not (CHINESE.match(text[-1]) and CHINESE.match(line[0])):
            text += f" {line}"
        else:
            text += line
    return text


DOCUMENTS: dict[str, Callable[[bytes], str]] = {
    ".docx": read_docx,
    ".epub": read_epub,
    ".pdf": read_pdf,
    ".html": read_html,
    ".htm": read_html,
    ".srt": read_srt,
}
