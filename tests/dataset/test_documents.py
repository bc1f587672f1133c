"""The text of documents: those of other people's programs (python-docx, reportlab) and written by hand, damaged
ones, locked ones and those without text."""

import io
import zipfile

import docx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pypdf import PdfReader, PdfWriter
from reportlab.lib.pagesizes import A5
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import Paragraph, SimpleDocTemplate

from common.errors import UserError
from dataset import documents
from dataset.documents import Unreadable, page_text, read_docx, read_epub, read_html, read_pdf, read_srt
from dataset.files import find_files, read_records
from dataset.token_cache import CacheOptions, build_token_cache, load_tokenizer
from tests.conftest import ROOT

STORY = "The river rose in spring, and the people of the valley carried their boats to the upper meadow. "


def archive(files: dict[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return buffer.getvalue()


# --- Word


def word_document() -> bytes:
    document = docx.Document()
    document.add_heading("The valley", 1)
    paragraph = document.add_paragraph("A river ")
    paragraph.add_run("ran").bold = True
    paragraph.add_run(" here.\nNow\tit is dry. 河水干了。")
    table = document.add_table(2, 2)
    for i, text in enumerate(("name", "place", "Anna", "mill")):
        table.cell(i // 2, i % 2).text = text
    document.add_paragraph("The end.")
    document.sections[0].header.paragraphs[0].text = "a header"
    buffer = io.BytesIO()
    document.save(buffer)
    return buffer.getvalue()


def test_word():
    lines = [
        "The valley",
        "A river ran here.",
        "Now\tit is dry. 河水干了。",
        "name",
        "place",
        "Anna",
        "mill",
        "The end.",
    ]
    assert read_docx(word_document()).split("\n") == lines


WORDS = {
    "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
}


def word_body(body: str) -> bytes:
    names = " ".join(f'xmlns:{name}="{uri}"' for name, uri in WORDS.items())
    return archive({"word/document.xml": f"<w:document {names}><w:body>{body}</w:body></w:document>"})


def test_word_with_changes_fields_and_text_boxes():
    run = "<w:r><w:t>{}</w:t></w:r>".format
    box = f"<w:txbxContent><w:p>{run('in a box')}</w:p></w:txbxContent>"
    body = (
        f"<w:p>{run('kept ')}<w:del><w:r><w:delText>deleted</w:delText></w:r></w:del><w:ins>{run('added')}</w:ins></w:p>"
        f"<w:p><w:r><w:instrText>PAGE</w:instrText></w:r><w:hyperlink>{run('a link')}</w:hyperlink></w:p>"
        f"<w:p>{run('beside it')}<w:r><mc:AlternateContent><mc:Choice>{box}</mc:Choice><mc:Fallback>{box}</mc:Fallback>"
        f"</mc:AlternateContent></w:r></w:p><w:sdt><w:sdtContent><w:p>{run('in a field')}</w:p></w:sdtContent></w:sdt>"
        f"<w:p><w:moveFrom>{run('moved')}</w:moveFrom></w:p><w:p><w:moveTo>{run('moved')}</w:moveTo></w:p>"
    )
    lines = ["kept added", "a link", "beside it", "in a box", "in a field", "", "moved"]
    assert read_docx(word_body(body)).split("\n") == lines


def test_word_as_it_is_seen():
    """A large first letter, text that is hidden, and how a word is pronounced."""
    run = "<w:r>{}<w:t>{}</w:t></w:r>".format
    letter = "<w:p><w:pPr><w:framePr w:dropCap='{}'/></w:pPr><w:r><w:t>{}</w:t></w:r></w:p>".format
    hidden = "<w:rPr><w:vanish{}/></w:rPr>".format
    soft, shown = " riv\u00ader ran.", ' w:val="0"'
    ruby = "<w:ruby><w:rt><w:r><w:t>hé</w:t></w:r></w:rt><w:rubyBase><w:r><w:t>河</w:t></w:r></w:rubyBase></w:ruby>"
    body = (
        f"{letter('drop', 'A')}<w:p>{run('', soft)}</w:p>"
        f"<w:p>{run(hidden(''), 'hidden')}{run(hidden(shown), 'seen')}<w:r>{ruby}</w:r></w:p>"
        f"{letter('none', 'B')}{letter('margin', 'C')}"
    )
    assert read_docx(word_body(body)).split("\n") == ["A river ran.", "seen河", "B", "C"]


def test_word_has_notes_formulas_and_its_text_elsewhere_or_in_the_strict_form():
    uri = "http://schemas.openxmlformats.org/officeDocument/2006/math"
    formula = f'<m:oMath xmlns:m="{uri}"><m:r><m:t>x=2</m:t></m:r></m:oMath>'
    with zipfile.ZipFile(io.BytesIO(word_body(f"<w:p><w:r><w:t>so </w:t></w:r>{formula}</w:p>"))) as file:
        text = file.read("word/document.xml").decode()
    note = text.replace("so ", "a note ").replace("x=2", "")
    strict = text.replace(WORDS["w"], "http://purl.oclc.org/ooxml/wordprocessingml/main")
    relation = '<Relationships xmlns="x"><Relationship Type="y/officeDocument" Target="/word/d2.xml"/></Relationships>'
    assert read_docx(archive({"word/document.xml": text, "word/footnotes.xml": note})) == "so x=2\na note "
    assert read_docx(archive({"word/document.xml": strict})) == "so x=2"
    assert read_docx(archive({"_rels/.rels": relation, "word/d2.xml": text, "word/endnotes.xml": note})) == (
        "so x=2\na note "
    )


# --- web pages and e-books

PAGE = """<!DOCTYPE html><html><head><title>not shown</title><style>p {color: red}</style></head><body>
<h1>The   valley</h1><p>A river <b>ran</b>
here &amp; there&nbsp;too.<br>Now it is dry.</p><script>var x = "<p>no</p>";</script>
<ul><li>one</li><li>two</li></ul><table><tr><td>name</td><td>place</td></tr><tr><td>Anna</td><td>mill</td></tr></table>
<pre>a
  b</pre><div><div>in</div></div>文字<noscript>turn it on</noscript></body></html>"""
SEEN = "The valley\nA river ran here & there\xa0too.\nNow it is dry.\none\ntwo\nname\tplace\nAnna\tmill\na\n  b\nin\n文字"


def test_a_web_page_as_it_is_seen():
    assert read_html(PAGE.encode()) == SEEN
    assert read_html(b"\xef\xbb\xbf" + PAGE.encode()) == SEEN
    old = '<meta charset="gb2312"><body>河水干了'
    assert read_html(old.encode("gb2312")) == "河水干了"
    assert read_html("<head><meta charset=nonsense><body>河".encode()) == "河"  # a head that is left open
    with pytest.raises(Unreadable, match="GB18030"):
        read_html(("<p>" + "的一是不了在人有我他这个们中来上大为和国地到以说时" * 5).encode("gb18030"))


@pytest.mark.parametrize(
    ("page", "seen"),
    [
        (
            "<html><head><title>T</title><h1>A river</h1><p>ran",
            "A river\nran",
        ),  # </head><body> may be left out
        ("<center>A</center><center>B</center><dialog open>C</dialog>D", "A\nB\nC\nD"),
        ("<p>a <math><mi>x</mi><mo>=</mo><mn>2</mn><annotation>x=2</annotation></math> b", "a x=2 b"),
        ("<p><![CDATA[a < b]]> and c", "a < b and c"),
        ("<p>co\u00adop\u200ber\ufb01", "cooperfi"),
        (
            '<div hidden>a<p>b</div><nav style="color:red; display: none">c</nav>d<p hidden>e<input hidden>f',
            "d\nef",
        ),
        ("<ruby>河<rp>(</rp><rt>hé</rt><rp>)</rp></ruby>水<ruby>干<rt>gān<rp>)</ruby>了", "河水干了"),
        (
            "a <span class='x pagenum'>[Pg 14]</span> b<i epub:type=pagebreak>xv</i> c<a role=doc-pagebreak>9</a>",
            "a b c",
        ),
        ("<p>a <b class=pagenum>14 boats</b> <i class=page>14</i></p>", "a 14 boats 14"),  # text is kept
        ("<div epub:type=pagebreak>a<p>14</p></div>b", "a\n14\nb"),
    ],
)
def test_what_browsers_show(page, seen):
    assert read_html(page.encode()) == seen


@pytest.mark.parametrize(
    ("head", "text", "encoding"),
    [
        ("<meta charset=iso-8859-1>", "“A river” – café", "cp1252"),
        ("<meta charset=gb2312>", "镕基", "gbk"),
        ('<?xml version="1.0" encoding="windows-1252"?>', "café", "cp1252"),
        ("<meta charset=utf-16>", "A river ran", "utf-8"),  # as bytes say it, it cannot be
        ("<meta charset=undefined>", "河水", "utf-8"),
        ("", "河水", "utf-16"),
    ],
)
def test_encodings_are_those_of_browsers(head, text, encoding):
    page = f"{head}<p>{text}".encode(encoding)
    assert read_html(page) == text
    chapters = e_book() | {"OPS/text/one.xhtml": page}
    assert read_epub(archive(chapters)) == f"{text}\n\nSecond\xa0."


@given(st.text())
def test_any_text_is_a_page(text):
    page_text(text)


def e_book(**more: str | bytes) -> dict[str, str | bytes]:
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="b" href="two%20b.xhtml"/><item id="a" '
        'href="text/one.xhtml"/><item id="nav" href="nav.xhtml"/></manifest><spine><itemref idref="a"/>'
        '<itemref idref="b"/><itemref idref="missing"/></spine></package>'
    )
    name = 'xmlns="urn:oasis:names:tc:opendocument:xmlns:container"'
    container = f'<container {name}><rootfiles><rootfile full-path="OPS/p.opf"/></rootfiles></container>'
    chapter = '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body><p>{}&nbsp;.</p><hr/></body></html>'
    files: dict[str, str | bytes] = {"mimetype": "application/epub+zip", documents.CONTAINER: container}
    files |= {"OPS/p.opf": package, "OPS/two b.xhtml": chapter.format("Second")}
    return files | {"OPS/text/one.xhtml": chapter.format("First"), "OPS/nav.xhtml": "no"} | more


def locked(path: str) -> str:
    return f'<encryption xmlns="x"><CipherReference URI="{path}"/></encryption>'


def test_an_e_book_has_its_chapters_in_order():
    assert read_epub(archive(e_book())) == "First\xa0.\n\nSecond\xa0."
    fonts = e_book() | {documents.ENCRYPTION: locked("OPS/font.otf")}
    assert read_epub(archive(fonts)) == "First\xa0.\n\nSecond\xa0."
    with pytest.raises(Unreadable, match="DRM"):
        read_epub(archive(e_book() | {documents.ENCRYPTION: locked("OPS/two%20b.xhtml")}))


def test_pictures_among_the_chapters_and_packages_without_a_namespace():
    book = e_book()
    package = str(book["OPS/p.opf"]).replace(' xmlns="http://www.idpf.org/2007/opf"', "")
    package = package.replace(
        "<manifest>", '<manifest><item id="missing" href="c.jpg" media-type="image/jpeg"/>'
    )
    assert (
        read_epub(archive(book | {"OPS/p.opf": package, "OPS/c.jpg": b"\xff\xd8"}))
        == "First\xa0.\n\nSecond\xa0."
    )


# --- subtitles


def test_subtitles_are_what_is_spoken():
    subtitles = (
        "1\r\n00:00:01,000 --> 00:00:02,000\r\n<i>A river</i>\r\nran.\r\n\r\n2\r\n00:00:03,000 --> 00:00:04,500 X1:40\r\n"
        "{\\an8}河水\r\n干了。\r\n\r\n\r\n3\r\n00:00:05.000 --> 00:00:06.000\r\n\r\n00:00:07,000 --> 00:00:08,000\r\n2 < 3 apples\r\n"
    )
    assert read_srt(subtitles.encode()) == "A river ran.\n河水干了。\n2 < 3 apples"
    with pytest.raises(Unreadable, match=r"name it \.txt"):
        read_srt(b"A river ran.\n\nAnd so on.\n")


def test_web_subtitles_are_what_is_spoken():
    subtitles = (
        "\ufeffWEBVTT - a film\r\nKind: captions\r\n\r\nSTYLE\r\n::cue { color: red }\r\n\r\nNOTE\r\nby us\r\n\r\n"
        "intro\r\n00:01.000 --> 00:02.000 align:start\r\n<v Anna>A &lt;river&gt;</v>\r\nran.\r\n\r\n"
        "00:00:03.000 --> 00:00:04.000\r\nIt<00:00:03.500><c> rolled</c>\r\n\r\n"
        "00:00:04.000 --> 00:00:05.000\r\nIt rolled\r\nand rolled\r\n\r\n00:00:05.000 --> 00:00:06.000\r\nand rolled\r\n"
    )
    assert read_srt(subtitles.encode()) == "A <river> ran.\nIt rolled\nand rolled"
    assert read_srt(b"WEBVTT\n") == ""


def test_subtitles_of_any_unicode_encoding():
    text = "1\n00:00:01,000 --> 00:00:02,000\nA river ran. 河水\n"
    for encoding in ("utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-32-be"):
        assert read_srt(text.encode(encoding)) == "A river ran. 河水"
    for mark, encoding in ((b"\xff\xfe\0\0", "utf-32-le"), (b"\0\0\xfe\xff", "utf-32-be")):
        assert read_srt(mark + text.encode(encoding)) == "A river ran. 河水"


def test_empty_lines_are_where_people_put_them():
    time = "00:00:01,000 --> 00:00:02,000"
    text = f"1\n{time}\nA river\n\nran.\n2\n{time}\nNow\n3\n{time}\nit is dry.\n\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert read_srt(text.encode(encoding)) == "A river ran.\nNow\nit is dry."
    assert read_srt(f"{time}\n1984\n\n{time}\nNow".encode()) == "1984\nNow"  # without numbers


# --- PDF


def printed(paragraphs: list[str], header: str = "", font: str = "Times-Roman") -> bytes:
    """A book as reportlab sets it: paragraphs over several pages, with a header and page numbers."""
    buffer = io.BytesIO()
    style = getSampleStyleSheet()["Normal"].clone(
        "x", fontName=font, wordWrap="CJK" if font != "Times-Roman" else None
    )

    def margins(canvas, document) -> None:
        canvas.drawString(72, 560, header)
        canvas.drawString(200, 20, str(document.page))

    book = SimpleDocTemplate(buffer, pagesize=A5)
    book.build([Paragraph(text, style) for text in paragraphs], onFirstPage=margins, onLaterPages=margins)
    return buffer.getvalue()


def partly_scanned(*pages: str | None) -> bytes:
    """A PDF with a line of text on each page; None: a picture alone."""
    buffer = io.BytesIO()
    canvas = Canvas(buffer)
    for text in pages:
        canvas.rect(10, 10, 100, 100)
        if text is not None:
            canvas.drawString(72, 560, text)
        canvas.showPage()
    canvas.save()
    return buffer.getvalue()


def test_sentences_of_a_book_go_on_over_lines_and_pages():
    paragraphs = [STORY * 12 + f"This was chapter {i}." for i in range(12)]
    data = printed(paragraphs, "The people of the valley")
    assert len(PdfReader(io.BytesIO(data)).pages) > 5
    assert read_pdf(data).split("\n") == paragraphs


def test_a_chinese_book():
    pdfmetrics.registerFont(UnicodeCIDFont("STSong-Light"))
    paragraphs = ["春天河水上涨，山谷里的人把船抬到高处的草地上，等着水退下去。" * 9 + "就这样过了一年。"] * 8
    assert read_pdf(printed(paragraphs, font="STSong-Light")).split("\n") == paragraphs


def test_a_scan_a_locked_and_an_empty_pdf():
    with pytest.raises(Unreadable, match=r"pictures without text; run text recognition \(OCR\)"):
        read_pdf(partly_scanned(None))
    text = read_pdf(partly_scanned("A river ran.", None, "It was long."))
    assert text == "A river ran. It was long." and (text.without_text, text.pages) == ("2", 3)
    for password, error in (("secret", "locked by a password"), ("", None)):
        writer = PdfWriter(io.BytesIO(printed(["A river ran."])))
        writer.encrypt(password, "owner", algorithm="RC4-128")
        buffer = io.BytesIO()
        writer.write(buffer)
        if error:
            with pytest.raises(Unreadable, match=error):
                read_pdf(buffer.getvalue())
        else:
            assert read_pdf(buffer.getvalue()) == "A river ran."


def drawn(pages: list[list[str]]) -> bytes:
    """A PDF of pages of lines; without lines a picture."""
    buffer = io.BytesIO()
    canvas = Canvas(buffer)
    for page in pages:
        canvas.rect(10, 10, 9, 9)
        for i, line in enumerate(page):
            canvas.drawString(72, 750 - 16 * i, line)
        canvas.showPage()
    canvas.save()
    return buffer.getvalue()


def test_numbers_that_are_text_are_not_taken_for_page_numbers():
    assert read_pdf(drawn([["Born in", "1984"]])) == "Born in 1984"
    rows = [[f"{7 * i + j * j} {i * i + 3 * j + 1} {(i * 5 + j) ** 3}" for j in range(6)] for i in range(5)]
    assert read_pdf(drawn(rows)).split() == " ".join(line for page in rows for line in page).split()
    book = [
        [f"The valley {i + 9} / 30", f"In {i * i + 1900}", f"{'they ' * (i + 1)}left.", str(i + 9)]
        for i in range(5)
    ]
    lines = [f"In {i * i + 1900} {'they ' * (i + 1)}left." for i in range(5)]
    assert read_pdf(drawn(book)).split() == " ".join(lines).split()


def test_a_scan_with_a_page_of_text_is_refused():
    with pytest.raises(Unreadable, match=r"3 of its 4 page\(s\) are pictures"):
        read_pdf(drawn([["Cover"], [], [], []]))
    assert read_pdf(drawn([["A river"], []])) == "A river"


def test_a_page_with_its_number_or_a_stamp_alone_has_no_text():
    pages = [["A river ran.", "1"], ["2"], ["It was long.", "3"], ["4"], ["5"], ["It dried.", "6"]]
    text = read_pdf(drawn(pages))
    assert text == "A river ran. It was long. It dried."
    assert (text.without_text, text.pages) == ("2, 4-5", 6)
    with pytest.raises(Unreadable, match=r"4 of its 4 page\(s\) are pictures"):
        read_pdf(drawn([["Scanned with a camera"]] * 4))


def test_encryption_that_needs_a_package_names_it():
    keys = b"/O<%s>/U<%s>/OE<%s>/UE<%s>/Perms<%s>" % tuple(b"00" * n for n in (48, 48, 32, 32, 16))
    filters = b"/CF<</StdCF<</CFM/AESV3/Length 32>>>>/StmF/StdCF/StrF/StdCF"
    locked = b"/ID[<00><00>]/Encrypt <</Filter/Standard/V 5/R 6/Length 256/P -4" + keys + filters + b">>/Root"
    with pytest.raises(Unreadable, match=r"pip install cryptography|locked"):  # locked: where it is installed
        read_pdf(drawn([["A river"]]).replace(b"/Root", locked))


def test_without_pypdf_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pypdf", None)
    with pytest.raises(Unreadable, match="pip install pypdf"):
        read_pdf(b"%PDF-1.4")


# --- as files


GOOD = {
    "a.docx": word_document(), "a.epub": archive(e_book()), "a.pdf": printed(["A river ran."]),
    "a.html": PAGE.encode(), "a.srt": b"1\n00:00:01,000 --> 00:00:02,000\nA river ran.\n",
    "a.vtt": b"WEBVTT\n\n00:01.000 --> 00:02.000\nA river ran.\n",
}  # fmt: skip
BAD = {
    "old.docx": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "locked by a password, or in an old format"),
    "cut.docx": (word_document()[:900], "damaged, or not a Word document"),
    "other.docx": (archive({"x": "y"}), r"has no word/document\.xml"),
    "xml.docx": (archive({"word/document.xml": "<w:p>"}), "damaged"),
    "cut.epub": (archive(e_book())[:500], "damaged, or not an e-book"),
    "no_list.epub": (archive({documents.CONTAINER: "<container/>"}), "names no list of its chapters"),
    "no_chapter.epub": (archive({k: v for k, v in e_book().items() if "one" not in k}), r"has no OPS/text/one\.xhtml"),
    "cut.pdf": (printed(["A river ran."])[:300], "damaged"),
    "x.pdf": (b"hello", "damaged"),
    "empty.pdf": (b"", "damaged"),
    "pointer.pdf": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n", "Git LFS pointer"),
    "x.srt": (b"hello", r"name it \.txt"),
    "empty.html": (b"<html></html>", "holds no record"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_documents_are_texts(tmp_path, name):
    (tmp_path / name).write_bytes(GOOD[name])
    (record,) = read_records([str(tmp_path / name)])
    assert "iver" in record[1]["text"] or "First" in record[1]["text"]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_document_is_one_line_with_its_name(tmp_path, name):
    data, why = BAD[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=f"^[^\n]*{name}[^\n]*{why}[^\n]*$"):
        list(read_records([str(tmp_path / name)]))


def test_a_part_that_grows_without_bounds_is_not_unpacked(monkeypatch):
    monkeypatch.setattr(documents, "MOST_BYTES", 1000)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("word/document.xml", b" " * 100_000)
    with pytest.raises(Unreadable, match=r"document\.xml in it has more than"):
        read_docx(buffer.getvalue())


@given(st.sampled_from(sorted(GOOD)), st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_a_flipped_byte_is_text_or_one_line(tmp_path_factory, name, at, flipped):
    data = bytearray(GOOD[name])
    data[at % len(data) : at % len(data) + len(flipped)] = flipped
    path = tmp_path_factory.mktemp("flipped") / name
    path.write_bytes(bytes(data))
    try:
        list(read_records([str(path)]))
    except UserError as error:
        assert "\n" not in str(error)


def test_a_folder_of_documents_is_data_beside_texts_and_not_beside_records(tmp_path):
    for name, data in GOOD.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "b.txt").write_text("A river ran.")
    (tmp_path / "README.md").write_text("about")
    found, skipped = find_files(str(tmp_path))
    assert [path.rsplit("/", 1)[1] for path in found] == [*sorted(GOOD), "b.txt"] and len(skipped) == 1
    (tmp_path / "c.jsonl").write_text('{"text": "A river ran."}\n')
    assert [path.rsplit("/", 1)[1] for path in find_files(str(tmp_path))[0]] == ["c.jsonl"]


def test_pages_without_text_are_said_at_each_training(tmp_path, capsys):
    """Also where the tokens are read from their cache."""
    (tmp_path / "a.pdf").write_bytes(partly_scanned("A river ran.", None, "It was long."))
    (tmp_path / "b.txt").write_text("A hill.")
    options = CacheOptions("pretrain", 64, tmp_path / "cache")
    for _ in range(2):
        build_token_cache(f"{tmp_path}/a.pdf,{tmp_path}/b.txt", load_tokenizer(ROOT / "model"), options)
        said = capsys.readouterr().out
        assert f"{tmp_path}/a.pdf: pages without text (pictures, scans): 2 of 3; only the others" in said
        assert said.count("without text") == 1
