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
from tests.test_project import PEERS, SOURCES
from tests.trainer.stage_flags import flags

MAIN = 'if __name__ == "__main__":'
BY_MODULE = ("dataset/", "trainer/rollouts/", "scripts/planning/")  # started with `python -m`
OWN = re.compile(r"^(from|import) (common|dataset|llm|model|scripts|tools|trainer)\b", flags=re.M)
SCRIPTS = [path for path in SOURCES if not path.startswith(BY_MODULE) and MAIN in (ROOT / path).read_text()]
SCRIPTS = [path for path in SCRIPTS if OWN.search((ROOT / path).read_text())]
SPAWN = "\nimport multiprocessing\nmultiprocessing.set_start_method('spawn', force=True)\n"
IN_EACH_PROCESS = "\nimport os\nprint('loaded', __file__, 'in', os.getpid(), flush=True)\n"


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path != PEERS])
def test_the_head_of_a_script_puts_its_repository_first(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    edit = f"sys.path.insert(0, str(Path(__file__).resolve().parents[{path.count('/')}]))"
    assert 0 <= text.find(edit) < OWN.search(text).start()


@pytest.fixture
def clone(tmp_path) -> Path:
    """Another clone, which prints the file of a module in each process that loads it. Its loader's processes
    are spawned."""
    clone = tmp_path / "clone"
    listed = ["git", "ls-files", "common", "dataset", "model", "trainer"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.split():
        if (ROOT / name).exists():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    added = {"dataset/tokenizing.py": IN_EACH_PROCESS, "trainer/loop.py": SPAWN}
    for name, text in added.items():
        with open(clone / name, "a", encoding="utf-8") as file:
            file.write(text)
    return clone


def test_a_second_clone_runs_its_own_code_in_all_processes(clone, corpus, tmp_path):
    """This one, found first by PYTHONPATH, stands for a clone that is installed."""
    argv = flags(corpus, tmp_path, "pretrain", cache_dir=tmp_path / "cache", num_workers=1, max_steps=1)
    argv += ["--eval_data_path", "none"]
    command = [sys.executable, str(clone / "trainer/train_pretrain.py"), *argv]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    loaded = re.findall(r"loaded (\S+) in (\d+)", done.stdout.decode())
    assert {path for path, _ in loaded} == {str(clone / "dataset/tokenizing.py")}
    assert len({process for _, process in loaded}) >= 2  # the script, and one that loads
