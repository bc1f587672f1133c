"""The tour: what it runs is possible, what fails ends it, what is in the way is one line."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from common.arguments import parse_args
from scripts.demo.sums import make_sums
from scripts.demo.tour import make_tour
from scripts.demo.world import make_corpus
from tests.conftest import ROOT
from trainer import train_agent, train_distillation, train_dpo, train_full_sft, train_grpo, train_lora

STAGES = (train_lora, train_dpo, train_distillation, train_full_sft, train_grpo, train_agent)
ARGS = {f"trainer/{stage.__name__.split('.')[1]}.py": stage.Args for stage in STAGES}
RUNS = ["persona", "terse", "alone", "student", "sums", "sums_grpo", "calls", "calculator"]


@pytest.fixture
def started(tmp_path):
    """started(fails): the tour with a `python` that only notes its arguments -> its end, and the lists of
    arguments."""
    for folder in ("scripts", "tools", "bin", "out/demo"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "tour.sh", tmp_path / "scripts")
    (tmp_path / "tools" / "environment.sh").write_text("activate_first=")
    (tmp_path / "out/demo/full_sft_256.pth").write_bytes(b"weights")
    python = tmp_path / "bin" / "python"

    def run(fails: str = "nothing") -> tuple[subprocess.CompletedProcess, list[list[str]]]:
        python.write_text(
            f'#!/usr/bin/env bash\nprintf "%s\\n" "$*" >>"{tmp_path}/commands"\n[[ "$*" != *{fails}* ]]\n'
        )
        python.chmod(0o755)
        path = f"{python.parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", tmp_path / "scripts/tour.sh"],
            capture_output=True, text=True, check=False, env=os.environ | {"PATH": path},
        )  # fmt: skip
        return done, [line.split() for line in (tmp_path / "commands").read_text().splitlines()]

    return run


def test_each_command_is_possible(started):
    done, commands = started()
    assert done.returncode == 0, done.stderr
    files = make_corpus(0) | make_tour(0) | make_sums(0)
    runs = [parse_args(ARGS[words[0]], None, words[1:]) for words in commands if words[0] in ARGS]
    for settings in runs:
        named = [settings.data_path, settings.eval_data_path]
        assert all(os.path.relpath(path, "dataset/demo") in files for path in named if path)
        assert settings.from_resume and str(settings.save_dir) == "out/tour"
    assert [settings.save_weight for settings in runs] == RUNS
    alone, student = (vars(settings) for settings in runs[2:4])
    differing = {name for name in alone if alone[name] != student[name]}
    assert differing == {"save_weight", "alpha"} and alone["alpha"] == 1  # but for the teacher the same run
    made = {"out/demo/full_sft_256.pth", "out/tour/persona_256", "out/tour/terse_256.pth"}
    made |= {"out/tour/alone_128.pth", "out/tour/student_128.pth"}
    for words in (words for words in commands if words[0] == "scripts/evaluate.py"):
        given = dict(zip(words[1::2], words[2::2], strict=True))
        assert os.path.relpath(given["--data_path"], "dataset/demo") in files
        assert {given[name] for name in ("--model", "--lora", "--against") if name in given} <= made


def test_a_run_that_fails_ends_the_tour(started):
    done, commands = started("alone")
    assert done.returncode == 1 and "It continues with: bash scripts/tour.sh" in done.stderr
    assert "alone" in commands[-1]


@pytest.mark.parametrize(("flag", "told"), [([], "bash scripts/quickstart.sh"), (["--again"], "--fresh")])
def test_without_the_quickstarts_model(tmp_path, flag, told):
    (tmp_path / "scripts").mkdir()
    script = Path(shutil.copy(ROOT / "scripts" / "tour.sh", tmp_path / "scripts"))
    done = subprocess.run(["bash", script, *flag], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and told in done.stderr
