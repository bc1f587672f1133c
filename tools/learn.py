"""Fills in the pages of docs/learn (excerpts of the source, outputs of the snippets), and makes a notebook of
each chapter, and of docs/moving.md.

    python -m tools.learn              the excerpts, in both languages
    python -m tools.learn --run        first run the snippets on the quickstart's result, for their outputs
    python -m tools.learn --run 05     those of one chapter
    python -m tools.learn --notebooks  the notebooks, in the folders notebooks/ beside the pages

A comment before an excerpt names the file and the function or method. If not all of it is shown, the comment
says how the first and the last line of each part begin. Without a last line, a part goes to the end:

    <!-- code: trainer/loop.py train_update -->
    <!-- code: trainer/loop.py train_update | for i, batch in | loss, aux_loss | optimizer.step -->

Any other Python block is a snippet, and a text block directly after it is its output. The Chinese pages have
the same snippets; the outputs of the English pages are copied into them.
"""

import ast
import code
import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: it reports missing requirements

# isort: split
from common.errors import UserError
from common.settings import ROOT

LANGUAGES = ("docs/learn", "docs/zh/learn")
EXCERPT = re.compile(r"(?P<mark><!-- code: (?P<what>.*?) -->)\n+```python\n(?P<text>.*?)^```$", re.M | re.S)
SNIPPET = re.compile(
    r"(?<!-->\n)^```python\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<output>.*?)^```$)?", re.M | re.S
)
COMMAND = re.compile(r"^```bash\n(?P<command>.*?)^```$", re.M | re.S)
PICTURE = re.compile(r"^!\[(?P<caption>.*?)\]\((?:\.\./)+images/(?P<file>.*?)\)$", re.M)
MOVING = ("docs/moving.md", "docs/zh/moving.md")  # a run that moves, for Colab and Kaggle
# The first cell of each notebook
CLONE = """\
# Run this cell first. Where there is no clone of the repository (Colab), it asks for the address and clones
# it. It installs missing packages and changes no others.
import os, pathlib, subprocess, sys
if sys.version_info < (3, 11):
    raise SystemExit("this notebook's Python is " + sys.version.split()[0] + "; it needs 3.11 or newer")
places = [pathlib.Path.cwd(), *pathlib.Path.cwd().parents, pathlib.Path("minimind-trainer")]
clones = [place for place in places if (place / "trainer/loop.py").is_file()]
if not clones:
    address = input("There is no clone of the repository here. Its address, as for git clone: ").strip()
    if not address:
        raise SystemExit("nothing was cloned: run this cell again and enter the repository's address")
    if subprocess.run(["git", "clone", "--", address, "minimind-trainer"]).returncode:
        raise SystemExit(f"git could not clone {address!r}: run this cell again with the right address")
os.chdir(clones[0] if clones else "minimind-trainer")
sys.path.insert(0, os.getcwd())
from tools.missing_packages import missing_packages
needed = missing_packages("requirements.txt")
if any(needed.values()):
    raise SystemExit(f"this notebook's Python has other versions of {needed}; it needs a Python of its own")
if needed:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *needed], check=True)
os.environ["VIRTUAL_ENV"] = sys.prefix  # the scripts use the Python of this notebook
os.environ["PATH"] = str(pathlib.Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
"""
# of the chapters
SETUP = f"""\
{CLONE}\
# If the quickstart's model is missing, this makes it, which takes minutes.
if not pathlib.Path("out/demo/quiz_second.json").is_file():
    subprocess.run(["bash", "scripts/quickstart.sh"], check=True)
"""


def chapters(language: str = LANGUAGES[0]) -> list[Path]:
    """The pages of the chapters, in order."""
    return sorted((ROOT / language).glob("[0-9]*.md"))


# --- excerpts


def excerpt(what: str) -> str:
    """The lines that a mark names, without the indentation of the function. `...` stands for the lines that
    are left out. Raises UserError if the lines do not exist."""
    where, *ends = (part.strip() for part in what.split(" | "))
    path, name = where.split()
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    node = _definition(ast.parse("\n".join(lines)), name.split("."))
    if node is None:
        raise UserError(f"{what}: {path} has no {name}")
    body, end = node.body[0].lineno - 1, node.end_lineno or 0  # lines begin at 1
    excerpt_lines = lines[node.lineno - 1 : body if ends else end]
    at = body
    for first, last in zip(ends[::2], [*ends[1::2], ""], strict=False):
        begin = _find(lines, first, at, end, what)
        if begin > at:
            excerpt_lines.append(_indent(lines[begin]) + "...")
        at = _find(lines, last, begin, end, what) + 1 if last else end
        excerpt_lines += lines[begin:at]
    if ends and at < end:
        excerpt_lines.append(_indent(lines[body]) + "...")
    return "".join(f"{line[node.col_offset :]}\n" for line in excerpt_lines)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _definition(tree: ast.AST, names: list[str]) -> ast.FunctionDef | ast.ClassDef | None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == names[0]:
            return node if len(names) == 1 else _definition(node, names[1:])
    return None


def _find(lines: list[str], beginning: str, start: int, end: int, what: str) -> int:
    for number in range(start, end):
        if lines[number].strip().startswith(beginning):
            return number
    raise UserError(f"{what}: no line begins with {beginning!r}")


def with_excerpts(page: str) -> str:
    """The text of a page, with its excerpts taken from the current source."""
    return EXCERPT.sub(lambda match: f"{match['mark']}\n```python\n{excerpt(match['what'])}```", page)


# --- snippets


def snippets(page: str) -> list[str]:
    """The snippets of a page. Each continues in the state that the one before left."""
    return [match["code"] for match in SNIPPET.finditer(page)]


class _Console(code.InteractiveConsole):
    """Python's prompt, but errors are raised instead of written."""

    def write(self, data: str) -> None:
        """Receives the text of errors; printed text goes to stdout."""
        raise RuntimeError(data)


def run_snippets(texts: list[str]) -> list[str]:
    """The outputs of snippets that are pasted into one Python, one after the other, each followed by Enter.
    The report on data that are read for the first time is left out."""
    console, printed = _Console(), []
    for text in texts:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            incomplete = [console.push(line) for line in [*text.splitlines(), ""]]
        if incomplete[-1]:
            raise UserError("a snippet ends in the middle of a statement")
        lines = shown.getvalue().replace(str(ROOT), "...").splitlines()
        lines = [line.rstrip() for line in lines if not line.startswith("tokenised ")]
        printed.append("".join(f"{line}\n" for line in lines))
    return printed


def with_outputs(page: str, printed: list[str]) -> str:
    """The text of a page with these outputs of its snippets."""
    for match, output in reversed(list(zip(SNIPPET.finditer(page), printed, strict=True))):
        if match["output"] is not None:
            page = page[: match.start("output")] + output + page[match.end("output") :]
    return page


# --- notebooks


def notebook_path(page: Path) -> Path:
    """The path of a page's notebook."""
    return page.parent / "notebooks" / f"{page.stem}.ipynb"


def notebook(page: str, setup: str = SETUP) -> str:
    """A page as a Jupyter notebook: snippets, commands and pictures become code cells, the rest text. setup:
    its first code cell."""
    cells = []
    for kind, text, output in _parts(page, setup):
        cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
        if kind == "code":
            shown = {"output_type": "stream", "name": "stdout", "text": output.splitlines(keepends=True)}
            cell |= {"execution_count": None, "outputs": [shown] if output else []}
        cells.append(cell)
    kernel = {"name": "python3", "language": "python", "display_name": "Python 3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def moving_notebook(page: str) -> str:
    """The notebook of a page in MOVING: its last section, whose cells do the whole work."""
    title, *_, last = re.split(r"^(?=##? )", page, flags=re.M)[1:]
    return notebook(title.split("\n", 1)[0] + "\n\n" + last.partition("\n")[2].strip() + "\n", CLONE)


def _parts(page: str, setup: str) -> list[tuple[str, str, str]]:
    """The cells of a page: their kind, source and output. The setup cell comes after the title."""
    blocks = sorted(
        (match for pattern in (SNIPPET, COMMAND, PICTURE) for match in pattern.finditer(page)),
        key=lambda match: match.start(),
    )
    title = page.split("\n", 1)[0]
    parts, at = [("markdown", title, ""), ("code", setup.rstrip(), "")], len(title)
    for match in blocks:
        parts.append(("markdown", _for_notebook(page[at : match.start()]), ""))
        groups = match.groupdict()
        if "code" in groups:
            parts.append(("code", groups["code"].rstrip(), groups["output"] or ""))
        elif "command" in groups:
            parts.append(("code", "\n".join(f"!{line}" for line in groups["command"].splitlines()), ""))
        else:
            picture = f'from IPython.display import Image\nImage("docs/images/{groups["file"]}")'
            parts.append(("code", picture, ""))
        at = match.end()
    parts.append(("markdown", _for_notebook(page[at:]), ""))
    return [part for part in parts if part[1]]


def _for_notebook(text: str) -> str:
    """Markdown of a page for its notebook: the notebook is a folder deeper, and its links lead to other
    notebooks."""
    text = re.sub(r"^<!-- code: .*? -->\n", "", text.strip(), flags=re.M)
    text = re.sub(r"\]\((?!https?:|#)(.*?)\)", r"](../\1)", text)
    return re.sub(r"\]\(\.\./(\d\d_\w+)\.md", r"](\1.ipynb", text)


# --- the command


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Change a file. Print its name if its content has changed."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    after = change(before)
    if after != before:
        path.parent.mkdir(exist_ok=True)
        path.write_text(after, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} rewritten")


def main() -> None:
    """Fill in the pages, or make the notebooks."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--run", nargs="*", metavar="NUMBER", help="run the snippets (of these chapters)")
    parser.add_argument("--notebooks", action="store_true", help="make the notebooks, nothing else")
    args = parser.parse_args()
    if args.notebooks:
        for page in [page for language in LANGUAGES for page in chapters(language)]:
            text = notebook(page.read_text(encoding="utf-8"))
            rewrite(notebook_path(page), lambda _, text=text: text)
        for page in (ROOT / name for name in MOVING):
            text = moving_notebook(page.read_text(encoding="utf-8"))
            rewrite(notebook_path(page), lambda _, text=text: text)
        return
    for page in chapters():
        if args.run is not None and (not args.run or page.name[:2] in args.run):
            printed = run_snippets(snippets(page.read_text(encoding="utf-8")))
            for language in LANGUAGES:
                rewrite(ROOT / language / page.name, partial(with_outputs, printed=printed))
    for language in LANGUAGES:
        for page in chapters(language):
            rewrite(page, with_excerpts)


if __name__ == "__main__":
    with one_line_errors():
        main()
