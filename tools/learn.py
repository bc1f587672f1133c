"""The pages of docs/learn: fills in the excerpts of the source, and the outputs of the snippets.

    python -m tools.learn          the excerpts, in both languages
    python -m tools.learn --run    also run the snippets on the quickstart's result, for their outputs

A comment stands before an excerpt and names the file, and the function or method. If not all of it is shown,
it says how the first and the last line of each part begin; without a last line, a part goes to the end:

    <!-- code: trainer/loop.py train_update -->
    <!-- code: trainer/loop.py train_update | for i, batch in | loss, aux_loss | optimizer.step -->

Another Python block is a snippet, and the text block after it shows its output. The outputs of the English
pages are copied into the Chinese ones, which have the same snippets.
"""

import ast
import code
import contextlib
import io
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from common.errors import UserError
from common.settings import ROOT

LANGUAGES = ("docs/learn", "docs/zh/learn")
EXCERPT = re.compile(r"(?P<mark><!-- code: (?P<what>.*?) -->)\n+```python\n(?P<text>.*?)^```$", re.M | re.S)
BETWEEN = r"(?:(?!^```).)*?"  # text without a block
SNIPPET = re.compile(
    rf"(?<!-->\n)^```python\n(?P<code>.*?)^```${BETWEEN}^```text\n(?P<output>.*?)^```$", re.M | re.S
)


def chapters(language: str = LANGUAGES[0]) -> list[Path]:
    """The pages of the chapters, in order."""
    return sorted((ROOT / language).glob("[0-9]*.md"))


# --- excerpts


def excerpt(what: str) -> str:
    """The lines that a mark names, with the indentation of the function taken away; `...` stands for what is
    left out. Raises UserError if they are not there."""
    where, *ends = (part.strip() for part in what.split(" | "))
    path, name = where.split()
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    node = _definition(ast.parse("\n".join(lines)), name.split("."))
    if node is None:
        raise UserError(f"{what}: {path} has no {name}")
    body, end = node.body[0].lineno - 1, node.end_lineno or 0  # lines begin at 1
    shown = lines[node.lineno - 1 : body if ends else end]
    at = body
    for first, last in zip(ends[::2], [*ends[1::2], ""], strict=False):
        begin = _find(lines, first, at, end, what)
        if begin > at:
            shown.append(_indent(lines[begin]) + "...")
        at = _find(lines, last, begin, end, what) + 1 if last else end
        shown += lines[begin:at]
    if ends and at < end:
        shown.append(_indent(lines[body]) + "...")
    return "".join(f"{line[node.col_offset :]}\n" for line in shown)


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
    """The text of a page with its excerpts as they are in the source."""
    return EXCERPT.sub(lambda match: f"{match['mark']}\n```python\n{excerpt(match['what'])}```", page)


# --- snippets


def snippets(page: str) -> list[str]:
    """The snippets of a page; the later ones go on where the first one ended."""
    return [match["code"] for match in SNIPPET.finditer(page)]


def outputs(page: str) -> list[str]:
    """What the page shows as the outputs of its snippets."""
    return [match["output"] for match in SNIPPET.finditer(page)]


class _Console(code.InteractiveConsole):
    """Python's prompt, where an error is raised instead of written."""

    def write(self, data: str) -> None:
        """Of errors; what is printed goes to stdout."""
        raise RuntimeError(data)


def run_snippets(texts: list[str]) -> list[str]:
    """What snippets print that are pasted into one Python, one after the other, each followed by Enter."""
    console, printed = _Console(), []
    for text in texts:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            waits = [console.push(line) for line in [*text.splitlines(), ""]]
        if waits[-1]:
            raise UserError("a snippet ends in the middle of a statement")
        lines = shown.getvalue().replace(str(ROOT), "...").splitlines()
        printed.append("".join(f"{line.rstrip()}\n" for line in lines))
    return printed


def with_outputs(page: str, printed: list[str]) -> str:
    """The text of a page with these outputs of its snippets."""
    for match, output in reversed(list(zip(SNIPPET.finditer(page), printed, strict=True))):
        page = page[: match.start("output")] + output + page[match.end("output") :]
    return page


# --- the command


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Change a page, and say so if it is another then."""
    before = path.read_text(encoding="utf-8")
    after = change(before)
    if after != before:
        path.write_text(after, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} rewritten")


def main() -> None:
    """Fill in the pages."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", nargs="*", metavar="NUMBER", help="run the snippets (of these chapters)")
    args = parser.parse_args()
    for language in LANGUAGES:
        for path in chapters(language):
            rewrite(path, with_excerpts)
    if args.run is None:
        return
    for path in chapters():
        if not args.run or path.name[:2] in args.run:
            printed = run_snippets(snippets(path.read_text(encoding="utf-8")))
            for language in LANGUAGES:
                rewrite(ROOT / language / path.name, partial(with_outputs, printed=printed))


if __name__ == "__main__":
    with one_line_errors():
        main()
