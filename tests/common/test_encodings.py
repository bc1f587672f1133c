"""The advice for a text that is not UTF-8: what it names, converts the text back to what was written."""

import codecs
import shutil
import subprocess

import pytest

from common.encodings import conversion, fitting_encodings, not_utf8, wide_encoding

# encodings -> sentences written in them
TEXTS = {
    "gb18030 gbk": "小镇在河口，清晨有雾。孩子们去学校，老人坐在桥边说话，等着渡船从对面过来。",
    "gb18030": "小鎮在河口，清晨有霧。孩子們去學校，老人坐在橋邊說話，等著渡船從對面過來。",
    "big5": "小鎮在河口，清晨有霧。孩子們去學校，老人坐在橋邊說話，等著渡船從對面過來。",
    "euc_kr cp949": "작은 마을은 강어귀에 있다. 아침에는 안개가 끼고 아이들은 학교에 간다.",
    "euc_jp cp932 shift_jis": "小さな町は川の口にあります。朝は霧が出て、子供たちは学校へ行きます。テスト、データ。",
    "tis_620 cp874": "เมืองเล็กอยู่ที่ปากแม่น้ำ ตอนเช้ามีหมอก เด็กไปโรงเรียน",
    "cp1251 koi8_r cp866 iso8859_5": "Городок стоит у реки. Утром там туман, дети идут в школу.",
    "cp1250 iso8859_2": "Mała wieś leży nad rzeką, a rano jest mgła; później dzieci idą do szkoły.",
    "cp1250": "Městečko leží u řeky, ráno je mlha a děti jdou do školy přes starý most.",
    "cp1252 latin_1": "Die Stadt liegt schön am Fluß; später gehen die Kinder über die Brücke.",
    "cp1252": "L’été, la rivière est très belle et l’école est fermée jusqu’à la rentrée.",
    "cp1253": "Η μικρή πόλη βρίσκεται στο ποτάμι και τα παιδιά πηγαίνουν στο σχολείο.",
    "cp1254": "Küçük kasaba nehrin ağzında; çocuklar sabah köprüden geçip okula gidiyorlar, yağmur yağıyor.",
    "cp1255": "העיירה הקטנה נמצאת ליד הנהר והילדים הולכים לבית הספר",
    "cp1256": "تقع المدينة الصغيرة عند النهر ويذهب الأطفال إلى المدرسة في الصباح",
}
WRITTEN = [(text, codec) for codecs, text in TEXTS.items() for codec in codecs.split()]


@pytest.mark.parametrize("form", ["%s", '{"text": "%s"}\n{"text": "plain"}\n'])
@pytest.mark.parametrize(("text", "codec"), WRITTEN, ids=[codec for _, codec in WRITTEN])
def test_the_first_encoding_that_is_named_gives_the_text_back(text, codec, form):
    raw = (form % text).encode(codec)
    first, *_ = names = fitting_encodings(raw)
    assert codecs.decode(raw, first) == form % text
    assert len({codecs.decode(raw, name) for name in names}) == len(names)
    if shutil.which("iconv"):
        done = subprocess.run(
            ["iconv", "-f", first, "-t", "UTF-8"], input=raw, capture_output=True, check=True
        )
        assert done.stdout.decode() == form % text
    assert f"iconv -f {first} -t UTF-8 OLD > NEW" in not_utf8(raw)


@pytest.mark.parametrize(("text", "codec"), WRITTEN, ids=[codec for _, codec in WRITTEN])
def test_of_a_few_words_the_right_encoding_is_among_those_named(text, codec):
    words = " ".join(text.split()[:3])
    raw = words.encode(codec)
    names = fitting_encodings(raw)
    assert not names or words in {codecs.decode(raw, name) for name in names}


@pytest.mark.parametrize(
    "raw", [bytes(range(128, 256)), "日本語".encode() + b"\xff" * 9, b"a \xff\xfe b \x81"]
)
def test_where_none_fits_a_placeholder_stands(raw):
    assert fitting_encodings(raw) == []
    assert not_utf8(raw) == "not UTF-8; save the file as UTF-8: iconv -f FILE_ENCODING -t UTF-8 OLD > NEW"


def test_of_two_letters_the_right_encoding_is_named_too():
    for word in ("水车", "你说"):
        names = fitting_encodings(word.encode("gb18030"))
        assert "GB18030" in names
    assert fitting_encodings(b"plain \x8f") == []


def test_lines_in_two_encodings():
    """The lines that are not UTF-8 decide, if most are not."""
    other = "小镇在河口，清晨有雾。\n".encode("gb18030")
    assert "iconv -f GB18030" in not_utf8(other, 9, sample="水\n".encode() + other * 9)
    assert "though most of the file is" in not_utf8(
        other, 9, sample="小镇在河口，清晨有雾。\n".encode() * 9 + other
    )


def test_of_several_that_fit_all_are_named():
    said = not_utf8("crème".encode("cp1252"))
    assert said == (
        "not UTF-8; save the file as UTF-8: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW, and read NEW: "
        "WINDOWS-1250 would fit, too"
    )


GOOD = "The mill stands by the river, naïve and old. 水车在河边。\n".encode()


@pytest.mark.parametrize("codec", ["cp1252", "gb18030", "koi8_r"])
def test_a_damaged_place_in_utf8_is_named_by_byte_and_line(codec):
    bad = "и é"[:1] if codec != "cp1252" else "é"
    raw = GOOD * 3 + b"abc " + bad.encode(codec) + b"\n" + GOOD
    said = not_utf8(raw, line=5)
    assert said.startswith("not UTF-8 at byte 5 of line 8, though most of the file is; ")
    assert "iconv -c -f UTF-8" in said and "GB18030" not in said


def test_a_character_that_is_cut_is_named_where_it_begins():
    for cut in (1, 2):
        raw = ("河边" * 300).encode()[:-cut]
        assert not_utf8(raw).startswith("not UTF-8 at byte 1,798 of line 1, though most of the file is; ")


def test_the_rest_of_the_file_decides_about_a_line():
    """A line whose only letter above ASCII is damaged may stand in a file of either kind."""
    line = "caf\xe9\n".encode("latin-1")
    assert "at byte 4 of line 7, though" in not_utf8(line, 7, sample=GOOD * 5)
    assert "iconv -f WINDOWS-1252 -t" in not_utf8(line, 7, sample=b"plain\n" * 5)
    assert "iconv -f WINDOWS-1252 -t" in not_utf8(line, 7, sample="für später\n".encode("cp1252") * 5)


@pytest.mark.parametrize(
    "text", ['{"text": "mill"}\n', '{"text": "水车"}\r\n' * 9, "a word\n", '[{"q": "ш"}]']
)
@pytest.mark.parametrize("name", ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_text_of_two_and_four_bytes_a_character(name, text):
    found = wide_encoding(text.encode(name))
    assert found.replace("-", "").lower() == name.replace("-", "")
    assert text.encode(name).decode(found) == text
    assert conversion([found]) == f"not UTF-8; save the file as UTF-8: iconv -f {found} -t UTF-8 OLD > NEW"


@pytest.mark.parametrize("raw", [b"a\0b\0\1\0", bytes(64), b"text\0 with a zero", GOOD, b"", b"\0"])
def test_other_bytes_are_no_such_text(raw):
    assert wide_encoding(raw) == ""
