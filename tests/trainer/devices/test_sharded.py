"""The states of sharded runs: whole files for any number of ranks; and the folders that early versions
wrote."""

import pickle
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from common.errors import UserError
from common.files import atomic_write
from model.model_minimind import MiniMindConfig
from scripts.convert_model import main
from tests.stage_process import Faults, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, flags, records
from trainer.run.checkpoint import (
    DIGESTS,
    PARTS,
    REST,
    UNREADABLE,
    file_digest,
    read_file,
    read_state_folder,
    shard_like,
    snapshot,
    write_file,
)
from trainer.trainer_utils import lm_checkpoint

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=1)
SETTINGS = {"batch_size": 2, "accumulation_steps": 2, "epochs": 1, "num_hidden_layers": 1, "parallel": "fsdp"}
SETTINGS |= {"save_interval": 4, "eval_interval": 1000}
KILLED = """
import trainer.run.checkpoint as checkpoint
rotate, count = checkpoint.rotate, []
def killed(*args):
    count.append(1)
    os.kill(os.getpid(), 9) if len(count) == 2 else rotate(*args)
checkpoint.rotate = killed
"""


def state_of(folder: Path) -> dict:
    """The newest state of a run."""
    state = lm_checkpoint(CONFIG, "pretrain", save_dir=folder / "checkpoints")
    assert state is not None
    return state


def write_folder(state: dict, folder: Path) -> None:
    """Write a state as early versions did, here from one rank."""
    tensors = {}

    def take(value, name):
        if isinstance(value, torch.Tensor):
            key = next((key for key, tensor in tensors.items() if tensor is value), name)
            tensors[key] = value
            return key
        if isinstance(value, dict):
            return {key: take(item, f"{name}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(take(item, f"{name}/{i}") for i, item in enumerate(value))
        return value

    rest = state | {part: take(state[part], part) for part in PARTS}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    digests = {path.name: file_digest(path) for path in folder.iterdir()}
    atomic_write(folder / REST, lambda file: write_file(rest | {DIGESTS: digests}, file))


def as_folders(run: Path) -> Path:
    """Turn the newest state of a run into a folder; returns that."""
    path = run / "checkpoints/pretrain_32_resume.pth"
    write_folder(read_file(path), path.with_suffix(""))
    path.unlink()
    return path.with_suffix("")


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
    ranks = start_ranks(
        2, "pretrain", flags(corpus, folder, "pretrain", **SETTINGS), {0: Faults(script=KILLED)}
    )
    assert [rank.wait() for rank in ranks] == [-9, 2], ranks[1].err
    assert "another rank ended" in ranks[1].err
    left = sorted(path.name for path in (folder / "checkpoints").glob("*resume*"))
    assert left == [".pretrain_32_resume.pth.tmp", "pretrain_32_resume.pth"]
    assert state_of(folder)["update"] == 2
    return folder


@pytest.mark.parametrize("is_early", [False, True])
def test_a_killed_run_resumes_bit_for_bit(corpus, whole, killed, tmp_path, is_early):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    if is_early:
        as_folders(tmp_path)
    run("pretrain", flags(corpus, tmp_path, "pretrain", **SETTINGS, from_resume=1), ranks=2)
    one, other = state_of(whole), state_of(tmp_path)
    assert one["update"] == other["update"] > 4 and one["world_size"] == 2
    for key, value in one["model"].items():
        assert torch.equal(value, other["model"][key]), key
    for index, state in one["optimizer"]["state"].items():
        assert all(
            torch.equal(value, other["optimizer"]["state"][index][key]) for key, value in state.items()
        )
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    one, other = (torch.load(run / "out/pretrain_32.pth", weights_only=True) for run in (whole, tmp_path))
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert records(whole) == records(tmp_path)
    left = sorted(path.name for path in (tmp_path / "checkpoints").glob("pretrain*"))
    assert left == [f"pretrain_32_{name}.pth" for name in ("best_resume", "resume", "resume_previous")]


def test_from_shards_to_a_plain_run_and_back(corpus, whole, killed, tmp_path):
    """Two ranks -> one -> two: the same losses to 1e-5, the same samples."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    as_folders(tmp_path)
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, from_resume=1)
    run("pretrain", argv, Faults(signals={5: signal.SIGTERM}), status=143)  # one process is not sharded
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("pretrain*"))
    assert names in (["pretrain_32_resume.pth", f"pretrain_32_resume_previous{end}"] for end in ("", ".pth"))
    middle = state_of(tmp_path)
    assert middle["world_size"] == 1 and middle["update"] == 4
    run("pretrain", argv, ranks=2)
    one, other = records(whole), records(tmp_path)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a[0] == b[0] and a[7] == b[7] and abs(a[2] - b[2]) <= 1e-5


def test_shards_with_muon(corpus, tmp_path):
    """Stopped and resumed: the same bits, in a checkpoint of the usual form. Copies (DDP), and one process
    that goes on with the shards' checkpoint: the same losses to rounding."""
    settings = SETTINGS | {"optimizer": "muon", "learning_rate": 1e-3}

    def train(folder, faults=None, ranks=2, **extra) -> list:
        argv = flags(corpus, tmp_path / folder, "pretrain", **settings | extra)
        processes = start_ranks(ranks, "pretrain", argv, dict.fromkeys(range(ranks), faults or Faults()))
        assert {process.wait() for process in processes} == {143 if faults else 0}, processes[0].err
        return records(tmp_path / folder)

    whole, copies = train("whole"), train("copies", parallel="ddp")
    train("cut", Faults(signals={5: signal.SIGTERM}))
    shutil.copytree(tmp_path / "cut", tmp_path / "alone")
    train("cut", from_resume=1)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    alone = train("alone", ranks=1, from_resume=1)
    assert len(whole) == len(copies) == len(alone) > 4
    for others in (copies, alone):
        assert [x[:2] for x in others] == [x[:2] for x in whole]
        assert [x[2] for x in others] == pytest.approx([x[2] for x in whole], abs=3e-4)
    one, other = state_of(tmp_path / "whole")["optimizer"], state_of(tmp_path / "copies")["optimizer"]
    assert one["muon"]["param_groups"] == other["muon"]["param_groups"]
    shapes = [[x["momentum_buffer"].shape for x in each["muon"]["state"].values()] for each in (one, other)]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 7


def test_damage_is_found_and_nothing_is_executed(whole, tmp_path, capsys):
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    folder = as_folders(tmp_path)
    (shard,) = folder.glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    for damage in (bytes(content), bytes(content[:-100]), None):
        shard.write_bytes(damage) if damage is not None else shard.unlink()
        with pytest.raises(UNREADABLE):
            read_state_folder(folder)
    assert state_of(tmp_path)["update"] < state_of(whole)["update"]
    assert f"warning: damaged checkpoint {folder}" in capsys.readouterr().err
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    with pytest.raises(ValueError, match=r"the digest of \.metadata is wrong"):
        read_state_folder(folder)
    rest = read_file(folder / REST)
    for digests in (None, {}):  # as somebody who means harm
        rest = {key: value for key, value in rest.items() if key != DIGESTS}
        rest |= {DIGESTS: digests} if digests is not None else {}
        atomic_write(folder / REST, lambda file, rest=rest: write_file(rest, file))
        with pytest.raises(
            UNREADABLE, match=DIGESTS if digests is None else "does not belong in a checkpoint"
        ):
            read_state_folder(folder)
    assert not (tmp_path / "harm").exists()


def test_tensors_that_a_hook_keeps_are_sharded_like_the_weights():
    """A moving average of sharded weights is saved whole, and comes back sharded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
        average = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
        hooks = {"callbacks": {"average": average | {"updates": torch.tensor(7)}}}
        saved = snapshot({"model": model.state_dict(), "optimizer": {}, "hooks": hooks})
        kept = saved["hooks"]["callbacks"]["average"]
        assert not isinstance(kept["weight"], DTensor)
        assert torch.equal(kept["weight"], average["weight"].full_tensor())
        back = shard_like(model, saved)["hooks"]["callbacks"]["average"]
        assert isinstance(back["weight"], DTensor) and int(back["updates"]) == 7
        assert torch.equal(back["weight"].full_tensor(), kept["weight"])
    finally:
        dist.destroy_process_group()


def test_a_flipped_bit_of_the_list_of_tensors_is_noticed(whole, tmp_path, request, monkeypatch):
    """The list has no checksum of its own; torch would read other tensors, or ask for gigabytes of memory. So
    a damaged one is not even parsed."""
    parsed = []
    monkeypatch.setattr("trainer.run.checkpoint._Unpickler", lambda file: parsed.append(file))
    folder = tmp_path / "pretrain_32_resume"
    write_folder(read_file(whole / "checkpoints/pretrain_32_resume.pth"), folder)
    saved = (folder / ".metadata").read_bytes()
    step = 1 if request.config.getoption("--slow") else 101
    for bit in range(0, 8 * len(saved), step):
        damaged = bytearray(saved)
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / ".metadata").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"the digest of \.metadata is wrong"):
            read_state_folder(folder)
    assert bit > 10_000 and not parsed


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_folder_becomes_a_weights_file(whole, tmp_path, monkeypatch, capsys):
    folder, weights = tmp_path / "folder", tmp_path / "w.pth"
    write_folder(read_file(whole / "checkpoints/pretrain_32_resume.pth"), folder)
    monkeypatch.setattr(
        sys, "argv", ["convert_model", "--model", str(folder), "--to", "pth", "--output", str(weights)]
    )
    main()
    assert capsys.readouterr().out.endswith(f"wrote {weights}\n")
    made, written = (torch.load(path, weights_only=True) for path in (weights, whole / "out/pretrain_32.pth"))
    assert list(made) == list(written) and all(
        torch.equal(value, written[key]) for key, value in made.items()
    )
    assert made["lm_head.weight"].data_ptr() == made["model.embed_tokens.weight"].data_ptr()
    (tmp_path / "none").mkdir()
    argv = [
        "convert_model",
        "--model",
        str(tmp_path / "none"),
        "--to",
        "pth",
        "--output",
        str(tmp_path / "a.pth"),
    ]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(UserError, match="none"):
        main()
