"""The page of runs that `plot_metrics.py --html` writes: one file without scripts that loads nothing from elsewhere."""

import io
import json
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Template
from markupsafe import Markup
from matplotlib.colors import to_hex

from scripts.runs.run import Run

TEMPLATE = Path(__file__).with_name("page.html")


def html_page(rows: list[list[str]], figure: Any, runs: list[Run]) -> str:
    """The page: the table of runs with its head, the curves (a matplotlib figure), and each run of the table."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = Markup(file.getvalue().partition("<!DOCTYPE")[2].partition(">")[2])
    colors = [to_hex(f"C{number % 10}") for number in range(len(runs))]
    template = Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return template.render(head=rows[0], runs=[*zip(runs, rows[1:], colors, strict=True)], svg=svg, dumps=json.dumps)
