"""The stage scripts as a user runs them: files, falling losses, ranks, resuming after kill -9."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.stage_process import run
from tests.trainer.stage_flags import flags
from trainer.report.metrics import read_metrics

PRETRAIN, SFT = ROOT / "trainer" / "train_pretrain.py", ROOT / "trainer" / "train_full_sft.py"


def test_pretrain_then_sft_on_two_ranks(corpus, tmp_path):
    settings = {"use_moe": 1, "eval_interval": 4}
    assert "done: 16 updates" in run(str(PRETRAIN), flags(corpus, tmp_path, "pretrain", **settings)).out
    run(str(SFT), flags(corpus, tmp_path, "sft", **settings, batch_size=4), ranks=2)
    for stage in ("pretrain", "full_sft"):
        for path in (f"out/{stage}_32_moe.pth", f"out/{stage}_best_32_moe.pth"):
            weights = torch.load(tmp_path / path, weights_only=True)
            assert {value.dtype for value in weights.values()} == {torch.float16}
            assert not any(key.startswith(("module.", "_orig_mod.")) for key in weights)
        saved = torch.load(tmp_path / f"checkpoints/{stage}_32_moe_resume.pth", weights_only=True)
        assert {value.dtype for value in saved["model"].values()} == {torch.float32}
        records = read_metrics(tmp_path / f"out/{stage}_32_moe_metrics.jsonl")
        assert [r["update"] for r in records] == list(range(1, len(records) + 1))
        assert sum(r["loss"] for r in records[-3:]) < sum(r["loss"] for r in records[:3]) - 1
        held_out = [r["eval_loss"] for r in records if "eval_loss" in r]
        assert len(held_out) >= 3 and held_out[-1] < held_out[0]
        assert all(r["aux_loss"] > 0 for r in records)


def test_resuming(corpus, tmp_path):
    """Without a checkpoint: from the start, loudly. A finished run: nothing to do. A damaged one: the one
    before."""
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1)
    assert "new run: " in run("pretrain", argv).out
    assert "nothing to do" in run("pretrain", argv).out
    before = (tmp_path / "out/pretrain_32.pth").read_bytes()
    newest = tmp_path / "checkpoints/pretrain_32_resume.pth"
    newest.write_bytes(newest.read_bytes()[:1000])
    done = run("pretrain", argv)
    assert "warning: damaged checkpoint" in done.err and "done: 8 updates" in done.out
    assert (tmp_path / "out/pretrain_32.pth").read_bytes() == before


INSTEAD_OF_PYTHON = f"""#!/bin/sh
case "$1" in - | -c) exec {sys.executable} "$@" ;; esac
printf '%s\\0' "$@" >> "$COMMANDS" && printf '\\n' >> "$COMMANDS"
case "$1" in *"${{STOPS:-no stage}}"*) touch "$TRAINING_SESSION_STOPPED" ;; esac
"""


def test_the_pipeline_script_resumes_where_it_stopped(corpus, tmp_path):
    """The commands that it gives to `python`, run in processes that have torch loaded."""
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    small = "--max_seq_len 64 --epochs 1 --dtype float32 --accumulation_steps 1 --cache_dir " + str(
        corpus["cache"]
    )
    python, commands = tmp_path / "bin/python", tmp_path / "commands"
    python.parent.mkdir()
    python.write_text(INSTEAD_OF_PYTHON)
    python.chmod(0o755)
    env = {
        **os.environ,
        "PRETRAIN_DATA": str(corpus["pretrain"]),
        "SFT_DATA": str(corpus["sft"]),
        "HIDDEN_SIZE": "32",
        "LAYERS": "1",
        "SAVE_DIR": str(tmp_path / "out"),
        "CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "PRETRAIN_ARGS": small,
        "SFT_ARGS": small,
        "VIRTUAL_ENV": os.environ.get("VIRTUAL_ENV", sys.prefix),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "COMMANDS": str(commands),
    }
    script = ["bash", str(ROOT / "scripts/run_pretrain_sft.sh")]
    for expected in ("new run: ", "full_sft_32 is finished"):
        done = subprocess.run(script, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        typed = [line.split("\0")[:-1] for line in commands.read_text().splitlines()]
        typed = [words for words in typed if not words[0].endswith("missing_packages.py")]
        said = [run(file, argv).out for file, *argv in typed]
        assert len(said) == 2 and expected in said[1]
        commands.unlink()
    assert (tmp_path / "out/full_sft_32.pth").is_file()
    for stops, stages in (("train_pretrain", 1), ("train_full_sft", 2)):
        command = [*script, "--stop_after", "1h"]
        stopped = env | {"STOPS": stops}
        done = subprocess.run(command, env=stopped, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout.endswith("not finished; the same command continues\n")
        typed = commands.read_text().replace("\0", " ")
        assert typed.count("--stop_after 1h") == typed.count("trainer/train_") == stages
        commands.unlink()
    del env["SFT_DATA"]
    done = subprocess.run(script, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 2
        and done.stderr.startswith("error: SFT_DATA is not set")
        and "train_" not in commands.read_text()
    )
