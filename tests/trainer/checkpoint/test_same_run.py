"""Which checkpoint a run goes on from: another number of ranks, more epochs, other settings, a second run at
once."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from common.settings import StageArgs
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT
from tests.stage_process import Faults, StageProcess, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, assert_same_tensors, flags, records, saved_state
from trainer.checkpoint import same_run
from trainer.checkpoint.same_run import (
    check_same_run,
    code_version,
    environment,
    run_fingerprint,
    warn_of_changes,
)
from trainer.report.metrics import read_metrics
from trainer.weights.config import model_config
from trainer.weights.files import weights_hash


def sample_ids(files: list[Path]) -> list[int]:
    """Samples of all ranks together, in the order of global micro-batches."""
    ranks = [file.read_text().splitlines() for file in files]
    return [int(i) for lines in zip(*ranks, strict=True) for line in lines for i in line.split()]


SMALL = {"epochs": 1, "num_hidden_layers": 1, "save_interval": 2, "eval_interval": 2}


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """A run of eight updates that nobody stops; tests only read its files."""
    folder = tmp_path_factory.mktemp("finished")
    run("pretrain", flags(corpus, folder, "pretrain", **SMALL))
    return folder


def test_another_number_of_ranks_and_another_grouping(corpus, tmp_path):
    """One rank, two, and one again with larger micro-batches: the same updates of the same samples, each
    exactly once; losses to 1e-5 (the sums are taken in another order)."""
    settings = {"batch_size": 2, "accumulation_steps": 4, "epochs": 2, "num_hidden_layers": 1}
    settings |= {"save_interval": 1000, "eval_interval": 1000, "optimizer": "adamw"}
    whole = flags(corpus, tmp_path / "whole", "pretrain", **settings)
    run("pretrain", whole, Faults(record=str(tmp_path / "whole_ids")))
    seen = []
    # ranks, micro-batch at which a signal comes, other settings
    parts = [(1, 17, {}), (2, 9, {}), (1, 0, {"batch_size": 4, "accumulation_steps": 2})]
    for part, (ranks, stop, others) in enumerate(parts):
        argv = flags(corpus, tmp_path, "pretrain", **settings | others, from_resume=1)
        files = [tmp_path / f"ids{part}{rank}" for rank in range(ranks)]
        faults = {rank: Faults(record=str(file)) for rank, file in enumerate(files)}
        faults[0].signals = {stop: signal.SIGTERM}
        processes = start_ranks(ranks, "pretrain", argv, faults)
        assert {process.wait() for process in processes} == {143 if stop else 0}, processes[0].err
        if ranks == 2:
            assert "2 ranks instead of 1: --accumulation_steps is now" in processes[0].out
        seen += sample_ids(files)
    assert seen == sample_ids([tmp_path / "whole_ids"])
    assert sorted(seen) == sorted(2 * list(range(max(seen) + 1)))
    one, other = (
        read_metrics(folder / "out/pretrain_32_metrics.jsonl") for folder in (tmp_path / "whole", tmp_path)
    )
    assert len(one) == one[-1]["update"] > 11
    for record, same in zip(one, other, strict=True):
        assert abs(record["loss"] - same["loss"]) <= 1e-5
        assert record["learning_rate"] == same["learning_rate"]


@pytest.mark.parametrize("stage", ["muon", pytest.param("moe", marks=pytest.mark.slow)])
def test_another_number_of_ranks_with_other_optimizers(corpus, tmp_path, stage):
    """From one rank to three and back; Muon iterates in float32 here, since bfloat16 makes rounding visible."""
    faults = Faults(script="import trainer.optim.muon as a; a.native_bfloat16 = lambda device: False")
    settings = {"batch_size": 6, "epochs": 1, "num_hidden_layers": 1, "eval_interval": 1000}
    settings |= {"optimizer": "muon"} if stage == "muon" else {"use_moe": 1, "optimizer": "adamw"}
    name = "pretrain_32" if stage == "muon" else "pretrain_32_moe"
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings), faults)
    for part, (ranks, stop) in enumerate([(1, 3), (3, 2), (1, 0)]):
        argv = flags(corpus, tmp_path, "pretrain", **settings | {"batch_size": 6 // ranks}, from_resume=1)
        of_ranks = {rank: replace(faults, signals={stop: signal.SIGTERM}) for rank in range(ranks)}
        processes = start_ranks(ranks, "pretrain", argv, of_ranks)
        assert {process.wait() for process in processes} == {143 if stop else 0}, (part, processes[0].err)
    one, other = (read_metrics(f / f"out/{name}_metrics.jsonl") for f in (tmp_path / "whole", tmp_path))
    assert len(one) == len(other) > 8
    for record, same in zip(one, other, strict=True):
        assert abs(record["loss"] - same["loss"]) <= 1e-5


def test_a_global_batch_that_cannot_be_kept(corpus, finished):
    argv = flags(corpus, finished, "pretrain", **SMALL | {"batch_size": 5}, from_resume=1)
    line = run("pretrain", argv, status=2).error_lines[-1]
    assert "global_batch: 8 -> 5" in line and "must be 8" in line


def test_more_epochs_only_by_an_explicit_flag(corpus, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    longer = flags(corpus, tmp_path, "pretrain", **SMALL | {"epochs": 3}, from_resume=1)
    line = run("pretrain", longer, status=2).error_lines[-1]
    assert "epochs: 1 -> 3" in line and "--extend_epochs 1" in line
    run("pretrain", [*longer, "--extend_epochs", "1"])
    rates = [record["learning_rate"] for record in read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")]
    assert len(rates) == 24 and rates[7] == pytest.approx(1e-3) and 7e-3 < rates[8] < 7.75e-3
    assert "nothing to do" in run("pretrain", longer).out  # it is now one of three epochs
    state = saved_state(tmp_path)  # it keeps the decay that it began with
    decay, rows = state["fingerprint"]["weight_decay"], state["fingerprint"]["samples"]
    assert decay == state["optimizer"]["param_groups"][0]["weight_decay"]
    assert decay == pytest.approx(0.7 / (0.08 * rows / 8), rel=5e-3)
    decayed = run("pretrain", [*longer, "--weight_decay", "0.7"], status=2)
    assert f"weight_decay: {decay} -> 0.7" in decayed.error_lines[-1]
    shorter = flags(corpus, tmp_path, "pretrain", **SMALL | {"epochs": 2}, from_resume=1, extend_epochs=1)
    assert "epochs: 3 -> 2" in run("pretrain", shorter, status=2).error_lines[-1]


def test_another_run_is_refused_field_by_field(corpus, finished, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "model")
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    others = [{"tokenizer_path": tmp_path / "tokenizer"}]
    others.append({"learning_rate": 0.02, "seed": 7, "epochs": 2, "batch_size": 4, "num_hidden_layers": 2})
    others[-1] |= {
        "packing": 1,
        "optimizer": "adamw",
        "data_path": corpus["pretrain_eval"],
        "eval_data_path": corpus["pretrain"],
    }
    lines = []
    for other in others:
        argv = flags(corpus, finished, "pretrain", **SMALL | other, from_resume=1)
        lines.append(run("pretrain", argv, status=2).error_lines[-1])
    assert "tokenizer: " in lines[0] and "data: " not in lines[0]
    assert lines[1].startswith("error: --from_resume 1: the checkpoint belongs to another run: ")
    for field in (*others[1], "samples", "global_batch"):
        name = {"data_path": "data", "eval_data_path": "held_out_data", "batch_size": "global_batch"}.get(
            field, field
        )
        assert f"{name}: " in lines[1], name


PRECISIONS = {
    # emulated, to see the scaler come back
    "float16": {"dtype": "float16", "batch_size": 16, "max_seq_len": 16, "num_hidden_layers": 1},
    "bfloat16": {"dtype": "bfloat16_emulated", "num_hidden_layers": 1},
}
ALLOW_FLOAT16 = "import trainer.devices.device as a; a.native_float16 = lambda device: True"


@pytest.mark.parametrize("name", PRECISIONS)
def test_half_precision_resumes_exactly_and_float32_may_follow(corpus, tmp_path, name):
    """Killed, gone on in the same precision; then stopped by a signal, gone on in float32."""
    settings = PRECISIONS[name] | {"epochs": 2}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings), Faults(script=ALLOW_FLOAT16))
    at = len(records(tmp_path / "whole")) - 2
    argv = flags(corpus, tmp_path / "broken", "pretrain", **settings, from_resume=1)
    run("pretrain", argv, Faults(script=ALLOW_FLOAT16, signals={at: signal.SIGKILL}), status=-9)
    shutil.copytree(tmp_path / "broken", tmp_path / "other")
    run("pretrain", argv, Faults(script=ALLOW_FLOAT16))
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    if name == "float16":
        scales = [saved_state(tmp_path / folder)["scaler"] for folder in ("whole", "broken")]
        assert scales[0] == scales[1] and scales[0]["scale"] >= 1 and scales[0]["_growth_tracker"] > 0
    argv = flags(
        corpus,
        tmp_path / "other",
        "pretrain",
        **settings | {"dtype": "float32"},
        from_resume=1,
        log_interval=2,
    )
    run("pretrain", argv)
    one, other = (
        read_metrics(tmp_path / folder / "out/pretrain_32_metrics.jsonl") for folder in ("whole", "other")
    )
    assert one[-1]["update"] == other[-1]["update"] and abs(one[-1]["loss"] - other[-1]["loss"]) < 0.05


def test_ranks_that_do_not_agree_do_not_start(corpus, tmp_path):
    """As on two machines without a shared file system, or with different devices."""
    argv = flags(corpus, tmp_path, "pretrain", **SMALL | {"batch_size": 4, "dtype": "auto"}, from_resume=1)
    run("pretrain", argv, ranks=2)
    elsewhere = f"sys.argv[sys.argv.index('--checkpoint_dir') + 1] = {str(tmp_path / 'elsewhere')!r}"
    dtype = "import trainer.devices.device as d; d.automatic_dtype = lambda _: 'bfloat16_emulated'"
    float32 = Faults(script=dtype.replace("bfloat16_emulated", "float32"))
    for script, told in ((elsewhere, "update: 8 -> None"), (dtype, "-> rank 1: dtype: ")):
        others = flags(corpus, tmp_path, "pretrain", **SMALL | {"batch_size": 4, "dtype": "auto"})
        typed = argv if script == elsewhere else [*others, "--save_weight", "other"]
        processes = start_ranks(2, "pretrain", typed, {0: float32, 1: Faults(script=script)})
        assert [process.wait() for process in processes] == [2, 2]
        assert "the ranks do not agree" in processes[0].err and told in processes[0].err


PARTED = """
from torch.optim import AdamW
step = AdamW.step
def other_step(optimizer, *args):
    step(optimizer, *args)
    optimizer.param_groups[0]["params"][0].data.add_(1e-6)
AdamW.step = other_step
"""


def test_replicas_that_part_end_the_run_at_the_next_checkpoint(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", **SMALL | {"batch_size": 4})
    processes = start_ranks(2, "pretrain", argv, {1: Faults(script=PARTED)})
    assert [process.wait() for process in processes] == [2, 2]
    assert "after update 1 rank 1 has other weights than rank 0 (" in processes[0].error_lines[-1]
    assert not list(tmp_path.rglob("*.pth"))


def test_three_ranks_resume_bit_for_bit(corpus, tmp_path):
    """Two ranks would hide another order of summation: a + b is b + a. Unequal layers make DDP change its
    buckets."""
    settings = {"batch_size": 2, "max_steps": 5, "hidden_size": 64, "save_interval": 2, "eval_interval": 0}
    settings |= {"num_hidden_layers": 2}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings), ranks=3)
    argv = flags(corpus, tmp_path / "broken", "pretrain", **settings, from_resume=1)
    start = start_ranks(3, "pretrain", argv, {0: Faults(signals={4: signal.SIGTERM})})
    assert {rank.wait() for rank in start} == {143}, start[0].err
    run("pretrain", argv, ranks=3)
    assert_same_run(tmp_path / "whole", tmp_path / "broken", "pretrain_64")


def test_a_forgotten_from_resume_loses_nothing(corpus, finished, tmp_path):
    """The old run's files are set aside together, and those of a run that died before its first save: its
    metrics."""
    argv = flags(corpus, tmp_path, "pretrain", **SMALL)
    run("pretrain", argv, Faults(signals={5: signal.SIGTERM}), status=143)
    old = {path.name: path.read_bytes() for path in tmp_path.rglob("pretrain*")}
    assert set(old) > {"pretrain_32.pth", "pretrain_best_32.pth", "pretrain_32_resume.pth"}
    killed = Faults(script="import trainer.loop as l; l.save_checkpoint = lambda _: os._exit(9)")
    begun = run("pretrain", argv, killed, status=9)
    assert "there was an earlier run named pretrain_32; its files are now in" in begun.out
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("*/earlier_1/*")}
    assert kept == old
    resumed = run("pretrain", [*argv, "--from_resume", "1"])
    assert "new run: " in resumed.out
    updates = [record["update"] for record in read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")]
    assert updates == [*range(1, 9)]
    assert [r["update"] for r in read_metrics(tmp_path / "out/earlier_2/pretrain_32_metrics.jsonl")] == [1]
    for path in tmp_path.glob("*/earlier_1/*"):  # put back, the old run goes on
        os.replace(path, path.parents[1] / path.name)
    assert "resuming pretrain at epoch 1, update 5" in run("pretrain", [*argv, "--from_resume", "1"]).out
    assert_same_run(finished, tmp_path)


def test_a_start_from_its_own_weights_is_refused_before_the_model_is_built(corpus, finished):
    argv = flags(corpus, finished, "pretrain", **SMALL | {"from_weight": "pretrain"})
    refused = run("pretrain", argv, status=2)
    assert "another --save_weight" in refused.error_lines[-1] and "model: " not in refused.out


def test_start_weights_may_lie_elsewhere_but_not_be_others(corpus, finished, tmp_path):
    start = shutil.copy(finished / "out/pretrain_32.pth", tmp_path / "start.pth")
    argv = flags(corpus, tmp_path, "sft", **SMALL, from_resume=1)
    run("sft", [*argv, "--from_weight", start], Faults(signals={3: signal.SIGTERM}), status=143)
    moved = os.rename(start, tmp_path / "moved.pth") or tmp_path / "moved.pth"
    again = run("sft", [*argv, "--from_weight", moved], Faults(signals={2: signal.SIGTERM}), status=143)
    assert "update 3 of" in again.out
    other = shutil.copy(finished / "out/pretrain_best_32.pth", tmp_path / "other.pth")
    with open(other, "ab") as file:
        file.write(b" ")
    refused = run("sft", [*argv, "--from_weight", other], status=2)
    assert "from_weight_sha256: " in refused.error_lines[-1]


def test_start_weights_that_are_gone_are_not_missed(corpus, finished, tmp_path):
    (tmp_path / "out").mkdir()
    start = shutil.copy(finished / "out/pretrain_32.pth", tmp_path / "out/start_32.pth")
    argv = flags(corpus, tmp_path, "sft", **SMALL, from_weight="start", from_resume=1)
    run("sft", argv, Faults(signals={3: signal.SIGTERM}), status=143)
    os.remove(start)
    assert "resuming full_sft" in run("sft", argv).out


def test_only_the_model_in_a_folder_is_what_a_run_starts_from(tmp_path):
    """Whatever else is put there, such as the run's own files."""
    folder = tmp_path / "model"
    (folder / "out").mkdir(parents=True)
    shards = {"a": "model-2.safetensors", "b": "model-1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name in ("config.json", *shards.values()):
        (folder / name).write_text(name)

    before = weights_hash(folder)
    for name in ("out/w_512.pth", "w_512_metrics.jsonl", "adapter_model.safetensors", "README.md"):
        (folder / name).write_text(name)
    assert weights_hash(folder) == before
    (folder / "model-1.safetensors").write_text("other")
    assert weights_hash(folder) != before


def test_other_threads_or_another_cpu_are_a_warning(monkeypatch, capsys):
    cpu = torch.device("cpu")
    code = {"sources": {"a.py": "1"}, "optimizer": {}}
    before = {"environment": environment(StageArgs(), cpu, nullcontext()), "code": code, "update": 4}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "Z80")
    now = environment(StageArgs(), cpu, torch.autocast("cpu", torch.bfloat16))
    (result,) = warn_of_changes(before, now, code)
    assert result.startswith("to rounding from update 4 on (")
    line = capsys.readouterr().err
    assert all(text in line for text in ("-> 99", "-> Z80", "-> bfloat16", "only up to rounding"))
    assert warn_of_changes(before, before["environment"], code) == []
    assert not capsys.readouterr().err


def test_a_path_that_is_not_utf8_is_refused_at_the_start(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", save_dir=f"{tmp_path}/\udcff")
    refused = run("pretrain", argv, status=2)
    assert "--save_dir is not UTF-8" in refused.error_lines[-1] and not list(tmp_path.iterdir())


class Before(StageArgs):
    mine: int = 1


class After(Before):
    added: float = 0.5


def test_a_flag_that_is_added_does_not_end_a_run():
    """With its default the run goes on; with another value it is another run."""

    def fingerprint(args):
        return run_fingerprint(args, config.own_fields(), {}, 9)

    start = {"from_weight": "none", "from_resume": True}
    config = model_config(load_tokenizer(ROOT / "model"), Before(**start))
    saved = fingerprint(Before(**start))
    checkpoint = {"world_size": 1, "fingerprint": saved, "run_id": "a", "update": 1}
    check_same_run(After(**start), fingerprint(After(**start)), checkpoint)
    for other, told in (({"added": 0.7}, "added: 0.5 -> 0.7"), ({"mine": 2}, "mine: 1 -> 2")):
        args = After(**start, **other)
        with pytest.raises(UserError, match=re.escape(f"another run: {told}")):
            check_same_run(args, fingerprint(args), checkpoint)


def test_a_second_run_of_the_same_name_is_refused(corpus, tmp_path):
    """As long as the first lives; killed with -9, it holds nothing any more."""
    argv = flags(corpus, tmp_path, "pretrain", epochs=1)
    first = StageProcess("pretrain", [*argv, "--num_workers", "1"], Faults(sleep=30.0))
    deadline = time.time() + 60
    while "Epoch" not in first.out and "model:" not in first.out and time.time() < deadline:
        time.sleep(0.02)
    second = run("pretrain", argv, status=2)
    assert len(second.error_lines) == 1
    assert f"error: process {first.process.pid} on " in second.err and "another --save_weight" in second.err
    first.send(signal.SIGKILL)
    assert first.wait() == -9
    assert "done: 8 updates" in run("pretrain", argv).out


KILLED = {
    "dense": ("sft", "full_sft", "", {"packing": 1, "batch_size": 2, "epochs": 2, "save_interval": 7}),
    "moe": ("pretrain", "pretrain", "_moe", {"use_moe": 1, "optimizer": "muon", "epochs": 2}),
}
KILLED["moe"][3].update(learning_rate=1e-3, batch_size=4)


@pytest.mark.parametrize("kind", KILLED)
def test_a_run_that_is_killed_ends_with_the_same_bits(corpus, tmp_path, kind):
    """Twice, within accumulation windows of two epochs; loader processes change nothing.
    scripts/verify_resume.py does more."""
    stage, weight, suffix, settings = KILLED[kind]
    settings |= {"from_weight": "none", "num_hidden_layers": 1, "dropout": 0.1, "accumulation_steps": 2}
    run(stage, flags(corpus, tmp_path / "whole", stage, **settings))
    broken = flags(corpus, tmp_path / "broken", stage, **settings, num_workers=2, from_resume=1)
    for micro_batch in (7, 10):
        run(stage, broken, Faults(signals={micro_batch: signal.SIGKILL}), status=-signal.SIGKILL)
    assert f"resuming {weight} at epoch" in run(stage, broken).out
    assert_same_run(tmp_path / "whole", tmp_path / "broken", f"{weight}_32{suffix}")
    best = f"out/{weight}_best_32{suffix}.pth"
    assert_same_tensors(*(torch.load(tmp_path / name / best) for name in ("whole", "broken")))


def test_a_foreign_checkpoint_is_refused(corpus, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    torch.save({"weights": torch.ones(3)}, folder / "pretrain_32_resume.pth")
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1)
    assert "is damaged (it is not a state to resume from)" in run("pretrain", argv, status=2).error_lines[-1]
    keys = ("model", "optimizer", "epoch", "step", "world_size")
    torch.save(dict.fromkeys(keys, 0), folder / "pretrain_32_resume.pth")
    assert "is not a checkpoint of a stage script" in run("pretrain", argv, status=2).error_lines[-1]
    assert not (tmp_path / "out/pretrain_32.pth").exists()


@pytest.mark.slow
def test_compiled_runs_resume_exactly_and_compiling_may_be_toggled(corpus, tmp_path):
    """Without the compiler's cache, as in a new container, and with loader processes, too, which must not
    outlive the run."""
    settings = {"epochs": 2, "num_hidden_layers": 1, "accumulation_steps": 2, "num_workers": 2}
    at = Faults(signals={13: signal.SIGKILL})

    def argv(folder: str, **more) -> list[str]:
        return flags(corpus, tmp_path / folder, "pretrain", **settings | more)

    run("pretrain", argv("whole", use_compile=1), timeout=600)
    run("pretrain", argv("broken", use_compile=1), at, status=-9, timeout=600)
    shutil.copytree(tmp_path / "broken", tmp_path / "toggled")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    run("pretrain", argv("broken", use_compile=1, from_resume=1), timeout=600, **cache)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    run("pretrain", argv("toggled", use_compile=0, from_resume=1))
    whole, toggled = records(tmp_path / "whole"), records(tmp_path / "toggled")
    assert all(abs(a[2] - b[2]) < 1e-4 for a, b in zip(whole, toggled, strict=True))


def test_the_revision_is_of_the_codes_own_repository(tmp_path, monkeypatch):
    """Not of one that surrounds its folder, nor of the one in whose hook it runs; a worktree is one."""
    outer = tmp_path / "home: of all"
    (outer / "project").mkdir(parents=True)
    (outer / "project/a.py").write_text("1\n")

    def git(folder, *words):
        command = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for name in (".", "project"):
        folder = outer / name
        if name == "project":
            monkeypatch.setattr(same_run, "ROOT", folder)
            assert code_version() == "unknown"
        git(folder, "init")
        git(folder, "add", "--all")
        git(folder, "commit", "--message", name)
    own = git(outer / "project", "rev-parse", "--short", "HEAD")
    assert code_version() == own
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    assert code_version() == own
    monkeypatch.delenv("GIT_DIR")
    (outer / "project/a.py").write_text("2\n")
    assert code_version() == f"{own}-dirty"
    git(outer / "project", "worktree", "add", tmp_path / "tree")
    monkeypatch.setattr(same_run, "ROOT", tmp_path / "tree")
    assert code_version() == own
