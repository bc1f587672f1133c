"""Finds packages of requirements files that a Python lacks, as arguments for pip: `python
tools/missing_packages.py FILE`.

A package counts as missing if the file excludes its installed version. The versions to install are those of
requirements-lock.txt. It runs in environments that have no packages yet, so it imports only Python's standard
library.
"""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements-lock.txt"


def requirements(path: Path) -> Iterator[tuple[str, str]]:
    """(name, versions) of each line, such as ("torch", ">=2.11"), including the files that it includes by
    -r."""
    for line in path.read_text(encoding="utf-8").splitlines():
        requirement = line.partition("#")[0].strip()
        if requirement.startswith("-r "):
            yield from requirements(path.parent / requirement.removeprefix("-r ").strip())
        elif requirement:
            name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
            yield name, re.sub(r"^\s*\[.*?\]", "", requirement.removeprefix(name)).strip()


def missing_packages(*paths: str) -> dict[str, str | None]:
    """pip's argument for each missing package -> the version that is installed instead, or "" if there is
    none."""
    locked = {canonical(name): versions for name, versions in requirements(LOCK)}
    missing = {}
    for name, versions in [line for path in paths for line in requirements(Path(path))]:
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = None
        if installed is None or not is_allowed(installed, versions):
            missing[name + locked.get(canonical(name), versions)] = installed
    return missing


def canonical(name: str) -> str:
    """The name of a package in the form in which PyPI compares names: PyYAML is pyyaml, pydantic_core is
    pydantic-core."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_allowed(installed: str, versions: str) -> bool:
    """Whether `versions` (">=2.11,<2.16") allows a version. 2.13.0+cpu, a build for one device, counts as
    2.13.0. A release candidate of 2.11 comes before 2.11, and one of 2.16 does not count as below 2.16."""
    release = numbers(installed)
    comes_before = re.match(r"[\d.]+[-_.]?(a|b|c|rc|alpha|beta|pre|dev)", installed) is not None
    for each in filter(None, versions.split(",")):
        operator, bound = re.split(r"(?<=[<>=])(?=\s*\d)", each.strip(), maxsplit=1)
        is_equal = release == numbers(bound) and not comes_before
        allows = {
            "==": is_equal,
            "!=": not is_equal,
            ">=": release > numbers(bound) or is_equal,
            "<=": release <= numbers(bound),
            "<": release < numbers(bound),
        }
        if not allows[operator]:
            return False
    return True


def numbers(version: str) -> list[int]:
    """The numbers of a release without zeros at the end: 2.13 equals 2.13.0."""
    found = re.match(r"[\d.]*\d", version.strip())
    return [int(part) for part in re.sub(r"(\.0+)+$", "", found[0]).split(".")] if found else []


if __name__ == "__main__":
    print(*missing_packages(*sys.argv[1:]), sep="\n", end="")
