"""Printed pages, such as those of a PDF, as text: page numbers, headers and footers are left out, and lines
become paragraphs."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from statistics import median

CHINESE = re.compile("[\u3000-\u9fff\uff00-\uffef]")
SENTENCE_END = (".", "!", "?", "。", "！", "？")
# A line goes on in the next one if it is at least this share of a full line. The second share is for lines
# that end with a sentence.
FULL_LINE, FULL_LINE_OF_SENTENCE = 0.8, 0.95
LONGER_LINES, FAR_LONGER = 20, 1.25  # one of so many lines may be so many times as long as a full line
SHORT_PAGE = 0.4  # share of the document's usual full line, below which no line of a page is full
DIVIDED = re.compile(r"[^\W\d_][-\u00ad]$")  # the end of a line that ends within a word
LEADERS = re.compile(r"(?:\.\s?|…\s?){4,}\s*[\divxlc]*$")  # dots before a page number in a list of contents
BULLET = re.compile(r"[•‣⁃▪▫■□●○◦➢➤✓✔]\s")
PAGE_NUMBER = re.compile(r"\W*(page |seite |第 ?)?\d+( ?页)?\W*", re.IGNORECASE)
ROMAN = re.compile(r"(\W*)(?=[ivxlc])(c{0,3})(xc|xl|l?x{0,3})(ix|iv|v?i{0,3})(\W*)")
ROMAN_VALUES = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}
NUMBER_FIRST, NUMBER_LAST = re.compile(r"(\d{1,4})\s+(\D.*|\d.*\D.*)"), re.compile(r"(.*\D)\s+(\d{1,4})")
MARGIN_LINES = 3  # at each end of a page, at most
REPEATED = 0.5  # share of the pages from which on an outermost line is a header or a footer
NEAR = (-2, -1, 1, 2)  # pages beside a page; an outermost line that two of them have is a header of a chapter
MOST_PAGE_NUMBERS = 3  # in a header or footer, beside other numbers
# Signs of printers, and those that a reader does not see
AS_READ = str.maketrans({
    "ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st",
    "\u200b": "", "\u2060": "", "\ufeff": "",
} | {chr(code): "" for code in range(32) if chr(code) not in "\t\n"})  # fmt: skip
SEEN = AS_READ | {0xAD: None}  # the same for text that is not in lines: hyphens that no line ends with
SYMBOL_BULLET = re.compile("^\\s*[\uf020-\uf0ff](?=\\s)")  # a sign of a font of symbols


def as_read(line: str) -> str:
    """A line with the letters that a reader sees: no ligatures, no signs without a form."""
    return SYMBOL_BULLET.sub("•", line.translate(AS_READ)).rstrip()


def without_margins(pages: list[list[str]]) -> list[list[str]]:
    """The pages without page numbers, and without headers and footers: lines at the ends that most pages
    have, or those beside a page."""
    kept = [list(page) for page in pages]
    written = sum(map(bool, pages))
    for end in [0, -1] * MARGIN_LINES:
        outer = {number: page[end].strip() for number, page in enumerate(kept, 1) if page}
        for number in margins(outer, written):
            del kept[number - 1][end]
    return kept


def margins(outer: dict[int, str], written: int) -> list[int]:
    """The pages whose outermost line is a page number, a header or a footer. outer: the lines by page.
    written: how many pages have text."""
    keys = {number: margin_keys(line, number) for number, line in outer.items()}
    counts = Counter(key for several in keys.values() for key in several)
    beside = {number: beside_number(line, number) for number, line in outer.items()}
    offsets = Counter(offset for several in beside.values() for offset in {offset for offset, _ in several})
    titles = Counter(title for several in beside.values() for title in several)
    # with a number as it is, or without any
    alike = {number: set(several[: max(1, len(several) - 1)]) for number, several in keys.items()}
    most = max(2, REPEATED * written)
    found = []
    for number, line in outer.items():
        relative = keys[number][-1]
        # a single Roman one may be the letter of a formula
        is_numbered = counts[relative] > 1 or (relative[1] == ("+0",) and PAGE_NUMBER.fullmatch(line))
        is_repeated = max(counts[key] for key in keys[number]) > most
        is_near = sum(bool(alike[number] & alike.get(number + step, set())) for step in NEAR) > 1
        is_title = any(offsets[each[0]] > most and titles[each] > 1 for each in beside[number])
        if is_repeated or is_near or is_title or (is_number(line) and is_numbered):
            found.append(number)
    return found


def is_number(line: str) -> bool:
    """Whether a line is nothing but a number."""
    return bool(PAGE_NUMBER.fullmatch(line) or ROMAN.fullmatch(line))


def margin_keys(line: str, page: int) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Ways to read a line as a header or footer: its text, and each number in it as it is or as the number of
    the page plus something. Lines of two pages are alike if they have a key in common. In the first one all
    numbers are as they are, in the last one all are relative."""
    if roman := ROMAN.fullmatch(line):
        line = f"{roman[1]}{roman_value(roman[2] + roman[3] + roman[4])}{roman[5]}"
    text = re.split(r"(\d{1,9})", line)
    as_is = text[1::2]
    relative = [f"{int(digits) - page:+}" for digits in as_is]
    if len(as_is) <= MOST_PAGE_NUMBERS:
        ways = itertools.product(*zip(as_is, relative, strict=True))
    else:  # one of them, or all
        one = [[*as_is[:i], relative[i], *as_is[i + 1 :]] for i in range(len(as_is))]
        ways = iter([as_is, *one, relative])
    return [(tuple(text[::2]), tuple(way)) for way in ways]


def roman_value(digits: str) -> int:
    """The number of Roman digits."""
    values = [ROMAN_VALUES[digit] for digit in digits]
    return sum(a if a >= max(values[i:]) else -a for i, a in enumerate(values))


def beside_number(line: str, page: int) -> list[tuple[int, str]]:
    """What stands beside a number at the beginning or at the end of a line, with the number of pages that it
    is ahead of this page."""
    found = []
    if match := NUMBER_FIRST.fullmatch(line):
        found.append((int(match[1]) - page, match[2]))
    if match := NUMBER_LAST.fullmatch(line):
        found.append((int(match[2]) - page, match[1]))
    return found


def to_paragraphs(pages: list[list[str]]) -> Iterator[str]:
    """The paragraphs of the pages: lines that go on in the next one are joined."""
    pages = [page for page in pages if page]
    lengths = [full_length(page) for page in pages]
    usual = median(lengths) if lengths else 0
    open_lines: list[str] = []
    for page, length in zip(pages, lengths, strict=True):
        length = usual if length < SHORT_PAGE * usual else length
        for line in page:
            line = line.strip()
            is_apart = len(line) >= FAR_LONGER * length
            if open_lines and (is_apart or BULLET.match(line)):
                yield joined(open_lines)
                open_lines = []
            open_lines.append(line)
            full = FULL_LINE_OF_SENTENCE if line.endswith(SENTENCE_END) else FULL_LINE
            is_full = len(line) >= full * length and not is_apart and not LEADERS.search(line)
            if not is_full and not DIVIDED.search(line):
                yield joined(open_lines)
                open_lines = []
    if open_lines:
        yield joined(open_lines)


def full_length(page: list[str]) -> int:
    """The length of a full line of a page in characters: the longest, unless few lines are far longer than
    the others, such as a title above columns."""
    lengths = sorted(map(len, page), reverse=True)
    usual = lengths[len(page) // LONGER_LINES]
    return lengths[0] if lengths[0] < FAR_LONGER * usual else usual


def joined(lines: list[str]) -> str:
    """Lines as one: with a blank between them, but not between Chinese characters, in a divided word or in a
    range of numbers."""
    text = ""
    for line in lines:
        if DIVIDED.search(text) and line[:1].isalpha():
            text = text[:-1] + ("" if line[0].islower() else "-") + line
        elif re.search(r"\d[-–]$", text) and line[:1].isdigit():
            text += line
        elif text and line and not (CHINESE.match(text[-1]) and CHINESE.match(line[0])):
            text += f" {line}"
        else:
            text += line
    return text.replace("\u00ad", "")


def spans(numbers: list[int]) -> str:
    """Ascending numbers as text, with those that follow one another as a span: 2, 5-7."""
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
