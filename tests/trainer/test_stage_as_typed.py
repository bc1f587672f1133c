"""The launch lines of the manual as typed, in a copy of the repository, with its default data files; and what
a reader changes in a stage script."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT, write_jsonl
from tests.stage_process import FORKED_RANKS, QUICK_RATE, Faults, StageProcess, run
from tests.trainer.stage_flags import flags, records
from trainer.report.metrics import read_metrics
from trainer.weights.files import half_weights


@pytest.fixture
def clone(tmp_path) -> Path:
    """A copy of the packages, whose scripts import each other."""
    for name in ("common", "dataset", "model", "trainer"):
        ignored = shutil.ignore_patterns("__pycache__", "cache", "demo", "*.jsonl")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    with open(tmp_path / "trainer/report/speed.py", "a") as file:
        file.write(QUICK_RATE)
    return tmp_path


def typed(clone: Path, line: str, status: int = 0) -> StageProcess:
    """Run a line in the clone's trainer/, in a process that has torch loaded."""
    folder, (script, *argv) = clone / "trainer", shlex.split(line)
    return run(str(folder / script), argv, Faults(script=f"os.chdir({str(folder)!r})"), status=status)


def test_without_data_one_line_says_how_to_get_some(clone):
    done = typed(clone, "train_full_sft.py", status=2)
    told = r"error: \S+/dataset/sft_t2t_mini\.jsonl: no such file; .*\(python (\S+) writes (\S+) to try\)\n"
    script, folder = re.fullmatch(told, done.err).groups()
    shutil.copytree(ROOT / "scripts/demo", clone / "scripts/demo")
    subprocess.run([sys.executable, script], cwd=clone, check=True)
    assert folder == str(clone / "dataset/demo") and (clone / "dataset/demo/sft.jsonl").is_file()


@pytest.mark.parametrize("start", ["forked", pytest.param("as typed", marks=pytest.mark.slow)])
def test_the_users_launch_lines(clone, start):
    """Two ranks from pretrained weights with the default data, epochs and batch size given, and resumed. The
    default model is made smaller."""
    settings = clone / "common/settings.py"
    text, number = settings.read_text(encoding="utf-8"), 0
    for name, value in (("hidden_size", 32), ("num_hidden_layers", 1)):
        text, number = re.subn(rf"(    {name}: int = setting\(\s*)\d+", rf"\g<1>{value}", text)
        assert number == 1
    settings.write_text(text, encoding="utf-8")
    chats = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}."}] for i in range(40)
    ]
    write_jsonl(clone / "dataset" / "sft_mini_512.jsonl", [{"conversations": chat} for chat in chats])
    shape = MiniMindConfig(
        hidden_size=32, num_hidden_layers=1, vocab_size=len(load_tokenizer(ROOT / "model"))
    )
    (clone / "out").mkdir()
    torch.save(half_weights(MiniMindForCausalLM(shape)), clone / "out" / "pretrain_32.pth")
    words = ["--nproc_per_node", "2", "train_full_sft.py"]
    if start == "forked":
        script = f"os.chdir({str(clone / 'trainer')!r})\n{FORKED_RANKS}"
        first = run("torch.distributed.run", words, Faults(script=script), CUDA_VISIBLE_DEVICES="2,3").out
    else:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = os.environ | {"PYTHONPATH": str(clone), "PATH": path}
        launch = f"CUDA_VISIBLE_DEVICES=2,3 torchrun {shlex.join(words)}"
        options = {"cwd": clone / "trainer", "env": env, "capture_output": True, "text": True, "timeout": 240}
        done = subprocess.run(launch, shell=True, **options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        first = done.stdout
    assert "done: 4 updates" in first and (clone / "out/full_sft_32.pth").is_file()
    argv = ["--epochs", "3", "--extend_epochs", "1", "--batch_size", "16", "--from_resume", "1"]
    again = run(str(clone / "trainer/train_full_sft.py"), argv, ranks=2)
    assert "resuming full_sft at epoch 2, update 4 of 6" in again.out and "done: 6 updates" in again.out
    assert "warning: trainer" not in again.err  # the code is the same


def edited(clone: Path, old: str, new: str) -> Path:
    """The clone's SFT script with one piece of text replaced."""
    script = clone / "trainer" / "train_full_sft.py"
    text = script.read_text(encoding="utf-8")
    assert text.count(old) == 1
    script.write_text(text.replace(old, new), encoding="utf-8")
    return script


PAGE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
Z_LOSS = PAGE[PAGE.index("class Objective(next_token.NextToken)") : PAGE.index("frozen_parameters = tuple(")]


def test_a_loss_and_a_flag_of_ones_own_are_local_to_the_stage(clone, corpus):
    """With its extra term the training loss is larger, the held-out loss is not. The engine follows, and a
    resume with another value is refused."""
    small = " ".join(
        flags(corpus, clone, "sft", from_weight="none", epochs=1, save_interval=1000, eval_interval=0)
    )
    edited(clone, "    max_seq_len: int = 768\n", "    max_seq_len: int = 768\n    z_loss: float = 0.0\n")
    script = clone / "trainer/train_full_sft.py"
    script.write_text(script.read_text().replace("schedule = ", f"import torch\n{Z_LOSS}schedule = ", 1))
    found = {}
    for z in ("0", "1e-3"):
        done = typed(clone, f"train_full_sft.py {small} --z_loss {z}")
        found[z] = read_metrics(clone / "out/full_sft_32_metrics.jsonl")
    assert "cross_entropy: " in done.out and found["0"][-1]["early"] == found["0"][-1]["cross_entropy"]
    losses = {z: [record["loss"] for record in rows] for z, rows in found.items()}
    assert losses["1e-3"][0] > losses["0"][0] + 0.05
    assert found["1e-3"][-1]["eval_loss"] == pytest.approx(found["0"][-1]["eval_loss"], abs=0.05)
    shutil.copytree(ROOT / "llm", clone / "llm", ignore=shutil.ignore_patterns("__pycache__"))
    typed(clone, f"../llm/training/train.py --task full_sft {small} --z_loss 1e-3")
    engine = [record["loss"] for record in read_metrics(clone / "out/full_sft_32_metrics.jsonl")]
    assert engine == losses["1e-3"]
    refused = typed(clone, f"train_full_sft.py {small} --from_resume 1 --z_loss 0.5", status=2)
    assert "the checkpoint belongs to another run: z_loss: 0.001 -> 0.5" in refused.err


def test_mean_loss_is_the_mean_since_the_last_record_also_after_a_resume(corpus, tmp_path):
    """Against a run that logs every update: of the whole one, and of one stopped between two log points."""
    settings = {"epochs": 1, "save_interval": 1000, "eval_interval": 0, "batch_size": 4}
    run("pretrain", flags(corpus, tmp_path / "every", "pretrain", **settings, log_interval=1))
    losses = [row[2] for row in records(tmp_path / "every")]
    argv = flags(corpus, tmp_path / "some", "pretrain", **settings, log_interval=5, from_resume=1)
    run("pretrain", argv, Faults(signals={8: signal.SIGTERM}), status=128 + signal.SIGTERM)
    run("pretrain", argv)
    found = read_metrics(tmp_path / "some/out/pretrain_32_metrics.jsonl")
    begin = 0
    for record in found:
        assert record["loss"] == losses[record["update"] - 1]
        since = losses[begin : record["update"]]
        assert record["mean_loss"] == pytest.approx(sum(since) / len(since), rel=1e-12)
        begin = record["update"]
    assert [record["update"] for record in found][:3] == [1, 5, 10]
