"""The folders that sharded runs resume from: whole or not at all, for any number of ranks, and back to plain files."""

import pickle
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from common.durable_files import atomic_write
from common.errors import UserError
from model.model_minimind import MiniMindConfig
from scripts.convert_model import main
from tests.stage_process import Faults, run, start_ranks
from tests.trainer.stage_flags import flags, records
from trainer.components.checkpoint import (
    DIGESTS,
    REST,
    SHARDS,
    UNREADABLE,
    put_tensors,
    read_file,
    read_rest,
    save_sharded,
    saving_group,
    take_tensors,
    with_tensors,
    write_file,
)
from trainer.trainer_utils import lm_checkpoint

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=1)
SETTINGS = {"batch_size": 2, "accumulation_steps": 2, "epochs": 1, "num_hidden_layers": 1, "parallel": "fsdp"}
SETTINGS |= {"save_interval": 4, "eval_interval": 1000}
KILLED = """
import trainer.components.checkpoint as sharded
commit, count = sharded._commit, []
def killed(*args):
    count.append(1)
    os.kill(os.getpid(), 9) if len(count) == 2 else commit(*args)
sharded._commit = killed
"""


def state_of(folder: Path) -> dict:
    """The newest state of a run, with whole tensors."""
    return with_tensors(lm_checkpoint(CONFIG, "pretrain", save_dir=folder / "checkpoints"))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """A run on two ranks that nobody stops."""
    folder = tmp_path_factory.mktemp("whole")
    run("pretrain", flags(corpus, folder, "pretrain", **SETTINGS), ranks=2)
    return folder


@pytest.fixture(scope="module")
def killed(corpus, tmp_path_factory) -> Path:
    """One that is killed with -9 when all of its second checkpoint is written but its name."""
    folder = tmp_path_factory.mktemp("killed")
    ranks = start_ranks(2, "pretrain", flags(corpus, folder, "pretrain", **SETTINGS), {0: Faults(script=KILLED)})
    assert [rank.wait() for rank in ranks] == [-9, 2], ranks[1].err
    assert "another rank ended" in ranks[1].err
    left = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())
    assert left == [".pretrain_32_resume.tmp", "pretrain_32_resume"]
    assert state_of(folder)["update"] == 2
    return folder


def test_a_killed_run_resumes_bit_for_bit(corpus, whole, killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    run("pretrain", flags(corpus, tmp_path, "pretrain", **SETTINGS, from_resume=1), ranks=2)
    one, other = state_of(whole), state_of(tmp_path)
    assert one["update"] == other["update"] > 4 and one["world_size"] == 2
    for key, value in one["model"].items():
        assert torch.equal(value, other["model"][key]), key
    for index, state in one["optimizer"]["state"].items():
        assert all(torch.equal(value, other["optimizer"]["state"][index][key]) for key, value in state.items())
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    one, other = (torch.load(run / "out/pretrain_32.pth", weights_only=True) for run in (whole, tmp_path))
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert records(whole) == records(tmp_path)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert left == ["pretrain_32_best_resume", "pretrain_32_resume", "pretrain_32_resume_previous"]


def test_from_shards_to_a_plain_run_and_back(corpus, whole, killed, tmp_path):
    """Two ranks -> one -> two: the same losses to 1e-5, the same samples; either form of the state is set aside."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, from_resume=1)
    run("pretrain", argv, Faults(signals={5: signal.SIGTERM}), status=143)  # one process is not sharded
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("pretrain*"))
    assert names in (["pretrain_32_resume.pth", f"pretrain_32_resume_previous{end}"] for end in ("", ".pth"))
    middle = state_of(tmp_path)
    assert middle["world_size"] == 1 and middle["update"] == 4
    run("pretrain", argv, ranks=2)
    assert not (tmp_path / "checkpoints/pretrain_32_resume.pth").exists()
    one, other = records(whole), records(tmp_path)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a[0] == b[0] and a[7] == b[7] and abs(a[2] - b[2]) <= 1e-5


def test_no_room_for_a_part(corpus, killed, tmp_path):
    """One line, and the state that was there stays."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints/pretrain_32_resume").iterdir()}
    full = Faults(file_limit=300_000)
    ranks = start_ranks(2, "pretrain", flags(corpus, tmp_path, "pretrain", **SETTINGS, from_resume=1), {0: full})
    assert [rank.wait() for rank in ranks] == [2, 2], ranks[0].err + ranks[1].err
    line = ranks[0].error_lines[-1]
    assert line.startswith(f"error: {tmp_path}/checkpoints/pretrain_32_resume cannot be written (")
    assert "Traceback" not in ranks[0].err + ranks[1].err
    assert {path: path.read_bytes() for path in before} == before
    assert not (tmp_path / "checkpoints/.pretrain_32_resume.tmp").exists()


def test_saving_touches_no_gpu(tmp_path, monkeypatch):
    """torch's writer would copy ahead with the current CUDA stream of its own thread: each rank's one of GPU 0."""

    def touched(*_):
        raise AssertionError("CUDA is touched")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for name in ("current_stream", "current_device", "Stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, touched)
        weights = torch.arange(6.0)
        save_sharded(tmp_path / "state.pth", {"model": {"a": weights, "b": weights}, "optimizer": {}, "epoch": 1})
        weights.zero_()
    finally:
        saving_group.cache_clear()
        dist.destroy_process_group()
    state = with_tensors(read_rest(tmp_path / "state"))
    assert state["epoch"] == 1 and state["model"]["a"].tolist() == state["model"]["b"].tolist() == [0, 1, 2, 3, 4, 5]


def test_damage_is_found_and_nothing_is_executed(whole, tmp_path, capsys):
    folder = tmp_path / "checkpoints/pretrain_32_resume"
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    shards = sorted(folder.glob("*.distcp"))
    assert len(shards) == 2
    content = bytearray(shards[1].read_bytes())
    content[len(content) // 2] ^= 1
    for damage in (bytes(content), bytes(content[:-100]), None):
        shards[1].write_bytes(damage) if damage is not None else shards[1].unlink()
        with pytest.raises(UNREADABLE):
            read_rest(folder)
    assert state_of(tmp_path)["update"] < state_of(whole)["update"]
    assert f"warning: damaged checkpoint {folder}" in capsys.readouterr().err
    (folder / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    with pytest.raises(ValueError, match=r"the digest of \.metadata is wrong"):
        read_rest(folder)
    rest = read_file(folder / REST)
    del rest[DIGESTS]  # as an early version wrote it, or somebody who means harm
    atomic_write(folder / REST, lambda file: write_file(rest, file))
    with pytest.raises(KeyError, match=DIGESTS):
        read_rest(folder)
    with pytest.raises(pickle.UnpicklingError, match=r"does not belong in a checkpoint"):  # even if nobody had checked
        with_tensors(rest | {SHARDS: folder})
    assert not (tmp_path / "harm").exists()


def test_tensors_that_a_hook_keeps_are_sharded_like_the_weights(tmp_path):
    """A moving average of sharded weights comes back sharded, or whole for a model that is not."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
        average = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
        whole = {name: value.full_tensor() for name, value in average.items()}
        hooks = {"callbacks": {"average": average | {"updates": torch.tensor(7)}}}
        save_sharded(tmp_path / "s.pth", {"model": model.state_dict(), "optimizer": {}, "hooks": hooks})
        back = with_tensors(read_rest(tmp_path / "s"), model)["hooks"]["callbacks"]["average"]
        assert isinstance(back["weight"], DTensor) and int(back["updates"]) == 7
        assert torch.equal(back["weight"].full_tensor(), whole["weight"])
        plain = with_tensors(read_rest(tmp_path / "s"))
        assert torch.equal(plain["hooks"]["callbacks"]["average"]["bias"], whole["bias"])
        again = with_tensors(plain, model)["hooks"]["callbacks"]["average"]["bias"]
        assert isinstance(again, DTensor) and torch.equal(again.full_tensor(), whole["bias"])
    finally:
        saving_group.cache_clear()
        dist.destroy_process_group()


def test_a_flipped_bit_of_the_list_of_tensors_is_noticed(whole, tmp_path, request, monkeypatch):
    """The list has no checksum of its own; torch would read other tensors, or ask for gigabytes of memory. So a damaged
    one is not even parsed."""
    parsed = []
    monkeypatch.setattr("trainer.components.checkpoint._Unpickler", lambda file: parsed.append(file))
    folder = tmp_path / "pretrain_32_resume"
    shutil.copytree(whole / "checkpoints/pretrain_32_resume", folder)
    saved = (folder / ".metadata").read_bytes()
    step = 1 if request.config.getoption("--slow") else 101
    for bit in range(0, 8 * len(saved), step):
        damaged = bytearray(saved)
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / ".metadata").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"the digest of \.metadata is wrong"):
            read_rest(folder)
    assert bit > 10_000 and not parsed


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_folder_becomes_plain_files(whole, tmp_path, monkeypatch, capsys):
    folder = whole / "checkpoints/pretrain_32_resume"
    weights, state = tmp_path / "w.pth", tmp_path / "pretrain_32_resume.pth"
    for form, output in (("pth", weights), ("checkpoint", state)):
        call = ["convert_model", "--model", str(folder), "--to", form, "--output", str(output)]
        monkeypatch.setattr(sys, "argv", call)
        main()
        assert capsys.readouterr().out.endswith(f"wrote {output}\n")
    made, written = (torch.load(path, weights_only=True) for path in (weights, whole / "out/pretrain_32.pth"))
    assert list(made) == list(written) and all(torch.equal(value, written[key]) for key, value in made.items())
    assert made["lm_head.weight"].data_ptr() == made["model.embed_tokens.weight"].data_ptr()
    plain, sharded = lm_checkpoint(CONFIG, "pretrain", save_dir=tmp_path), state_of(whole)
    assert plain["run"] == sharded["run"] and plain["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert all(torch.equal(value, sharded["model"][key]) for key, value in plain["model"].items())
    (tmp_path / "none").mkdir()
    call = [
        "convert_model",
        "--model",
        str(tmp_path / "none"),
        "--to",
        "checkpoint",
        "--output",
        str(tmp_path / "a.pth"),
    ]
    monkeypatch.setattr(sys, "argv", call)
    with pytest.raises(UserError, match="none: not a readable checkpoint"):
        main()


def test_tensors_are_taken_out_and_put_back():
    one = torch.ones(2)
    tree = {"a": one, "b": [one, (1, "a")], 3: {"c": torch.zeros(()), "d": None}}
    taken = {}
    rest = take_tensors(tree, taken, "x")
    assert rest == {"a": "x/a", "b": ["x/a", (1, "a")], 3: {"c": "x/3/c", "d": None}}
    back = put_tensors(rest, dict(taken.values()))
    assert back["a"] is one and back["b"][0] is one and back["b"][1] == (1, "a") and back[3]["d"] is None
