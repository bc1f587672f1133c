"""Budgets of the source: a smoke alarm for files and functions that grow past what one sees at a glance."""

import ast
import difflib
import subprocess

import pytest

from tests.conftest import ROOT

FILES = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
SOURCES = [f for f in FILES.split() if not f.startswith("tests/")]
NESTING = (ast.If, ast.For, ast.While, ast.With, ast.Try)


def depth(node: ast.AST, level: int = 0) -> int:
    """Deepest block inside a function; `elif` is no deeper than its `if`."""
    deepest = level
    for name, children in ast.iter_fields(node):
        for child in children if isinstance(children, list) else [children]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                is_elif = name == "orelse" and isinstance(node, ast.If) and isinstance(child, ast.If)
                deepest = max(deepest, depth(child, level + (isinstance(child, NESTING) and not is_elif)))
    return deepest


@pytest.mark.parametrize("path", SOURCES)
def test_budgets(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert text.count("\n") <= 350
    assert not text.strip() or ast.get_docstring(tree), "a file opens with what it is for"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno + 1 <= 60, node.name
            assert depth(node) <= 3, node.name
            public = not node.name.startswith("_") and node.name not in ("main", "forward")
            top = node in tree.body
            assert not (public and top) or ast.get_docstring(node), f"{node.name} has no docstring"


def test_stage_scripts_own_only_what_differs():
    """At most a quarter of one stage script's lines stand in another (stripped; no comments, no blank lines)."""
    scripts = [(ROOT / f"trainer/{name}.py").read_text().splitlines() for name in ("train_pretrain", "train_full_sft")]
    a, b = ([line.strip() for line in lines if line.strip() and not line.strip().startswith("#")] for lines in scripts)
    same = sum(block.size for block in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks())
    assert same <= 0.25 * max(len(a), len(b)), f"{same} of {len(a)}/{len(b)}"
