"""A table as text."""

from tqdm.utils import disp_len


def text_table(rows: list[list[str]]) -> str:
    """Format rows of cells as aligned columns for a terminal, where a Chinese character takes two columns.
    The first column is aligned left, the others, with figures, right."""
    widths = [max(map(disp_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first + " " * (widths[0] - disp_len(first))]
        for cell, width in zip(others, widths[1:], strict=True):
            cells.append(" " * (width - disp_len(cell)) + cell)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
