"""A Python that is too old is told so by every command, before it meets what it cannot read."""

import ast
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.test_project import SOURCES

ELSEWHERE = ("benchmarks/peers.py", "tools/missing_packages.py")  # run by other scripts, which have asked
STUBS = ("eval_llm.py", "scripts/web_demo.py")  # MiniMind's names, which any Python can read
COMMANDS = [
    path
    for path in SOURCES
    if path not in (*ELSEWHERE, *STUBS) and "\nif __name__ ==" in (ROOT / path).read_text(encoding="utf-8")
]
AS_OLD = """
import runpy, sys
sys.version_info = (3, 10, 13, "final", 0)
sys.argv = [sys.argv[1], "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("path", COMMANDS)
def test_each_command_says_that_python_is_too_old(path):
    done = subprocess.run(
        [sys.executable, "-c", AS_OLD, path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: .* is Python 3\.10\.13, which is too old: .* 3\.11 or newer .*\n", done.stderr
    )


@pytest.mark.parametrize("path", ["common/__init__.py", *COMMANDS])
def test_an_old_python_can_read_so_far(path):
    """Its syntax is that of 3.8; the standard library has what is imported before `common` looks."""
    source = (ROOT / path).read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    before = re.split(r"^(?:from|import) common\b", source, maxsplit=1, flags=re.M)[0]
    newer = {"UTC", "Self", "StrEnum", "pairwise", "tomllib", "batched", "override"}
    assert not newer & set(re.findall(r"\w+", before))


def test_gpu_check_takes_no_python_that_is_too_old():
    script = (ROOT / "scripts/gpu_check.sh").read_text(encoding="utf-8")
    code = re.search(r"<<'END'\n(.*?)^END$", script, re.M | re.S)[1]
    for version, status in (((3, 10), 1), (tuple(sys.version_info[:2]), 0)):
        with pytest.raises(SystemExit) as ended:
            exec(code.replace("import sys", f"class sys:\n    version_info, exit = {version}, exit\n"), {})
        assert int(ended.value.code) == status
