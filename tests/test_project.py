"""Imports run one way and without circles."""

import ast
import subprocess

from tests.conftest import ROOT

FILES = subprocess.run(
    ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout
SOURCES = [f for f in FILES.split() if not f.startswith("tests/") and (ROOT / f).exists()]
TREES = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in SOURCES}
LAYERS = {"common": 0, "model": 1, "dataset": 2, "trainer": 3, "llm": 4, "tools": 5, "scripts": 5}
PEERS = "tools/bench/peers.py"  # runs beside another trainer's packages of the same names


def imported(path: str) -> set[str]:
    """The project's own modules that a file imports, as paths; also inside functions."""
    names = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    paths = {name.replace(".", "/") + ".py" for name in names}
    return {found for found in paths if found in TREES and found != path}


IMPORTS = {path: imported(path) for path in SOURCES if path != PEERS}


def test_imports_run_one_way():
    """common <- model <- dataset <- trainer <- llm.training <- scripts with their parts in tools/; the
    folders of trainer/ know nothing of the scripts above them."""
    for path, others in IMPORTS.items():
        for other in others:
            assert LAYERS[other.split("/")[0]] <= LAYERS[path.split("/")[0]], f"{path} imports {other}"
            if path.count("/") == 2 and path.startswith("trainer/"):
                assert other.count("/") == 2 or not other.startswith("trainer/"), f"{path}: {other}"


def test_no_circles_between_files():
    done: set[str] = set()
    while waiting := [path for path in IMPORTS if path not in done]:
        ready = {path for path in waiting if IMPORTS[path] <= done}
        assert ready, f"imports in a circle among {sorted(waiting)}"
        done |= ready
