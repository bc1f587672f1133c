"""Tables as text."""

from tqdm.utils import disp_len

LONGEST = 28  # characters of a cell on a terminal


def table_lines(rows: list[list[str]], width: int | None = None) -> list[str]:
    """A table as lines, the first column to the left, the others to the right.

    width: columns of a terminal. There long cells lose their beginning, and columns that do not fit stand in
    further blocks below, each with the first column again.
    """
    if width:
        rows = [[cell if len(cell) <= LONGEST else f"…{cell[1 - LONGEST :]}" for cell in row] for row in rows]
    sizes = [max(map(disp_len, column)) for column in zip(*rows, strict=True)]
    blocks, used = [[0]], sizes[0]
    for column in range(1, len(sizes)):
        used += 2 + sizes[column]
        if width and used > width and len(blocks[-1]) > 1:
            blocks.append([0])
            used = sizes[0] + 2 + sizes[column]
        blocks[-1].append(column)
    lines: list[str] = []
    for block in blocks:
        if lines:
            lines.append("")
        for row in rows:
            cells = [row[0] + padding(row[0], sizes[0])]
            cells += [padding(row[column], sizes[column]) + row[column] for column in block[1:]]
            lines.append("  ".join(cells).rstrip())
    return lines


def padding(cell: str, size: int) -> str:
    """The blanks that fill a cell: some characters take two columns of a terminal."""
    return " " * (size - disp_len(cell))
