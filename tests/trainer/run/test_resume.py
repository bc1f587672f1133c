"""Which checkpoint a run goes on from: another number of ranks, more epochs, other settings, a second run at
once."""

import json
import os
import re
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.errors import UserError
from common.settings import StageArgs
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT, write_jsonl
from tests.stage_process import Faults, StageProcess, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, assert_same_tensors, flags, records, saved_state
from trainer import train_distillation, train_dpo, train_full_sft, train_grpo
from trainer.objectives.distillation import TeacherArgs
from trainer.objectives.next_token import model_config
from trainer.report.metrics import read_metrics
from trainer.run import resume
from trainer.run.checkpoint import FORMAT, write_file
from trainer.run.paths import start_path
from trainer.run.resume import (
    check_resume,
    computing,
    keep_global_batch,
    run_fingerprint,
    warn_of_changes,
    weights_fingerprint,
)
from trainer.run.state import TrainState


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
    settings |= {"save_interval": 1000, "eval_interval": 1000}
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


@pytest.mark.parametrize(
    ("ranks", "batch_size", "accumulation", "advice"),
    [
        (2, 5, 3, "12 -> 30.*must be 12: --batch_size 3 --accumulation_steps 2$"),
        (1, 4, 2, "12 -> 8.*must be 12: --batch_size 4 --accumulation_steps 3$"),
        (5, 4, 3, "12 -> 60.*5 processes do not divide it"),
    ],
)
def test_a_global_batch_that_cannot_be_kept(monkeypatch, ranks, batch_size, accumulation, advice):
    """It is refused with what would work."""
    start = {"from_weight": "none", "from_resume": True}
    saved = run_fingerprint(StageArgs(**start, batch_size=4, accumulation_steps=3), {}, {}, 9)
    checkpoint = {"run": saved, "epoch": 0, "step": 1, "update": 1, "world_size": 1, "loaded_from": "x.pth"}
    monkeypatch.setattr(resume, "world_size", lambda: ranks)
    monkeypatch.setattr(resume, "gather", lambda own: [own] * ranks)
    args = StageArgs(**start, batch_size=batch_size, accumulation_steps=accumulation)
    args = keep_global_batch(args, checkpoint)
    with pytest.raises(UserError, match=f"global_batch: {advice}"):
        check_resume(args, run_fingerprint(args, {}, {}, 9), checkpoint)


def test_more_epochs_only_by_an_explicit_flag(corpus, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    longer = flags(corpus, tmp_path, "pretrain", **SMALL | {"epochs": 3}, from_resume=1)
    line = run("pretrain", longer, status=2).error_lines[-1]
    assert "epochs: 1 -> 3" in line and "--extend_epochs 1 would go on" in line
    done = run("pretrain", [*longer, "--extend_epochs", "1"])
    assert "--extend_epochs 1: 3 epochs instead of 1" in done.out
    rates = [record["learning_rate"] for record in read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")]
    assert len(rates) == 24 and rates[7] == pytest.approx(1e-3) and 7e-3 < rates[8] < 7.75e-3
    assert f"the learning rate goes from 1.00e-03 to {rates[8]:.2e}" in done.out
    assert "nothing to do" in run("pretrain", longer).out  # it is now one of three epochs
    shorter = flags(corpus, tmp_path, "pretrain", **SMALL | {"epochs": 2}, from_resume=1, extend_epochs=1)
    assert "epochs: 3 -> 2" in run("pretrain", shorter, status=2).error_lines[-1]


def test_another_run_is_refused_field_by_field(corpus, finished, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "model")
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    others = [{"tokenizer_path": tmp_path / "tokenizer"}]
    others.append({"learning_rate": 0.02, "seed": 7, "epochs": 2, "batch_size": 4, "num_hidden_layers": 2})
    others[-1] |= {"packing": 1, "optimizer": "muon", "data_path": corpus["pretrain_eval"]}
    lines = []
    for other in others:
        argv = flags(corpus, finished, "pretrain", **SMALL | other, from_resume=1)
        lines.append(run("pretrain", argv, status=2).error_lines[-1])
    assert "(tokenizer: " in lines[0] and "data: " not in lines[0]
    assert lines[1].startswith("error: --from_resume 1: the checkpoint belongs to another run (")
    for field in (*others[1], "samples", "global_batch"):
        name = {"data_path": "data", "batch_size": "global_batch"}.get(field, field)
        assert f"{name}: " in lines[1], name


PRECISIONS = {
    # emulated, to see the scaler come back
    "float16": {"dtype": "float16", "batch_size": 16, "max_seq_len": 16, "num_hidden_layers": 1},
    "bfloat16": {"dtype": "bfloat16_emulated"},
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


def test_ranks_that_see_different_files_do_not_start(corpus, tmp_path):
    """As on two machines without a shared file system."""
    argv = flags(corpus, tmp_path, "pretrain", **SMALL | {"batch_size": 4}, from_resume=1)
    run("pretrain", argv, ranks=2)
    elsewhere = f"sys.argv[sys.argv.index('--checkpoint_dir') + 1] = {str(tmp_path / 'elsewhere')!r}"
    processes = start_ranks(2, "pretrain", argv, {1: Faults(script=elsewhere)})
    assert [process.wait() for process in processes] == [2, 2]
    told = (
        "the ranks do not see the same data, settings or checkpoint (checkpoint's epoch: 0 on rank 0, None "
    )
    assert told in processes[0].err
    # another run's checkpoint, at the same place in the same update
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "elsewhere")
    path = tmp_path / "elsewhere/pretrain_32_resume.pth"
    state = torch.load(path, weights_only=True)
    state["model"]["model.norm.weight"] += 1
    with path.open("w+b") as file:
        write_file(state, file)
    processes = start_ranks(2, "pretrain", argv, {1: Faults(script=elsewhere)})
    assert [process.wait() for process in processes] == [2, 2]
    assert "data, settings or checkpoint (checkpoint's sha256: " in processes[0].err


def test_ranks_of_different_precision_do_not_train(corpus, tmp_path):
    """As `auto` gives on machines with different devices."""
    argv = flags(corpus, tmp_path, "pretrain", **SMALL | {"dtype": "auto", "batch_size": 4})
    dtypes = ("float32", "bfloat16_emulated")
    faults = {
        rank: Faults(script=f"import trainer.devices.device as d; d.automatic_dtype = lambda _: {dtype!r}")
        for rank, dtype in enumerate(dtypes)
    }
    processes = start_ranks(2, "pretrain", argv, faults)
    assert [process.wait() for process in processes] == [2, 2]
    told = (
        "the ranks compute differently: rank 0 in float32 on cpu, rank 1 in bfloat16 on cpu; give a --dtype"
    )
    assert told in processes[0].error_lines[-1]
    assert not list((tmp_path / "out").glob("*.pth"))


def test_a_mean_over_the_updates_since_a_record_goes_on(corpus, tmp_path):
    """The run is stopped between two records."""
    settings = {
        "epochs": 1,
        "num_hidden_layers": 1,
        "log_interval": 4,
        "save_interval": 100,
        "eval_interval": 0,
    }
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings))
    argv = flags(corpus, tmp_path / "stopped", "pretrain", **settings, from_resume=1)
    run("pretrain", argv, Faults(signals={2: signal.SIGTERM}), status=143)
    run("pretrain", argv)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_three_ranks_resume_bit_for_bit(corpus, tmp_path):
    """Two ranks would hide another order of summation: a + b is b + a. Unequal layers make DDP change its
    buckets."""
    settings = {"batch_size": 2, "epochs": 1, "hidden_size": 64, "save_interval": 2, "eval_interval": 0}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings), ranks=3)
    argv = flags(corpus, tmp_path / "broken", "pretrain", **settings, from_resume=1)
    start = start_ranks(3, "pretrain", argv, {0: Faults(signals={4: signal.SIGTERM})})
    assert {rank.wait() for rank in start} == {143}, start[0].err
    run("pretrain", argv, ranks=3)
    assert_same_run(tmp_path / "whole", tmp_path / "broken", "pretrain_64")


def test_a_forgotten_from_resume_loses_nothing(corpus, finished, tmp_path):
    """The old run's files are set aside together, and a new run that is killed early never continues the old
    one."""
    argv = flags(corpus, tmp_path, "pretrain", **SMALL)
    run("pretrain", argv, Faults(signals={5: signal.SIGTERM}), status=143)
    old = {path.name: path.read_bytes() for path in tmp_path.rglob("pretrain*")}
    assert set(old) > {
        "pretrain_32.pth",
        "pretrain_best_32.pth",
        "pretrain_32_resume.pth",
        "pretrain_32_metrics.jsonl",
    }
    begun = run("pretrain", argv, Faults(signals={2: signal.SIGKILL}), status=-9)
    assert "a run named pretrain_32 was here; its files are kept in" in begun.out
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("*/earlier_1/*")}
    assert kept == old
    resumed = run("pretrain", [*argv, "--from_resume", "1"])
    assert "new run: " in resumed.out
    assert [record["update"] for record in read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")] == [
        *range(1, 9)
    ]
    # what was killed before its first checkpoint is nothing to keep
    assert not list(tmp_path.glob("*/earlier_2"))
    for path in tmp_path.glob("*/earlier_1/*"):  # put back, the old run goes on
        os.replace(path, path.parents[1] / path.name)
    assert "resuming pretrain at epoch 1, update 5" in run("pretrain", [*argv, "--from_resume", "1"]).out
    assert_same_run(finished, tmp_path)


STARTS = {"name": "w", "best": "w_best", "path": "out/w_512.pth", "link": "link.pth"}
STARTS |= {"state": "checkpoints/w_512_resume.pth"}
STARTS |= {"numbered": "elsewhere/../checkpoints/w_512_update_00000002.pth"}
STARTS |= {"best state": "checkpoints/w_512_best_resume.pth", "other": "other", "hard link": "hard.pth"}
IS_STATE = {"state", "numbered", "best state"}


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    """Files of a run of the name w, and links to its weights; the current folder is where they are."""
    for name in ("out", "checkpoints"):
        (tmp_path / name).mkdir()
    for name in ("w_512", "w_best_512", "other_512"):
        (tmp_path / f"out/{name}.pth").write_text(name)
    for name in ("resume", "resume_previous", "update_00000002", "best_resume"):
        (tmp_path / f"checkpoints/w_512_{name}.pth").write_text(name)
    (tmp_path / "link.pth").symlink_to("out/w_512.pth")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "out", target_is_directory=True)
    os.link(tmp_path / "out/w_512.pth", tmp_path / "hard.pth")
    monkeypatch.chdir(tmp_path)
    return {
        "save_weight": "w",
        "save_dir": str(tmp_path / "out"),
        "checkpoint_dir": str(tmp_path / "checkpoints"),
    }


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("needs", ["nothing", "reference", "kl", "no kl", "teacher"])
def test_weights_that_a_run_needs_again_are_not_written_over(own_files, start, needs):
    """It is refused at its start, not at the resume, when it is too late."""
    flag = "from_teacher_weight" if needs == "teacher" else "from_weight"
    stage = {"reference": train_dpo, "kl": train_grpo, "no kl": train_grpo, "teacher": train_distillation}
    more = {"kl": {"beta": 0.1}}.get(needs, {})
    args = stage.get(needs, train_full_sft).Args(**own_files, **{flag: STARTS[start]}, **more)
    needed = needs not in ("nothing", "no kl")
    if (start in IS_STATE and flag == "from_weight") or (needed and start not in ("other", "hard link")):
        with pytest.raises(UserError, match=rf"--{flag} .*give another --save_weight") as error:
            check_resume(args, {}, None)
        assert ("which a new run of this name sets aside" in str(error.value)) == (start in IS_STATE)
    else:
        assert check_resume(args, {"seed": 1}, None) == {"seed": 1}


@pytest.mark.parametrize("start", [name for name in STARTS if name not in ("other", "hard link")])
def test_a_run_goes_on_whose_start_weights_it_has_written_over(own_files, tmp_path, start):
    """Whatever way it names them; and if it names them in another way, too."""
    args = StageArgs(**own_files, cache_dir=str(tmp_path), from_weight=STARTS[start], from_resume=True)
    saved = run_fingerprint(args, {}, {}, 9)
    checkpoint = {"run": saved, "epoch": 0, "step": 1, "update": 1, "world_size": 1}
    path = start_path(args.save_dir, args.from_weight, args)
    path.resolve().write_text("after update 1")
    assert check_resume(args, run_fingerprint(args, {}, {}, 9), checkpoint) == saved
    absolute = args.model_copy(update={"from_weight": str(path.absolute())})
    again = check_resume(absolute, run_fingerprint(absolute, {}, {}, 9), checkpoint)
    assert again["from_weight_sha256"] == saved["from_weight_sha256"]
    with pytest.raises(UserError, match=r"another run \(from_weight: .* -> other"):
        other = args.model_copy(update={"from_weight": "other"})
        check_resume(other, run_fingerprint(other, {}, {}, 9), checkpoint)


def test_start_weights_may_lie_elsewhere_than_before(own_files, tmp_path):
    """They are the same if their content is; so is a teacher, whose shape was told by its name."""

    class Args(TeacherArgs):
        def frozen_hashes(self):
            return {"teacher_sha256": "a"}

    args = Args(**own_files, cache_dir=str(tmp_path), from_weight="other", from_resume=True)
    saved = run_fingerprint(args, {}, {}, 9)
    os.rename("out/other_512.pth", "moved.pth")
    args = args.model_copy(update={"from_weight": "moved.pth", "teacher_hidden_size": 768})
    run = run_fingerprint(args, {}, {}, 9)
    checkpoint = {"run": saved, "epoch": 0, "step": 1, "update": 1, "world_size": 1}
    assert check_resume(args, run, checkpoint) == saved
    with pytest.raises(UserError, match=r"\(teacher_hidden_size: 0 -> 768; teacher_sha256: a -> b\)"):
        check_resume(args, run | {"teacher_sha256": "b"}, checkpoint)


def test_only_the_model_in_a_folder_is_what_a_run_starts_from(tmp_path):
    """Whatever else is put there, such as the run's own files."""
    folder = tmp_path / "model"
    (folder / "out").mkdir(parents=True)
    shards = {"a": "model-2.safetensors", "b": "model-1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name in ("config.json", *shards.values()):
        (folder / name).write_text(name)

    def digest() -> str:
        return weights_fingerprint("teacher", folder)["teacher_sha256"]

    before = digest()
    for name in ("out/w_512.pth", "w_512_metrics.jsonl", "adapter_model.safetensors", "README.md"):
        (folder / name).write_text(name)
    assert digest() == before
    for name in ("model-1.safetensors", "config.json"):
        (folder / name).write_text("other")
        assert digest() != before
        (folder / name).write_text(name)
    assert digest() == before


def test_other_threads_or_another_cpu_are_a_warning(monkeypatch, capsys):
    """The run then equals one that was not stopped to rounding only; with other ranks it does so anyway."""
    cpu, model = torch.device("cpu"), torch.nn.Linear(2, 2)
    before = computing(StageArgs(), model, cpu, nullcontext())
    on_gpu = computing(StageArgs(), model, torch.device("cuda"), nullcontext())
    assert not {"threads", "instructions"} & on_gpu.keys()
    checkpoint = {"world_size": 1, "computing": before, "code": {"a.py": "1", "b.py": "2"}}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "Z80")
    args = StageArgs(deterministic=True)
    model.compile()
    now = computing(args, model, cpu, torch.autocast("cpu", torch.bfloat16))
    warn_of_changes(checkpoint, {}, now)
    line = capsys.readouterr().err
    told = [f"threads was {before['threads']} and is 99", "and is Z80", "torch.bfloat16"]
    told += [
        "--deterministic was 0 and is 1",
        "--use_compile was 0 and is 1",
        "up to rounding, not bit for bit",
    ]
    assert all(text in line for text in told)
    warn_of_changes(checkpoint, {"a.py": "1"}, before)
    warn_of_changes(checkpoint | {"world_size": 2}, {}, now)
    assert not capsys.readouterr().err
    warn_of_changes(checkpoint, {"a.py": "1", "b.py": "3"}, before)
    assert capsys.readouterr().err.startswith("warning: b.py changed since the checkpoint was written")


def test_evaluations_of_other_held_out_data_do_not_count(corpus, tmp_path):
    """Neither for the best weights nor for early stopping, which would end the run; of the same data they
    count."""
    settings = {"num_hidden_layers": 1, "epochs": 1, "eval_interval": 2, "patience": 2, "keep_every": 2}
    run(
        "pretrain",
        flags(corpus, tmp_path, "pretrain", **settings),
        Faults(signals={5: signal.SIGTERM}),
        status=143,
    )
    path, state = tmp_path / "checkpoints/pretrain_32_resume.pth", saved_state(tmp_path)
    state["callbacks"]["EarlyStopping of --patience"]["best"] = 0.1  # what no evaluation reaches
    torch.save({key: value for key, value in state.items() if key != FORMAT} | {"best_eval": 0.1}, path)
    shutil.copytree(tmp_path, tmp_path / "same")
    same = run("pretrain", flags(corpus, tmp_path / "same", "pretrain", **settings, from_resume=1))
    assert "stopping: EarlyStopping: eval_loss got no better than 0.1" in same.out
    other = write_jsonl(tmp_path / "other.jsonl", [{"text": "the river walks"}])
    resumed = [*flags(corpus, tmp_path, "pretrain", **settings, from_resume=1), "--eval_data_path", other]
    process = run("pretrain", resumed)
    assert "warning: the held-out data are not those of before" in process.err
    assert "done: 8 updates" in process.out and "stopping" not in process.out
    last = saved_state(tmp_path)
    assert last["eval_data"] != state["eval_data"] and 1 < last["best_eval"] < 20
    assert last["callbacks"]["EarlyStopping of --patience"]["best"] > 1


def test_the_best_state_is_that_of_the_weights_which_were_evaluated(corpus, tmp_path):
    """The newest file is damaged, the run goes back to the one before and evaluates there: that one is the
    best, not what lies at the newest place."""
    settings = {"num_hidden_layers": 1, "epochs": 1, "eval_interval": 2, "save_interval": 100}
    run(
        "pretrain",
        flags(corpus, tmp_path, "pretrain", **settings),
        Faults(eval_signal=signal.SIGTERM),
        status=143,
    )
    folder = tmp_path / "checkpoints"
    first = (folder / "pretrain_32_resume.pth").read_bytes()  # of update 2, which is still to be evaluated
    (folder / "pretrain_32_resume_previous.pth").write_bytes(first)
    (folder / "pretrain_32_resume.pth").write_bytes(first[:-100])
    argv = flags(corpus, tmp_path, "pretrain", **settings, from_resume=1)
    run("pretrain", argv, Faults(signals={1: signal.SIGKILL}), status=-9)
    assert (folder / "pretrain_32_best_resume.pth").read_bytes() == first


def test_the_checkpoint_of_another_stage_is_one_line():
    """One of the same data and settings, as of SFT for LoRA."""
    state = SimpleNamespace(model=torch.nn.Linear(2, 2), state_dict_fn=None, code={}, args=StageArgs())
    with pytest.raises(UserError, match=r"of another stage or model .*; give another --save_weight"):
        TrainState.restore(state, {"model": {"weight": torch.zeros(2, 2), "lora": torch.zeros(2)}})


class Before(StageArgs):
    mine: int = 1


class After(Before):
    added: float = 0.5


def test_a_flag_or_a_field_that_is_added_does_not_end_a_run():
    """With its default the run goes on; with another value it is another run."""

    def fingerprint(args):
        return run_fingerprint(args, config.own_fields(), {}, 9)

    start = {"from_weight": "none", "from_resume": True}
    config = model_config(load_tokenizer(ROOT / "model"), Before(**start))
    saved = fingerprint(Before(**start))
    del saved["norm_topk_prob"]
    checkpoint = {"epoch": 0, "step": 1, "update": 1, "world_size": 1, "run": saved}
    current = fingerprint(After(**start))
    assert check_resume(After(**start), current, checkpoint) == current and current["added"] == 0.5
    with pytest.raises(UserError, match=r"another run \(norm_topk_prob: True -> False\)"):
        check_resume(After(**start), current | {"norm_topk_prob": False}, checkpoint)
    for other, told in (({"added": 0.7}, "added: 0.5 -> 0.7"), ({"mine": 2}, "mine: 1 -> 2")):
        args = After(**start, **other)
        with pytest.raises(UserError, match=re.escape(f"another run ({told})")):
            check_resume(args, fingerprint(args), checkpoint)


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
    "moe": ("pretrain", "pretrain", "_moe", {"use_moe": 1, "optimizer": "muon", "epochs": 9}),
}
KILLED["moe"][3].update(learning_rate="auto", batch_size="auto")


@pytest.mark.parametrize("kind", KILLED)
def test_a_run_that_is_killed_ends_with_the_same_bits(corpus, tmp_path, kind):
    """Twice, within accumulation windows of two epochs; loader processes change nothing.
    scripts/verify_resume.py does more."""
    stage, weight, suffix, settings = KILLED[kind]
    settings |= {"from_weight": "none", "num_hidden_layers": 1, "dropout": 0.1, "accumulation_steps": 2}
    whole = run(stage, flags(corpus, tmp_path / "whole", stage, **settings))
    assert ("auto: --batch_size 2" in whole.out) == (kind == "moe")
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
    assert "no readable checkpoint" in run("pretrain", argv, status=2).error_lines[-1]
    keys = ("model", "optimizer", "epoch", "step", "world_size")
    torch.save(dict.fromkeys(keys, 0), folder / "pretrain_32_resume.pth")
    assert "is not one of a stage script" in run("pretrain", argv, status=2).error_lines[-1]
    assert not (tmp_path / "out/pretrain_32.pth").exists()


@pytest.mark.slow
def test_compiled_runs_resume_exactly_and_compiling_may_be_toggled(corpus, tmp_path):
    """With loader processes, too, which must not outlive the run."""
    settings = {"epochs": 2, "num_hidden_layers": 1, "accumulation_steps": 2, "num_workers": 2}
    at = Faults(signals={13: signal.SIGKILL})

    def argv(folder: str, **more) -> list[str]:
        return flags(corpus, tmp_path / folder, "pretrain", **settings | more)

    run("pretrain", argv("whole", use_compile=1), timeout=600)
    run("pretrain", argv("broken", use_compile=1), at, status=-9, timeout=600)
    shutil.copytree(tmp_path / "broken", tmp_path / "toggled")
    run("pretrain", argv("broken", use_compile=1, from_resume=1), timeout=600)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    run("pretrain", argv("toggled", use_compile=0, from_resume=1))
    whole, toggled = records(tmp_path / "whole"), records(tmp_path / "toggled")
    assert all(abs(a[2] - b[2]) < 1e-4 for a, b in zip(whole, toggled, strict=True))
