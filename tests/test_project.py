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
LAYERS = {"common": 0, "model": 1, "dataset": 2, "trainer": 3, "llm": 4, "scripts": 5}
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
    """By name among the top-level functions of the packages, and by what it does. Scripts may have their own,
    and stages, which all have the same parts."""
    names, bodies = defaultdict(list), defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, FUNCTIONS):
                continue
            if (
                node in tree.body
                and not path.startswith("scripts/")
                and path not in STAGES
                and node.name != "main"
            ):
                names[node.name].append(path)
            body = without_docstring(node.body)
            if len(ast.unparse(ast.Module(body, []))) > 120 and not (path in STAGES and node.name == "main"):
                bodies[ast.dump(ast.Module(body, []))].append(f"{path}:{node.lineno} {node.name}")
    assert {name: paths for name, paths in names.items() if len(paths) > 1} == {}
    assert [places for places in bodies.values() if len(places) > 1] == []


def logic_lines(path: str) -> list[tuple[int, str]]:
    """The lines of a file that do something, normalised: no comments, docstrings, imports, class fields or
    brackets."""
    kept = {}
    for node in ast.walk(TREES[path]):
        if isinstance(node, FUNCTIONS):
            for statement in without_docstring(node.body):
                for line in range(statement.lineno, statement.end_lineno + 1):
                    kept[line] = True
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    found = ((number, lines[number - 1].split("  #")[0].strip()) for number in sorted(kept))
    skipped = ("#", "import ", "from ", '"""', "@")
    return [(n, text) for n, text in found if len(text) > 3 and not text.startswith(skipped)]


def test_no_block_of_logic_stands_in_two_places():
    """Wiring may repeat from stage script to stage script; what does work is written once."""
    places = defaultdict(set)
    for path in SOURCES:
        lines = logic_lines(path)
        for i in range(len(lines) - BLOCK + 1):
            places[tuple(text for _, text in lines[i : i + BLOCK])].add((path, lines[i][0]))
    twice = [
        sorted(found)
        for found in places.values()
        if len(found) > 1 and not {path for path, _ in found} <= STAGES
    ]
    assert twice == []


def imported(path: str) -> set[str]:
    """The project's own modules that a file imports, as paths; also inside functions."""
    names = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {found for name in names if (found := name.replace(".", "/") + ".py") in TREES and found != path}


def test_imports_run_one_way():
    """common <- model <- dataset <- trainer <- llm.training <- scripts; the folders of trainer/ know nothing
    of the scripts above them."""
    for path in SOURCES:
        if path == "scripts/bench/peers.py":  # runs beside another trainer's packages of the same names
            continue
        for found in imported(path):
            own, other = path.split("/")[0], found.split("/")[0]
            assert LAYERS[other] < LAYERS[own] or own == other, f"{path} imports {found}"
            if path.count("/") == 2 and path.startswith("trainer/"):
                assert found.count("/") == 2 or not found.startswith("trainer/"), f"{path}: {found}"


@pytest.mark.parametrize("path", sorted(STAGES))
def test_a_stage_shows_what_differs(path):
    """MiniMind's names stand in its `main`, and what all stages do alike in few helpers."""
    imports = [node for node in TREES[path].body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert sum(len(node.names) for node in imports) <= 30
    (main,) = [node for node in TREES[path].body if isinstance(node, FUNCTIONS) and node.name == "main"]
    functions = [node.func for node in ast.walk(main) if isinstance(node, ast.Call)]
    called = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in functions
        if not isinstance(node, ast.Call)
    }
    assert called >= {"init_distributed_mode", "setup_seed", "lm_checkpoint", "init_model", "train_epoch"}


def test_no_circles_between_files():
    graph = {path: imported(path) for path in SOURCES if path != "scripts/bench/peers.py"}
    done: set[str] = set()
    while waiting := [path for path in graph if path not in done]:
        ready = {path for path in waiting if graph[path] <= done}
        assert ready, f"imports in a circle among {sorted(waiting)}"
        done |= ready


def test_the_imports_of_a_stage_are_shallow():
    """Floors of trainer/: the longest chain of imports inside it, from a stage script down."""
    graph = {path: {found for found in imported(path) if found.startswith("trainer/")} for path in SOURCES}
    floors: dict[str, int] = {}

    def floor(path: str) -> int:
        if path not in floors:
            floors[path] = 1 + max(map(floor, graph[path]), default=0)
        return floors[path]

    assert len(STAGES) >= 2
    assert max(map(floor, STAGES)) <= 7, sorted(floors.items(), key=lambda item: item[1])


def test_every_stage_hands_its_learning_rates_on():
    """`Args.lr_scales` of a reader's own must not be without effect."""
    assert all("args.optimizer, args.lr_scales)" in (ROOT / path).read_text() for path in STAGES)
