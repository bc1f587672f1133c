"""Imports run one way and without circles; what stands in several files of the project is the same."""

import ast
import re
import subprocess
import tomllib
from functools import cache

import pytest
import yaml

from tests.conftest import ROOT

FILES = subprocess.run(
    ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout
SOURCES = [f for f in FILES.split() if not f.startswith("tests/") and (ROOT / f).exists()]
LAYERS = {
    "common": 0,
    "model": 1,
    "dataset": 2,
    "trainer": 3,
    "llm": 4,
    "tools": 5,
    "benchmarks": 5,
    "scripts": 5,
    "minimind.py": 5,
    "eval_llm.py": 5,
}
# the folders of trainer/; the stages, above them all, are the files in it
ROOMS = ["devices", "weights", "optim", "report", "objectives", "callbacks", "checkpoint", "rollouts"]
PEERS = "benchmarks/peers.py"  # runs beside another trainer's packages of the same names


@cache
def nodes(path: str) -> list[ast.AST]:
    """All nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))))


def imported(path: str) -> set[str]:
    """The project's own modules that a file imports, as paths; also inside functions."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    paths = {name.replace(".", "/") + ".py" for name in names}
    return {found for found in paths if found in SOURCES and found != path}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return {path: imported(path) for path in SOURCES if path != PEERS}


def test_imports_run_one_way(imports):
    """common <- model <- dataset <- trainer <- llm.training <- scripts with their parts in tools/."""
    for path, others in imports.items():
        for other in others:
            assert LAYERS[other.split("/")[0]] <= LAYERS[path.split("/")[0]], f"{path} imports {other}"


def test_a_folder_of_trainer_imports_those_before_it(imports):
    """Its own, those before it in ROOMS, none after it, and none of the files above the folders."""
    rooms = {
        path: path.split("/")[1] for path in imports if path.startswith("trainer/") and path.count("/") == 2
    }
    for path, room in rooms.items():
        for other in [name for name in imports[path] if name.startswith("trainer/")]:
            before = ROOMS[: ROOMS.index(room) + 1]
            assert rooms.get(other) in before, f"{path} imports {other}, which is not in {', '.join(before)}"


def test_no_circles_between_files(imports):
    done: set[str] = set()
    while waiting := [path for path in imports if path not in done]:
        ready = {path for path in waiting if imports[path] <= done}
        assert ready, f"imports in a circle among {sorted(waiting)}"
        done |= ready


# --- releases, continuous integration, issues

FORMS = [
    path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"
]


# where a wrong "absent" would begin a run anew, write over files or leave out a check
DECIDE = ("common/", "dataset/", "llm/", "model/", "trainer/", "scripts/plan.py", "scripts/evaluate.py")
SWALLOW_ERRORS = {"exists", "lexists", "is_file", "isfile", "is_dir", "isdir", "glob"}
HARMLESS = {  # what happens after a wrong "absent"
    ("common/files.py", "is_dir"): "unlink refuses a folder",
    ("dataset/files.py", "glob"): "a pattern of the user; that nothing fits it is an error",
    ("trainer/devices/device.py", "exists"): "the hint on a driver is left out",
    ("trainer/weights/files.py", "glob"): "an error names fewer weights",
    ("trainer/checkpoint/same_run.py", "glob"): "the code of this repository",
}


def test_what_decides_about_a_run_does_not_take_errors_for_absence():
    """`Path.exists` and the like are False after an error of the disk (all of them from Python 3.14 on); `is_there` and the
    others of common/files.py raise."""
    found = set()
    for path in (path for path in SOURCES if path.startswith(DECIDE)):
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr in SWALLOW_ERRORS:
                found.add((path, node.attr))
    assert found == HARMLESS.keys(), "use those of common/files.py, or say why it is harmless"


def test_the_version_is_the_same_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changelog, flags=re.M)
    assert newest and newest.groups() == (cited["version"], str(cited["date-released"]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")).get("project")
    assert project is None or project["version"] == cited["version"]


@pytest.mark.parametrize("name", ["test", "nightly"])
def test_the_workflows_run_the_scripts_with_torch_for_the_cpu(name):
    """With PyPI's build for Linux, which has CUDA, the stages on the stand-in for CUDA would be skipped."""
    text = (ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8")
    for job in yaml.safe_load(text)["jobs"].values():
        assert "https://download.pytorch.org/whl/cpu" in job["env"]["PIP_EXTRA_INDEX_URL"]
        scripts = [step["run"].split()[1] for step in job["steps"] if step.get("run", "").startswith("bash ")]
        assert scripts and all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_asks_for_something(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"] and form["description"]
    assert any(field.get("validations", {}).get("required") for field in form["body"])
