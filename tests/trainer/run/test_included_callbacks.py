"""The checkpoints that are kept besides the latest: which of them are deleted."""

from pathlib import Path

from common.settings import StageArgs
from trainer.run.included_callbacks import CheckpointManager


def kept(folder: Path, keep_last: int = 2) -> CheckpointManager:
    """The hook of a run that has states of the updates 2, 4 ... 12; its name has characters of patterns."""
    for update in range(2, 14, 2):
        (folder / f"w[1].5_512_update_{update:08d}.pth").write_text("")
    args = StageArgs(save_weight="w[1].5", checkpoint_dir=str(folder), keep_every=2, keep_last=keep_last)
    return CheckpointManager(args)


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem[-8:]) for path in folder.glob("*_update_*.pth"))


def test_later_ones_than_the_present_update_stay(tmp_path):
    """Of a run that went back to an older state."""
    kept(tmp_path).prune(now=6, best=None)
    assert numbers(tmp_path) == [4, 6, 8, 10, 12]


def test_one_stays_in_any_case(tmp_path):
    kept(tmp_path, keep_last=0).prune(now=12, best=None)
    assert numbers(tmp_path) == [12]
