"""The stage scripts as a user runs them: files, falling losses, ranks, resuming after kill -9, mistakes."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.conftest import ROOT, launch
from trainer.console import read_metrics

PRETRAIN, SFT = ROOT / "trainer" / "train_pretrain.py", ROOT / "trainer" / "train_full_sft.py"


def flags(corpus, folder, stage, **extra) -> list[str]:
    """A small run; `extra` replaces its settings."""
    settings = {
        "data_path": corpus[stage],
        "eval_data_path": corpus[f"{stage}_eval"],
        "cache_dir": corpus["cache"],
        "save_dir": folder / "out",
        "checkpoint_dir": folder / "checkpoints",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "max_seq_len": 64,
        "batch_size": 8,
        "accumulation_steps": 1,
        "epochs": 2,
        "learning_rate": 1e-2,
        "dtype": "float32",
        "log_interval": 1,
        "save_interval": 3,
        "eval_interval": 4,
    }
    settings |= {"from_weight": "none"} if stage == "pretrain" else {}
    return [part for key, value in (settings | extra).items() for part in (f"--{key}", str(value))]


@pytest.mark.parametrize("moe", [0, 1])
def test_pretrain_then_sft_on_two_ranks(corpus, tmp_path, moe):
    done = launch(PRETRAIN.name, *flags(corpus, tmp_path, "pretrain", use_moe=moe), cwd=PRETRAIN.parent)
    assert "done: 16 updates" in done.stdout
    launch(SFT.name, *flags(corpus, tmp_path, "sft", use_moe=moe, batch_size=4), cwd=SFT.parent, ranks=2)
    suffix = "_moe" if moe else ""
    for stage in ("pretrain", "full_sft"):
        for path in (f"out/{stage}_32{suffix}.pth", f"out/{stage}_best_32{suffix}.pth"):
            weights = torch.load(tmp_path / path, weights_only=True)
            assert {value.dtype for value in weights.values()} == {torch.float16}
            assert not any(key.startswith(("module.", "_orig_mod.")) for key in weights)
        saved = torch.load(tmp_path / f"checkpoints/{stage}_32{suffix}_resume.pth", weights_only=True)
        assert {value.dtype for value in saved["model"].values()} == {torch.float32}
        records = read_metrics(tmp_path / f"out/{stage}_32{suffix}_metrics.jsonl")
        assert [r["update"] for r in records] == list(range(1, len(records) + 1))
        assert sum(r["loss"] for r in records[-3:]) < sum(r["loss"] for r in records[:3]) - 1
        held_out = [r["eval_loss"] for r in records if "eval_loss" in r]
        assert len(held_out) >= 3 and held_out[-1] < held_out[0]
        assert all(r["aux_loss"] > 0 if moe else r["aux_loss"] == 0 for r in records)


def test_held_out_loss_and_training_loss_do_not_depend_on_the_ranks(corpus, tmp_path):
    for name, ranks, batch_size in (("one", 0, 8), ("two", 2, 4)):
        launch(SFT, *flags(corpus, tmp_path / name, "sft", from_weight="none", batch_size=batch_size), ranks=ranks)
    one, two = (read_metrics(tmp_path / name / "out/full_sft_32_metrics.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) == 20
    for a, b in zip(one, two, strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-5 and a["learning_rate"] == b["learning_rate"]
        assert ("eval_loss" in a) == ("eval_loss" in b)
        if "eval_loss" in a and a["update"] <= 4:  # later the weights themselves differ in the last bits
            assert abs(a["eval_loss"] - b["eval_loss"]) <= 1e-5 and abs(a["eval_bpb"] - b["eval_bpb"]) <= 1e-5


def kill_after(records: int, metrics, command: list[str]) -> None:
    """Start a run and kill -9 it once its metrics file holds this many records."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.time() + 120
    while len(read_metrics(metrics)) < records and process.poll() is None and time.time() < deadline:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_and_resumed_ends_with_the_same_bits(corpus, tmp_path):
    settings = {"from_weight": "none", "epochs": 3, "dropout": 0.1, "accumulation_steps": 2, "batch_size": 6}
    launch(SFT, *flags(corpus, tmp_path / "whole", "sft", **settings))
    broken = flags(corpus, tmp_path / "broken", "sft", **settings, from_resume=1)
    metrics = tmp_path / "broken/out/full_sft_32_metrics.jsonl"
    for records in (5, 16):
        kill_after(records, metrics, [sys.executable, str(SFT), *broken])
        assert records <= len(read_metrics(metrics)) < 21
    done = launch(SFT, *broken)
    assert "resuming full_sft at epoch" in done.stdout
    for path in ("out/full_sft_32.pth", "out/full_sft_best_32.pth", "checkpoints/full_sft_32_resume.pth"):
        whole, broken_one = (torch.load(tmp_path / run / path, weights_only=True) for run in ("whole", "broken"))
        whole, broken_one = (state.get("model", state) for state in (whole, broken_one))
        assert all(torch.equal(whole[key], broken_one[key]) for key in whole)
    fields = ("update", "epoch", "step", "loss", "learning_rate", "grad_norm", "eval_loss", "eval_bpb", "tokens")
    whole, broken_one = (
        [[r.get(f) for f in fields] for r in read_metrics(tmp_path / run / "out/full_sft_32_metrics.jsonl")]
        for run in ("whole", "broken")
    )
    assert whole == broken_one and len(whole) == 21


def test_resuming(corpus, tmp_path):
    """Without a checkpoint: from the start, loudly. A finished run: nothing to do. Other settings: refused by name."""
    run = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1)
    assert "starting afresh" in launch(PRETRAIN, *run).stdout
    before = (tmp_path / "out/pretrain_32.pth").read_bytes()
    half = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1, dtype="float16")  # the precision may change
    assert "done: 8 updates" in launch(PRETRAIN, *half).stdout
    assert (tmp_path / "out/pretrain_32.pth").read_bytes() == before
    other = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1, learning_rate=0.02, from_weight="pretrain")
    done = launch(PRETRAIN, *other, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().startswith("error: --from_resume 1: the checkpoint belongs to another run")
    assert "learning_rate: 0.01 -> 0.02" in done.stderr and "from_weight: none -> pretrain" in done.stderr
    assert (tmp_path / "out/pretrain_32.pth").read_bytes() == before
    newest = tmp_path / "checkpoints/pretrain_32_resume.pth"
    newest.write_bytes(newest.read_bytes()[:1000])  # damaged: the one before it stands in
    done = launch(PRETRAIN, *run)
    assert "warning: damaged checkpoint" in done.stderr and "done: 8 updates" in done.stdout


MISTAKES = {
    "no pretrained weights": (SFT, {"stage": "sft"}, "pretrain_32.pth do not exist", "--from_weight"),
    "several settings": (PRETRAIN, {"epochs": 0, "learning_rate": -1}, "--epochs 0", "--learning_rate -1.0"),
    "no data": (PRETRAIN, {"data_path": "nowhere.jsonl"}, "nowhere.jsonl", ""),
    "no tokenizer": (PRETRAIN, {"tokenizer_path": "nowhere"}, "--tokenizer_path nowhere", "no such folder"),
    "unknown flag": (PRETRAIN, {"bath_size": 3}, "--bath_size", "--help"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_exit_status_2(corpus, tmp_path, case):
    script, extra, *expected = MISTAKES[case]
    extra = dict(extra)
    done = launch(script, *flags(corpus, tmp_path, extra.pop("stage", "pretrain"), **extra), check=False)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert all(text in lines[0] for text in expected)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.pth"))


def test_weights_of_another_shape_are_refused(corpus, tmp_path):
    launch(PRETRAIN, *flags(corpus, tmp_path, "pretrain", epochs=1, num_hidden_layers=1))
    done = launch(SFT, *flags(corpus, tmp_path, "sft"), check=False)
    assert done.returncode == 2 and "do not fit the model" in done.stderr and "layers.1." in done.stderr
    (tmp_path / "out/pretrain_32.pth").write_bytes(b"not weights")
    done = launch(SFT, *flags(corpus, tmp_path, "sft"), check=False)
    assert done.returncode == 2 and "not a readable weights file" in done.stderr


def test_the_pipeline_script_resumes_where_it_stopped(corpus, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    small = "--max_seq_len 64 --epochs 1 --dtype float32 --accumulation_steps 1 --cache_dir " + str(corpus["cache"])
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
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
    }
    script = ["bash", str(ROOT / "scripts/run_pretrain_sft.sh")]
    for expected in ("starting afresh", "resuming full_sft"):
        done = subprocess.run(script, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    assert (tmp_path / "out/full_sft_32.pth").is_file()
    del env["SFT_DATA"]
    done = subprocess.run(script, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: SFT_DATA is not set")
