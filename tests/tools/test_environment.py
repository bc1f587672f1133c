"""Which environment the shell scripts use, with stand-ins for Python; what is found missing in a real one."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from tests.conftest import ROOT
from tools import missing_packages

# Each notes its calls in `log`. A stand-in lacks what $LACKS says; .venv, once something is installed, lacks nothing.
PYTHON = """#!/usr/bin/env bash
here="$(dirname "${BASH_SOURCE[0]}")"
echo "$(basename "$here")/$(basename "$0") $*" >>"$LOG"
case "$*" in
    "-m venv"*)
        mkdir -p .venv/bin
        cp "$0" .venv/bin/python
        [ -z "${NO_PIP:-}" ] || touch .venv/bin/no_pip
        ;;
    "-c import sys; sys.exit(sys.version_info < (3, 11))") [ ! -e "$here/too_old" ] && [ -z "${TOO_OLD:-}" ] ;;
    "tools/missing_packages.py "*)
        [ -e "$here/installed" ] || printf '%s' "${LACKS:-}"
        ;;
    "-m pip --version") [ ! -e "$here/no_pip" ] ;;
    "-m ensurepip") rm "$here/no_pip" ;;
    "-m pip install "*) touch "$here/installed" ;;
    *) exit 99 ;;
esac
"""


def source(folder: Path, **environment: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Source the file in an empty folder, printing which python it leaves; what was called, without the questions."""
    for name in ("python", "python3"):
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(PYTHON)
        (folder / "bin" / name).chmod(0o755)
    script = f"set -euo pipefail; source {ROOT}/tools/environment.sh; command -v python"
    log = folder / "log"
    log.write_text("")
    env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "LOG": str(log)} | environment
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    calls = log.read_text().splitlines()
    questions = ("missing_packages", "--version", "version_info")
    return done, [call for call in calls if not any(question in call for question in questions)]


ACTIVE = [{}, {"VIRTUAL_ENV": "/home/own"}, {"CONDA_PREFIX": "/opt/conda", "CONDA_DEFAULT_ENV": "base"}]


@pytest.mark.parametrize("active", ACTIVE)
def test_what_is_active_is_taken_as_it_is_if_it_lacks_nothing(tmp_path, active):
    done, calls = source(tmp_path, **active)
    assert (done.stdout, done.stderr, done.returncode) == (f"{tmp_path}/bin/python\n", "", 0)
    assert calls == [] and not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("active", ACTIVE)
def test_what_is_active_is_not_changed_if_it_lacks_something(tmp_path, active):
    done, calls = source(tmp_path, LACKS="torch==2.13.0\npydantic==2.14.3\n", **active)
    assert done.stdout.splitlines()[-1] == f"{tmp_path}/.venv/bin/python" and done.returncode == 0
    install = "bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 pydantic==2.14.3 -c requirements-lock.txt"
    assert calls == ["bin/python3 -m venv .venv", install]
    assert (tmp_path / ".venv/bin/installed").exists() and not (tmp_path / "bin/installed").exists()
    lacks = "the active environment lacks torch==2.13.0 pydantic==2.14.3 and stays as it is"
    assert (lacks in done.stdout) == bool(active)
    # once more: nothing is left to do, whatever is active
    assert source(tmp_path, LACKS="torch==2.13.0", **active)[1] == []


def test_a_torch_of_the_machine_is_used_from_the_own_environment(tmp_path):
    _, calls = source(tmp_path, LACKS="pydantic==2.14.3")
    assert calls[0] == "bin/python3 -m venv --system-site-packages .venv"


def test_an_environment_without_pip_gets_it(tmp_path):
    """As uv makes them."""
    _, calls = source(tmp_path, LACKS="torch==2.13.0", NO_PIP="1")
    assert [call.split(" --quiet")[0] for call in calls[1:]] == [
        "bin/python -m ensurepip",
        "bin/python -m pip install",
    ]


def test_the_own_environment_is_filled_where_it_is_the_active_one(tmp_path):
    """As `uv run` and `source .venv/bin/activate` leave it."""
    source(tmp_path, LACKS="torch==2.13.0")
    (tmp_path / ".venv/bin/installed").unlink()
    own = {"VIRTUAL_ENV": f"{tmp_path}/.venv", "PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}"}
    done, calls = source(tmp_path, LACKS="torch==2.13.0", **own)
    assert done.stdout.splitlines()[-1] == f"{tmp_path}/.venv/bin/python"
    assert calls == [
        "bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c requirements-lock.txt"
    ]


@pytest.mark.parametrize("active", ACTIVE)
def test_an_old_python_is_one_line(tmp_path, active):
    done, _ = source(tmp_path, TOO_OLD="1", **active)
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "python3 is not Python 3.11 or newer" in line


def test_an_own_environment_of_an_old_python_is_one_line(tmp_path):
    source(tmp_path, LACKS="torch==2.13.0")
    (tmp_path / ".venv/bin/too_old").touch()
    done, calls = source(tmp_path, LACKS="torch==2.13.0")
    assert (done.returncode, calls) == (2, [])
    own = f"{tmp_path}/.venv/bin/python"
    assert done.stderr == f"error: {own} is not Python 3.11 or newer; remove .venv, which is then made anew\n"


def test_packages_that_are_absent_or_of_an_excluded_version_are_missing(tmp_path):
    (tmp_path / "more.txt").write_text("no-such-package>=1\n")
    numpy = version("numpy")
    (tmp_path / "asked.txt").write_text(
        f"# a comment\nnumpy>=1,<={numpy}  # there\n-r more.txt\ntorch>=99\nuvicorn[standard]!=0\n"
    )
    script = [sys.executable, ROOT / "tools/missing_packages.py", tmp_path / "asked.txt"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    locked = dict(missing_packages.requirements(missing_packages.LOCK))
    assert done.stdout.split() == ["no-such-package>=1", "torch" + locked["torch"]]


def test_without_packaging_only_what_is_missing_is_missing(tmp_path):
    """Nothing but Python's own is imported: the torch of a machine may come without `packaging`."""
    (tmp_path / "packaging.py").write_text("raise ImportError\n")
    (tmp_path / "asked.txt").write_text("numpy>=1\nno-such-package>=1\n")
    script = [sys.executable, ROOT / "tools/missing_packages.py", tmp_path / "asked.txt"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["no-such-package>=1"]


releases = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))
endings = st.sampled_from(["", "+cu130", "+cpu", "rc1", "a0", ".dev20260101", "a0+5228986c39.nv25.6"])
ranges = st.lists(
    st.tuples(st.sampled_from([">=", "<=", "==", "!=", "<"]), releases).map("".join), max_size=3
).map(",".join)


@given(installed=st.tuples(releases, endings).map("".join), versions=ranges)
@example(installed="2.12.1+cu130", versions=">=2.11,<2.16")
@example(installed="2.12.1+cu130", versions="==2.13.0")
@example(installed="2.16.0a0+1ea8b80.nv26.5", versions=">=2.11, <2.16")
@example(installed="2.11", versions="==2.11.0")
def test_versions_are_compared_as_packaging_does(installed, versions):
    """A build for one device, 2.13.0+cpu, is its version."""
    expected = SpecifierSet(versions).contains(installed.partition("+")[0], prereleases=True)
    assert missing_packages.is_allowed(installed, versions) == expected
