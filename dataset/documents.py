"""The text of documents that are not plain text: Word (.docx), e-books (.epub), PDF, web pages and subtitles
(.srt, .vtt), as a reader sees it, in its order. What is not text (pictures, scripts, notes of the layout) is
left out.

Each reader takes the bytes of a file and raises Unreadable with what is wrong. To support another kind, add
it to DOCUMENTS.
"""

import codecs
import html
import io
import itertools
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

from common.encodings import not_utf8, wide_encoding
from dataset.pages import SEEN, as_read, joined, spans, to_paragraphs, without_margins

MOST_BYTES = 256 << 20  # of an unpacked part of an archive; no author writes more
WORD_TEXT = "word/document.xml"
RELATIONS = "_rels/.rels"  # names the text of a Word document that is elsewhere
NOTES = ("footnotes.xml", "endnotes.xml")  # beside the text
# in a paragraph: its settings, what was moved elsewhere, and the same once more for old programs
NOT_IN_PARAGRAPH = ("pPr", "rPr", "moveFrom", "Fallback", "rt")  # rt: how to pronounce it
CONTAINER = "META-INF/container.xml"
ENCRYPTION = "META-INF/encryption.xml"
BLOCK = re.compile(
    "address|article|aside|blockquote|body|br|caption|center|dd|details|dialog|dir|div|dl|dt|fieldset|"
    "figcaption|figure|footer|form|h[1-6]|header|hgroup|hr|legend|li|main|menu|nav|ol|option|p|pre|search|"
    "section|summary|table|tbody|tfoot|thead|tr|ul"
)
UNSEEN = re.compile("title|script|style|template|noscript|svg|annotation|iframe|object|select|textarea|rt|rp")
RUBY = ("rb", "rt", "rp")  # text, its pronunciation and brackets around it; they may have no end
# elements that have no end, or may have none
MAY_NOT_END = re.compile(
    "area|base|br|col|dd|dt|embed|hr|img|input|li|link|meta|option|p|source|tbody|td|tfoot|th|thead|tr|track|wbr"
)
HIDDEN_STYLE = re.compile(r"(display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
PAGE_BREAK = re.compile(r"(.*\s)?(pagebreak|doc-pagebreak|page-?(num|no|number))(\s.*)?", re.IGNORECASE)
PAGE_MARK = re.compile(r"\W*((p|pg|page|s|seite)\b\.?)?\s*[\divxlc]*\W*", re.IGNORECASE)
CHARSET = re.compile(rb"""(?:<meta[^>]+charset|<\?xml[^>]+encoding)\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
# Encodings that a page names (as Python calls them) -> larger ones, which browsers read instead
AS_BROWSERS = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "gb2312": "gb18030", "gbk": "gb18030",
    "shift_jis": "cp932", "euc_kr": "cp949", "utf-16": "utf-8",
}  # fmt: skip
HEAD_BYTES = 4096  # of a web page, in which it names its encoding
TIMES = re.compile(r"(\d+:)?\d\d:\d\d[,.]\d+\s*-->")
MARKUP = re.compile(r"</?[a-zA-Z\d][^<>]*>|\{\\[^{}]*\}")  # of subtitles; in .vtt also times
WEBVTT = "WEBVTT"  # what .vtt begins with
SUBTITLES = re.compile(rf"\ufeff?\s*({WEBVTT}\b|\d+\s*\n{TIMES.pattern})")
MOST_WITHOUT_TEXT = 0.5  # share of the pages; more are those of a scan


class Unreadable(Exception):
    """What is wrong with a document, and what to do."""


class PartialText(str):
    """The text of a document of which some pages have none, such as scanned ones. without_text: these pages
    ("2, 5-7"). pages: how many the document has."""

    without_text, pages = "", 0


def decode(data: bytes) -> str:
    """Text in UTF-8, UTF-16 or UTF-32. Raises Unreadable."""
    try:
        return data.decode(wide_encoding(data[:HEAD_BYTES]) or "utf-8-sig")
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
    except Unreadable:
        raise
    except KeyError as error:
        raise Unreadable(f"it has no {name}; save it again") from error
    except Exception as error:  # zipfile, zlib and lzma each have errors of their own
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


def local_name(element: ElementTree.Element) -> str:
    """The name of an element without its namespace, of which each format has several."""
    return element.tag.rpartition("}")[2]


# --- Word


def read_docx(data: bytes) -> str:
    """The paragraphs of a Word document, a line each, in tables a cell each; then its notes."""
    archive = open_archive(data, "a Word document")
    names, path = archive.namelist(), WORD_TEXT
    if path not in names and RELATIONS in names:
        for relation in parse_xml(read_part(archive, RELATIONS)):
            if relation.get("Type", "").endswith("/officeDocument"):
                path = relation.get("Target", "").lstrip("/")
    notes = (posixpath.join(posixpath.dirname(path), name) for name in NOTES)
    parts = [path, *(name for name in notes if name in names)]
    lines = (line for part in parts for line in paragraphs(parse_xml(read_part(archive, part))))
    return "\n".join(lines).translate(SEEN)


def paragraphs(root: ElementTree.Element) -> Iterator[str]:
    """The text of each paragraph. A text box is in a paragraph and has paragraphs: they come after it. A
    large first letter is a paragraph of its own; it belongs to the next one."""
    initial = ""
    for child in root:
        name = local_name(child)
        if name == "p":
            inner: list[ElementTree.Element] = []
            text = initial + "".join(runs(child, inner))
            initial = text if has_setting(child, "framePr", "dropCap") else ""
            if not initial:
                yield text
            for box in inner:
                yield from paragraphs(box)
        elif name != "Fallback":
            yield from paragraphs(child)
    if initial:
        yield initial


def runs(element: ElementTree.Element, boxes: list[ElementTree.Element]) -> Iterator[str]:
    """The pieces of text of a paragraph; text boxes in it are added to `boxes`."""
    for child in element:
        name = local_name(child)
        if name == "t":
            yield child.text or ""
        elif name in ("tab", "ptab"):
            yield "\t"
        elif name in ("br", "cr"):
            yield "\n"
        elif name == "noBreakHyphen":
            yield "-"
        elif name == "txbxContent":
            boxes.append(child)
        elif name not in NOT_IN_PARAGRAPH and not has_setting(child, "vanish"):  # hidden text
            yield from runs(child, boxes)


def has_setting(element: ElementTree.Element, name: str, attribute: str = "val") -> bool:
    """Whether a paragraph or run has this setting and does not turn it off."""
    for settings in element:
        if local_name(settings) in ("pPr", "rPr"):
            for setting in settings:
                if local_name(setting) == name:
                    values = [value for key, value in setting.items() if key.endswith(f"}}{attribute}")]
                    return values[0] not in ("0", "false", "off", "none") if values else attribute == "val"
    return False


# --- web pages and e-books


class PageText(HTMLParser):
    """The visible text of a web page. Blocks are lines; white space is that of a browser."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self.pieces: list[str] = []  # of the present line
        self.unseen: list[str] = []  # open elements whose content is not shown
        # open elements for the number of a printed page, with the lines and pieces before them
        self.page_breaks: list[tuple[str, int, int]] = []
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """Begin an element."""
        if tag == "body":
            self.unseen.clear()  # what the head left open
        if tag in RUBY:
            self.end_ruby()
        if UNSEEN.fullmatch(tag) or is_hidden(tag, dict(attrs)):
            self.unseen.append(tag)
        self.preformatted += tag == "pre"
        if BLOCK.fullmatch(tag):
            self.break_line()
        elif tag in ("td", "th") and self.pieces:
            self.pieces.append("\t")
        if any(
            PAGE_BREAK.fullmatch(value or "")
            for name, value in attrs
            if name in ("epub:type", "role", "class")
        ):
            self.page_breaks.append((tag, len(self.lines), len(self.pieces)))

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        """An element without content, as XHTML writes it."""
        if BLOCK.fullmatch(tag):
            self.break_line()

    def handle_endtag(self, tag: str) -> None:
        """End an element."""
        if tag == "ruby":
            self.end_ruby()
        if self.page_breaks and self.page_breaks[-1][0] == tag:
            _, lines, pieces = self.page_breaks.pop()
            if lines == len(self.lines) and PAGE_MARK.fullmatch("".join(self.pieces[pieces:])):
                del self.pieces[pieces:]
        if tag in self.unseen:
            del self.unseen[self.unseen.index(tag) :]
        if tag == "pre":
            self.preformatted = max(0, self.preformatted - 1)
        if BLOCK.fullmatch(tag):
            self.break_line()

    def end_ruby(self) -> None:
        """End the pronunciation of a word."""
        while self.unseen and self.unseen[-1] in RUBY:
            self.unseen.pop()

    def unknown_decl(self, data: str) -> None:
        """Text of XHTML in which signs need no entities."""
        if data.startswith("CDATA["):
            self.handle_data(data.removeprefix("CDATA["))

    def handle_data(self, data: str) -> None:
        """Text."""
        if self.unseen:
            return
        if self.preformatted:
            first, *more = data.split("\n")
            self.pieces.append(first)
            for line in more:
                self.break_line()
                self.pieces.append(line)
            return
        text = re.sub(r"[ \t\r\n\f]+", " ", data)
        if not self.pieces or self.pieces[-1].endswith((" ", "\t")):
            text = text.lstrip(" ")
        if text:
            self.pieces.append(text)

    def break_line(self) -> None:
        """Begin a line."""
        self.lines.append("".join(self.pieces).rstrip())
        self.pieces = []

    def text(self) -> str:
        """The lines that are not empty."""
        self.break_line()
        return "\n".join(line for line in self.lines if line.strip())


def is_hidden(tag: str, attributes: dict[str, str | None]) -> bool:
    """Whether an element is not shown. Elements that may have no end are taken as shown, so that no text
    after them is lost."""
    if MAY_NOT_END.fullmatch(tag):
        return False
    return "hidden" in attributes or bool(HIDDEN_STYLE.search(attributes.get("style") or ""))


def page_text(page: str) -> str:
    """The visible text of HTML or XHTML."""
    parser = PageText()
    parser.feed(page)
    parser.close()
    return parser.text().translate(SEEN)


def read_html(data: bytes) -> str:
    """The visible text of a saved web page, in the encoding that it names."""
    named = CHARSET.search(data[:HEAD_BYTES])
    if named and not data.startswith(codecs.BOM_UTF8):
        try:
            encoding = codecs.lookup(named[1].decode()).name
            return page_text(data.decode(AS_BROWSERS.get(encoding, encoding)))
        except (LookupError, ValueError):
            pass  # it says what it is not
    return page_text(decode(data))


def read_epub(data: bytes) -> str:
    """The chapters of an e-book in their order, with an empty line between them."""
    archive = open_archive(data, "an e-book")
    container = parse_xml(read_part(archive, CONTAINER))
    root = next((element for element in container.iter() if local_name(element) == "rootfile"), None)
    if root is None or not root.get("full-path"):
        raise Unreadable("it names no list of its chapters; save it again")
    package_path = root.get("full-path", "")
    package = parse_xml(read_part(archive, package_path))
    paths, order = {}, []
    for element in package.iter():
        if local_name(element) == "item":
            if element.get("media-type", "").startswith("image/"):
                continue
            href = unquote(element.get("href", ""))
            paths[element.get("id")] = posixpath.normpath(
                posixpath.join(posixpath.dirname(package_path), href)
            )
        elif local_name(element) == "itemref":
            order.append(element.get("idref"))
    chapters = [paths[name] for name in order if name in paths]
    if ENCRYPTION in archive.namelist():
        locked = {
            unquote(element.get("URI", "")) for element in parse_xml(read_part(archive, ENCRYPTION)).iter()
        }
        if locked & set(chapters):  # else fonts alone
            raise Unreadable("it is locked by its seller (DRM)")
    texts = [read_html(read_part(archive, path)) for path in chapters]
    return "\n\n".join(text for text in texts if text)


# --- subtitles


def read_srt(data: bytes) -> str:
    """What is spoken, a line for each subtitle, without numbers and times."""
    lines = [line.strip() for line in re.split(r"\r\n?|\n", decode(data))]
    if lines[0].startswith(WEBVTT):
        return "\n".join(spoken_in_vtt(lines))
    times = [i for i, line in enumerate(lines) if TIMES.match(line)]
    head = [line for line in lines[: times[0] if times else len(lines)] if line]
    if not all(line.isdigit() for line in head) or (head and not times):
        raise Unreadable("it is not a file of subtitles: it begins with lines without a time; name it .txt")
    spoken = []
    for begin, end in zip(times, [*times[1:], len(lines)], strict=True):
        block = lines[begin + 1 : end]
        if head and block and block[-1].isdigit() and end < len(lines):  # number of the next one
            block.pop()
        text = [MARKUP.sub("", line).strip() for line in block]
        spoken.append(joined([line for line in text if line]))
    return "\n".join(line for line in spoken if line)


def spoken_in_vtt(lines: list[str]) -> Iterator[str]:
    """The subtitles of a .vtt file. Notes, styles and names of subtitles are left out. Subtitles that roll
    repeat the line before, which is read once."""
    before = ""
    for is_end, block in itertools.groupby(lines, key=lambda line: not line):
        block = list(block)
        times = [i for i, line in enumerate(block) if TIMES.match(line)]
        if is_end or not times:
            continue
        texts = [html.unescape(MARKUP.sub("", line)).strip() for line in block[times[0] + 1 :]]
        said = [text for text in texts if text]
        if new := said[said.index(before) + 1 if before in said else 0 :]:
            yield joined(new)
        before = said[-1] if said else before


# --- PDF


def read_pdf(data: bytes) -> str:
    """The text of the pages, without page numbers, headers and footers. Lines that fill the page are joined
    to paragraphs, also across pages."""
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, PyPdfError
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
    except DependencyError as error:
        raise Unreadable(
            "it is encrypted (AES), which needs cryptography: pip install cryptography"
        ) from error
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        raise Unreadable("it is damaged, or not a PDF; save it again") from error
    except RecursionError as error:
        raise Unreadable("it is damaged; save it again") from error
    pages = [[line for line in map(as_read, page) if line.strip()] for page in pages]
    pages = without_margins(pages)
    empty = [number for number, page in enumerate(pages, 1) if not page]
    if len(empty) > MOST_WITHOUT_TEXT * len(pages):
        raise Unreadable(
            f"{len(empty)} of its {len(pages)} page(s) are pictures without text; "
            "run text recognition (OCR) on it first"
        )
    text = PartialText("\n".join(to_paragraphs(pages)))
    text.without_text, text.pages = spans(empty), len(pages)
    return text


DOCUMENTS: dict[str, Callable[[bytes], str]] = {
    ".docx": read_docx,
    ".epub": read_epub,
    ".pdf": read_pdf,
    ".html": read_html,
    ".htm": read_html,
    ".srt": read_srt,
    ".vtt": read_srt,
}
