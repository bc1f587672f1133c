"""A script runs the code that it lies beside: from any folder, whatever is installed, in each of its
processes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_project import SOURCES
from tests.trainer.stage_flags import flags

MAIN = 'if __name__ == "__main__":'
SCRIPTS = [path for path in SOURCES if not path.startswith("dataset/") and MAIN in (ROOT / path).read_text()]
OWN = re.compile(r"^(from|import) (common|dataset|llm|model|scripts|trainer)\b", flags=re.M)
EDIT = re.compile(r"^ *sys\.path\b.*", flags=re.M)
USERS_FOLDERS = (  # of tasks, rewards, environments
    "sys.path.insert(0, os.getcwd())  # spawned processes and torchrun do not search it",
    "sys.path.append(str(Path(path).expanduser().resolve().parent))  # last: it hides nothing",
)
IN_EACH_PROCESS = "\nimport os\nprint('loaded', __file__, 'in', os.getpid(), flush=True)\n"
NOT_INSTALLED = f"""
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
sys.path = [folder for folder in sys.path if folder not in ("", {str(ROOT)!r})]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("path", SOURCES)
def test_the_head_of_a_script_puts_its_repository_first(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    edits = [line for line in EDIT.findall(text) if line.strip() not in USERS_FOLDERS]
    if path not in SCRIPTS or path == "scripts/bench/peers.py":  # it runs beside another trainer's packages
        assert not edits, "only a file that is run as a script edits sys.path"
        return
    depth = path.count("/")
    assert [line.split("  #")[0] for line in edits] == [
        f"sys.path.insert(0, str(Path(__file__).resolve().parents[{depth}]))"
    ]
    assert text.index(edits[0]) < OWN.search(text).start()


def test_all_scripts_were_found():
    folders = {str(Path(path).parent) for path in SCRIPTS}
    assert folders == {"trainer", "llm/training", "scripts", "scripts/bench"} and len(SCRIPTS) >= 12


@pytest.fixture
def clone(tmp_path) -> Path:
    """Another clone, which prints the file of a module in each process that loads it. Its loader's processes
    are spawned, and it tokenises in two processes however small the data are."""
    clone = tmp_path / "clone"
    listed = ["git", "ls-files", "common", "dataset", "model", "trainer"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.split():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    added = {
        "dataset/tokenizing.py": IN_EACH_PROCESS,
        "dataset/token_cache.py": "\nPARALLEL_ABOVE, blocks.BLOCK_BYTES = 0, 2000\n",
        "common/machine.py": "\navailable_cores = lambda: 2\n",
        "trainer/loop.py": "\nimport multiprocessing\nmultiprocessing.set_start_method('spawn', force=True)\n",
    }
    for name, text in added.items():
        with open(clone / name, "a", encoding="utf-8") as file:
            file.write(text)
    return clone


def test_a_second_clone_runs_its_own_code_in_all_processes(clone, corpus, tmp_path):
    """This one, found first by PYTHONPATH, stands for the clone that is installed."""
    argv = flags(corpus, tmp_path, "pretrain", cache_dir=tmp_path / "cache", num_workers=1, epochs=1)
    command = [sys.executable, str(clone / "trainer/train_pretrain.py"), *argv]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    loaded = re.findall(r"loaded (\S+) in (\d+)", done.stdout.decode())
    assert {path for path, _ in loaded} == {str(clone / "dataset/tokenizing.py")}
    # the script, one or two that tokenise, one that loads
    assert len({process for _, process in loaded}) >= 3


def test_a_script_runs_where_nothing_is_installed(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", NOT_INSTALLED, str(ROOT / "scripts/train_tokenizer.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "--vocab_size" in done.stdout, done.stderr
