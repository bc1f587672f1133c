"""What the commands of training load before they answer: no more than torch; and what they set before they
load it."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT

COMMANDS = [
    *sorted(str(path) for path in (ROOT / "trainer").glob("train_*.py")),
    str(ROOT / "llm/training/train.py"),
]
HEAVY = {
    "transformers",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "swanlab",
}

ANSWERS = """
import contextlib, io, json, runpy, sys
answers = []
for command in json.loads(sys.argv[1]):
    for flags in (["--help"], ["--epochs", "none"]):
        sys.argv, out, err = [command, *flags], io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path(command, run_name="__main__")
            except SystemExit as end:
                answers.append([out.getvalue()[:6], err.getvalue()[:6], end.code])
print(json.dumps([answers, list(sys.modules)]))
"""

BEFORE_TORCH = """
import os, runpy, sys

class Torch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def python(script: str, argument: str, **env: str) -> str:
    """What a script prints."""
    command = [sys.executable, "-c", script, argument]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=True, env=os.environ | env
    )
    return done.stdout


def test_help_and_mistakes_are_answered_without_heavy_imports():
    answers, modules = json.loads(python(ANSWERS, json.dumps(COMMANDS)))
    assert answers == [["usage:", "", 0], ["", "error:", 2]] * len(COMMANDS)
    assert "torch" in modules and not HEAVY & set(modules)


def test_a_forgotten_environment_is_one_line(tmp_path):
    """-S: without site-packages, as with the Python of the system."""
    files = [path for folder in ("trainer", "scripts") for path in (ROOT / folder).glob("*.py")]
    files.remove(ROOT / "scripts/web_demo.py")  # a stub, which needs nothing
    commands = [[str(path)] for path in files if '__name__ == "__main__"' in path.read_text()]
    commands += [
        ["-m", name] for name in ("llm.training.train", "dataset.show_samples", "scripts.demo.corpus")
    ]
    assert len(commands) >= 20
    for command in commands:
        cwd = ROOT if command[0] == "-m" else tmp_path
        done = subprocess.run(
            [sys.executable, "-S", *command], cwd=cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
        assert (
            done.stderr.startswith(f"error: {sys.executable} has no torch, ")
            and ".venv/bin/activate" in done.stderr
        )


def test_waiting_threads_sleep_early_unless_the_user_says_how_they_wait(monkeypatch):
    """Without the shell scripts, too; it must be set before torch is loaded."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for command in [*COMMANDS, str(ROOT / "scripts/benchmark.py")]:
        assert python(BEFORE_TORCH, command) == "2000\n", command
    assert python(BEFORE_TORCH, COMMANDS[0], GOMP_SPINCOUNT="7") == "7\n"
    assert python(BEFORE_TORCH, COMMANDS[0], OMP_WAIT_POLICY="active") == "None\n"
