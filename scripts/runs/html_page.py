"""The page of runs that `plot_metrics.py --html` writes: one file without scripts that loads nothing from elsewhere."""

import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from scripts.runs.summary import Summary

HEAD = Path(__file__).with_name("head.html")
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")


def html_page(rows: list[list[str]], figure: Any, runs: list[tuple[Summary, dict[str, str], dict[str, Any]]]) -> str:
    """The page.

    Args:
        rows: the table of runs, with its head.
        figure: the curves, a matplotlib figure.
        runs: in the order of the table, what each came to, its settings, and what else their file holds.
    """
    names = [f'<span class="swatch" style="background: {COLORS[n % 10]}"></span>' for n in range(len(runs))]
    names = [mark + escape(row[0]) for mark, row in zip(names, rows[1:], strict=True)]
    cells = [["run", *names], *([escape(row[i]) for row in rows] for i in range(1, len(rows[0])))]
    parts = [HEAD.read_text(encoding="utf-8"), f'<div class="wide">{_table([*zip(*cells, strict=True)], "runs")}']
    parts.append(f"{_svg(figure)}</div>")
    for name, (summary, settings, about) in zip(names, runs, strict=True):
        parts.append(f"<h2>{name}</h2>")
        parts += [f'<p class="warning">update {update:,}: {escape(text)}</p>' for update, text in summary.warnings]
        for prompt, answers in [*summary.samples.items(), *summary.rollout.items()]:
            found = [(f"update {update:,}", escape(text)) for update, text in answers]
            parts.append(_table([("<b>prompt</b>", f"<b>{escape(prompt)}</b>"), *found]))
        folded = {"environment": about.pop("environment", None), "settings": settings, "starts, data and code": about}
        for title, values in folded.items():
            pairs = values.items() if isinstance(values, dict) else ()
            texts = [(escape(key), escape(each if isinstance(each, str) else json.dumps(each))) for key, each in pairs]
            parts.append(f"<details><summary>{title}</summary>{_table(texts) if texts else 'not known'}</details>")
    return "\n".join([*parts, "</body></html>\n"])


def _table(rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are markup."""
    lines = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
    return "\n".join([f'<table class="{kind}">', *lines, "</table>"])


def _svg(figure: Any) -> str:
    """A figure as SVG, with its text as text."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]
