"""The states of sharded runs: whole files for any number of ranks."""

import shutil
import signal
from pathlib import Path

import pytest

from model.model_minimind import MiniMindConfig
from tests.stage_process import Faults, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, flags, records
from trainer.trainer_utils import lm_checkpoint

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=1)
SETTINGS = {"batch_size": 2, "accumulation_steps": 2, "epochs": 1, "num_hidden_layers": 1, "parallel": "fsdp"}
SETTINGS |= {"save_interval": 4, "eval_interval": 1000, "optimizer": "adamw", "learning_rate": 1e-3}
KILLED = """
import trainer.checkpoint.file as checkpoint
atomic_write, count = checkpoint.atomic_write, []
def killed(path, write, rotate):
    def before_its_name(path):
        count.append(1)
        os.kill(os.getpid(), 9) if len(count) == 2 else rotate(path)
    atomic_write(path, write, rotate=before_its_name)
checkpoint.atomic_write = killed
"""


def state_of(folder: Path) -> dict:
    """The newest state of a run."""
    state = lm_checkpoint(CONFIG, "pretrain", save_dir=folder / "checkpoints")
    assert state is not None
    return state


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
    assert state_of(folder)["update"] == 1
    return folder


def test_a_killed_run_resumes_bit_for_bit(corpus, whole, killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    run("pretrain", flags(corpus, tmp_path, "pretrain", **SETTINGS, from_resume=1), ranks=2)
    one, other = state_of(whole), state_of(tmp_path)
    assert one["update"] == other["update"] > 4 and one["world_size"] == 2
    assert_same_run(whole, tmp_path)
    left = sorted(path.name for path in (tmp_path / "checkpoints").glob("pretrain*"))
    assert left == [f"pretrain_32_{name}.pth" for name in ("best_resume", "resume", "resume_previous")]


def test_from_shards_to_a_plain_run_and_back(corpus, whole, killed, tmp_path):
    """Two ranks -> one -> two: the same losses to 1e-5, the same samples."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, from_resume=1)
    run("pretrain", argv, Faults(signals={5: signal.SIGTERM}), status=143)  # one process is not sharded
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("pretrain*"))
    assert names == ["pretrain_32_resume.pth", "pretrain_32_resume_previous.pth"]
    middle = state_of(tmp_path)
    assert middle["world_size"] == 1 and middle["update"] == 3
    run("pretrain", argv, ranks=2)
    one, other = records(whole), records(tmp_path)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a[0] == b[0] and a[7] == b[7] and abs(a[2] - b[2]) <= 1e-5
