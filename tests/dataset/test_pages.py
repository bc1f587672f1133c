"""Printed pages as text: what stands in their margins, and which lines are one paragraph."""

import pytest

from dataset.pages import as_read, joined, margin_keys, roman_value, spans, to_paragraphs, without_margins

LINE = "The people of the valley carried their boats to the upper"  # a full line
WORDS = ("meadow", "garden", "corner", "cellar", "square", "harbor")
# so many lines that no line of the text is outermost
TEXT = [[f"{word.title()}: {LINE}", f"{word} and", f"they stayed in the {word}."] for word in WORDS]


def with_margins(top: list[str], bottom: list[str]) -> list[list[str]]:
    """The pages of TEXT with these lines around them."""
    ends = zip(top, TEXT, bottom, strict=True)
    return [[line for line in (above, *page, below) if line] for above, page, below in ends]


NONE = [""] * len(TEXT)


@pytest.mark.parametrize(
    ("top", "bottom"),
    [
        (
            [f"{i + 38} 2.3. Boats" for i in range(4)] + ["42 2.4. Nets", "43 2.4. Nets"],
            NONE,
        ),  # title of a section
        ([f"{i} The valley" if i % 2 else f"Boats {i}" for i in range(12, 18)], NONE),  # even and odd pages
        (["Boats"] * 3 + ["Nets"] * 3, [str(i) for i in range(1, 7)]),  # the title of a chapter on its pages
        (NONE, ["iii", "iv", "v", "vi", "vii", "viii"]),
        (NONE, [f"Issue 12/5 of 2020, no. 7, 14:30, page 0000{i}" for i in range(1, 7)]),
        (NONE, ["- 1 -", "- 2 -", "- 3 -", "- 4 -", "- 5 -", "- 6 -"]),
    ],
)
def test_margins_are_no_text(top, bottom):
    assert without_margins(with_margins(top, bottom)) == TEXT


@pytest.mark.parametrize(
    "top",
    [
        ["1. Boats", "2. Nets", "3. Ropes", "4. Oars", "5. Sails", "6. Masts"],  # a heading on each page
        ["Boats", "", "Nets", "", "Boats", ""],
        ["i", "x", "c", "", "", ""],  # letters of a formula
        ["In 1912", "In 1950", "In 1931", "In 1999", "In 2004", "In 1875"],
        ["7 boats", "9 boats", "4 nets", "2 nets", "8 oars", "3 oars"],
    ],
)
def test_text_is_no_margin(top):
    pages = with_margins(top, NONE)
    assert without_margins(pages) == pages


def test_a_page_of_contents_or_a_title_is_lines():
    """Its lines are as long as one another, but short beside those of the other pages."""
    contents = ["1 Boats 2", "2 Nets 14", "3 Oars 20"]
    full = [f"{LINE} meadow in spring", "when the river rose and", "went."]
    assert list(to_paragraphs([contents, full, full])) == [*contents, *[f"{full[0]} {full[1]}", "went."] * 2]
    leaders = ["1.1 Boats . . . . . . . . . 2", "1.2 Nets ............... xii", "1.3 Oars ………… 20"]
    assert list(to_paragraphs([leaders])) == leaders


def test_columns_below_a_long_title():
    column = ["The people of the valley", "carried their boats to the", "meadow when the river"] * 8 + [
        "rose."
    ]
    title = "The boats of the valley, and what became of them in the years of the great flood"
    assert list(to_paragraphs([[title, *column]])) == [title, " ".join(column)]


def test_items_begin_a_line():
    items = [f"{LINE} meadow:", "• nets of rope that were long and older than many of them", "• oars"]
    assert list(to_paragraphs([items])) == items


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["a mead-", "ow"], "a meadow"),
        (["Sainte-", "Anne"], "Sainte-Anne"),
        (["a mead\u00ad", "ow, up\u00adper"], "a meadow, upper"),
        (["pages 737–", "9"], "pages 737–9"),
        (["one -", "two"], "one - two"),
        (["河水", "干了", "in spring"], "河水干了 in spring"),
    ],
)
def test_lines_as_one(lines, text):
    assert joined(lines) == text


def test_a_divided_word_goes_on_after_a_short_line():
    assert list(to_paragraphs([[LINE, "to the mead-", "ow."]])) == [f"{LINE} to the meadow."]


def test_letters_as_they_are_seen():
    assert as_read("o\ufb03ce, a \ufb02ag\x00\u200b  ") == "office, a flag"
    assert as_read("\uf0b7 nets") == "• nets" and as_read("x \uf0b7") == "x \uf0b7"


def test_numbers():
    assert [roman_value(digits) for digits in ("i", "iv", "ix", "xiv", "xl", "xcviii", "cc")] == [
        1,
        4,
        9,
        14,
        40,
        98,
        200,
    ]
    assert spans([2, 5, 6, 7, 9]) == "2, 5-7, 9" and spans([]) == ""
    keys = margin_keys("1 2 3 4 5", 1)
    assert (
        keys[0][1] == ("1", "2", "3", "4", "5")
        and keys[-1][1] == ("+0", "+1", "+2", "+3", "+4")
        and len(keys) == 7
    )
