"""Which environment the shell scripts use, with stand-ins for Python."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-m venv .venv") # as far as it matters here
        mkdir -p .venv/bin
        cp "$0" .venv/bin/python
        echo 'PATH="$PWD/.venv/bin:$PATH"' >.venv/bin/activate
        ;;
    "-c "*) exit "${TOO_OLD:-0}" ;;
    "- "*) exit "${MISSING:-0}" ;; # whether a requirement is not met
    "-m pip "*) echo "$*" >>pip ;;
esac
"""


def source(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Source the file in an empty folder; prints which python it leaves."""
    for name in ("python", "python3"):
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(PYTHON)
        (folder / "bin" / name).chmod(0o755)
    script = f"set -euo pipefail; source {ROOT}/tools/environment.sh; command -v python"
    env = {"PATH": f"{folder}/bin:{os.environ['PATH']}"} | environment
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("active", "used"),
    [
        ({}, ".venv/bin/python"),
        ({"CONDA_PREFIX": "/opt/conda", "CONDA_DEFAULT_ENV": "base"}, ".venv/bin/python"),
        ({"CONDA_PREFIX": "/opt/conda/envs/own", "CONDA_DEFAULT_ENV": "own"}, "bin/python"),
        ({"CONDA_PREFIX": "/home/own", "CONDA_DEFAULT_ENV": "/home/own"}, "bin/python"),
        ({"VIRTUAL_ENV": "/home/own"}, "bin/python"),
    ],
)
def test_only_an_environment_of_the_users_own_is_used(tmp_path, active, used):
    done = source(tmp_path, **active)
    assert (done.stdout, done.stderr, done.returncode) == (f"{tmp_path / used}\n", "", 0)


@pytest.mark.parametrize("active", [{}, {"VIRTUAL_ENV": "/home/own"}])
def test_an_old_python_is_one_line(tmp_path, active):
    done = source(tmp_path, TOO_OLD="1", **active)
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: python") and "is not Python 3.11 or newer" in line


@pytest.mark.parametrize(("active", "exactly"), [({}, True), ({"VIRTUAL_ENV": "/home/own"}, False)])
def test_exact_versions_are_for_an_environment_that_is_made_here(tmp_path, active, exactly):
    """Elsewhere they would replace what is there; and pip runs only if something is missing."""
    source(tmp_path, constraints="lock.txt", **active)
    assert not (tmp_path / "pip").exists()
    shutil.rmtree(tmp_path / ".venv", ignore_errors=True)
    done = source(tmp_path, constraints="lock.txt", MISSING="1", **active)
    assert done.stdout.startswith("installing requirements.txt\n")
    (installed,) = (tmp_path / "pip").read_text().splitlines()
    assert ("-r requirements.txt" in installed, "-c lock.txt" in installed) == (True, exactly)
