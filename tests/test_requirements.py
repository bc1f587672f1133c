"""What is imported is required, pyproject.toml reads the requirements files, and the lock is within their
ranges."""

import ast
import sys
import tomllib

from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.test_project import LAYERS, PEERS, SOURCES, nodes

NAMES = {"yaml": "pyyaml"}  # of packages that have another one than their module
# offered, and each says so where it is missing
BY_HAND = {"triton", "wandb"}


def lines(name: str) -> list[str]:
    """The requirements in a file."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and line[0] not in "#-"]


LISTED = [line for name in ("", "-serve", "-test") for line in lines(f"requirements{name}.txt")]


def imported() -> set[str]:
    """The packages of others that the source imports, also inside functions."""
    modules = set()
    for path in SOURCES:
        if path == PEERS:  # it runs in an environment of the peers'
            continue
        for node in nodes(path):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    ours = LAYERS.keys() | {"tests"} | sys.stdlib_module_names
    return {NAMES.get(module, module) for module in modules - ours}


def test_pip_and_uv_read_the_same_files():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    read = project["tool"]["setuptools"]["dynamic"]
    assert project["project"]["dynamic"] == list(read)
    for file in (read["dependencies"]["file"], read["optional-dependencies"]["serve"]["file"]):
        assert "\n-" not in (ROOT / file).read_text(), "setuptools reads no options, such as -r"


def test_what_is_imported_is_required():
    assert imported() - BY_HAND <= {Requirement(line).name for line in LISTED}


def test_the_lock_holds_a_version_within_each_range():
    locked = dict(line.lower().split("==") for line in lines("requirements-lock.txt"))
    for line in LISTED:
        needed = Requirement(line)
        assert needed.specifier.contains(locked[needed.name]), line
