"""Explains text that is not UTF-8: it is either UTF-8 with a damaged byte, or in another encoding, which is
guessed.

An encoding fits if it yields the letters that a language uses most. LANGUAGES has them in the order of their
frequency; the r-th one has a probability proportional to 1/r (Zipf).
"""

import codecs
import math
import re
import unicodedata
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

CYRILLIC = "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфёі"
CHINESE = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里"
    "用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实"
)
TAIWANESE = (
    "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發後作裡"
    "用道行所然家種事成方多經麼去法學如都同現當沒動面起看定天分還進好小部其些主樣理心她本前開但因只從想實"
)
JAPANESE = (
    "のいしかとたてにをはなるがでっんれらもすまりこくきさだうあよけせじおえやみわつどめちろほばげごひねむ"
    "ンースルトイクラリアドシレジタフロプカテマサコグデウムパオバミッャュョ日本人一大年中"
)
KOREAN = (
    "이다는을에의가고하지한도기사로어리자해나대은서시그수일스를인들정있아보라부구상전만주게장여과면관것원동"
    "조위공제성국습니요우마소성모유선세무안신비오물미되경방문발연학음으며와간중산없했말때등"
)
THAI = "านรกอเงลมยวตสดทปหีั่้ิ์แไคพบใะชขจูุืึำ็ซถโธภศณษญผฟ"
LANGUAGES = (  # as iconv names the encoding, as Python does, the letters
    ("WINDOWS-1252", "cp1252", "éèàêçôùûîâœïëÉÀ"),  # French
    ("WINDOWS-1252", "cp1252", "üäößÜÖÄ"),  # German
    ("WINDOWS-1252", "cp1252", "óíáéñúüÁÉ"),  # Spanish
    ("WINDOWS-1252", "cp1252", "ãçáéóíêõâúàÉÁ"),  # Portuguese
    ("WINDOWS-1252", "cp1252", "äåöøæéÅÄÖØÆ"),  # Scandinavian
    ("WINDOWS-1252", "cp1252", "èàùìòéÈ"),  # Italian
    ("GB18030", "gb18030", CHINESE),
    ("GB18030", "gb18030", TAIWANESE),
    ("BIG5", "big5", TAIWANESE),
    ("CP950", "cp950", TAIWANESE),
    ("EUC-KR", "euc_kr", KOREAN),
    ("CP949", "cp949", KOREAN),
    ("EUC-JP", "euc_jp", JAPANESE),
    ("CP932", "cp932", JAPANESE),  # Shift-JIS
    ("TIS-620", "tis_620", THAI),
    ("CP874", "cp874", THAI),
    ("WINDOWS-1251", "cp1251", CYRILLIC),
    ("KOI8-R", "koi8_r", CYRILLIC),
    ("KOI8-U", "koi8_u", CYRILLIC),
    ("IBM866", "cp866", CYRILLIC),
    ("ISO-8859-5", "iso8859_5", CYRILLIC),
    ("WINDOWS-1250", "cp1250", "łęóążśćńźŁŚŻ"),  # Polish
    ("WINDOWS-1250", "cp1250", "íáěéřčýžšůúňťďČŠŘŽ"),  # Czech
    ("WINDOWS-1250", "cp1250", "éáóőöüíúűÉÁÖ"),  # Hungarian
    ("WINDOWS-1250", "cp1250", "čšžćđŠČŽ"),  # Croatian
    ("WINDOWS-1250", "cp1250", "ăîşâţŞŢ"),  # Romanian
    ("ISO-8859-2", "iso8859_2", "łęóążśćńźŁŚŻ"),
    ("ISO-8859-2", "iso8859_2", "íáěéřčýžšůúňťďČŠŘŽ"),
    ("WINDOWS-1254", "cp1254", "ıüşğöçİÇŞÖâ"),  # Turkish
    ("WINDOWS-1253", "cp1253", "αοιτεσνηυρπκμλςωάίόέδγχήθύφώβξζψ"),
    ("WINDOWS-1255", "cp1255", "יוהלאמרבתשנכםחדעקפטגסצןזךףץ"),
    ("WINDOWS-1256", "cp1256", "اليمنرتوبةعدسفهكقحجأشصطخىضذثزغءإظئ"),
)
OTHER = 1e-4  # the probability of a letter that is none of a language's
FEW = 8  # letters, among which there need be no frequent one of a script that has thousands
FITS = 100  # an encoding fits that makes the text at most so many times less probable than the best one does
MANY_ZEROS = 0.3  # the share of the bytes of a file, which is no text then
BESIDE_ASCII = re.compile(r"(?:(?<=[A-Za-z])[^\x00-\x7f]|[^\x00-\x7f](?=[A-Za-z]))")
ABOVE_ASCII = bytes(range(0x80, 0x100))


class NotUtf8(NamedTuple):
    """Lines of a file that are not UTF-8; `line` is the first of them."""

    raw: bytes
    line: int


class Damage(NamedTuple):
    """How much of a text is UTF-8, without ASCII."""

    bytes: int  # that are no UTF-8
    lines: int  # that have such bytes
    good_bytes: int
    good_lines: int


@lru_cache(maxsize=4)
def damaged_lines(raw: bytes) -> bytes:
    """The lines of a text that are not UTF-8."""
    return b"".join(
        line for line in raw.splitlines(keepends=True) if line.decode("utf-8", "ignore").encode() != line
    )


@lru_cache(maxsize=4)  # of a file whose lines are all damaged it is asked for each line
def damage(raw: bytes) -> Damage:
    """How much of a text is UTF-8."""
    valid = len(raw.decode("utf-8", "ignore").encode())
    lines = sum(not line.isascii() for line in raw.splitlines())
    damaged = len(damaged_lines(raw).splitlines())
    good = valid - len(raw.translate(None, ABOVE_ASCII))
    return Damage(len(raw) - valid, damaged, good, lines - damaged)


def log_probability(text: str, letters: str) -> float | None:
    """The log-probability of a text's non-ASCII letters in a language that uses `letters`; None if the text
    cannot be in this language."""
    counts = Counter(letter for letter in text if not letter.isascii())
    if any(unicodedata.category(letter)[0] == "C" for letter in counts):  # controls, and no characters
        return None
    if not counts:
        return None
    counts = Counter({letter: count for letter, count in counts.items() if not is_sign(letter)})
    ranks = {letter: rank for rank, letter in enumerate(letters, 1)}
    known = sum(count for letter, count in counts.items() if letter in ranks)
    is_alphabet, is_latin = len(letters) < 80, letters[0] < "\u0250"
    least = 0.0
    if is_alphabet:
        least = 0.75
    elif counts.total() >= FEW:
        least = 0.12
    if known < least * counts.total():
        return None
    beside = len(BESIDE_ASCII.findall(text))  # only Latin words have letters of both
    if beside and (2 * beside > counts.total()) != is_latin:
        return None
    scale = sum(1 / rank for rank in ranks.values())
    return sum(
        count * math.log(1 / ranks[letter] / scale if letter in ranks else OTHER)
        for letter, count in counts.items()
    )


def is_sign(letter: str) -> bool:
    """Whether a character is a sign of any language, such as a quote or a full-width comma."""
    return letter in "“”‘’„‚–—…«»·" or "\uff01" <= letter <= "\uff20" or "\u3000" <= letter <= "\u3020"


@lru_cache(maxsize=4)
def fitting_encodings(raw: bytes) -> list[str]:
    """iconv names of the encodings that fit these non-UTF-8 bytes, the best first. Of several that give the
    same text, only one is returned."""
    found: dict[str, tuple[float, str]] = {}  # text -> its probability, and the first encoding that gives it
    for name, codec, letters in LANGUAGES:
        try:
            text = codecs.getincrementaldecoder(codec)().decode(raw)  # its last character may be cut
        except UnicodeDecodeError:
            continue
        probability = log_probability(text, letters)
        if probability is not None:
            best, first = found.get(text, (probability, name))
            found[text] = max(best, probability), first
    ordered = sorted(found.values(), key=lambda entry: -entry[0])
    names = [name for probability, name in ordered if probability >= ordered[0][0] - math.log(FITS)]
    return list(dict.fromkeys(names))


def is_utf8(head: bytes) -> bool:
    """Whether the first bytes of a file are UTF-8; the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def wide_encoding(head: bytes) -> str:
    """The iconv name of the UTF-16 or UTF-32 encoding that the first bytes of a file show; "" if they show
    none."""
    for name in ("UTF-32", "UTF-16"):  # UTF-32's mark begins with that of UTF-16
        if head.startswith(("\ufeff".encode(f"{name}LE"), "\ufeff".encode(f"{name}BE"))):
            return name
    if 0 not in head or (is_utf8(head) and head.count(0) <= MANY_ZEROS * len(head)):
        return ""
    for name in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        try:
            text = codecs.getincrementaldecoder(name)().decode(head)
        except UnicodeDecodeError:
            continue
        kinds = {unicodedata.category(letter) for letter in set(text) - set("\n\r\t")}
        if kinds.isdisjoint({"Cc", "Cn", "Co"}) and set(text) & set(' \n"'):
            return name
    return ""


def conversion(names: list[str]) -> str:
    """What to do with a text in one of these encodings."""
    first, *others = names or ["FILE_ENCODING"]
    more = f", and read NEW: {' and '.join(others)} would fit, too" if others else ""
    return f"not UTF-8; save the file as UTF-8: iconv -f {first} -t UTF-8 OLD > NEW{more}"


def not_utf8(raw: bytes, line: int = 1, sample: bytes = b"") -> str:
    """The reason for bytes that are not UTF-8, and what to do.

    raw: one line or several, of which the first is `line`. sample: of the file that they come from.
    """
    seen = Damage(*map(sum, zip(damage(sample), damage(raw), strict=True)))
    if seen.bytes * 3 >= seen.good_bytes and seen.lines >= 4 * seen.good_lines:
        names = fitting_encodings(damaged_lines(sample) or damaged_lines(raw))
        if names or seen.bytes >= seen.good_bytes:
            return conversion(names)
    try:
        raw.decode()
        at = 0
    except UnicodeDecodeError as error:
        at = error.start
    byte, lines_before = at - raw.rfind(b"\n", 0, at), raw.count(b"\n", 0, at)
    return (
        f"not UTF-8 at byte {byte:,} of line {line + lines_before:,}, though most of the file is; write this "
        "character again, or leave all such bytes out: iconv -c -f UTF-8 -t UTF-8 OLD > NEW"
    )
