"""The shape of the source: docstrings, one implementation of each thing, imports that run one way."""

import ast
import subprocess
from collections import defaultdict

import pytest

from tests.conftest import ROOT

FILES = subprocess.run(
    ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout
SOURCES = [f for f in FILES.split() if not f.startswith("tests/") and (ROOT / f).exists()]
TREES = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in SOURCES}
STAGES = {path for path in SOURCES if path.startswith("trainer/train_")}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYERS = {"common": 0, "model": 1, "dataset": 2, "trainer": 3, "llm": 4, "tools": 5, "scripts": 5}
PEERS = "tools/bench/peers.py"  # runs beside another trainer's packages of the same names
BLOCK = 6  # lines of logic that may not stand in two places


@pytest.mark.parametrize("path", SOURCES)
def test_docstrings(path):
    text, tree = (ROOT / path).read_text(encoding="utf-8"), TREES[path]
    assert not text.strip() or ast.get_docstring(tree), "a file opens with what it is for"
    for node in tree.body:
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_") and node.name != "main":
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_docstring else body


def test_no_function_is_defined_twice():
    """By what it does. Stages may have the same `main`."""
    bodies = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, FUNCTIONS) or (path in STAGES and node.name == "main"):
                continue
            body = ast.Module(without_docstring(node.body), [])
            if len(ast.unparse(body)) > 120:
                bodies[ast.dump(body)].append(f"{path}:{node.lineno} {node.name}")
    assert [places for places in bodies.values() if len(places) > 1] == []


def logic_lines(path: str) -> list[tuple[int, str]]:
    """The lines of a file's functions with their numbers: no comments, docstrings, imports or brackets."""
    numbers = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, FUNCTIONS):
            for statement in without_docstring(node.body):
                numbers |= {*range(statement.lineno, statement.end_lineno + 1)}
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    found = [(number, lines[number - 1].split("  #")[0].strip()) for number in sorted(numbers)]
    skipped = ("#", "import ", "from ", '"""', "@")
    return [(number, text) for number, text in found if len(text) > 3 and not text.startswith(skipped)]


def test_no_block_of_logic_stands_in_two_places():
    """Wiring may repeat from stage script to stage script; what does work is written once."""
    places = defaultdict(set)
    for path in SOURCES:
        lines = logic_lines(path)
        for i in range(len(lines) - BLOCK + 1):
            places[tuple(text for _, text in lines[i : i + BLOCK])].add((path, lines[i][0]))
    twice = [sorted(found) for found in places.values() if len(found) > 1]
    assert [found for found in twice if not {path for path, _ in found} <= STAGES] == []


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


@pytest.mark.parametrize("path", sorted(STAGES))
def test_a_stage_shows_minimind_s_steps(path):
    """MiniMind's names stand in its `main`, and learning rates of parameter groups (`Args.lr_scales`) are
    handed on."""
    (main,) = [node for node in TREES[path].body if isinstance(node, FUNCTIONS) and node.name == "main"]
    names = {node.id for node in ast.walk(main) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(main) if isinstance(node, ast.Attribute)}
    assert names >= {"init_distributed_mode", "setup_seed", "lm_checkpoint", "init_model", "train_epoch"}
    assert "lr_scales" in names
