"""CSV and TSV: what spreadsheets and csv.writer write is read; a quote that is text takes no other row with it."""

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.encodings import NotUtf8
from dataset import delimited
from dataset.delimited import read_rows
from dataset.messages import BadRecord


def rows_of(text: str | bytes, delimiters=delimited.DELIMITERS) -> list[tuple[int, object]]:
    """(line, record) of each row; of a bad one the reason."""
    raw = text if isinstance(text, bytes) else text.encode()
    found = read_rows(io.BufferedReader(io.BytesIO(raw)), delimiters)
    return [(line, str(row) if isinstance(row, BadRecord) else row) for line, row in found]


def written(rows: list[list[str]], **options) -> str:
    memory = io.StringIO(newline="")
    csv.writer(memory, **options).writerows(rows)
    return memory.getvalue()


def outputs(text: str | bytes, **options) -> list[str]:
    """The cells of the last column; of a bad row the beginning of the reason."""
    return [
        row["a"] if isinstance(row, dict) else row.partition(";")[0] for _, row in rows_of(text, **options)
    ]


# --- quotes of spreadsheets

CELLS = {
    "letter": "Dear Ann,\nthank you\n\nYours, Bob",
    "one comma a line": "first, second\nthird, fourth",
    "code": "def f(x):\n\treturn x\n\ty = 1",
    "quotes": 'He said "yes",\n"no" and ""',
    "a table": "Here it is:\nname,age\nAnn,3",
    "quote at the end": 'line\nlast "word"',
    "only a quote": '"',
    "line ends": "\n\n",
    "semicolons": "int a;\nint b;",
}


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL], ids=["minimal", "all"])
@pytest.mark.parametrize("delimiter", delimited.DELIMITERS)
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_what_a_spreadsheet_writes_is_read(delimiter, quoting, end):
    rows = [["q", "a"], *([f"question {name}", cell] for name, cell in CELLS.items())]
    text = written(rows, delimiter=delimiter, quoting=quoting, lineterminator=end).replace("\n", end)
    assert outputs(text.replace("\r\r", "\r")) == list(CELLS.values())


@pytest.mark.parametrize("name", ["letter", "one comma a line", "code", "quotes", "line ends", "semicolons"])
@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_a_cell_of_several_lines_needs_no_other_quotes_in_the_file(name, delimiter):
    text = written([["q", "a"], ["x", "y"], ["q1", CELLS[name]], ["q2", "z"]], delimiter=delimiter)
    assert outputs(text, delimiters=(delimiter,)) == ["y", CELLS[name], "z"]


def test_the_only_column_may_have_several_lines():
    texts = ["It was night.\nThe mill stood still.", "one", "a\nb\nc"]
    assert outputs(written([["a"], *([text] for text in texts)])) == texts


def test_a_long_cell_is_read():
    cell = "\n".join(f"line {i}" for i in range(5 * delimited.MANY_LINES))
    assert outputs(written([["q", "a"], ["q1", cell], ["q2", "b"]])) == [cell, "b"]


TEXT = st.text(st.sampled_from('ab ,;\t|"\n水'), max_size=9)


@settings(deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6), st.sampled_from(delimited.DELIMITERS))
def test_what_is_written_is_read_or_a_quote_is_blamed(rows, delimiter):
    """Two rows that a quote joins look as a cell of two lines that is written on purpose; neither is lost."""
    cells = [["q", "a"], *rows]
    found = rows_of(written(cells, delimiter=delimiter), (delimiter,))
    if not any("a quote opens a cell, which closes" in str(row) for _, row in found):
        assert [tuple(row.values()) for _, row in found] == rows


# --- quotes that are text

SWALLOWED = {
    "tabs": ("\t", ["q1", '"a1 opens'], ["q2", "a2"], ["q3", 'closes"'], ["q4", "a4"]),
    "bars": ("|", ["q1", '"a1 opens'], ["q2", "a2"], ["q3", 'closes"'], ["q4", "a4"]),
    "commas": (",", ["q1", '"a1 opens'], ["q2", "a2"], ["q3", 'closes"'], ["q4", "a4"]),
    "at once": ("\t", ["q1", '"a1 opens'], ["q3", 'closes"'], ["q4", "a4"]),
    "first column": ("\t", ['"q1 opens', "a1"], ["q2", "a2"], ['closes"', "a3"], ["q4", "a4"]),
    "other column": ("\t", ["q1", '"a1 opens'], ["q2", "a2"], ['closes"', "a3"], ["q4", "a4"]),
    "an odd row": ("\t", ["q1", '"a1 opens'], ["q2"], ["q3", "a3"], ["q4", 'closes"'], ["q5", "a5"]),
    "quote in a text": ("\t", ["q1", '"a1 opens'], ["q2", "a2"], ["q3", 'the "old" mill'], ["q4", "a4"]),
    "never closes": ("\t", ["q1", '"a1 opens'], ["q2", "a2"], ["q3", "a3"], ["q4", "a4"]),
    "opens twice": ("\t", ["q1", '"a1 opens'], ["q2", '"a2 opens'], ["q3", "a3"], ["q4", "a4"]),
    "many rows": ("\t", ["q1", '"a1 opens'], *(["q", "a"] for _ in range(3000)), ["q3", 'closes"']),
}


@pytest.mark.parametrize("name", SWALLOWED)
def test_a_quote_that_closes_rows_later_costs_its_own_row(name):
    delimiter, *rows = SWALLOWED[name]
    text = "".join(delimiter.join(row) + "\n" for row in [["q", "a"], *rows])
    found = rows_of(text, (delimiter,))
    assert [line for line, _ in found] == list(range(2, len(rows) + 2))
    for (_, row), cells in zip(found, rows, strict=True):
        if any(cell.startswith('"') for cell in cells):
            assert row.startswith(("a quote opens a cell", "a quote inside a cell"))
        elif len(cells) == 2:
            assert tuple(row.values()) == tuple(cells)
        else:
            assert row.startswith("1 cells, but 2 columns")


def test_it_is_told_where_the_quote_closes():
    (line, said), *_ = rows_of('q\ta\nq1\t"a1\nq2\ta2\nq3\ta3"\n')
    assert line == 2 and said.startswith(
        "a quote opens a cell, which closes in line 4, after other rows; double "
    )


LITERAL = st.sampled_from(
    ["a1", "b2 c", '"opens', 'closes"', '"both"', 'the "old" mill', '5" disk', "'s", "-"]
)


@settings(deadline=None)
@given(st.lists(st.lists(LITERAL, min_size=3, max_size=3), min_size=1, max_size=9), st.sampled_from("\t|,"))
def test_rows_of_a_program_that_does_not_quote_are_never_joined(rows, delimiter):
    text = "".join(delimiter.join(row) + "\n" for row in [["q", "x", "a"], *rows])
    found = rows_of(text, (delimiter,))
    assert [line for line, _ in found] == list(range(2, len(rows) + 2))
    for (_, row), cells in zip(found, rows, strict=True):
        if isinstance(row, dict):
            assert [cell.strip('"') for cell in row.values()] == [cell.strip('"') for cell in cells]
        else:
            assert any('"' in cell for cell in cells)


@pytest.mark.parametrize(
    "bad", ['"say \\"hi\\"",a1', 'q,"say "hi" to"', '"q" x,a', '"a"b"c",d', '"q\\"1\\"",a']
)
def test_a_quote_inside_a_cell_costs_its_line(bad):
    found = rows_of(f"q,a\nq0,a0\n{bad}\nq2,a2\n")
    assert [line for line, _ in found] == [2, 3, 4] and found[2][1] == {"q": "q2", "a": "a2"}
    assert found[1][1].startswith(
        "a quote inside a cell; double a quote in the text and put the cell in quotes"
    )


@pytest.mark.parametrize(
    "rest",
    ['"print(\\"a\\")\nprint(2, 3)\n"\nq2,a2\n', '"one\ntwo "three" four\nfive"\n', '"first\nsecond\n'],
)
def test_where_the_next_row_begins_is_not_guessed(rest):
    with pytest.raises(ValueError, match=r"line 3: a quote .*, and where the next row begins is unclear; "):
        rows_of(f"q,a\nq0,a0\nq1,{rest}")


# --- header, line ends, bytes


@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "SEP=;\r", "\ufeffsep=;"])
def test_excels_first_line_names_the_delimiter(line):
    assert rows_of(f"{line}\nq;a, b\nx;y\n") == [(3, {"q": "x", "a, b": "y"})]
    assert rows_of("sep=\t\nq\ta\n1,5\ty\n", ("\t",)) == [(3, {"q": "1,5", "a": "y"})]
    assert rows_of("\n\nsep=;\n\nq;a\nx;y\n") == [(6, {"q": "x", "a": "y"})]
    assert rows_of("sep=x,a\n1,2\n") == [(2, {"sep=x": "1", "a": "2"})]


def test_cells_are_stripped_as_their_header_is():
    assert rows_of('q, a, b\nx, y, "z, ""w"""\n') == [(2, {"q": "x", "a": "y", "b": 'z, "w"'})]
    assert rows_of("q  ;a\nx  ;  y \n") == [(2, {"q": "x", "a": "  y "})]
    assert rows_of("q | a\nx | y\n") == [(2, {"q": "x", "a": "y"})]
    assert rows_of("q,a\n x, y \n") == [(2, {"q": " x", "a": " y "})]  # the blanks may be meant


def test_line_ends_in_cells():
    text = 'q,a\r\nx,"one\r\ntwo\rthree\nfour"\r\ny,"a\r\r\nb"\r\n'
    assert outputs(text) == ["one\ntwo\nthree\nfour", "a\n\nb"]
    (_, first), (line, said), (_, last) = rows_of("q,a\nx,y\nx,one\rtwo\nz,w\n")
    assert (first, line, last) == ({"q": "x", "a": "y"}, 3, {"q": "z", "a": "w"})
    assert said.startswith("a line end inside a cell without quotes; ")


def test_a_row_that_is_not_utf8_costs_only_itself():
    found = rows_of(b'q,a\nx,"one\ntwo caf\xe9"\ny,\xe6\xb0\xb4\n')
    assert found == [(2, NotUtf8(b'x,"one\ntwo caf\xe9"\n', 2)), (4, {"q": "y", "a": "水"})]
    with pytest.raises(UnicodeDecodeError):
        rows_of(b"q\xe9,a\nx,y\n")
